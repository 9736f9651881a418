"""The observer of publishes and runs, which reads what `tests.lab.callers` wrote: it never accuses wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.lab.ledger import NEVER, Ledger


@dataclass(frozen=True)
class Call:
    """One call of a caller. All times are `time.monotonic()`, which processes of one host share."""

    caller: int
    id: str
    """The id of the result that the caller was given."""
    way: str
    asked_at: float
    sent_at: float | None
    """When the message was about to be handed to the broker; None where the caller was answered with another's job."""
    returned_at: float
    expires_at: float | None


@dataclass(frozen=True)
class Job:
    """A message that a bare publish has sent."""

    call: Call
    start: float
    """Until then it was queued, or had asked for its key."""
    end: float
    """The earliest moment at which it may count as over."""


@dataclass(frozen=True)
class Pair:
    """Two jobs, the second of which was sent though the first was outstanding."""

    first: Job
    second: Job

    @property
    def by(self) -> float:
        """For how many seconds the first one was still outstanding."""
        return self.first.end - (self.second.call.sent_at or 0.0)


class Observer:
    """What the callers and the bodies of one key have written down."""

    def __init__(self, ledger: Ledger) -> None:
        lines = ledger.lines()
        self.calls = sorted((_call(line) for line in lines if line["event"] == "call"), key=lambda call: call.asked_at)
        self._revoked = {line["id"]: line["at"] for line in lines if line["event"] == "revoke"}
        self._asked = [(line["task_id"], line["at"]) for line in lines if line["event"] == "asks"]
        self._runs: dict[str, list[tuple[float, float]]] = {}
        for run in ledger.runs():
            self._runs.setdefault(run.task_id, []).append((run.start, run.end))
        self._seen: dict[str, float] = {}
        for line in lines:
            if line["event"] == "seen":
                self._seen[line["id"]] = min(line["at"], self._seen.get(line["id"], NEVER))
        self._others = {line["id"] for line in lines if line["event"] == "named"}
        self.unseen = [line["id"] for line in lines if line["event"] == "unseen"]
        """Jobs whose results callers have waited for in vain."""
        self.jobs = [self._job(call) for call in self.calls if call.sent_at is not None]

    def pairs(self) -> list[Pair]:
        """Jobs that were sent though an earlier one was queued, waiting or running, as both callers can prove."""
        return list(_overlapping([replace(job, end=self._shown_to_end(job)) for job in self.jobs]))

    def pairs_in_the_queue(self) -> list[Pair]:
        """The same, where a job counts as over when it begins."""
        return list(_overlapping([replace(job, end=min(job.start, self._shown_to_end(job))) for job in self.jobs]))

    def late_answers(self) -> list[Call]:
        """Calls that were answered with a job that had ended, and whose end somebody had seen, before the call.

        A job that is revoked just as it starts runs, though its state is REVOKED from then on. Its end is not seen: it
        still holds its key for a moment after its body.
        """
        ends = {job.call.id: job.end for job in self.jobs if job.call.id in self._runs}
        ends |= dict.fromkeys(ends.keys() & self._revoked.keys(), NEVER)
        answered = [call for call in self.calls if call.sent_at is None]
        return [one for one in answered if max(self._seen.get(one.id, NEVER), ends.get(one.id, 0.0)) < one.asked_at]

    def unknown_answers(self) -> list[Call]:
        """Calls that were answered with a job that nobody has sent."""
        sent = self._others | {job.call.id for job in self.jobs}
        return [call for call in self.calls if call.id not in sent]

    def _job(self, call: Call) -> Job:
        runs = self._runs.get(call.id, [])
        start = min((start for start, _ in runs), default=NEVER)
        ends = [at for at in (self._revoked.get(call.id), call.expires_at) if at is not None]
        if not runs:  # it was revoked, has expired, or its policy has ended it: nobody knows when
            return Job(call, min(ends, default=call.asked_at), min(ends, default=call.asked_at))
        return Job(call, self._asked_before(call.id, start), max(end for _, end in runs))

    def _shown_to_end(self, job: Job) -> float:
        """When everybody may take the job for ended: one that is revoked as it begins runs on, shown as REVOKED."""
        return min(job.end, self._revoked.get(job.call.id, NEVER))

    def _asked_before(self, job: str, start: float) -> float:
        """When a run asked for the key that it was granted: from then on it need not be queued any more."""
        return max((at for one, at in self._asked if one == job and at < start), default=start)


def _overlapping(jobs: list[Job]) -> Iterator[Pair]:
    outstanding: list[Job] = []
    for job in jobs:
        outstanding = [other for other in outstanding if other.end > job.call.asked_at]
        for other in outstanding:
            if other.call.returned_at < job.call.asked_at and (job.call.sent_at or NEVER) < other.end:
                yield Pair(other, job)
        outstanding.append(job)


def _call(line: dict[str, object]) -> Call:
    return Call(**{name: value for name, value in line.items() if name != "event"})  # type: ignore[arg-type]
