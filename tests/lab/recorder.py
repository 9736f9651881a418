"""What a lock server is sent: the scripts by their names, and the commands that they call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from redis.client import Monitor

from celery_redislock.protocol import scripts
from tests.lab.cluster_locks import ClusterLocks
from tests.lab.servers import Valkey

#: The scripts by the digests under which they are sent.
NAMES = {script.sha: name.lower() for name, script in vars(scripts).items() if isinstance(script, scripts.Script)}
#: What the tests themselves ask, what a connection sends once, before its first command, and what a room subscribes to:
#: the room of an earlier test, in the test's own process, may subscribe again at any time. And what the nodes of a
#: Cluster are asked about its hash slots.
NOT_COUNTED = frozenset({"SCAN", "AUTH", "HELLO", "CLIENT", "SELECT", "SUBSCRIBE", "CLUSTER", "COMMAND", "PING"})
THE_END = "the end of the record"


def load_scripts(server: Valkey | ClusterLocks) -> None:
    """So that no command has to be sent twice."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script):
            server.client.script_load(script.text)


@contextmanager
def recording(server: Valkey | ClusterLocks) -> Iterator[list[str]]:
    """Record what clients send to the server, or to all nodes of a Cluster, during the block.

    Yields:
        A list, which is filled at the end of the block: ``"acquire: EXISTS SET"`` for a script and what it calls,
        and the name of any other command.
    """
    recorded: list[str] = []
    nodes = server.nodes.primaries if isinstance(server, ClusterLocks) else [server]
    with ExitStack() as stack:
        monitors = [stack.enter_context(stack.enter_context(node.connect()).monitor()) for node in nodes]
        yield recorded
        for node in nodes:
            node.client.echo(THE_END)
        sent = sorted((one for monitor in monitors for one in _sent(monitor)), key=lambda one: one.at)
    recorded += [_line(one.name, one.called) for one in sent]


@dataclass
class _Sent:
    """A command, when the server heard of it, and what it called if it is a script."""

    at: float
    name: str
    called: Counter[str] = field(default_factory=Counter)


def _sent(monitor: Monitor) -> list[_Sent]:
    sent: list[_Sent] = []
    for seen in monitor.listen():
        name, *arguments = seen["command"].split(" ", 2)
        if THE_END in seen["command"]:
            break
        if seen["client_type"] == "lua":
            sent[-1].called[name] += 1
        elif name not in NOT_COUNTED:
            sent.append(_Sent(seen["time"], NAMES.get(arguments[0], name) if name == "EVALSHA" else name))
    return sent


def _line(name: str, called: Counter[str]) -> str:
    calls = " ".join(command if times == 1 else f"{times} {command}" for command, times in called.items())
    return f"{name}: {calls}" if calls else name
