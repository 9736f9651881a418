"""How late an event loop is while its coroutines use locks and publish, next to the same loop with nothing to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from celery import Celery
from rich.table import Table

from celery_redislock import LockedTask
from celery_redislock.asyncio import Lock

from .findings import Findings
from .server import valkey

#: Milliseconds by which a timer may be late, in 99 of 100 cases.
BOUND = 5.0
ROUNDS = 5
SECONDS = 1.5
WAITERS = 1000
#: Seconds that a timer of the loop is set to.
TICK = 0.001


def main(findings: Findings) -> None:
    findings.chapter("The event loop")
    with valkey() as url:
        late = asyncio.run(_measure(url))
    table = Table(title="event loop: how late a timer of the loop is", title_justify="left")
    for column in ("while", "p50 ms", "p99 ms", "most", "bound", "met"):
        table.add_column(column, justify="left" if column == "while" else "right")
    for name, times in late.items():
        times.sort()
        p50, p99 = (1000 * times[int(len(times) * share)] for share in (0.5, 0.99))
        met = "" if name == "idle" else findings.judge(f"event loop: {name}, p99", p99, BOUND, " ms")
        bound = "" if name == "idle" else f"{BOUND:g}"
        table.add_row(name, f"{p50:.2f}", f"{p99:.2f}", f"{1000 * times[-1]:.1f}", bound, met)
    findings.show(table)


async def _measure(url: str) -> dict[str, list[float]]:
    """The delays of all rounds, in seconds. Each round has each kind of work."""
    client = redis.asyncio.Redis.from_url(url)
    app = Celery("loop", broker=url, set_as_current=False)

    @app.task(base=LockedTask, shared=False, lock_scope="job", lock_args=["key"])
    def task(key: int) -> None: ...

    async def wait_in_line() -> None:
        async with Lock(client, "one", timeout=30):
            await asyncio.sleep(TICK)

    async def take(number: int) -> None:
        async with Lock(client, f"own:{number}", timeout=30, renew=True):
            await asyncio.sleep(TICK)
        await asyncio.sleep(10 * TICK)

    async def publish(number: int) -> None:
        await task.adelay(number % 7)
        await asyncio.sleep(10 * TICK)

    kinds = {
        "idle": _again_and_again(lambda _: asyncio.sleep(1), 1),
        "20 coroutines take locks": _again_and_again(take, 20),
        f"{WAITERS} coroutines wait for one lock": _again_and_again(lambda _: wait_in_line(), WAITERS),
        "20 coroutines publish": _again_and_again(publish, 20),
    }
    late: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(ROUNDS + 1):
        for name, kind in kinds.items():
            async with kind():
                await _ticks(0.5)  # those that begin at once are on their way
                late[name] += await _ticks(SECONDS) if number else []
    await client.aclose()
    app.close()
    return late


async def _ticks(seconds: float) -> list[float]:
    late, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        late.append(time.perf_counter() - began - TICK)
    return late


def _again_and_again(work: Callable[[int], Awaitable[object]], count: int) -> Any:
    """So many coroutines do `work` in a loop, until the end of the block."""

    async def go_on(number: int) -> None:
        while True:
            await work(number)

    @asynccontextmanager
    async def block() -> Any:
        tasks = [asyncio.create_task(go_on(number)) for number in range(count)]
        try:
            yield
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return block
