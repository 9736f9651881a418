"""The ledger: what the task bodies themselves wrote down, and what it proves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from celery import current_task

from tests.lab.gate import spend

NEVER = float("inf")


@dataclass(frozen=True)
class Run:
    """One run of a body. All times are `time.monotonic()`, which processes of one host share."""

    key: str
    item: str
    pid: int
    task_id: str
    """Empty where no task runs."""
    start: float
    end: float = NEVER
    """When the body ended, or its process died; infinite where neither has been written down."""
    noticed: float = NEVER
    """When its holder was told that the lock is lost."""


class Ledger:
    """A file to which every process appends whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def run(self, key: object, item: object = "") -> Iterator[None]:
        """Write down that a body runs under `key`, from here to the end of the block."""
        mark: dict[str, Any] = {"key": str(key), "item": str(item), "pid": os.getpid(), "task_id": _task_id()}
        mark["start"] = time.monotonic()
        try:
            self.write({**mark, "event": "start"})  # a SystemExit may come as soon as others can read the line
            yield
        finally:
            self.write({**mark, "event": "end", "end": time.monotonic()})

    def take(self, key: object, item: object, first: float | str) -> object:
        """A body that takes `first` seconds in its first run, and no time in the next ones.

        Where `first` names a file, such as a `Gate`, the first run lasts until it is there.
        """
        is_first = str(item) not in self.items()
        with self.run(key, item):
            spend(first if is_first else 0)
        return item

    def died(self, pid: int, at: float | None = None) -> None:
        """Write down that a process is dead: its unfinished runs ended `at` that time.

        Args:
            pid: The pid of a process that has been seen dead.
            at: When it was killed. By default now, which is later than its end and may show an overlap that was none.
        """
        self.write({"event": "died", "pid": pid, "at": at or time.monotonic()})

    def lost(self, key: str, task_id: str, reason: str) -> None:
        """In the holder's process: write down that it has been told just now that its lock is lost."""
        line = {"event": "lost", "key": key, "task_id": task_id, "reason": reason}
        self.write({**line, "pid": os.getpid(), "at": time.monotonic()})

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:  # O_APPEND: one write of a short line is whole
            file.write(json.dumps(line, default=repr) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_text().rpartition("\n")  # the last line may still be on its way
        return [json.loads(line) for line in whole.splitlines()]

    def runs(self) -> list[Run]:
        """All runs, in the order of their start."""
        lines = self.lines()
        runs: dict[tuple[object, object], Run] = {}
        for line in lines:
            if line["event"] in {"start", "end"}:
                values = {name: value for name, value in line.items() if name != "event"}
                runs[line["pid"], line["start"]] = Run(**values)
        deaths = [line for line in lines if line["event"] == "died"]
        losses = [line for line in lines if line["event"] == "lost"]
        complete = [_with_loss(_ended(run, deaths), losses) for run in runs.values()]
        return sorted(complete, key=lambda run: run.start)

    def running(self) -> list[Run]:
        """The runs that go on, as far as anybody knows."""
        return [run for run in self.runs() if run.end == NEVER]

    def losses(self) -> list[dict[str, Any]]:
        """Every loss of a lock that its holder was told of: ``key`` (in Redis), ``task_id``, ``pid``, ``reason``."""
        return [line for line in self.lines() if line["event"] == "lost"]

    def conflicts(self) -> list[dict[str, Any]]:
        """Every conflict that a worker announced: the task ids of its first and of all holders, and the policy."""
        return [line for line in self.lines() if line["event"] == "conflict"]

    def wait_for_conflict(self, holder: str, seen: int = 0, patience: float = 5.0) -> None:
        """In a body or hook: hold on until another message has met this holder's lock.

        Args:
            holder: The holder's task id.
            seen: How many have met it before.
            patience: Seconds after which the body goes on all the same: the other one may need its process.
        """
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if sum(holder in line["holders"] for line in self.conflicts()) > seen:
                return
            time.sleep(0.005)

    def items(self) -> list[str]:
        """What ran, in order."""
        return [run.item for run in self.runs()]

    def most_at_once(self, pids: Collection[int] | None = None) -> int:
        """How many runs went on at one moment at most: all, or those of some processes."""
        runs = [run for run in self.runs() if pids is None or run.pid in pids]
        # An end comes before a start of the same moment.
        steps = sorted([(run.start, 1) for run in runs] + [(run.end, -1) for run in runs])
        return max(accumulate(step for _, step in steps), default=0)

    def overlaps(self) -> list[tuple[Run, Run]]:
        """Pairs of runs of one key at the same time, the first of which had not been told that its lock is lost."""
        return [(first, second) for first, second in self._overlaps() if second.start < first.noticed]

    def excused_overlaps(self) -> list[tuple[Run, Run]]:
        """The other pairs: the second began only after the first had been told."""
        return [(first, second) for first, second in self._overlaps() if second.start >= first.noticed]

    def _overlaps(self) -> Iterator[tuple[Run, Run]]:
        going_on: dict[str, list[Run]] = {}
        for run in self.runs():
            earlier = [other for other in going_on.get(run.key, []) if other.end > run.start]
            yield from ((other, run) for other in earlier)
            going_on[run.key] = [*earlier, run]


def _ended(run: Run, deaths: list[dict[str, Any]]) -> Run:
    """`run` with the death of its process as its end, where it has no other."""
    after = [line["at"] for line in deaths if line["pid"] == run.pid and line["at"] >= run.start]
    return replace(run, end=min(after)) if after and run.end == NEVER else run


def _with_loss(run: Run, losses: list[dict[str, Any]]) -> Run:
    """`run` with the first loss of which its own process was told while it ran."""
    own = [line["at"] for line in losses if (line["pid"], line["task_id"]) == (run.pid, run.task_id)]
    return replace(run, noticed=min((at for at in own if run.start <= at <= run.end), default=NEVER))


def _task_id() -> str:
    """The id of the task that runs here: a pool of threads runs many tasks in one process."""
    return str(current_task.request.id) if current_task else ""
