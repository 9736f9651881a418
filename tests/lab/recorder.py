"""What a lock server is sent: the scripts by their names, and the commands that they call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from celery_redislock.server import scripts
from tests.lab.servers import Valkey

#: The scripts by the digests under which they are sent.
NAMES = {script.sha: name.lower() for name, script in vars(scripts).items() if isinstance(script, scripts.Script)}
#: What the tests themselves ask, what a connection sends once, before its first command, and what a room subscribes to:
#: the room of an earlier test, in the test's own process, may subscribe again at any time.
NOT_COUNTED = frozenset({"SCAN", "HELLO", "CLIENT", "SELECT", "SUBSCRIBE"})
THE_END = "the end of the record"


def load_scripts(server: Valkey) -> None:
    """So that no command has to be sent twice."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script):
            server.client.script_load(script.text)


@contextmanager
def recording(server: Valkey) -> Iterator[list[str]]:
    """Record what clients send to the server during the block.

    Yields:
        A list, which is filled at the end of the block: ``"acquire: EXISTS SET"`` for a script and what it calls,
        and the name of any other command.
    """
    recorded: list[str] = []
    with server.connect() as client, client.monitor() as monitor:
        yield recorded
        server.client.echo(THE_END)
        sent: list[tuple[str, Counter[str]]] = []
        for seen in monitor.listen():
            name, *arguments = seen["command"].split(" ", 2)
            if THE_END in seen["command"]:
                break
            if seen["client_type"] == "lua":
                sent[-1][1][name] += 1
            elif name not in NOT_COUNTED:
                sent.append((NAMES.get(arguments[0], name) if name == "EVALSHA" else name, Counter()))
    recorded += [_line(name, called) for name, called in sent]


def _line(name: str, called: Counter[str]) -> str:
    calls = " ".join(command if times == 1 else f"{times} {command}" for command, times in called.items())
    return f"{name}: {calls}" if calls else name
