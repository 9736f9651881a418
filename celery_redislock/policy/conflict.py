"""Conflict: what happens to a run or a publish that does not get its key, as values.

The functions are pure: they know the facts about a message (`celery_redislock.message.delivery`), the key's holder
(`LockInfo`) and the message's options. The model in tests/model imports them too, so a wrong rule breaks one of the
model's promises.

To add a policy, write its file and add its name to `POLICIES` and to `options.ConflictPolicy`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from celery_redislock.errors import LockInfo
from celery_redislock.message.delivery import Delivery, Facts
from celery_redislock.options import LockOptions
from celery_redislock.protocol.scripts import Passed
from celery_redislock.protocol.tokens import is_whole, known_as

from .join import Join, join
from .raise_ import Fail, refuse
from .replace import replace
from .skip import Skip, skip
from .wait import ComeBack, Wait, Waiting, wait

HasEnded = Callable[[LockInfo], bool]
"""Tells whether the result backend knows the outcome of a holder's run, although the key is still held."""


# Decisions for a run whose key is held.


Decision = Skip | Fail | Wait | Join | ComeBack
Policy = Callable[[Facts, LockInfo, LockOptions], Decision]


def on_conflict(
    message: Facts, holder: LockInfo, options: LockOptions, *, is_own_copy: bool, has_ended: HasEnded
) -> Decision:
    """Decide what happens to a run whose key is held.

    Copies, successors, messages that have begun and messages with a reservation are not duplicates, so they wait.
    A message also waits if its sender may have seen the holder's run end, or if the holder has not started and may
    never start: a waiter to which the key is offered, or a message that is still being sent. It asks again if the key
    then cools down. For all others the policy decides.

    `is_own_copy` means that a holder runs the same attempt, from another delivery of this message. `has_ended` may ask
    the result backend: it is called only if no cheaper rule decides, and never for a policy in `WAITING`.
    """
    is_begun = is_own_copy or message.delivery.has_begun
    is_successor = any(follows(message.causes, one) for one in holder.holders)
    if is_begun or message.attempt.retries or is_successor or message.is_owed_its_key:
        return ComeBack(is_begun)
    policy = policy_for(holder, options)
    if policy not in WAITING and any(one.state in {"offered", "sending"} or has_ended(one) for one in holder.holders):
        return ComeBack(is_begun=False, reason=Waiting.UNLESS_COOLING)
    return POLICIES[policy](message, holder, options)


def policy_for(holder: LockInfo, options: LockOptions) -> str:
    """The policy for a conflict with `holder`: the one in `options`, with one exception.

    In scope ``job`` a message is a duplicate of another job. A holder that is not a task is not a job, so the
    message waits.
    """
    return "wait" if options.scope == "job" and holder.task_id is None else options.on_conflict


def follows(causes: frozenset[str], holder: LockInfo) -> bool:
    """Whether `holder` caused the message, which makes the message a successor and not a duplicate.

    The causes include the root, because the first step of a chain may run once more when the last step arrives. A run
    that has spent a permit of a rate holds nothing that its successors would have to wait for.
    """
    return holder.task_id is not None and holder.task_id in causes and holder.state != "spent"


POLICIES: dict[str, Policy] = {"join": join, "raise": refuse, "replace": replace, "skip": skip, "wait": wait}
"""The function for each value of `lock_on_conflict`."""
WAITING = ("wait", "replace")
"""The policies by which each message waits, whichever task holds the key."""


# Decisions for a run that cannot ask for its key.


def on_outage(delivery: Delivery, waited: float, options: LockOptions) -> Literal["raise", "run"] | ComeBack:
    """Decide what happens to a run when the lock server does not answer, or refuses the command.

    `waited` is the time since its message first had to wait, in seconds.

    Returns:
        ``"raise"``: the run ends as FAILURE with LockUnavailable. ``"run"``: the body runs without the lock.
    """
    if options.on_outage == "run":
        return "run"
    is_late = options.wait_for is not None and waited >= options.wait_for
    return "raise" if options.on_outage == "raise" or is_late else ComeBack(delivery.has_begun)


# Decisions for a publish.


class Answer(NamedTuple):
    """The message is not sent. The caller gets the result of `job` instead."""

    job: LockInfo
    how: Literal["outstanding", "window", "merged"] = "outstanding"
    """Whether the job has not ended; or it is the last one within `lock_window`, and may have ended; or it waits, and
    the call was merged into it."""


class NotSent(NamedTuple):
    """The job that has the key or the place may never be sent: its publisher has not said that it was.

    The publish asks again for a while, and then takes over what is reserved for that job.
    """

    task_id: str
    """The job's task id, as in tokens."""


def on_outstanding(
    task: str,
    causes: frozenset[str],
    taken: Sequence[LockInfo],
    passed: Passed,
    has_ended: HasEnded,
    *,
    in_window: bool = False,
) -> Answer | Passed | NotSent | None:
    """Decide what happens to a publish of `task` that got neither the key nor the place in the queue.

    A job that the caller may have seen end cannot be the answer. Nor can one that caused the message, because the
    message must follow it. If the publish has already asked again and passed over some jobs, a job that the first
    answer did not name is newer than the call, so the caller cannot have seen it end.

    Args:
        task: The task's name.
        causes: The ids of the tasks that caused the message, shortened as in tokens.
        taken: The holders of the key and of the place in the queue.
        passed: What the publish has passed over.
        has_ended: Called only if the job's result would otherwise be the answer, and only at the first answer.
        in_window: Whether `taken` is the one job whose window is open. It is the answer, even if it has ended.

    Returns:
        A `Passed` if the publish asks again for the key or the place in the queue, passing over those jobs. None if the
        message is sent without a reservation.
    """
    if in_window:
        job = taken[0]
        return NotSent(str(job.task_id)) if job.state == "sending" else Answer(job, "window")
    known, ended, preceding = passed.ended | passed.preceding, set[str](), set[str]()
    for job in taken:
        if not is_job(task, job) or follows(causes, job):
            preceding.add(str(job.task_id))
        elif job.state == "sending":
            if job.task_id not in passed.unsent:
                return NotSent(str(job.task_id))
        elif job.task_id in known or (not known and has_ended(job)):
            ended.add(str(job.task_id))
        else:
            return Answer(job)
    is_new = not known and (ended or preceding)
    return passed._replace(ended=frozenset(ended), preceding=frozenset(preceding)) if is_new else None


def is_job(task: str, holder: LockInfo) -> bool:
    """Whether `holder` is a job of `task` whose result can be given to the caller."""
    # Other processes cannot read an eager run's result (`apply()`). Unlike a worker's name, its host contains no "@".
    has_a_result = holder.state in {"queued", "sending"} or "@" in (holder.hostname or "")
    return holder.task == known_as(task) and has_a_result and holder.task_id is not None and is_whole(holder.task_id)
