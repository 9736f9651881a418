"""The judge of windows: it knows only what publishers and bodies have noted, and never accuses wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from tests.lab.ledger import Ledger

#: Seconds. A publisher that takes longer to send its message may have been taken for dead: after one second, half of
#: which is left to a busy machine.
SLOW = 0.5


@dataclass(frozen=True)
class Job:
    """A bare job that was sent. Its window was opened between `asked_at` and `sent_at`, all by `time.monotonic()`."""

    key: str
    id: str
    pid: int
    asked_at: float
    named_at: float
    """When its publisher knew its id: from then on it did nothing but send the message."""
    sent_at: float
    """When its message was about to be handed to the broker."""
    returned_at: float
    failed: bool
    """Its caller got an error, but the broker had the message."""


@dataclass(frozen=True)
class Pair:
    """Two jobs of one key, the second of which was sent within the window of the first."""

    first: Job
    second: Job
    excuse: str
    """Why that may happen; empty if it may not."""


class Judge:
    """What publishers and bodies have noted.

    Args:
        ledger: Has their notes.
        window: The task's `lock_window`, in seconds.
    """

    def __init__(self, ledger: Ledger, window: float) -> None:
        self.window = window
        lines = ledger.lines()
        self._keys_of_runs = {run.task_id: run.key for run in ledger.runs()}
        calls = [line for line in lines if line["event"] == "call"]
        errors = [line for line in lines if line["event"] == "error"]
        self.answers = [line for line in calls if line["duplicate"]]
        """The calls that were answered with another caller's job."""
        sent = [line for line in calls if not line["duplicate"]]
        sent += [line for line in errors if line["id"] in self._keys_of_runs]
        self.jobs = [_job(line) for line in sent]
        self.counts = Counter(jobs=len(self.jobs), answers=len(self.answers), errors=len(errors))
        self.counts.update(line["event"] for line in lines if line["event"] in {"dies", "dawdles", "doubles", "warned"})
        self._warned = [(line["pid"], line["at"]) for line in lines if line["event"] == "warned"]
        self._told = {line["id"]: line["key"] for line in calls}

    def never_ran(self) -> list[str]:
        """The ids that a caller has and that no body has."""
        return sorted(self._told.keys() - self._keys_of_runs.keys())

    def of_another_key(self) -> list[str]:
        """The ids that a caller has and that ran for another key."""
        return sorted(one for one, key in self._told.items() if self._keys_of_runs.get(one, key) != key)

    def pairs(self) -> list[Pair]:
        """All pairs of jobs that were certainly sent within one window."""
        return sorted(self._pairs(), key=lambda pair: pair.first.asked_at)

    def unexcused(self) -> list[Pair]:
        """Those for which there is no excuse."""
        return [pair for pair in self.pairs() if not pair.excuse]

    def excuses(self) -> Counter[str]:
        """How often there was which excuse."""
        return Counter(pair.excuse for pair in self.pairs() if pair.excuse)

    def _pairs(self) -> Iterator[Pair]:
        jobs = sorted(self.jobs, key=lambda job: job.sent_at)
        for first, second in combinations(jobs, 2):
            if first.key != second.key or not self._are_within_a_window(first, second):
                continue
            excuse = self._excuse(first, second)
            if not excuse and second.asked_at < first.sent_at:  # the second one may have been the first to reserve
                excuse = self._excuse(second, first)
            yield Pair(first, second, excuse)

    def _are_within_a_window(self, first: Job, second: Job) -> bool:
        """Whether they are, whenever between the call and the send each has opened its own."""
        return max(second.sent_at - first.asked_at, first.sent_at - second.asked_at) < self.window

    def _excuse(self, first: Job, second: Job) -> str:
        if first.failed:
            return "the broker had the first message, but its publisher was told that it had failed"
        if first.returned_at - first.named_at >= SLOW:
            return "the first publisher was slow"
        if any(self._was_warned(job) for job in (first, second)):
            return "Redis was out of reach"
        return ""

    def _was_warned(self, job: Job) -> bool:
        return any(pid == job.pid and job.asked_at <= at <= job.returned_at for pid, at in self._warned)


def _job(line: dict[str, object]) -> Job:
    names = ("key", "id", "pid", "asked_at", "named_at", "sent_at", "returned_at")
    return Job(**{name: line[name] for name in names}, failed=line["event"] == "error")  # type: ignore[arg-type]
