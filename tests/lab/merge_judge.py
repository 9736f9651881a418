"""The judge of merged calls: it knows only what publishers and bodies have noted, and never accuses wrongly.

A call is surely later than another one of its key if it was made after the other's caller had its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.lab.ledger import Ledger, Run


@dataclass(frozen=True)
class Noted:
    """One call, as its caller noted it; all times are by `time.monotonic()`."""

    key: str
    item: str
    """Its argument, which no other call has."""
    pid: int
    asked_at: float
    returned_at: float
    is_accepted: bool
    """Its caller has a result, not an error."""
    is_numbered: bool
    """It was merged, or its message can be."""

    def is_surely_before(self, other: Noted) -> bool:
        """Whether this caller had its answer before the other one called."""
        return self.returned_at <= other.asked_at


@dataclass(frozen=True)
class Stale:
    """A body that began with the arguments of a call after one with those of a surely later call had begun."""

    run: Run
    call: Noted
    later: Noted
    excuse: str
    """Why that may happen; empty if it may not."""


class Judge:
    """What publishers and bodies have noted; the judgments are about the runs up to now."""

    def __init__(self, ledger: Ledger) -> None:
        lines = ledger.lines()
        self.runs = ledger.runs()
        self._ended = {(line["pid"], line["start"]) for line in lines if line["event"] == "end"}
        self.calls = {line["item"]: _noted(line) for line in lines if line["event"] in {"call", "error"}}
        self._warned = [(line["pid"], line["at"]) for line in lines if line["event"] == "warned"]
        answers = [line for line in lines if line["event"] == "call"]
        self.counts = Counter(
            jobs=sum(not line["duplicate"] for line in answers),
            merged=sum(line["duplicate"] for line in answers),
            alone=sum(not call.is_numbered for call in self.calls.values()),
            runs=len(self.runs),
            killed=sum(not self._is_whole(run) for run in self.runs),
        )
        self.counts.update(
            line["event"] for line in lines if line["event"] in {"error", "dies", "dawdles", "doubles", "warned"}
        )

    def of_nobody(self) -> list[Run]:
        """The runs with arguments that no caller has noted, or for another key."""
        return [run for run in self.runs if run.item not in self.calls or self.calls[run.item].key != run.key]

    def lost(self) -> list[Noted]:
        """The accepted calls after which no run has begun, and ended alive, with their arguments or perhaps later ones.

        Their tasks are acked late: the message of a run that was killed is delivered again.
        """
        return [call for call in self.calls.values() if call.is_accepted and not self._has_run(call)]

    def stale(self) -> list[Stale]:
        """The stale runs, with and without an excuse."""
        return list(self._stale())

    def unexcused(self) -> list[Stale]:
        """Those for which there is no excuse."""
        return [stale for stale in self.stale() if not stale.excuse]

    def excuses(self) -> Counter[str]:
        """How often there was which excuse."""
        return Counter(stale.excuse for stale in self.stale() if stale.excuse)

    def _has_run(self, call: Noted) -> bool:
        after = (run for run in self.runs if run.key == call.key and run.start >= call.asked_at and self._is_whole(run))
        return any(not self.calls[run.item].is_surely_before(call) for run in after if run.item in self.calls)

    def _is_whole(self, run: Run) -> bool:
        return (run.pid, run.start) in self._ended

    def _stale(self) -> Iterator[Stale]:
        newest: dict[str, list[Noted]] = {}
        for run in self.runs:
            call = self.calls.get(run.item)
            if call is None:
                continue
            begun = newest.setdefault(run.key, [])
            later = [other for other in begun if call.is_surely_before(other)]
            if later:
                yield Stale(run, call, later[0], min(self._excuse(call, other) for other in later))
            begun.append(call)

    def _excuse(self, call: Noted, later: Noted) -> str:
        if not (call.is_numbered and later.is_numbered):
            return "one of them was sent alone"
        if any(self._was_warned(one) for one in (call, later)):
            return "Redis was out of reach"
        return ""

    def _was_warned(self, call: Noted) -> bool:
        return any(pid == call.pid and call.asked_at <= at <= call.returned_at for pid, at in self._warned)


def _noted(line: dict[str, object]) -> Noted:
    names = ("key", "item", "pid", "asked_at", "returned_at", "is_numbered")
    return Noted(**{name: line[name] for name in names}, is_accepted=line["event"] == "call")  # type: ignore[arg-type]
