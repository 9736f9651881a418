"""Several locks for one run: how long transfers between accounts take, next to the ideal of their conflicts.

A real worker, on a Redis broker. Each body writes a line when it begins and one when it ends.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from rich.table import Table

from celery_redislock import LockedTask

from .findings import Findings
from .server import valkey

#: How many transfers there are between how many accounts, how many run at once at most, and how long a body takes.
TRANSFERS, ACCOUNTS, SLOTS, SECONDS = 1000, 40, 20, 0.5
#: By how much the transfers may take longer than their conflicts make them.
BOUND = 2.0


class Run(NamedTuple):
    """A transfer, and when its body ran."""

    pair: str
    begin: float
    end: float


def main(findings: Findings) -> None:
    findings.chapter("Several locks for one run: transfers between accounts")
    table = Table(title=f"{TRANSFERS:,} transfers of {SECONDS:g} s between {ACCOUNTS} accounts, {SLOTS} at once")
    for column in ("figure", "measured", "bound", "met"):
        table.add_column(column)
    dice = random.Random(TRANSFERS)
    pairs = [dice.sample(range(ACCOUNTS), 2) for _ in range(TRANSFERS)]
    runs = transfers([("-".join(map(str, pair)), SECONDS) for pair in pairs], SLOTS)
    took = max(run.end for run in runs) - min(run.begin for run in runs)
    busiest = max(Counter(account for pair in pairs for account in pair).values())
    ideal = SECONDS * max(busiest, TRANSFERS / SLOTS)
    met = findings.judge("several locks: time of the transfers, relative to the ideal", round(took / ideal, 2), BOUND)
    table.add_row(
        "the ideal: the busiest account's transfers in turn, or all on the processes", f"{ideal:.1f} s", "", ""
    )
    table.add_row("from the first start to the last end", f"{took:.1f} s", "", "")
    table.add_row("relative to the ideal", f"{took / ideal:.2f}", f"{BOUND:g}", met)
    findings.show(table)


def transfers(of: Sequence[tuple[str, float]], slots: int) -> list[Run]:
    """Run these transfers, each with its accounts and seconds, in a worker with so many processes."""
    with _worker(slots) as (app, record):
        for pair, seconds in of:
            app.tasks["transfer"].delay(*pair.split("-"), seconds)
        end = time.monotonic() + 600
        while len(lines := record.read_text().splitlines()) < len(of):
            if time.monotonic() > end:
                raise RuntimeError("the transfers are not done after ten minutes")
            time.sleep(0.05)
    return [Run(pair, float(begin), float(end)) for pair, begin, end in map(str.split, lines)]


def make_app(url: str, record: str) -> Celery:
    """An app with transfers, each of which needs two accounts."""
    app = Celery("several", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

    @app.task(name="transfer", base=LockedTask, lock_key=["account:{source}", "account:{target}"], shared=False)
    def transfer(source: str, target: str, seconds: float) -> None:
        begin = time.monotonic()
        time.sleep(seconds)
        with Path(record).open("a") as file:
            file.write(f"{source}-{target} {begin} {time.monotonic()}\n")

    return app


@contextmanager
def _worker(slots: int) -> Iterator[tuple[Celery, Path]]:
    with valkey() as url, tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.several", url, str(record), str(slots)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            app = make_app(url, str(record))
            control: Any = app.control
            while not control.ping(timeout=0.5):
                pass
            yield app, record
        finally:
            process.kill()
            process.wait(30)


if __name__ == "__main__":
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    make_app(sys.argv[1], sys.argv[2]).worker_main(["worker", f"--concurrency={sys.argv[3]}", *quiet])
