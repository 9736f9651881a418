"""Fair turns: when messages begin while the flood of another customer waits for the same key, and how even shares are.

Real workers, on a Redis broker. Each body writes a line when it begins: a grant.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis
from rich.table import Table

from celery_redislock import Lock, LockedTask

from .findings import Findings
from .server import valkey

#: How many may run at once; workers, and children of each; how long a body takes, in seconds.
LIMIT, WORKERS, CHILDREN, SECONDS = 2, 2, 3, 0.05
#: How many messages the flood has, and how many come after it; how many a small room keeps.
FLOOD, FEW, SMALL_ROOM = 2000, 10, 100
#: With weights: by how much one weighs more, of how many grants the shares are counted, and within which bounds.
WEIGHT, GRANTS, BOUNDS = 3, 400, (2.8, 3.2)
#: How many tenants there are, and how many messages all but one send: that one sends a third of all.
TENANTS, EACH = 20, 40
#: Within how many grants of their publish the few must begin: with a large room, and with a small one. The least of
#: Jain's index.
WITHIN, WITHIN_SMALL, JAIN = 25, 30, 0.99

KEY = "redislock:{imports}"


def main(findings: Findings) -> None:
    findings.chapter("Fair turns: one customer's flood, and the others")
    table = Table(title=f"fair turns: {LIMIT} at once, {WORKERS} workers, bodies of {SECONDS * 1000:g} ms")
    for column in ("case", "figure", "measured", "bound", "met"):
        table.add_column(column)
    by_time = flooded("by_time")
    begins = places(by_time, "B")
    table.add_row("by time", f"grants until the first of {FEW}, and the last", f"{begins[0]:,}, {begins[-1]:,}", "", "")
    by_turns = flooded("by_turns")
    for case, rows, bound in (
        (f"{FLOOD:,} of A wait, then {FEW} of B", by_turns, WITHIN),
        (f"a room for {SMALL_ROOM}, flooded by A", flooded("by_turns", SMALL_ROOM), WITHIN_SMALL),
    ):
        begins = places(rows, "B")
        met = findings.judge(f"fair turns: {case}: grants until the last of B", begins[-1] + 1, bound)
        table.add_row(case, "grants until each of B", " ".join(map(str, begins)), f"{bound}", met)
    for room in (0, SMALL_ROOM):
        begins = places(flooded("by_turns", room, reads_all=False), "B")
        what = f"B comes right behind {FLOOD:,} of A" + (f", a room for {room}" if room else "")
        table.add_row(what, "grants until the first of B, and the last", f"{begins[0]:,}, {begins[-1]:,}", "", "")
    ratio = weighed()
    low, high = BOUNDS
    met = findings.judge("fair turns: weights 3 : 1", abs(ratio - WEIGHT), max(high - WEIGHT, WEIGHT - low))
    table.add_row(f"weights {WEIGHT} : 1", f"ratio of {GRANTS} grants", f"{ratio:.3f}", f"{low} to {high}", met)
    index = even()
    met = findings.judge("fair turns: 1 - Jain's index", round(1 - index, 4), 1 - JAIN)
    table.add_row(f"{TENANTS} tenants, one sends a third", "Jain's index", f"{index:.4f}", f">= {JAIN}", met)
    findings.show(table)


def places(grants: Sequence[str], group: str) -> list[int]:
    """Which of the grants are the group's, counted from 0."""
    return [place for place, one in enumerate(grants) if one == group]


def flooded(task: str, room: int = 0, *, reads_all: bool = True) -> list[str]:
    """The grants from the publish of the few on, until they have begun.

    Args:
        task: The task.
        room: How many messages the workers keep waiting; 0 for the default.
        reads_all: Whether the flood has asked for its key by then. If not, most of it is in the broker's queue.
    """
    with _workers(room) as lab:
        with lab.closed():
            lab.send(task, "A", FLOOD)
            if reads_all:
                lab.wait_for(room or FLOOD)
                _until(lab.has_read_all, "each message has asked", 300)
            else:
                lab.wait_for(SMALL_ROOM)
        _until(lambda: len(lab.grants()) > 2 * LIMIT, "the flood runs")
        before = len(lab.grants())
        lab.send(task, "B", FEW)

        def is_over() -> bool:
            grants = lab.grants()[before:]
            return grants.count("B") == FEW

        _until(is_over, "the few have begun", 600)
        return lab.grants()[before:]


def weighed() -> float:
    """The ratio of the grants of two groups, one of which weighs more."""
    with _workers() as lab:
        with lab.closed():
            lab.send("by_turns", "A", GRANTS, WEIGHT)
            lab.send("by_turns", "B", GRANTS)
            lab.wait_for(2 * GRANTS)
        _until(lambda: len(lab.grants()) >= GRANTS, "the grants", 600)
        found = Counter(lab.grants()[:GRANTS])
        return found["A"] / found["B"]


def even() -> float:
    """Jain's index of the tenants' grants while all of them wait."""
    with _workers() as lab:
        few = EACH * (TENANTS - 1)
        with lab.closed():
            lab.send("by_turns", "big", few // 2)
            for tenant in range(TENANTS - 1):
                lab.send("by_turns", f"t{tenant}", EACH)
            lab.wait_for(few + few // 2)
        counted = TENANTS * (EACH - 5)
        _until(lambda: len(lab.grants()) >= counted, "the grants", 600)
        shares = Counter(lab.grants()[:counted]).values()
        return sum(shares) ** 2 / (TENANTS * sum(one**2 for one in shares))


class Lab:
    """The app of the running workers, and their grants."""

    def __init__(self, url: str, record: Path) -> None:
        self.app, self._url, self._record = make_app(url, str(record), 0), url, record

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nothing begins until the end of the block."""
        with ExitStack() as stack:
            for _ in range(LIMIT):
                stack.enter_context(Lock(Redis.from_url(self._url), KEY, 60, limit=LIMIT, renew=True))
            yield

    def send(self, task: str, customer: str, number: int, weight: float = 1) -> None:
        """Publish so many messages of a customer."""
        for _ in range(number):
            self.app.tasks[task].delay(customer, weight)

    def wait_for(self, number: int) -> None:
        """Wait until so many messages wait in the workers' rooms."""
        control: Any = self.app.control

        def is_there() -> bool:
            answers = control.broadcast("redislock_counts", reply=True, timeout=1, limit=WORKERS) or []
            kept = [sum(line[2] for line in one["lines"]) for answer in answers for one in answer.values()]
            return len(kept) == WORKERS and sum(kept) >= number

        _until(is_there, f"{number} wait", 300)

    def has_read_all(self) -> bool:
        """Whether the broker's queue is empty."""
        return Redis.from_url(self._url).llen("celery") == 0

    def grants(self) -> list[str]:
        """Whose messages have begun, in order."""
        return self._record.read_text().split()


def _until(condition: Callable[[], bool], what: str, patience: float = 60) -> None:
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited {patience:g} s in vain until {what}")
        time.sleep(0.02)


def make_app(url: str, record: str, room: int) -> Celery:
    """An app with a task whose customers take turns, and one that goes by time."""
    app = Celery("fair", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
    if room:
        app.conf.redislock_waiting_limit = room // WORKERS

    def begins(customer: str) -> None:
        with Path(record).open("a") as file:
            file.write(f"{customer}\n")
        time.sleep(SECONDS)

    common: dict[str, Any] = {"base": LockedTask, "lock_key": "imports", "lock_limit": LIMIT, "shared": False}

    @app.task(name="by_turns", lock_fair="customer", lock_weight=lambda call: call["weight"], **common)
    def by_turns(customer: str, weight: float = 1) -> None:
        begins(customer)

    @app.task(name="by_time", **common)
    def by_time(customer: str, weight: float = 1) -> None:
        begins(customer)

    return app


@contextmanager
def _workers(room: int = 0) -> Iterator[Lab]:
    with valkey() as url, tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fair", url, str(record), str(room)]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL}
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        processes = [subprocess.Popen([*command, f"w{one}"], env=environment, **quiet) for one in range(WORKERS)]
        try:
            lab = Lab(url, record)
            control: Any = lab.app.control
            _until(lambda: len(control.ping(timeout=0.5)) == WORKERS, "the workers have started")
            yield lab
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(30)


if __name__ == "__main__":
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    make_app(sys.argv[1], sys.argv[2], int(sys.argv[3])).worker_main(
        ["worker", f"--concurrency={CHILDREN}", f"--hostname={sys.argv[4]}@%h", *quiet]
    )
