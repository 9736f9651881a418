"""Decisions: what happens to a run and its message, or to a publish, as values.

They are pure functions of the facts about a message (`celery_redislock.message.delivery`), the key's holder
(`LockInfo`) and the task's options. `WorkerExecution`, `JoiningExecution`, `EagerExecution` and `Publication` carry
them out. The model in tests/model imports these functions too, so a wrong rule breaks one of the model's promises.

To add a policy, write one function here and add its name to `POLICIES` and to `options.ConflictPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from celery import states

from celery_redislock.info import LockInfo, shown
from celery_redislock.message.delivery import Delivered, Facts
from celery_redislock.options import LockOptions
from celery_redislock.protocol.scripts import Passed
from celery_redislock.protocol.tokens import is_whole

#: An attempt that ended in one of these states is over: a copy of its message must not run. An attempt is not over if
#: its message was rejected or requeued, its body raised SystemExit or its process died: the message must run again.
OVER = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED})

#: The reason for skipping a run whose message expired while it waited.
EXPIRED = "expired"

HasEnded = Callable[[LockInfo], bool]
"""Tells whether the result backend knows the outcome of a holder's run, although the key is still held."""


# Decisions for a run whose key is held.


class Skip(NamedTuple):
    """The run ends as REVOKED. The rest of its chain and its chord fail too, so that no caller waits for them."""

    reason: str


class Fail(NamedTuple):
    """The run ends as FAILURE, with LockConflict."""

    is_late: bool = False
    """The message has waited longer than `lock_wait_for`."""


class Wait(NamedTuple):
    """The message waits in line for its turn. The run is shown as RETRY."""

    joins: str | None = None
    """The id of the joined task. The run ends with that task's outcome as soon as there is one."""


class ComeBack(NamedTuple):
    """The message is not a duplicate, so no policy applies. It waits in line for its turn."""

    is_begun: bool
    """Mark the message as begun, so that no policy drops it in a later conflict."""


Decision = Skip | Fail | Wait | ComeBack
Policy = Callable[[Facts, LockInfo, LockOptions], Decision]


def on_conflict(
    message: Facts, holder: LockInfo, options: LockOptions, *, is_own_copy: bool, has_ended: HasEnded
) -> Decision:
    """Decide what happens to a run whose key is held.

    Copies, successors, messages that have begun and messages with a reservation are not duplicates, so they come back.
    A message also comes back if its sender may have seen the holder's run end, or if the key is offered to a waiter,
    which has not started and may never start. For all others the task's policy decides.

    `is_own_copy` means that a holder runs the same attempt, from another delivery of this message. `has_ended` may ask
    the result backend: it is called only if no cheaper rule decides, and never for the policy ``wait``.
    """
    is_begun = is_own_copy or message.delivered.has_begun
    is_successor = any(follows(message.causes, one) for one in holder.holders)
    if is_begun or message.attempt.retries or is_successor or message.is_owed_its_key:
        return ComeBack(is_begun)
    policy = policy_for(holder, options)
    if policy != "wait" and any(one.state == "offered" or has_ended(one) for one in holder.holders):
        return ComeBack(is_begun=False)
    return POLICIES[policy](message, holder, options)


def policy_for(holder: LockInfo, options: LockOptions) -> str:
    """The policy for a conflict with `holder`: the task's own, with one exception.

    In scope ``job`` a message is a duplicate of another job. A holder that is not a task is not a job, so the
    message waits.
    """
    return "wait" if options.scope == "job" and holder.task_id is None else options.on_conflict


def follows(causes: frozenset[str], holder: LockInfo) -> bool:
    """Whether `holder` caused the message, which makes the message a successor and not a duplicate.

    The causes include the root, because the first step of a chain may run once more when the last step arrives.
    """
    return holder.task_id is not None and holder.task_id in causes


def skip(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``skip``: the duplicate is the same work and is not needed."""
    if holder.state == "cooling":
        return Skip(f"cooling down after {shown(str(holder.task_id))}")
    return Skip(f"duplicate of {shown(holder.task_id) if holder.task_id else holder.who}")


def wait(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``wait``: the message is other work, so it waits in line."""
    return take_turn(message, options)


def refuse(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``raise``: the run fails, and its caller decides what to do."""
    return Fail()


def join(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``join``: the run ends with the outcome of the first holder that its message met.

    A holder that is not a task has no outcome. If no holder is a task, the message waits in line.
    """
    tasks = [one.task_id for one in holder.holders if one.task_id is not None]
    return take_turn(message, options, message.joins or next(iter(tasks), None))


def take_turn(message: Facts, options: LockOptions, joins: str | None = None) -> Decision:
    """Have the message wait in line, unless it has expired or has already waited for `lock_wait_for`.

    An expired message must not wait: it may be sent to the broker again, which may drop it silently.
    """
    if message.has_expired:
        return Skip(EXPIRED)
    if options.wait_for is not None and message.waited >= options.wait_for:
        return Fail(is_late=True)
    return Wait(joins)


POLICIES: dict[str, Policy] = {"join": join, "raise": refuse, "skip": skip, "wait": wait}
"""The function for each value of `lock_on_conflict`."""


# Decisions for a run that cannot ask for its key.


class Refuse(NamedTuple):
    """The run ends as FAILURE with LockUnavailable."""


class RunWithout(NamedTuple):
    """The body runs without the lock."""


def on_outage(message: Delivered, waited: float, options: LockOptions) -> Refuse | RunWithout | ComeBack:
    """Decide what happens to a run when the lock server does not answer, or refuses the command.

    `waited` is the time since its message first had to wait, in seconds.
    """
    if options.on_outage == "retry" and options.wait_for is not None and waited >= options.wait_for:
        return Refuse()
    match options.on_outage:
        case "raise":
            return Refuse()
        case "run":
            return RunWithout()
        case _:
            return ComeBack(message.has_begun)


# Decisions for the end of a run.


def leaves_note(state: str | None) -> bool:
    """Whether an attempt that ended with `state` is over, so that its release leaves a note for copies of its message.

    `state` is None if the run was cut short, so that its outcome is unknown.
    """
    return state in OVER


def may_be_handed_a_key(retries: int | None, options: LockOptions) -> bool:
    """Whether the previous attempt hands its key over to this one when it ends, or has done so."""
    return bool(retries) and hands_over(options)


def hands_over(options: LockOptions) -> bool:
    """Whether a run that calls `self.retry()` hands its key over to the next attempt."""
    return options.scope == "job" or options.hold_on_retry


# Decisions for a run that has joined another task.


class Joining(Enum):
    """What a run that has joined another task does next."""

    END = auto()
    """End with the joined task's outcome."""
    ASK = auto()
    """Ask for the key. If it is held, wait: the joined task may still get an outcome."""
    COME_BACK = auto()
    """Release the key and come back: the joined task is between two attempts and holds no key."""
    RUN = auto()
    """Run the body: the joined task died without an outcome."""


def on_joining(*, is_ready: bool, will_run_again: bool, has_key: bool, waited: float, options: LockOptions) -> Joining:
    """Decide what a run that has joined another task does next.

    Args:
        is_ready: Whether the joined task has an outcome.
        will_run_again: Whether the joined task's state is RETRY.
        has_key: Whether this run holds the key, which means that the joined task is not running.
        waited: Seconds since this run's message first had to wait.
        options: The task's options. A joined task in state RETRY counts as dead once `waited` reaches `lock_queue_ttl`.
    """
    if is_ready:
        return Joining.END
    if not has_key:
        return Joining.ASK
    return Joining.COME_BACK if will_run_again and waited < options.queue_ttl else Joining.RUN


# Decisions for a publish.


class Published(NamedTuple):
    """A message that is about to be published, and that only the caller knows about."""

    task: str
    """The task's name."""
    causes: frozenset[str]
    """The ids of the tasks that caused it, shortened as in tokens."""


class Answer(NamedTuple):
    """The message is not sent. The caller gets the result of the outstanding `job` instead."""

    job: LockInfo


class AskAgain(NamedTuple):
    """The publish asks again for the key or the place in the queue, disregarding the jobs in `passed`."""

    passed: Passed


def on_first(message: Published, taken: Iterable[LockInfo], has_ended: HasEnded) -> Answer | AskAgain:
    """Decide what happens to a publish, given who has the key and the place in the queue.

    A job that the caller may have seen end cannot be the answer. Nor can one that caused the message, because the
    message must follow it. `has_ended` is called only if the job's result would otherwise be the answer.
    """
    ended, preceding = set[str](), set[str]()
    for job in taken:
        if not is_job(message, job) or follows(message.causes, job):
            preceding.add(str(job.task_id))
        elif has_ended(job):
            ended.add(str(job.task_id))
        else:
            return Answer(job)
    return AskAgain(Passed(frozenset(ended), frozenset(preceding)))


def on_second(message: Published, taken: Iterable[LockInfo], passed: Passed) -> Answer | None:
    """Decide what happens to a publish that asked again and passed over some jobs.

    None means that the message is sent without a reservation. A job that the first answer did not name is newer than
    the call, so the caller cannot have seen it end.
    """
    known = passed.ended | passed.preceding
    return next((Answer(job) for job in taken if is_job(message, job) and job.task_id not in known), None)


def is_job(message: Published, holder: LockInfo) -> bool:
    """Whether `holder` is a job of the message's task whose result can be given to the caller."""
    # Other processes cannot read an eager run's result (`apply()`). Unlike a worker's name, its host contains no "@".
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    return holder.task == message.task and has_a_result and holder.task_id is not None and is_whole(holder.task_id)
