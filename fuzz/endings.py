"""How a job may end, by the tables of docs/conflicts.md, merging-calls.md, replacing.md and unique-jobs.md."""

from __future__ import annotations

from itertools import pairwise

from celery import states

from chaos import missing
from chaos.excuses import DEATHS, OUTAGES
from chaos.faults import COLD, CUT_LOCKS, DROP, KILL_CHILD, KILL_WORKER, RESTART, SHRINK
from chaos.story import Line, Story
from chaos.tasks import LEASE
from chaos.windows import ACK, AT_ONCE, MADE_UP_FOR, NEVER
from fuzz.facts import Accepted, Body, Facts
from fuzz.options import LONGEST
from promises import Excuse
from tests.lab.ledger import Run

#: What ends a process in the middle of its work.
KILLS = (KILL_CHILD, KILL_WORKER, COLD, SHRINK)
#: When a command to the lock server may get no answer.
AWAY = (*OUTAGES, RESTART, CUT_LOCKS, DROP)
#: What the plan's operations do to a message: the docs say so, so these are no excuses.
PURGED, REVOKED, EXPIRED, BEFORE, FAILED, RESERVED = (
    "a purge dropped the message",
    "the job was revoked",
    "the job expired",
    "what comes before it in its canvas was lost, revoked or has expired",
    "what it follows has failed: Celery stores no end of a link, or of a group in a chain",
    "its key is reserved for a message that was lost",
)
#: docs/guarantees.md says so.
KEPT = "its reservation was given up in an outage, and its process ended before the lock server answered"
#: docs/merging-calls.md says so.
UNLOCKED = "the ticket's run had no lock, in an outage: it had the ticket's own arguments"
#: The process sends what it owes within about a second after the lock server answers again.
LATER = MADE_UP_FOR + AT_ONCE
#: Celery stores RETRY after it has sent the next attempt, as the twins have shown too.
OVERWRITTEN = "Celery stored RETRY over the end of the next attempt"
#: For so many seconds a process that is to send a chord's body is the only one that may, even if it has died.
CLAIM = 10.0
CLAIMED = "a process was killed as it sent the body of a chord, and Celery let no other send it for a while"
#: A key may be held for so long after its last body: a lease where its holder died, and a cooldown.
HELD = LEASE + LONGEST


def wrong(facts: Facts, job: Accepted, final: Line) -> str:
    """What is wrong with the end of a job; empty if it may end so."""
    match final["state"]:
        case states.SUCCESS:
            return _wrong_success(facts, job, final)
        case states.FAILURE:
            return _wrong_failure(facts, job, final)
        case states.REVOKED:
            return _wrong_revoke(facts, job, final)
    return ""


def _wrong_success(facts: Facts, job: Accepted, final: Line) -> str:
    own = [body for body in facts.bodies_of(job.task_id) if facts.story.is_done(body.run)]
    if any(final["result"] == body.items[-1] for body in own):
        return ""
    if "join" in facts.policies(job) and _of_others(facts, job, final["result"]):
        return ""
    return "no run of it has returned that"


def _of_others(facts: Facts, job: Accepted, result: object) -> list[Body]:
    """The runs of others that share one of its locks, and returned that."""
    names = facts.lock_names(job)
    others = [body for body in facts.bodies if names & body.limits.keys() and body.run.task_id != job.task_id]
    return [body for body in others if body.items[-1] == result]


def _wrong_failure(facts: Facts, job: Accepted, final: Line) -> str:
    kind, policies = str(final["result"]).partition(":")[0], facts.policies(job)
    if job.before and not facts.bodies_of(job.task_id) and _before_failed(facts, job):
        return ""
    if "join" in policies:
        return ""
    match kind:
        case "ValueError":
            fails = any(facts.parts[one].does == "fails" for body in facts.bodies_of(job.task_id) for one in body.items)
            return "" if fails else "its body does not fail"
        case "LockConflict":
            waits = facts.options(job, "lock_wait_for") - {None}
            return "" if "raise" in policies or waits else f"its policy is {policies}, and it waits for ever"
        case "LockUnavailable":
            asked = "raise" in facts.options(job, "lock_on_outage") or facts.options(job, "lock_wait_for") - {None}
            away = facts.story.faults(*AWAY)
            return "" if asked and away else "nothing asks for that"
        case "LockLost":
            lost = [line for line in facts.story.events("lost") if line["task_id"] == job.task_id]
            return "" if lost and "abort" in facts.options(job, "lock_on_lost") else "its lock was not lost"
        case "WorkerLostError" | "Terminated":
            return "" if facts.story.faults(*DEATHS) or facts.revoked else "no process was killed"
        case "ChordError":  # a part of its header was skipped, and its worker killed before the ack: a copy of it ran
            again = any(len(facts.story.received[one]) > 1 for one in job.before)
            return "" if again and facts.story.faults(*DEATHS) else "what it follows has not failed"
    return "nothing fails so"


def _before_failed(facts: Facts, job: Accepted) -> bool:
    return any(facts.final.get(one, {}).get("state") != states.SUCCESS for one in job.before)


def _wrong_revoke(facts: Facts, job: Accepted, final: Line) -> str:
    text = str(final["result"]).partition(": ")[2]
    if job.before and _before_failed(facts, job):
        return ""
    if "join" in facts.policies(job):
        return ""
    if text in {"revoked", "terminated"}:
        return "" if job.task_id in facts.revoked else "it was not revoked"
    if text == "expired":
        return "" if _may_expire(facts, job) else "it does not expire"
    if "skip" in facts.policies(job):
        return _wrong_skip(facts, job, text)
    if text.startswith("replaced by "):
        newer = facts.jobs.get(text.removeprefix("replaced by "))
        same = newer and newer.part.task == job.part.task and facts.lock_names(newer) & facts.lock_names(job)
        # The task's own policy: a call that waits itself may be replaced all the same.
        is_replaced = any(spec.policy == "replace" for spec in facts.specs(job.part.task))
        return "" if same and is_replaced else "nothing may replace it"
    if text.startswith("superseded by "):
        is_latest = "latest" in facts.options(job, "lock_arguments")
        return "" if is_latest else "nothing may supersede it"
    return f"its policy is {facts.policies(job)}"


def _wrong_skip(facts: Facts, job: Accepted, text: str) -> str:
    if text == "the rate is used up":
        return "" if any(locks.rates for locks in facts.locks(job)) else "it has no rate"
    for start in ("duplicate of ", "cooling down after "):
        if text.startswith(start):
            holder = facts.jobs.get(text.removeprefix(start))
            if holder is None or not facts.lock_names(holder) & facts.lock_names(job):
                return "that has another key"
            ends = [body.run.end for body in facts.bodies_of(holder.task_id)]
            return "that had ended before the call" if ends and max(ends) + HELD < job.asked_at else ""
    return "nothing skips so"


def _may_expire(facts: Facts, job: Accepted) -> bool:
    return any("expires" in call.part.options for call in facts.calls if call.task_id == job.task_id)


def of_open(facts: Facts, job: Accepted) -> str | None:
    """Why a job has not come to its end."""
    if _is_overwritten(facts, job):
        return OVERWRITTEN
    if _is_left_open(facts, job):
        return FAILED
    excuse = of_lost(facts, job)
    if excuse or facts.is_plain_task(job.part.task):
        return excuse or Excuse.ACKED_EARLY
    for other in facts.jobs.values():
        state = facts.final.get(other.task_id, {}).get("state")
        is_open = other is not job and state not in states.READY_STATES
        was_sent = bool(facts.story.published[other.task_id])
        is_reserved = (is_open and was_sent and of_lost(facts, other)) or _is_kept(facts, other)
        if is_reserved and facts.lock_names(other) & facts.lock_names(job):
            return RESERVED
    return None


def _is_overwritten(facts: Facts, job: Accepted) -> bool:
    """Whether the last attempt has ended, or expired at once, before Celery stored the RETRY of the one before it."""
    if facts.final[job.task_id]["state"] != states.RETRY:
        return False
    done = {body.run.item for body in facts.bodies_of(job.task_id) if facts.story.is_done(body.run)}
    is_known = any(line["task_id"] == job.task_id for line in facts.story.events("known"))
    return bool(done) and (is_known or _may_expire(facts, job) or len(done) > job.part.times)


def of_lost(facts: Facts, job: Accepted) -> str | None:
    """Why the message of a job was lost, or will never be sent."""
    story, task_id = facts.story, job.task_id
    if any(_never_goes_on(facts.final.get(one, {})) for one in job.before if not _is_left_open(facts, facts.jobs[one])):
        return BEFORE
    if any(_was_killed_at_its_end(story, one) for one in job.header):
        return Excuse.ACKED_EARLY
    if any(_came_again_too_soon(story, one) for one in job.header):
        return CLAIMED
    if story.sent.get(task_id, {}).get("kind") == "late":
        excuse = missing.of_missing(story, task_id)
    else:
        excuse = missing.of_lost_early(story, task_id)
    if excuse:
        return excuse
    seen = {line["publish"] for line in story.received[task_id]}
    unseen = [line["at"] for line in story.published[task_id] if line["publish"] not in seen]
    if any(at <= purge["at"] for at in unseen for purge in story.events("purged")):
        return PURGED
    return EXPIRED if _has_expired(facts, job) and (not seen or _went_back(story, task_id)) else None


def _was_killed_at_its_end(story: Story, task_id: str) -> bool:
    """Whether a job was acked early, and its process was killed between its result and the sending of a chord's body.

    What follows in a chain is sent before the result is stored.
    """
    is_early = story.sent.get(task_id, {}).get("kind") == "early"
    return is_early and any(_is_last_of_its_process(story, run) for run in story.runs_of(task_id)[-1:])


def _came_again_too_soon(story: Story, task_id: str) -> bool:
    """Whether a process was killed as it sent a chord's body, and a copy of its message ran while its claim lasted.

    Source: `celery.backends.redis`, `on_chord_part_return`, from Celery 5.7 on.
    """
    return any(
        story.is_done(run) and _is_last_of_its_process(story, run) and copy.start <= run.end + ACK + CLAIM
        for run, copy in pairwise(story.runs_of(task_id))
    )


def _is_last_of_its_process(story: Story, run: Run) -> bool:
    """Whether the process of a run was killed during it, or right after it."""
    until = run.end + ACK
    return bool(story.strikes(KILLS, run.start, until, run.pid)) and story.deaths.get(run.pid, NEVER) <= until


def _has_expired(facts: Facts, job: Accepted) -> bool:
    """Whether RabbitMQ may have dropped a message from its queue. On Redis an expired message is delivered."""
    ends = [
        call.asked_at + call.part.options.get("expires", NEVER) for call in facts.calls if call.task_id == job.task_id
    ]
    is_rabbitmq = any(line["kind"] == "rabbitmq" for line in facts.story.events("broker"))
    return is_rabbitmq and min(ends) <= facts.story.end


def _went_back(story: Story, task_id: str) -> bool:
    """Whether a message has gone back to the queue from its last worker."""
    last = max(story.received[task_id], key=lambda line: float(line["at"]))
    left = [line["at"] for line in story.events("leaves") if line["worker"] == last["worker"]]
    is_done = any(story.is_done(run) for run in story.runs_of(task_id))
    return not is_done and any(at >= last["at"] for at in left)


def _is_left_open(facts: Facts, job: Accepted) -> bool:
    """Whether it was never sent, and Celery stores no end of it."""
    return job.is_left_open and not facts.story.published[job.task_id] and _before_failed(facts, job)


def _never_goes_on(final: Line) -> bool:
    """Whether Celery leaves open what comes after this end in a canvas: it was lost, revoked or has expired."""
    text = str(final.get("result")).partition(": ")[2]
    return final.get("state") not in states.READY_STATES or text in {"revoked", "terminated", "expired"}


def _is_kept(facts: Facts, job: Accepted) -> bool:
    """Whether its key is still reserved: it ended, or ran without its lock, in an outage in which its worker ended."""
    story, receipts = facts.story, facts.story.received[job.task_id]
    has_failed = str(facts.final.get(job.task_id, {}).get("result")).startswith("LockUnavailable")
    if not has_failed and not any(body.is_unlocked for body in facts.bodies_of(job.task_id)):
        return False
    for outage in story.faults(*AWAY):
        for death in story.strikes(DEATHS, outage["from"], outage["until"] + LATER):
            if any(one["worker"] == death["worker"] and one["at"] <= death["until"] for one in receipts):
                return True
    return False


def of_unserved(facts: Facts, call: Accepted) -> str | None:
    """Why an accepted call may have been lost with the message that it was merged into."""
    ticket = facts.jobs.get(call.task_id)
    if ticket is None:
        return None
    final = facts.final.get(ticket.task_id, {})
    if final.get("state") not in states.READY_STATES:
        return of_open(facts, ticket)
    if any(body.is_unlocked for body in facts.bodies_of(ticket.task_id)):
        return UNLOCKED
    kind, _, text = str(final["result"]).partition(": ")
    if final["state"] == states.REVOKED and text in {"revoked", "terminated"}:
        return REVOKED
    if final["state"] == states.REVOKED and text == "expired":
        return EXPIRED
    if kind in {"LockConflict", "LockUnavailable", "WorkerLostError"}:
        return kind
    if facts.story.strikes((RESTART,), call.asked_at, float("inf")):
        return Excuse.DATA_LOST
    return None


def of_key(facts: Facts, line: Line) -> str | None:
    """Why a key is left: it is reserved for a message that is lost. The calls merged into that stay as long."""
    lock, _, _ = line["key"].partition("}")
    left = [one for one in facts.story.events("key") if one["key"].partition("}")[0] == lock]
    holders = [line["holder"]] if line["holder"] else [one["holder"] for one in left]
    for job in facts.jobs.values():
        text = f"{line['key']} {' '.join(holders)}"
        names = {f"fuzz.{job.part.task}", *(name for name in facts.lock_names(job) if name.startswith("shared:"))}
        is_about = job.task_id in text or any(name in line["key"] for name in names)
        is_open = facts.final.get(job.task_id, {}).get("state") not in states.READY_STATES
        excuse = of_lost(facts, job) if is_about and is_open else None
        if excuse or (job.task_id in text and _is_kept(facts, job)):
            return excuse or KEPT
    return None
