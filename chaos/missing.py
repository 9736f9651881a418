"""The excuses for messages that have not come to their end, or whose state says so."""

from __future__ import annotations

from chaos.excuses import DEATHS, STOPS
from chaos.faults import COLD, CUT_BROKER, KILL_WORKER, STOP_WORKER
from chaos.story import Line, Story
from chaos.windows import AT_ONCE, IN_QUEUE, IN_WORKER, NEARBY
from promises import Excuse


def of_missing(story: Story, task_id: str, *, is_acked: bool = False) -> Excuse | None:
    """Why a message has not come to its end; `is_acked` if a run of one that is acked early has begun.

    On RabbitMQ nothing excuses the loss of one that is acked late.
    """
    if any(line["kind"] == "rabbitmq" for line in story.events("broker")):
        return None
    published, received = story.published[task_id], story.received[task_id]
    if not published:
        before = story.sent[task_id]["after"]
        is_cut_off = before and story.final.get(before) != "SUCCESS"
        return of_missing(story, before) if is_cut_off else None  # a chain ends where a step is lost
    seen = {line["publish"] for line in received}
    unseen = [line for line in published if line["publish"] not in seen]
    if any(_may_have_been_taken(story, line["at"]) for line in unseen):
        return Excuse.TAKEN_BY_KOMBU
    if unseen or not received:
        return None
    last = max(received, key=lambda line: line["at"])
    if any(story.is_done(run) for run in story.runs_of(task_id)):
        return None
    if _ended_in(story, last):
        return Excuse.KEPT_BY_KOMBU
    if not is_acked and any(_may_have_been_taken(story, at) for at in _went_back(story, last)):
        return Excuse.TAKEN_BY_KOMBU
    return None


def is_finished(story: Story, task_id: str) -> bool:
    """Whether a retry has finished, and a run before it stood still and stored RETRY only then, as in plain Celery."""
    runs = story.runs_of(task_id)
    if not runs or not story.is_done(last := runs[-1]):
        return False
    stops = [stop for run in runs[:-1] for stop in story.strikes(STOPS, run.end - AT_ONCE, last.start, run.pid)]
    return any(stop["until"] >= last.end - AT_ONCE for stop in stops)


def _went_back(story: Story, receipt: Line) -> list[float]:
    """When a message went back to the queue, because its worker lost its connection."""
    cuts = story.strikes((CUT_BROKER,), receipt["at"], receipt["at"] + IN_WORKER)
    left = [line["at"] for line in story.events("leaves") if line["worker"] == receipt["worker"]]
    return [at for at in left if any(cut["from"] <= at <= cut["until"] + IN_WORKER for cut in cuts)]


def _may_have_been_taken(story: Story, queued_at: float) -> bool:
    """Whether a worker that was killed may have had a message in its connection; also while it stood still before."""
    in_queue = max([IN_QUEUE, *story.times_in_queue(queued_at - NEARBY, queued_at + NEARBY)])
    start, end = queued_at - AT_ONCE, queued_at + in_queue
    stops = story.strikes((STOP_WORKER,), start, end)
    kills = story.strikes((KILL_WORKER, COLD), start, max([end, *(stop["until"] + in_queue for stop in stops)]))
    stopped = {stop["worker"] for stop in stops}
    return any(kill["from"] <= end or kill["worker"] in stopped for kill in kills)


def of_lost_early(story: Story, task_id: str) -> Excuse | None:
    """Why a message that is acked early has not come to its end."""
    runs = [run for run in story.runs_of(task_id) if not story.is_done(run)]  # it may have waited in line before
    if any(story.strikes(DEATHS, run.start, run.end + AT_ONCE, run.pid) for run in runs):
        return Excuse.ACKED_EARLY
    if any(_ended_in(story, receipt) for receipt in story.received[task_id]):
        return Excuse.ACKED_EARLY
    return of_missing(story, task_id, is_acked=bool(story.runs_of(task_id)))


def _ended_in(story: Story, receipt: Line) -> bool:
    """Whether a fault ended the worker, or a child of it, while the worker had the message that it received."""
    faults = story.strikes(DEATHS, receipt["at"], receipt["at"] + IN_WORKER)
    return any(fault["worker"] == receipt["worker"] for fault in faults)
