"""The time from a lock's release until the next waiter has it, and how many commands the server gets for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median, quantiles
from typing import Any

import redis
from rich.table import Table

from celery_redislock import Lock

from .findings import HANDOVER, Findings
from .server import valkey

#: What a hand-over may take: its median in seconds, and a client's commands for each.
BOUND, COMMANDS = 0.002, 5.0
WAITERS, HOLD = 50, 0.02
ROUNDS = 3
NAME = "handover"
OURS = "Lock, renewal on"
#: Commands that are not counted: a new connection sends them, or the counting itself does.
_NOT_COUNTED = frozenset({"CLIENT", "HELLO", "SELECT", "AUTH", "PING", "MONITOR", "EVAL", "SCRIPT"})

Maker = Callable[[redis.Redis], Any]


def main(findings: Findings) -> None:
    findings.chapter("A hand-over: from a release to the next holder")
    makers = _makers()
    if not findings.full:
        makers = {OURS: makers[OURS]}
    results: dict[str, list[float]] = {name: [] for name in makers}
    commands: dict[str, list[float]] = {name: [] for name in makers}
    with valkey() as url:
        for _ in range(ROUNDS):
            for name, make in makers.items():
                with redis.Redis.from_url(url, max_connections=2 * WAITERS) as client:
                    results[name] += _hand_over(client, make)
                    with _counting(url) as counted:
                        hand_overs = len(_hand_over(client, make))
                    commands[name].append(counted[0] / hand_overs)
    _show(findings, results, commands)


def _makers() -> Mapping[str, Maker]:
    makers: dict[str, Maker] = {
        OURS: lambda client: Lock(client, NAME, timeout=30, renew=True),
        "redis-py's own Lock": lambda client: client.lock(NAME, timeout=30),
    }
    if find_spec("redis_lock"):
        import redis_lock

        makers["python-redis-lock"] = lambda client: redis_lock.Lock(client, NAME, expire=30)
    return makers


def _hand_over(client: redis.Redis, make: Maker) -> list[float]:
    """Seconds from the start of each release until the next waiter had the lock. Each waiter takes it once."""
    acquired: list[float] = []
    released: list[float] = []

    def take() -> None:
        lock = make(client)
        lock.acquire()
        acquired.append(time.perf_counter())
        time.sleep(HOLD)
        released.append(time.perf_counter())
        lock.release()

    first = make(client)
    first.acquire()
    threads = [threading.Thread(target=take) for _ in range(WAITERS)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # until all of them wait
    released.append(time.perf_counter())
    first.release()
    for thread in threads:
        thread.join()
    return [after - before for before, after in zip(released, acquired, strict=False)]


@contextmanager
def _counting(url: str) -> Iterator[list[int]]:
    """Count the commands that clients send during the block, without those inside scripts and `_NOT_COUNTED`."""
    counted, started = [0], threading.Event()

    def count() -> None:
        with redis.Redis.from_url(url, socket_timeout=None) as client, client.monitor() as monitor:
            started.set()
            for command in monitor.listen():
                name = command["command"].split(" ")[0].upper()
                if command["client_type"] != "lua" and name not in _NOT_COUNTED:
                    if name == "ECHO":
                        return
                    counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    started.wait()
    yield counted
    with redis.Redis.from_url(url) as client:
        client.echo("the end")
    thread.join()


def _show(findings: Findings, results: Mapping[str, list[float]], commands: Mapping[str, list[float]]) -> None:
    title = f"hand-over: {WAITERS} waiters, each holds the lock for {HOLD * 1000:.0f} ms"
    table = Table(title=title, title_justify="left")
    table.add_column("lock")
    for column in ("median ms", "quartiles", "bound", "met", "commands", "bound", "met"):
        table.add_column(column, justify="right")
    times = {}
    for name, seconds in results.items():
        lower, middle, upper = (1000 * value for value in quantiles(seconds, n=4))
        times[name] = (middle, lower, upper)
        count = median(commands[name])
        cells = [f"{middle:.2f}", f"{lower:.2f}-{upper:.2f}", "", "", f"{count:.1f}", "", ""]
        if name == OURS:
            met = findings.judge("hand-over: from a release to the next grant, median", middle, 1000 * BOUND, " ms")
            cells[2:4] = f"{BOUND * 1000:.0f}", met
            cells[5:] = f"{COMMANDS:.0f}", findings.judge("hand-over: client commands for each", count, COMMANDS)
        table.add_row(name, *cells)
    findings.show(table)
    ours = times[OURS][0]
    title = f"The next of {WAITERS} waiters has a Lock {ours:.1f} ms after its release"
    findings.bars("handover", title, times, "ms from a release to the next grant", first=True)
    if findings.full:
        others = ", ".join(f"{name} {middle:.1f} ms" for name, (middle, *_) in times.items() if name != OURS)
        findings.sum_up(HANDOVER, f"{ours:.1f} ms after the release, if {WAITERS} wait", others)
    findings.say(
        "**How it grows.** With redis-py's own lock, every waiter asks again every 0.1 s, so the commands grow with "
        "the waiters, and none of them knows whose turn it is. With python-redis-lock, every waiter blocks a "
        "connection of its own until it is woken. `Lock` wakes the waiter whose turn it is, through one connection "
        "for all waiters of a process."
    )
