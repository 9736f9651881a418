"""What waiting for a key costs: messages of one key in line, busy workers with and without locks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from rich.table import Table

from celery_redislock import LockedTask

from .findings import WAITING as TOPIC
from .findings import Findings
from .server import valkey

#: What waiting may cost: the time relative to the ideal one, and client commands for each message.
BOUND, COMMANDS = 1.15, 6.0
#: Workers and children of each, for messages of one key and for many keys.
IN_LINE, BUSY = (2, 4), (1, 4)
ROUNDS, BRIEF = 3, 2
RAN = "ran"
#: Of the messages that wait for long: how many, and how soon the broker would deliver them again, in seconds.
WAITING, VISIBILITY_TIMEOUT = 20, 6


def main(findings: Findings) -> None:
    findings.chapter("Waiting: messages for one key, and busy workers")
    times = ROUNDS if findings.full else BRIEF
    table = Table(
        title="waiting: tasks that sleep, from the first publish to the last end",
        title_justify="left",
        caption=f"The ideal has no time between two runs of a key. The worst of {times} rounds.",
        caption_justify="left",
    )
    table.add_column("case")
    for column in ("s", "ideal s", "ratio", "bound", "met", "commands", "out of order"):
        table.add_column(column, justify="right")
    with valkey() as url:
        with _workers(url, *IN_LINE) as app:
            for number in (3, 10, 30) if findings.full else (30,):
                rounds = [_run(app, url, "serial", number, 1, 0.2) for _ in range(times)]
                _add(findings, table, f"{number} of 0.2 s for one key, two idle workers", rounds, number * 0.2, BOUND)
                if number == 30:
                    out_of_order = max(one[2] for one in rounds)
                    _conclude(findings, number, rounds, out_of_order)
                    findings.judge("waiting: pairs out of order among 30 for one key", out_of_order, 0)
        with _workers(url, *BUSY) as app:
            free = [_run(app, url, "free", 400, 40, 0.05) for _ in range(times)]
            ideal = min(seconds for seconds, _, _ in free)
            _add(findings, table, "400 of 0.05 s without locks, four children", free, 400 * 0.05 / 4, None)
            rounds = [_run(app, url, "serial", 400, 40, 0.05) for _ in range(times)]
            _add(findings, table, "400 of 0.05 s for 40 keys, relative to that", rounds, ideal, BOUND)
            if findings.full:
                rounds = [_run(app, url, "serial", 400, 40, 0.05, in_blocks=True) for _ in range(times)]
                _add(findings, table, "the same, ten of a key at a time", rounds, ideal, None)
    findings.show(table)
    _judge_messages(findings)
    findings.say(
        "**How it grows.** In proportion to the messages: each one runs right after the one before it, and takes the "
        "same few commands, however many wait and for however long. While a message waits, nothing is sent to the "
        "broker except once every half visibility timeout, and its worker checks the key once a minute."
    )


def _conclude(findings: Findings, number: int, rounds: list[tuple[float, float, int]], out_of_order: int) -> None:
    seconds, commands = max(one[0] for one in rounds), max(one[1] for one in rounds)
    order = f"with {out_of_order} pairs out of order" if out_of_order else "in order"
    findings.sum_up(
        TOPIC,
        f"{commands:.1f} commands; {number} tasks with one key took {seconds / (number * 0.2):.2f} times as long as "
        f"back to back, {order}",
    )


def _add(
    findings: Findings,
    table: Table,
    case: str,
    rounds: list[tuple[float, float, int]],
    ideal: float,
    bound: float | None,
) -> None:
    seconds, commands = max(one[0] for one in rounds), max(one[1] for one in rounds)
    verdict = ""
    if bound is not None:
        verdict = findings.judge(f"waiting: {case}, time relative to the ideal", round(seconds / ideal, 3), bound)
        findings.judge(f"waiting: {case}, commands per message", commands, COMMANDS)
    order = str(max(one[2] for one in rounds))
    columns = (f"{seconds:.2f}", f"{ideal:.2f}", f"{seconds / ideal:.2f}", "" if bound is None else f"{bound:.2f}")
    table.add_row(case, *columns, verdict, f"{commands:.1f}", order)


def _judge_messages(findings: Findings) -> None:
    """Count what the broker is sent for messages that wait for two visibility timeouts: each is one command LPUSH."""
    with valkey() as url, _workers(url, 1, 1) as app, redis.Redis.from_url(url) as client:
        task: Any = app.tasks["serial"]
        with task.lock_for(0):
            for one in range(WAITING):
                task.delay(0, one, 0.0)
            time.sleep(VISIBILITY_TIMEOUT / 2)  # until all of them wait
            before = _calls(client, "lpush")
            time.sleep(2 * VISIBILITY_TIMEOUT)
            sent = (_calls(client, "lpush") - before) / WAITING / 4
        while client.llen(RAN) < WAITING:
            time.sleep(0.05)
    findings.judge("waiting: broker messages per waiting message in half a visibility timeout", sent, 1.0)


def _run(
    app: Celery, url: str, task: str, number: int, keys: int, seconds: float, *, in_blocks: bool = False
) -> tuple[float, float, int]:
    """Publish messages of `keys` keys, and wait until all have run.

    Returns:
        Seconds; commands for each message; pairs of one key that waited, and ran in another order than published.
    """
    key_of = [one * keys // number if in_blocks else one % keys for one in range(number)]
    with redis.Redis.from_url(url) as client:
        client.delete(RAN)
        before = _calls(client, "evalsha")
        start = time.perf_counter()
        for one in range(number):
            app.tasks[task].delay(key_of[one], one, seconds)
        while client.llen(RAN) < number:
            time.sleep(0.005)
        taken = time.perf_counter() - start
        ran: Any = client.lrange(RAN, 0, -1)
        order = [int(one) for one in ran]
        commands = (_calls(client, "evalsha") - before) / number
    # A message that finds its key free runs at once, though an older one may still be on its way.
    firsts = {next(one for one in order if key_of[one] == key) for key in range(keys)}
    pairs = ((a, b) for i, a in enumerate(order) if a not in firsts for b in order[i + 1 :])
    return taken, commands, sum(key_of[a] == key_of[b] and a > b for a, b in pairs)


def _calls(client: redis.Redis, command: str) -> int:
    stats: Any = client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


def make_app(url: str) -> Celery:
    """An app with a task that waits for its key, and one without a lock."""
    app = Celery("waiting", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
    client = redis.Redis.from_url(url)

    def body(number: int, seconds: float) -> None:
        time.sleep(seconds)
        client.rpush(RAN, number)

    @app.task(name="serial", base=LockedTask, lock_args=["key"], shared=False)
    def serial(key: int, number: int, seconds: float) -> None:
        body(number, seconds)

    @app.task(name="free", shared=False)
    def free(key: int, number: int, seconds: float) -> None:
        body(number, seconds)

    return app


@contextmanager
def _workers(url: str, number: int, children: int) -> Iterator[Celery]:
    """Start workers; yields their app once every child has run a task."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.waiting", url, str(children)]
    processes = [subprocess.Popen([*command, f"w{one}"], stdout=subprocess.DEVNULL) for one in range(number)]
    try:
        app = make_app(url)
        control: Any = app.control
        while len(control.ping(timeout=0.5)) < number:
            if any(process.poll() is not None for process in processes):
                raise RuntimeError("a worker has not started")
        _run(app, url, "free", 8 * number * children, 1, 0.05)
        _run(app, url, "serial", 8 * number * children, 4 * number * children, 0.02)
        yield app
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


if __name__ == "__main__":
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    make_app(sys.argv[1]).worker_main(
        ["worker", f"--concurrency={sys.argv[2]}", f"--hostname={sys.argv[3]}@%h", *quiet]
    )
