"""The story: what a ledger of a chaos run tells, ready to be asked."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any

from tests.lab.ledger import Ledger, Run

Line = dict[str, Any]
#: Keys of these begin so: more than one may hold them.
LIMITED = "three"
#: Keys of these begin so: a run needs two of them.
SEVERAL = "both"
#: Keys of these begin so: nothing holds them.
RATED = "rate"


class Story:
    """Read once; every method answers from the lines of the ledger alone."""

    def __init__(self, ledger: Ledger) -> None:
        self.lines = ledger.lines()
        self.runs = ledger.runs()
        #: Pairs of runs at the same time that may not be; and for each run of a key that more than one may hold, all
        #: that went on when it began.
        self.overlaps, self.beside = _sorted_out(ledger.overlaps())
        told, _ = _sorted_out(ledger.excused_overlaps())
        #: Pairs whose first run knew that this key was lost. One that has lost one of its keys holds the others.
        self.told_overlaps = [pair for pair in told if self._knew_of_its_key(*pair)]
        self.overlaps += [pair for pair in told if pair not in self.told_overlaps]
        self._events: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            self._events[line["event"]].append(line)

    def _knew_of_its_key(self, first: Run, second: Run) -> bool:
        if not first.key.startswith(SEVERAL):
            return True
        losses = [line for line in self.lines if line["event"] == "lost" and line["task_id"] == first.task_id]
        return any(f"{{chaos:{first.key}}}" in line["key"] and line["at"] <= second.start for line in losses)

    def events(self, name: str) -> list[Line]:
        """The lines of this event."""
        return self._events[name]

    def faults(self, *names: str) -> list[Line]:
        """The faults that have one of these names."""
        return [line for line in self.events("fault") if line["name"] in names]

    def strikes(self, names: tuple[str, ...], start: float, end: float, pid: int | None = None) -> list[Line]:
        """The faults of these names that went on at some time from `start` to `end`, and hit `pid` if one is given."""
        faults = [fault for fault in self.faults(*names) if fault["from"] <= end and fault["until"] >= start]
        return [fault for fault in faults if pid is None or pid in fault["pids"]]

    def about(self, task_id: str) -> list[Line]:
        """Every line that names a task."""
        return [line for line in self.lines if line.get("task_id") == task_id]

    @cached_property
    def sent(self) -> dict[str, Line]:
        """What the load sent, by task id."""
        return {line["task_id"]: line for line in self.events("sent")}

    @cached_property
    def final(self) -> dict[str, str]:
        """The state of each message at the end, by task id."""
        return {line["task_id"]: line["state"] for line in self.events("final")}

    @cached_property
    def results(self) -> dict[str, str]:
        """The result of each message at the end, as a text, by task id."""
        return {line["task_id"]: line.get("result", "") for line in self.events("final")}

    @cached_property
    def received(self) -> dict[str, list[Line]]:
        """The deliveries to workers, by task id."""
        return self._by("received", "task_id")

    @cached_property
    def published(self) -> dict[str, list[Line]]:
        """The publishes, also of what comes back, by task id."""
        return self._by("published", "task_id")

    def times_in_queue(self, start: float, end: float) -> list[float]:
        """How long what was published between these times lay in the queue until it was first received."""
        first = {line["publish"]: line["at"] for line in reversed(self.events("received"))}
        published = [line for line in self.events("published") if start <= line["at"] <= end]
        return [first[line["publish"]] - line["at"] for line in published if line["publish"] in first]

    @cached_property
    def unavailable(self) -> dict[str, list[Line]]:
        """When runs could not reach the lock server, by task id."""
        return self._by("unavailable", "task_id")

    @cached_property
    def hung(self) -> set[int]:
        """The workers that hung for ever, by their pids."""
        return {line["worker"] for line in self.events("hang")}

    @cached_property
    def deaths(self) -> dict[int, float]:
        """When each process that is dead has died."""
        deaths: dict[int, float] = {}
        for line in self.events("died"):
            deaths[line["pid"]] = min(line["at"], deaths.get(line["pid"], line["at"]))
        return deaths

    @cached_property
    def attempts(self) -> dict[tuple[str, str], list[Run]]:
        """The runs of every attempt, in order."""
        attempts: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in self.runs:
            attempts[run.task_id, run.item].append(run)
        return attempts

    @cached_property
    def ended(self) -> dict[int, list[Line]]:
        """The runs that have ended, with and without their bodies, by their workers."""
        ended: dict[int, list[Line]] = defaultdict(list)
        for line in self.events("ended"):
            ended[line["worker"]].append(line)
        return ended

    @cached_property
    def end(self) -> float:
        """When the last line that tells its time was written."""
        return max((line["at"] for line in self.lines if "at" in line), default=0.0)

    def runs_of(self, task_id: str) -> list[Run]:
        """The runs of a task, in the order of their start."""
        return self._runs[task_id]

    @cached_property
    def _runs(self) -> dict[str, list[Run]]:
        runs: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            runs[run.task_id].append(run)
        return runs

    def is_done(self, run: Run) -> bool:
        """Whether the body of `run` came to its end, and was not interrupted."""
        return bool(self.done_in(run))

    def done_in(self, run: Run) -> list[Line]:
        """What the body of `run` wrote at its end."""
        done = self._done[run.task_id]
        return [line for line in done if line["pid"] == run.pid and run.start <= line["at"] <= run.end]

    @cached_property
    def _done(self) -> dict[str, list[Line]]:
        return self._by("done", "task_id")

    def _by(self, event: str, field: str) -> dict[str, list[Line]]:
        lines: dict[str, list[Line]] = defaultdict(list)
        for line in self.events(event):
            lines[line[field]].append(line)
        return lines


def _sorted_out(pairs: list[tuple[Run, Run]]) -> tuple[list[tuple[Run, Run]], dict[Run, list[Run]]]:
    """Those pairs that may not be, and the others by their second run."""
    overlaps, beside = [], defaultdict(list)
    for first, second in pairs:
        is_twin = (first.task_id, first.item) == (second.task_id, second.item)
        if first.key.startswith(RATED):
            continue
        if first.key.startswith(LIMITED) and not is_twin:
            beside[second].append(first)
        else:
            overlaps.append((first, second))
    return overlaps, beside
