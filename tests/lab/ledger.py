"""The ledger: what the task bodies themselves wrote down, and what it proves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Run:
    key: str
    item: str
    pid: int
    start: float
    end: float
    """Both `time.monotonic()`, which processes of one host share; infinite where the body never ended."""


class Ledger:
    """A file to which every process appends whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def run(self, key: object, item: object = "") -> Iterator[None]:
        """Write down that a body runs under `key`, from here to the end of the block."""
        mark = {"key": str(key), "item": str(item), "pid": os.getpid(), "start": time.monotonic()}
        self.write({**mark, "event": "start"})
        try:
            yield
        finally:
            self.write({**mark, "event": "end", "end": time.monotonic()})

    def take(self, key: object, item: object, first: float) -> object:
        """A body that takes `first` seconds in its first run, and no time in the next ones."""
        is_first = str(item) not in self.items()
        with self.run(key, item):
            time.sleep(first if is_first else 0)
        return item

    def write(self, line: dict[str, object]) -> None:
        with self.path.open("a") as file:  # O_APPEND: one write of a short line is whole
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, object]]:
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_text().rpartition("\n")  # the last line may still be on its way
        return [json.loads(line) for line in whole.splitlines()]

    def runs(self) -> list[Run]:
        """All runs, in the order of their start."""
        runs: dict[tuple[object, object], Run] = {}
        for line in self.lines():
            event = line.pop("event")
            if event in {"start", "end"}:
                end = line.pop("end", float("inf"))
                runs[line["pid"], line["start"]] = Run(**line, end=end)  # type: ignore[arg-type]
        return sorted(runs.values(), key=lambda run: run.start)

    def conflicts(self) -> list[dict[str, object]]:
        """Every conflict that a worker announced: ``holder`` (its task id) and ``policy``."""
        return [line for line in self.lines() if line["event"] == "conflict"]

    def wait_for_conflict(self, holder: str, seen: int = 0) -> None:
        """In a body or hook: hold on until another message has met this holder's lock."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if sum(line["holder"] == holder for line in self.conflicts()) > seen:
                return
            time.sleep(0.005)

    def items(self) -> list[str]:
        """What ran, in order."""
        return [run.item for run in self.runs()]

    def overlaps(self) -> list[tuple[Run, Run]]:
        """Pairs of runs of one key that ran at the same time."""
        by_key: dict[str, list[Run]] = {}
        for run in self.runs():
            by_key.setdefault(run.key, []).append(run)
        return [(a, b) for runs in by_key.values() for a, b in pairwise(runs) if b.start < a.end]
