"""Limits: what a permit costs, and how well the permits are used while children are killed.

A recorder that does not know about locks sees the second: each body writes a line when it starts and when it ends.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from rich.table import Table

from celery_redislock import LockedTask
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand

from .cycle import Caller, store_cycle
from .findings import YES, Findings
from .report import Report
from .server import placements, valkey
from .timing import interleave

LIMITS = 1, 3, 10, 50
#: Of the run under kills: how many may run at once; workers, and children of each; messages, and seconds of each.
LIMIT, WORKERS, CHILDREN, MESSAGES, SECONDS, KILLS = 3, 2, 4, 200, 1.0, 30
#: How long after a kill the permits may be fewer, in seconds; and how well they must be used at all other times.
AFTER_KILL, FULL = 0.5, 0.95


def main(findings: Findings) -> None:
    findings.chapter("Limits: several runs of one key at once")
    _cost(findings)
    if findings.full:
        _kills(findings)


def _cost(findings: Findings) -> None:
    """Time acquire and release of the last free permit, where all others are held."""
    with valkey() as url:
        store = LockStore.of(connect(url, {}))
        origin = tokens.origin("worker@host", "shop.export")
        cases = {}
        for limit in LIMITS:
            demand = Demand(f"redislock:{{shop.export:{limit}}}", limit)
            for number in range(limit - 1):
                others = tokens.Attempt(f"6f6ad1c2-0000-4000-8000-{number:012}", 0, 0)
                store.acquire(Caller(demand, tokens.mint(tokens.mint_nonce(), others, origin)), 3600)
            mine = tokens.mint(tokens.mint_nonce(), tokens.Attempt("mine", 0, 0), origin)
            cases[f"limit {limit}"] = store_cycle(store, demand, mine)
        report = Report(
            findings, "limits: acquire + release of the last free permit, one round trip each", "a limit of 1"
        )
        for placement in placements(url):
            report.section(placement)
            results = interleave(cases)
            baseline, *_ = results.values()
            for case, rounds in results.items():
                report.add(case, rounds, baseline)
    report.show()


class Span(NamedTuple):
    """From when to when a body ran, in seconds of the system's monotonic clock."""

    start: float
    end: float


class Seen(NamedTuple):
    """What the recorder saw."""

    most: int
    """How many bodies ran at once at most."""
    full: float
    """For which share of the time `LIMIT` ran: while as many were due, and no kill was less than `AFTER_KILL` ago."""
    left_out: float
    """Which share of the time was less than `AFTER_KILL` after a kill."""


def seen(spans: Sequence[Span], kills: Sequence[float], limit: int, messages: int) -> Seen:
    """What the recorder saw of `spans`, from the moment when `limit` ran for the first time until fewer were due.

    Args:
        spans: One for each body; the end of one that was killed is when it was killed.
        kills: When children were killed.
        limit: How many may run at once.
        messages: How many messages there were: the last `limit` of them to end leave fewer due.
    """
    changes = sorted([*((span.end, -1) for span in spans), *((span.start, 1) for span in spans)])
    running, most, begin = 0, 0, 0.0
    for at, change in changes:
        running += change
        most = max(most, running)
        if running == limit and not begin:
            begin = at
    end = sorted(span.end for span in spans if span.end not in kills)[messages - limit]
    marks = sorted({begin, end, *(at for at, _ in changes), *kills, *(at + AFTER_KILL for at in kills)})
    full = counted = left_out = 0.0
    for at, following in pairwise(marks):
        if begin <= at < end:
            middle, length = (at + following) / 2, following - at
            if any(kill <= middle < kill + AFTER_KILL for kill in kills):
                left_out += length
            else:
                counted += length
                full += length * (sum(span.start <= middle < span.end for span in spans) >= limit)
    return Seen(most, full / counted, left_out / (counted + left_out))


def _kills(findings: Findings) -> None:
    table = Table(
        title=f"limits: {MESSAGES} messages of {SECONDS:g} s, {LIMIT} at once, {WORKERS * CHILDREN} children in "
        f"{WORKERS} workers, {KILLS} of which are killed",
        title_justify="left",
        caption=f"Ideal: {MESSAGES * SECONDS / LIMIT:.1f} s plus what the kills cost.",
        caption_justify="left",
    )
    for column in ("s", "killed", "most at once", f"{LIMIT} at once", "bound", "met", "left out after kills"):
        table.add_column(column, justify="right")
    with valkey() as url, tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        with _workers(url, record) as app:
            start = time.monotonic()
            for number in range(MESSAGES):
                app.tasks["export"].delay(number)
            kills = _kill_children(record)
            taken = time.monotonic() - start
        spans = _spans(record, kills)
    found = seen(spans, [*kills.values()], LIMIT, MESSAGES)
    at_once = findings.judge("limits: runs at once while children are killed", found.most, LIMIT)
    idle = findings.judge(f"limits: share of the time with fewer than {LIMIT}", round(1 - found.full, 3), 1 - FULL)
    table.add_row(
        *(f"{taken:.1f}", str(len(kills)), str(found.most), f"{found.full:.1%}", f"{FULL:.0%}"),
        *(idle if at_once == YES else at_once, f"{found.left_out:.1%}"),
    )
    findings.show(table)


def _kill_children(record: Path) -> dict[int, float]:
    """Kill `KILLS` children in their bodies, one by one; return, once all messages have run, when each died."""
    every = MESSAGES * SECONDS / LIMIT / (KILLS + 1)
    kills: dict[int, float] = {}
    chosen, following = random.Random(1), time.monotonic() + every
    while sum(line["event"] == "end" for line in _lines(record)) < MESSAGES:
        time.sleep(0.02)
        if len(kills) == KILLS or time.monotonic() < following:
            continue
        following += every
        ended = {(line["pid"], line["start"]) for line in _lines(record) if line["event"] == "end"}
        begun = {(line["pid"], line["start"]) for line in _lines(record)} - ended
        busy = sorted({pid for pid, _ in begun} - kills.keys())
        if busy:
            pid = chosen.choice(busy)
            kills[pid] = time.monotonic()
            os.kill(pid, signal.SIGKILL)
    return kills


def _lines(record: Path) -> list[dict[str, Any]]:
    whole, _, _ = record.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _spans(record: Path, kills: dict[int, float]) -> list[Span]:
    ends = {(line["pid"], line["start"]): line["end"] for line in _lines(record) if line["event"] == "end"}
    begun = [(line["pid"], line["start"]) for line in _lines(record) if line["event"] == "start"]
    return [Span(start, ends.get((pid, start)) or kills[pid]) for pid, start in begun]


def make_app(url: str, record: str) -> Celery:
    """An app with a task of which `LIMIT` may run at once, and whose body tells the recorder."""
    app = Celery("limits", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

    @app.task(
        name="export",
        base=LockedTask,
        lock_args=[],
        lock_limit=LIMIT,
        acks_late=True,
        reject_on_worker_lost=True,
        shared=False,
    )
    def export(number: int) -> None:
        line = {"pid": os.getpid(), "start": time.monotonic()}
        with Path(record).open("a") as file:
            file.write(json.dumps({**line, "event": "start"}) + "\n")
        time.sleep(SECONDS)
        with Path(record).open("a") as file:
            file.write(json.dumps({**line, "event": "end", "end": time.monotonic()}) + "\n")

    return app


@contextmanager
def _workers(url: str, record: Path) -> Iterator[Celery]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.limits", url, str(record)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # Celery logs each kill
    processes = [subprocess.Popen([*command, f"w{one}"], **quiet) for one in range(WORKERS)]
    try:
        app = make_app(url, str(record))
        control: Any = app.control
        while len(control.ping(timeout=0.5)) < WORKERS:
            if any(process.poll() is not None for process in processes):
                raise RuntimeError("a worker has not started")
        yield app
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


if __name__ == "__main__":
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    make_app(sys.argv[1], sys.argv[2]).worker_main(
        ["worker", f"--concurrency={CHILDREN}", f"--hostname={sys.argv[3]}@%h", *quiet]
    )
