"""Conflict: what happens to a run or a publish that does not get its key, as values.

The functions are pure: they know the facts about a message (`celery_redislock.message.delivery`), the key's holder
(`LockInfo`) and the message's options. The model in tests/model imports them too, so a wrong rule breaks one of the
model's promises.

To add a policy, write its file and add its name to `POLICIES` and to `options.ConflictPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from celery_redislock.errors import LockInfo
from celery_redislock.message.delivery import Delivery, Facts
from celery_redislock.options import LockOptions
from celery_redislock.protocol.scripts import Passed
from celery_redislock.protocol.tokens import is_whole

from .join import Join, join
from .raise_ import Fail, refuse
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
    A message also waits if its sender may have seen the holder's run end, or if the key is offered to a waiter,
    which has not started and may never start; it asks again if the key then cools down. For all others the policy
    decides.

    `is_own_copy` means that a holder runs the same attempt, from another delivery of this message. `has_ended` may ask
    the result backend: it is called only if no cheaper rule decides, and never for the policy ``wait``.
    """
    is_begun = is_own_copy or message.delivery.has_begun
    is_successor = any(follows(message.causes, one) for one in holder.holders)
    if is_begun or message.attempt.retries or is_successor or message.is_owed_its_key:
        return ComeBack(is_begun)
    policy = policy_for(holder, options)
    if policy != "wait" and any(one.state == "offered" or has_ended(one) for one in holder.holders):
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

    The causes include the root, because the first step of a chain may run once more when the last step arrives.
    """
    return holder.task_id is not None and holder.task_id in causes


POLICIES: dict[str, Policy] = {"join": join, "raise": refuse, "skip": skip, "wait": wait}
"""The function for each value of `lock_on_conflict`."""


# Decisions for a run that cannot ask for its key.


class Refuse(NamedTuple):
    """The run ends as FAILURE with LockUnavailable."""


class RunWithout(NamedTuple):
    """The body runs without the lock."""


def on_outage(message: Delivery, waited: float, options: LockOptions) -> Refuse | RunWithout | ComeBack:
    """Decide what happens to a run when the lock server does not answer, or refuses the command.

    `waited` is the time since its message first had to wait, in seconds.
    """
    if options.on_outage == "run":
        return RunWithout()
    is_late = options.wait_for is not None and waited >= options.wait_for
    return Refuse() if options.on_outage == "raise" or is_late else ComeBack(message.has_begun)


# Decisions for a publish.


class Answer(NamedTuple):
    """The message is not sent. The caller gets the result of the outstanding `job` instead."""

    job: LockInfo


class AskAgain(NamedTuple):
    """The publish asks again for the key or the place in the queue, disregarding the jobs in `passed`."""

    passed: Passed


def on_first(task: str, causes: frozenset[str], taken: Iterable[LockInfo], has_ended: HasEnded) -> Answer | AskAgain:
    """Decide what happens to a publish of `task`, given who has the key and the place in the queue.

    `causes` are the ids of the tasks that caused the message, shortened as in tokens. A job that the caller may have
    seen end cannot be the answer. Nor can one that caused the message, because the message must follow it.
    `has_ended` is called only if the job's result would otherwise be the answer.
    """
    ended, preceding = set[str](), set[str]()
    for job in taken:
        if not is_job(task, job) or follows(causes, job):
            preceding.add(str(job.task_id))
        elif has_ended(job):
            ended.add(str(job.task_id))
        else:
            return Answer(job)
    return AskAgain(Passed(frozenset(ended), frozenset(preceding)))


def on_second(task: str, taken: Iterable[LockInfo], passed: Passed) -> Answer | None:
    """Decide what happens to a publish of `task` that asked again and passed over some jobs.

    None means that the message is sent without a reservation. A job that the first answer did not name is newer than
    the call, so the caller cannot have seen it end.
    """
    known = passed.ended | passed.preceding
    return next((Answer(job) for job in taken if is_job(task, job) and job.task_id not in known), None)


def is_job(task: str, holder: LockInfo) -> bool:
    """Whether `holder` is a job of `task` whose result can be given to the caller."""
    # Other processes cannot read an eager run's result (`apply()`). Unlike a worker's name, its host contains no "@".
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    return holder.task == task and has_a_result and holder.task_id is not None and is_whole(holder.task_id)
