"""The command line on a server with 100,000 locks: the time of the command, of the server, and of another client."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from uuid import UUID

import redis
from celery import Celery
from rich.table import Table

from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import LockKeys

from .findings import Findings
from .server import valkey

LOCKS, WAITED, BATCH = 100_000, 1000, 1000
COMMANDS = ("list", "list --json", "list --waiting", "export", "why 00000000-0000-0000-0000-000000000000")
ROUNDS = 3
#: The app of the commands, which `celery -A benchmarks.cli` finds.
app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.redislock_url = os.environ.get("BENCHMARK_LOCKS", "redis://127.0.0.1:6379/0")


class Taken(NamedTuple):
    """What one run of a command took."""

    seconds: float
    server: float
    """Seconds of the server's processor time."""
    memory: float
    """The largest that the command's process has been, in MB."""
    median: float
    worst: float
    """Seconds that another client's GET took meanwhile."""


def main(findings: Findings) -> None:
    findings.chapter("The command line")
    table = Table(
        title=f"command line: {LOCKS:,} locks, as many notes of ended runs, {WAITED:,} locks waited for",
        title_justify="left",
        caption="GET: how long another client's GET takes meanwhile; the first row is the idle server.",
        caption_justify="left",
    )
    for column in ("command", "s", "server's s", "MB", "GET, median µs", "GET, worst ms"):
        table.add_column(column, justify="left" if column == "command" else "right")
    with valkey() as url, redis.Redis.from_url(url, socket_timeout=None) as client:
        fill(client, LOCKS)
        with _another_client(url) as waits:
            time.sleep(2.0)
        table.add_row("(none)", "", "", "", f"{statistics.median(waits) * 1e6:.0f}", f"{max(waits) * 1e3:.1f}")
        for command in COMMANDS:
            runs = [_run(client, url, command.split()) for _ in range(ROUNDS)]
            taken = Taken(*(statistics.median(values) for values in zip(*runs, strict=True)))
            shown = command.replace("00000000-0000-0000-0000-000000000000", "TASK_ID (unknown)")
            times = (f"{taken.seconds:.1f}", f"{taken.server:.2f}", f"{taken.memory:.0f}")
            table.add_row(f"`{shown}`", *times, f"{taken.median * 1e6:.0f}", f"{taken.worst * 1e3:.1f}")
        calls = client.info("commandstats")
    findings.show(table)
    each = ", ".join(
        f"{name.upper()} {calls[f'cmdstat_{name}']['usec_per_call']:.2f}" for name in ("scan", "get", "pttl", "zrange")
    )
    findings.say(
        f"**The server's time for one call**, in µs: {each}. Medians of {ROUNDS} runs, including the start of Python."
    )


def fill(client: redis.Redis, locks: int) -> None:
    """Put in what so many runs of a task leave there, without running them."""
    client.flushall()
    origin = tokens.origin("celery@worker-01.example.com", "shop.tasks.export")
    for start in range(0, locks, BATCH):
        with client.pipeline(transaction=False) as pipe:
            for one in range(start, start + BATCH):
                attempt = tokens.Attempt(str(UUID(int=one << 64 | one)), 0, 0, tokens.mint_publish())
                keys = LockKeys(f"redislock:{{shop.tasks.export:{one:032x}}}")
                pipe.set(keys.lock, tokens.mint(tokens.mint_nonce(), attempt, origin).value, px=3_600_000)
                pipe.set(keys.note(f"{UUID(int=one)}/0/0"), "", px=3_600_000)
                if one < WAITED:
                    room = tokens.of_room(tokens.mint_nonce(), "celery@worker-02.example.com")
                    pipe.zadd(keys.line, {room.value: time.time() * 1e6})
            pipe.execute()


def _run(client: redis.Redis, url: str, command: list[str]) -> Taken:
    program = [sys.executable, "-m", "celery_redislock", "-A", "benchmarks.cli", *command]
    cpu = _cpu(client)
    with _another_client(url) as waits:
        began = time.perf_counter()
        env = {**os.environ, "BENCHMARK_LOCKS": url}
        # A child of its own tells how large it has been: what this process knows is the largest of all its children.
        code = f"import subprocess, sys, resource; subprocess.run({program!r}, stdout=subprocess.DEVNULL); "
        code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - began
    # The other client's own commands are in it.
    return Taken(seconds, _cpu(client) - cpu, _mb(int(done.stdout)), statistics.median(waits), max(waits))


def _mb(largest: int) -> float:
    """Linux tells it in KB, macOS in bytes."""
    return largest / (2**20 if sys.platform == "darwin" else 2**10)


def _cpu(client: redis.Redis) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


@contextmanager
def _another_client(url: str) -> Iterator[list[float]]:
    """Another client asks for a key a hundred times a second, and notes how long each reply took."""
    waits: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        with redis.Redis.from_url(url) as client:
            while not stop.wait(0.01):
                began = time.perf_counter()
                client.get("a key")
                waits.append(time.perf_counter() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        stop.set()
        thread.join()
