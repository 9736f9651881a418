"""The evidence that each excuse of `promises` needs."""

from __future__ import annotations

from itertools import pairwise

from chaos.faults import (
    BLACKHOLE,
    COLD,
    CUT_BROKER,
    CUT_LOCKS,
    DROP,
    KILL_CHILD,
    KILL_WORKER,
    REFUSE,
    RESTART,
    SHRINK,
    STOP_CHILD,
    STOP_WORKER,
    WARM,
)
from chaos.story import SEVERAL, Line, Story
from chaos.tasks import LEASE, SHARED
from chaos.windows import ACK, AT_ONCE, CUT_TOLD, LAPSE, MADE_UP_FOR, NEVER, RENEWAL, RESTORED, TOO_LATE
from promises import Excuse
from tests.lab.ledger import Run

STOPS, OUTAGES = (STOP_CHILD, STOP_WORKER), (REFUSE, BLACKHOLE)
DEATHS = (KILL_CHILD, KILL_WORKER, COLD, WARM, SHRINK)


def of_overlap(story: Story, first: Run, second: Run) -> Excuse | None:
    """Why the second run could begin while the first went on, which nobody had told that its lock had lapsed."""
    for run in (first, second):  # the second may have stood still between its grant and its first line
        for stop in _standstills(story, run.start - LEASE, second.start, run.pid):
            if _lapses_in(story, stop) <= second.start <= stop["until"] + AT_ONCE:
                return Excuse.STOOD_STILL
    for restart in story.strikes((RESTART,), first.start - AT_ONCE, second.start):
        if second.start <= _until_noticed(story, restart, first):
            return Excuse.DATA_LOST
    return None


def _standstills(story: Story, start: float, end: float, pid: int) -> list[Line]:
    """When a process stood still. Two stops are one where it had no time between them to learn of a loss."""
    joined: list[Line] = []
    for stop in sorted(story.strikes(STOPS, start, end, pid), key=lambda stop: float(stop["from"])):
        if joined and stop["from"] - joined[-1]["until"] < AT_ONCE:
            stop = {**stop, "from": joined.pop()["from"]}
        joined.append(stop)
    return joined


def _lapses_in(story: Story, stop: Line) -> float:
    """When a lock lapses at the earliest while its process stands still: before that it was renewed if possible."""
    hindered = story.strikes((*OUTAGES, CUT_LOCKS, DROP), stop["from"] - LEASE, stop["from"])
    return float(stop["from"]) + (0.0 if hindered else LAPSE)


def _until_noticed(story: Story, restart: Line, holder: Run) -> float:
    """When a holder knows, at the latest, that the server has lost its data: after its next renewal."""
    told: float = restart["until"] + RENEWAL + AT_ONCE
    if story.strikes((*OUTAGES, CUT_LOCKS, DROP), restart["from"] - AT_ONCE, told):
        told = max(told, restart["from"] + LEASE + AT_ONCE)  # at its deadline
    for stop in story.strikes(STOPS, restart["from"] - AT_ONCE, told, holder.pid):
        told = max(told, stop["until"] + AT_ONCE)
    return told


def of_loss(story: Story, loss: Line) -> Excuse | None:
    """Why a holder lost its lock."""
    runs = [run for run in story.runs if (run.pid, run.task_id) == (loss["pid"], loss["task_id"])]
    start = max((run.start for run in runs if run.start <= loss["at"]), default=loss["at"] - LEASE) - AT_ONCE
    # Lost as soon as the body begins: the process may have stood still for long between its grant and its first line.
    since = loss["at"] - LEASE if loss["at"] < start + 2 * AT_ONCE else start
    if story.strikes(STOPS, since, loss["at"], loss["pid"]):
        return Excuse.STOOD_STILL
    if story.strikes((RESTART,), start, loss["at"]):
        return Excuse.DATA_LOST
    if "deadline" in loss["reason"] and story.strikes((*OUTAGES, CUT_LOCKS, DROP), start, loss["at"]):
        return Excuse.UNREACHABLE
    # It has ended, and its keys are released one by one, each of which waits for the server: its last one has lapsed.
    has_ended = "release" in loss["reason"] and len(runs) > 1 and all(run.end < loss["at"] for run in runs)
    if has_ended and story.strikes(OUTAGES, start, loss["at"] - (LEASE - RENEWAL)):
        return Excuse.UNREACHABLE
    return None


def of_another_run(story: Story, earlier: list[Run], run: Run) -> Excuse | None:
    """Why an attempt that had begun before ran again."""
    first = earlier[-1]
    finished = [other for other in earlier if story.is_done(other)]
    if not finished:
        ended = first.end + AT_ONCE
        cold = story.strikes((COLD,), first.start, ended, first.pid)
        if cold or story.deaths.get(first.pid, NEVER) <= ended:
            return Excuse.UNFINISHED
    first = [first, *finished][-1]  # where none has finished, an error has ended the body, such as LockLost
    ack = ACK * (3 if first.key.startswith((SEVERAL, SHARED)) else 1)  # each of three keys is released by itself
    if run.start < first.end:
        return Excuse.WENT_ON if _lost_its_lock(story, first, run) else None
    if first.noticed <= first.end and run.start < first.end + AT_ONCE:  # its note is written after its result
        return Excuse.WENT_ON
    if any(
        stop["until"] + AT_ONCE >= run.start for stop in story.strikes(STOPS, run.start - AT_ONCE, run.start, run.pid)
    ):
        return Excuse.STOOD_STILL_BEFORE_ITS_BODY
    if _stood_still_as_it_received(story, first, run):
        return Excuse.STOOD_STILL_WITH_THE_MESSAGE
    received, died = _first_receipt(story, run.task_id, first.start), story.deaths.get(first.pid, NEVER)
    if died <= first.end + ack:
        return Excuse.DIED_BEFORE_ACK
    if story.strikes((WARM, COLD), first.start, first.end + ack, first.pid):
        return Excuse.GIVEN_BACK
    stops = story.strikes((STOP_WORKER,), first.start, first.end + ack, first.pid)  # no ack was sent until then
    if _cut(story, first.end - CUT_TOLD, max([first.end, *(stop["until"] for stop in stops)]) + ack):
        return Excuse.DISCONNECTED
    if _noticed_a_cut_at_its_ack(story, first):
        return Excuse.DISCONNECTED
    if story.strikes((RESTART,), first.start, run.start):
        return Excuse.DATA_LOST
    if any(line["worker"] in story.hung for line in story.received[run.task_id]):
        return Excuse.HUNG
    if _was_sent_back_unacked(story, run):
        return Excuse.SENT_BACK_UNACKED
    if _was_published_twice(story, run):
        return Excuse.PUBLISHED_TWICE
    leaves_no_note = first.noticed < NEVER or story.strikes(STOPS, first.start, first.end + ack, first.pid)
    if leaves_no_note and run.start - received >= RESTORED:
        return Excuse.ACK_TOO_LATE
    if _cut(story, received, first.end + ack) and story.strikes(OUTAGES, first.start, first.end + ack):
        return Excuse.RELEASE_IN_DOUBT
    for outage in story.strikes(OUTAGES, first.end - ack, first.end + ack):
        is_over_at = _end_of_all(story, outage)
        made_up_at = is_over_at + MADE_UP_FOR + AT_ONCE
        # A process that stands still by then sends its release again only afterwards.
        stops = story.strikes(STOPS, first.end, min(made_up_at, run.start), first.pid)
        made_up_late = [stop["until"] + MADE_UP_FOR + AT_ONCE for stop in stops if stop["until"] > is_over_at]
        if died <= made_up_at or run.start <= max(made_up_late, default=0.0):
            return Excuse.RELEASE_IN_DOUBT
        if outage["from"] + LEASE - RENEWAL <= run.start <= made_up_at:  # no renewal since then: the lease was over
            return Excuse.RELEASE_IN_DOUBT
    return None


def _end_of_all(story: Story, outage: Line) -> float:
    """When an outage is over, with those that begin before it is made up for."""
    until: float = outage["until"]
    for later in sorted(story.faults(*OUTAGES), key=lambda fault: fault["from"]):
        if outage["from"] <= later["from"] <= until + MADE_UP_FOR + AT_ONCE:
            until = max(until, later["until"])
    return until


def _stood_still_as_it_received(story: Story, first: Run, run: Run) -> bool:
    """Whether a worker had taken the message of both from the broker, and only then, and after a stop, noted that.

    So it did not know when the message was delivered again elsewhere: its run leaves no note if it is the first, and
    reads none if it is the second.
    """
    ran = [line["publish"] for line in story.received[run.task_id] if line["at"] <= first.start][-1:]
    for receipt in story.received[run.task_id]:
        if receipt["publish"] not in ran or receipt["at"] > run.start or _deliveries(story, receipt) < 2:
            continue
        sent_at = [line["at"] for line in story.published[run.task_id] if line["publish"] == receipt["publish"]]
        copied_at = max(line["at"] for line in story.received[run.task_id] if line["publish"] == receipt["publish"])
        for stop in story.strikes((STOP_WORKER,), max(sent_at, default=NEVER), receipt["at"]):
            is_noted = stop["worker"] == receipt["worker"] and receipt["at"] <= stop["until"] + AT_ONCE
            if is_noted and stop["until"] - max(sent_at) >= TOO_LATE and copied_at - max(sent_at) >= RESTORED:
                return True
    return False


def _lost_its_lock(story: Story, first: Run, second: Run) -> bool:
    return second.start >= first.noticed or of_overlap(story, first, second) is not None


def _first_receipt(story: Story, task_id: str, before: float) -> float:
    """When the delivery that ran was received; the first one, where one publish was delivered several times."""
    receipts = [line for line in story.received[task_id] if line["at"] <= before]
    twice = [line["at"] for line in receipts if _deliveries(story, line) > 1]
    return min(twice or [line["at"] for line in receipts[-1:]], default=0.0)


def _cut(story: Story, start: float, end: float) -> bool:
    """Whether a worker may have lost its broker from `start` to `end`. A worker that stands still notices later."""
    for cut in story.faults(CUT_BROKER):
        stops = story.strikes(STOPS, cut["from"], cut["until"])
        noticed = max([cut["until"], *(stop["until"] + AT_ONCE for stop in stops)])
        if cut["from"] <= end and noticed >= start:
            return True
    return False


def _noticed_a_cut_at_its_ack(story: Story, run: Run) -> bool:
    """Whether the worker of `run` has noticed only after it that the broker's connections were cut during it.

    Kombu does not read from Redis while its worker may fetch no more, so the next ack is the first that fails.
    """
    receipts = [line for line in story.received[run.task_id] if line["at"] <= run.start]
    if not receipts:
        return False
    worker = receipts[-1]["worker"]
    fetched = [line["at"] for lines in story.received.values() for line in lines if line["worker"] == worker]
    noticed = [line["at"] for line in story.events("leaves") if line["worker"] == worker]
    return any(
        run.end - CUT_TOLD <= at <= run.end + ACK and not any(cut["until"] + AT_ONCE < one < at for one in fetched)
        for cut in story.faults(CUT_BROKER)
        for at in noticed
        if receipts[-1]["at"] <= cut["until"] <= at
    )


def _was_sent_back_unacked(story: Story, run: Run) -> bool:
    """Whether a delivery that had only been sent back came once more, because a fault had hit its ack."""
    runs, receipts = story.runs_of(run.task_id), story.received[run.task_id]
    for receipt in receipts:
        received = receipt["at"]
        sent_back = min((line["at"] for line in story.published[run.task_id] if line["at"] > received), default=None)
        ran = sent_back is not None and any(received < other.start < sent_back for other in runs)
        if sent_back is None or ran or _deliveries(story, receipt) < 2:
            continue
        struck = story.strikes((*DEATHS, *STOPS), received - AT_ONCE, sent_back + ACK)
        if any(fault["worker"] == receipt["worker"] for fault in struck):
            return True
        if _cut(story, received - AT_ONCE, sent_back + ACK):
            return True
    return False


def _deliveries(story: Story, published: Line) -> int:
    """How often what was published at one time has been received."""
    return sum(line["publish"] == published["publish"] for line in story.received[published["task_id"]])


def _was_published_twice(story: Story, run: Run) -> bool:
    item, _, retries = run.item.rpartition("/")
    before = story.sent.get(run.task_id, {}).get("after")
    if int(retries):
        predecessors = story.attempts.get((run.task_id, f"{item}/{int(retries) - 1}"), [])
    else:
        predecessors = story.runs_of(before) if before else []
    if any(story.is_done(earlier) for earlier, _ in pairwise(predecessors)):
        return True  # the earlier run had published this message, and the later run did so again
    return any(_was_resent(story, line) for line in story.published[run.task_id] if _deliveries(story, line) > 1)


def _was_resent(story: Story, published: Line) -> bool:
    """Whether the connection was lost while the message was published, so that kombu sent it again."""
    cuts = [cut for cut in story.faults(CUT_BROKER) if cut["publishers"]]
    return any(published["at"] - ACK <= cut["until"] and cut["from"] <= published["at"] for cut in cuts)
