"""The excuses for messages that have not come to their end."""

from __future__ import annotations

from tests.chaos.excuses import DEATHS, MARGIN
from tests.chaos.faults import COLD, KILL_WORKER
from tests.chaos.stage import VISIBILITY
from tests.chaos.story import Story

#: How long a delivery may wait and run in its worker.
LONGEST = 10.0


def of_missing(story: Story, task_id: str) -> str | None:
    """Why a message that is acked late has not come to its end. RabbitMQ loses none."""
    if any(line["kind"] == "rabbitmq" for line in story.events("broker")):
        return None
    published, received = story.published[task_id], story.received[task_id]
    if not published:
        before = story.sent[task_id]["after"]
        is_cut_off = before and story.final.get(before) != "SUCCESS"
        return of_missing(story, before) if is_cut_off else None  # a chain ends where a step is lost
    seen = {line["publish"] for line in received}
    unseen = [line for line in published if line["publish"] not in seen]
    if any(story.strikes((KILL_WORKER, COLD), line["at"] - MARGIN, line["at"] + VISIBILITY) for line in unseen):
        return "kombu had taken it from the queue when its worker was killed: no worker has ever received it"
    if unseen or not received:
        return None
    last = max(received, key=lambda line: line["at"])
    if any(story.is_done(run) for run in story.runs_of(task_id)):
        return None
    ended = [fault for fault in story.faults(*DEATHS) if fault["worker"] == last["worker"]]
    if any(fault["from"] <= last["at"] + LONGEST and fault["until"] >= last["at"] for fault in ended):
        return "its worker was ended with it, and kombu has given it to no other"
    return None


def of_lost_early(story: Story, task_id: str) -> str | None:
    """Why a message that is acked early has not come to its end."""
    for receipt in story.received[task_id]:
        faults = [fault for fault in story.faults(*DEATHS) if fault.get("worker") == receipt["worker"]]
        if any(fault["until"] >= receipt["at"] for fault in faults):
            return "acked early, and its process died"
    return of_missing(story, task_id)
