"""What waiting for a key costs: messages of one key in line, busy workers beside the same without locks, a crowd."""

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

from . import crowd
from .report import show, versions
from .server import valkey

#: What waiting may cost: the time beside the ideal one, and commands of clients for each message.
BOUND, COMMANDS = 1.15, 6.0
#: Workers and children of each, for messages of one key and for many keys.
IN_LINE, BUSY = (2, 4), (1, 4)
ROUNDS = 3
RAN = "ran"


def main() -> None:
    table = Table(
        title="waiting: tasks that sleep, from the first publish to the last end",
        title_justify="left",
        caption=f"Ideal: no time between two runs of a key. The worst of {ROUNDS} rounds.\n{versions()}",
        caption_justify="left",
    )
    table.add_column("case")
    for column in ("s", "ideal s", "ratio", "bound", "met", "commands", "out of order"):
        table.add_column(column, justify="right")
    with valkey() as url:
        with _workers(url, *IN_LINE) as app:
            for number in (3, 10, 30):
                rounds = [_run(app, url, "serial", number, 1, 0.2) for _ in range(ROUNDS)]
                _add(table, f"{number} of 0.2 s for one key, two idle workers", rounds, number * 0.2, BOUND)
        with _workers(url, *BUSY) as app:
            free = [_run(app, url, "free", 400, 40, 0.05) for _ in range(ROUNDS)]
            ideal = min(seconds for seconds, _, _ in free)
            _add(table, "400 of 0.05 s without locks, four children", free, 400 * 0.05 / 4, None)
            rounds = [_run(app, url, "serial", 400, 40, 0.05) for _ in range(ROUNDS)]
            _add(table, "the same for 40 keys in turn, beside that", rounds, ideal, BOUND)
            rounds = [_run(app, url, "serial", 400, 40, 0.05, in_blocks=True) for _ in range(ROUNDS)]
            _add(table, "the same, ten of a key at a time", rounds, ideal, None)
    show(table)
    crowd.main()


def _add(table: Table, case: str, rounds: list[tuple[float, float, int]], ideal: float, bound: float | None) -> None:
    seconds, commands = max(one[0] for one in rounds), max(one[1] for one in rounds)
    met = bound is None or (seconds <= bound * ideal and commands <= COMMANDS)
    verdict = "" if bound is None else "[green]yes[/]" if met else "[red]NO[/]"
    order = str(max(one[2] for one in rounds))
    columns = (f"{seconds:.2f}", f"{ideal:.2f}", f"{seconds / ideal:.2f}", "" if bound is None else f"{bound:.2f}")
    table.add_row(case, *columns, verdict, f"{commands:.1f}", order)


def _run(
    app: Celery, url: str, task: str, number: int, keys: int, seconds: float, *, in_blocks: bool = False
) -> tuple[float, float, int]:
    """Publish messages of `keys` keys, and wait until all have run.

    Returns:
        Seconds; commands for each message; pairs of one key that ran in another order than they were published.
    """
    key_of = [one * keys // number if in_blocks else one % keys for one in range(number)]
    with redis.Redis.from_url(url) as client:
        client.delete(RAN)
        before = _scripts(client)
        start = time.perf_counter()
        for one in range(number):
            app.tasks[task].delay(key_of[one], one, seconds)
        while client.llen(RAN) < number:
            time.sleep(0.005)
        taken = time.perf_counter() - start
        ran: Any = client.lrange(RAN, 0, -1)
        order = [int(one) for one in ran]
        commands = (_scripts(client) - before) / number
    pairs = ((a, b) for i, a in enumerate(order) for b in order[i + 1 :])
    return taken, commands, sum(key_of[a] == key_of[b] and a > b for a, b in pairs)


def _scripts(client: redis.Redis) -> int:
    stats: Any = client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


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
