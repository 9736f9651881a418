"""One job means one: what the checker says of jobs of one key that were sent while another was outstanding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chaos.excuses import OUTAGES, STOPS
from chaos.faults import COLD, KILL_CHILD, KILL_WORKER, RESTART, STOP_WORKER
from chaos.story import Line, Story
from chaos.windows import ACK, AT_ONCE, LAPSE, NEVER
from promises import Excuse
from tests.lab.ledger import Run


@dataclass(frozen=True)
class Job:
    """A job of the contending callers. It is outstanding from the return of its publish to its end."""

    task_id: str
    key: str
    asked_at: float
    returned_at: float
    is_unasked: bool
    """Its publisher could not ask the lock server, and sent it without its key."""
    runs: tuple[Run, ...]
    end: float
    """The end of the first run of its last attempt that came to its end; if none has, nobody knows when it was over."""


def jobs(story: Story) -> list[Job]:
    """The jobs of the contending callers, in the order in which these asked."""
    sent = [line for line in story.events("sent") if "asked_at" in line]
    return sorted((_job(story, line) for line in sent), key=lambda job: job.asked_at)


def _job(story: Story, sent: Line) -> Job:
    runs = story.runs_of(sent["task_id"])
    last = [run for run in runs if run.item.endswith(f"/{sent['retries']}") and story.is_done(run)]
    end = min((run.end for run in last if run.end < NEVER), default=float(sent["returned_at"]))
    return Job(sent["task_id"], sent["key"], sent["asked_at"], sent["returned_at"], sent["unasked"], tuple(runs), end)


def pairs(story: Story) -> Iterator[tuple[Job, Job]]:
    """Jobs of which the second was asked for and sent while the first was queued, waited or ran."""
    outstanding: list[Job] = []
    for job in jobs(story):
        outstanding = [other for other in outstanding if other.end > job.asked_at]
        for other in outstanding:
            is_proved = other.returned_at < job.asked_at and job.returned_at < other.end
            if other.key == job.key and is_proved:
                yield other, job
        outstanding.append(job)


def of_pair(story: Story, first: Job, second: Job) -> Excuse | None:
    """Why a second job could be sent while the first was outstanding."""
    start, end = first.asked_at, second.returned_at
    if story.strikes((RESTART,), start, end):
        return Excuse.DATA_LOST
    if first.is_unasked or second.is_unasked:
        return Excuse.UNREACHABLE
    if any(start <= line["at"] <= end for line in story.unavailable[first.task_id]):
        return Excuse.UNREACHABLE  # what the lock server had granted was given back, or lapsed, as its answer was lost
    if any(run.noticed <= end for run in first.runs):
        return Excuse.KNEW_OF_THE_LOSS
    workers, pids = {line["worker"] for line in story.received[first.task_id]}, {run.pid for run in first.runs}
    for stop in story.strikes(STOPS, start, end):
        is_of_first = stop["worker"] in workers if stop["name"] == STOP_WORKER else pids.intersection(stop["pids"])
        if is_of_first and stop["from"] + LAPSE <= end:
            return Excuse.STOOD_STILL
    # Its key is free from the death of its process, and until its message is delivered again.
    if any(death["worker"] in workers for death in story.strikes((KILL_CHILD, KILL_WORKER, COLD), start, end)):
        return Excuse.KILLED_BEFORE_REDELIVERY
    for run in first.runs:  # what was to be left to its retry has lapsed with the lease of this run
        if run.end + LAPSE <= end and story.strikes(OUTAGES, run.end - AT_ONCE, run.end + ACK):
            return Excuse.NOT_HANDED_OVER
    return None
