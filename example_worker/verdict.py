"""The verdict: compare the ledger, the results and the lock server. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from celery import states

from .ledger import Run

#: What may happen to a call.
RAN, SKIPPED, MERGED, REPLACED = "ran", "skipped", "merged", "replaced"


@dataclass(frozen=True)
class Fate:
    """What happened to one message."""

    task_id: str
    what: str
    state: str
    reason: str
    """What it returned, why it was skipped, or how it failed."""

    def __str__(self) -> str:
        return f"{self.what}, task {self.task_id}: {self.state} {self.reason}".rstrip()


def kind_of(fate: Fate, is_merged: bool = False) -> str:
    """What happened to a call; empty if it has not ended."""
    if is_merged:
        return MERGED
    if fate.state == states.REVOKED:
        return REPLACED if fate.reason.startswith("replaced by") else SKIPPED
    return {states.SUCCESS: RAN, states.FAILURE: "failed"}.get(fate.state, "")


@dataclass(frozen=True)
class Verdict:
    """The counts, and a sentence for each thing that went wrong."""

    runs: int
    skipped: int
    merged: int
    replaced: int
    lost: list[str]
    overlaps: list[str]
    keys_left: list[str]
    wrong: list[str]

    @property
    def faults(self) -> list[str]:
        """The sentences for everything that went wrong."""
        return [*self.lost, *self.overlaps, *self.keys_left, *self.wrong]

    def summary(self, seconds: float) -> str:
        """The verdict in one line.

        Args:
            seconds: How long the demo took.
        """
        wrong = f"wrong: {len(self.wrong)}  " if self.wrong else ""
        return (
            f"runs: {self.runs}  skipped: {self.skipped}  merged: {self.merged}  replaced: {self.replaced}  "
            f"lost: {len(self.lost)}  overlaps: {len(self.overlaps)}  "
            f"keys left: {len(self.keys_left)}  {wrong}({seconds:.1f} s)"
        )


def judge(
    fates: Sequence[Fate], merged: int, runs: Sequence[Run], keys_left: Iterable[str], expected: Mapping[str, int]
) -> Verdict:
    """Compare what the results say with what the bodies recorded.

    Args:
        fates: What happened to each message, according to its result.
        merged: How many calls sent none.
        runs: What the bodies recorded in the ledger.
        keys_left: The locks that are still held.
        expected: How many runs there must have been for each thing.
    """
    whole = [run for run in runs if run.end is not None]
    return Verdict(
        runs=len(whole),
        skipped=sum(kind_of(fate) == SKIPPED for fate in fates),
        merged=merged,
        replaced=sum(kind_of(fate) == REPLACED for fate in fates),
        lost=_lost(fates, whole),
        overlaps=_overlaps(runs),
        keys_left=[f"still held: {key}" for key in keys_left],
        wrong=[*_wrong_fates(fates, whole), *_wrong_counts(whole, expected), *_wrong_holders(fates, runs)],
    )


def took_together(runs: Sequence[Run]) -> str:
    """How long all runs took together, and how much of that the bodies worked."""
    ended = [run.end for run in runs if run.end is not None]
    if not ended:
        return ""
    worked = sum(run.end - run.start for run in runs if run.end is not None)
    return f"{max(ended) - min(run.start for run in runs):.2f} s for {worked:.2f} s of work"


def _lost(fates: Sequence[Fate], whole: Sequence[Run]) -> list[str]:
    """Messages that neither finished their body nor were skipped."""
    finished = {run.task_id for run in whole}
    lost = [fate for fate in fates if kind_of(fate) != SKIPPED and fate.task_id not in finished]
    return [f"lost: {fate}" for fate in lost]


def _overlaps(runs: Sequence[Run]) -> list[str]:
    """Runs on the same thing that overlap. A killed run has no end and is left out."""
    by_what: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.start):
        by_what.setdefault(run.what, []).append(run)
    return [
        f"overlap: {a.what}: task {b.task_id} started {a.end - b.start:.3f} s before task {a.task_id} ended"
        for same in by_what.values()
        for a, b in pairwise(same)
        if a.end is not None and b.start < a.end
    ]


def _wrong_fates(fates: Sequence[Fate], whole: Sequence[Run]) -> list[str]:
    """Messages whose body ran more than once, or finished although the task neither succeeded nor was replaced."""
    times = Counter(run.task_id for run in whole)
    return [
        f"wrong: {fate}, but its body ran {times[fate.task_id]} times"
        for fate in fates
        if times[fate.task_id] > (kind_of(fate) in {RAN, REPLACED})
    ]


def _wrong_counts(whole: Sequence[Run], expected: Mapping[str, int]) -> list[str]:
    times = Counter(run.what for run in whole)
    return [
        f"wrong: {what}: {times[what]} runs instead of {count}"
        for what, count in expected.items()
        if times[what] != count
    ]


def _wrong_holders(fates: Sequence[Fate], runs: Sequence[Run]) -> list[str]:
    """Skipped messages whose reason does not name a run on the same thing."""
    ran = {(run.what, f"duplicate of {run.task_id}") for run in runs}
    return [
        f"wrong: {fate}, but that task did not hold the key"
        for fate in fates
        if kind_of(fate) == SKIPPED and (fate.what, fate.reason) not in ran
    ]
