"""What holding many locks costs: the calls and the CPU time of their renewal, for the holder and for the server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import redis
from rich.table import Table

from celery_redislock.connection.connect import connect
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Granted

from .findings import Findings
from .server import valkey

#: How many renewal calls 1,000 locks of one process may take in an interval, on one node.
CALLS, BOUND_AT = 10, 1000
NUMBERS = 1, 10, 100, 1000, 10_000
#: Seconds; renewals are due every third of it. It takes less than that to acquire all the locks.
LEASE, INTERVALS = 9.0, 3


class Cost(NamedTuple):
    """Of all renewals in one interval."""

    calls: float
    client: float
    """CPU seconds of the process that holds the locks."""
    server: float
    """CPU seconds of the server."""


def main(findings: Findings) -> None:
    findings.chapter("Renewal: one process holds many locks")
    numbers = NUMBERS if findings.full else (BOUND_AT,)
    costs = [_cost(number) for number in numbers]
    table = Table(
        title="renewal: of all locks of one process, in one interval (a third of a lease)",
        title_justify="left",
        caption=f"The mean of {INTERVALS} intervals of {LEASE / 3:g} s. CPU: of the client's process and of the "
        "server, including what they take when idle.",
        caption_justify="left",
    )
    for column in ("locks", "calls", "bound", "met", "client's CPU ms", "server's CPU ms", "share of a CPU, client"):
        table.add_column(column, justify="right")
    for number, cost in zip(numbers, costs, strict=True):
        bound, verdict = "", ""
        if number == BOUND_AT:
            bound = str(CALLS)
            verdict = findings.judge(f"renewal: calls for {number:,} locks in an interval", cost.calls, CALLS)
        share = f"{cost.client / (LEASE / 3):.2%}"
        cpu = (f"{1000 * cost.client:.1f}", f"{1000 * cost.server:.1f}")
        table.add_row(f"{number:,}", f"{cost.calls:.1f}", bound, verdict, *cpu, share)
    findings.show(table)
    if findings.full:
        _tell(findings, numbers, costs)


def _cost(number: int) -> Cost:
    with valkey() as url, redis.Redis.from_url(url) as client:
        server = LockServer(connect(url, {}))
        for one in range(number):
            token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("worker@host", "shop.export"))
            lock = HeldLock(server.store, Hold(Demand(f"redislock:{{shop.export:{one}}}"), token), LEASE)
            granted = server.store.acquire(lock, LEASE)
            assert isinstance(granted, Granted)
            lock.granted(granted)
            server.keeper.add(lock)
        time.sleep(LEASE / 3)  # from now on each lock is renewed once in an interval
        before = _spent(client)
        time.sleep(INTERVALS * LEASE / 3)
        after = _spent(client)
        server.stop()
    return Cost(*((end - start) / INTERVALS for start, end in zip(before, after, strict=True)))


def _spent(client: redis.Redis) -> Cost:
    """What both processes have spent since they started."""
    calls = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    cpu = client.info("cpu")
    return Cost(calls, time.process_time(), cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def _tell(findings: Findings, numbers: Sequence[int], costs: Sequence[Cost]) -> None:
    client, server = ([1000 * getattr(cost, who) for cost in costs] for who in ("client", "server"))
    findings.lines(
        "renewal",
        f"Renewing {numbers[-1]:,} locks takes {client[-1]:.0f} ms of their holder's CPU time",
        numbers,
        {"the process that holds them": client, "the server": server},
        x="locks of one process",
        y="CPU ms in one interval",
        logarithmic="xy",
    )
    few, many = costs[0], costs[-1]
    findings.say(
        f"**How it grows.** In proportion to the locks, from {few.calls:.1f} calls for one lock to {many.calls:.1f} "
        f"for {numbers[-1]:,}: one call renews up to 500 locks that are due at the same time. Each further lock costs "
        f"its holder {1e6 * (many.client - few.client) / numbers[-1]:.1f} µs of CPU time in an interval, and the "
        f"server {1e6 * (many.server - few.server) / numbers[-1]:.1f} µs. With the default lease of 30 s, an interval "
        "is ten seconds."
    )
