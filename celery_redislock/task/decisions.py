"""Decisions: what becomes of a run and of its message, as values.

They are pure functions of what is known of a message (`celery_redislock.message.delivery`), of a key's holder
(`LockInfo`), and of the task's options. `WorkerExecution`, its subclass `JoiningExecution` and `EagerExecution` carry
out what they return. What becomes of a publish is decided in `publish_decisions`, and what a run does that has joined
another task in `on_joining`. The model in tests/model imports these functions too, so that a wrong rule breaks one
of the model's promises.

A new policy is one function here, its name in `POLICIES`, and its name in `options.ConflictPolicy`.
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

#: An attempt that ended in one of these states is over: a copy of its message must not run. An attempt whose message
#: was rejected or requeued, whose body raised SystemExit or whose process died is not: its message is to run again.
OVER = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED})

#: Why a run is skipped whose message has expired while it waited for its turn.
EXPIRED = "expired"

HasEnded = Callable[[LockInfo], bool]
"""Tells whether the result backend knows the outcome of a holder's run, although its key is not free yet."""


# What becomes of a run that finds its key held.


class Skip(NamedTuple):
    """The run ends as REVOKED. The rest of its chain and its chord fail with it, so that nobody waits for them."""

    reason: str


class Fail(NamedTuple):
    """The run ends as FAILURE with LockConflict."""

    is_late: bool = False
    """The reason is that the message has waited for longer than `lock_wait_for`."""


class Wait(NamedTuple):
    """The message waits in line for its turn, and the run is shown as RETRY."""

    joins: str | None = None
    """The id of the task whose outcome the run ends with, as soon as there is one."""


class ComeBack(NamedTuple):
    """The message is no duplicate and meets no policy: it waits in line for its turn."""

    is_begun: bool
    """The message is marked as work that has begun, so that no policy may drop it at its turn either."""


Decision = Skip | Fail | Wait | ComeBack
Policy = Callable[[Facts, LockInfo, LockOptions], Decision]


def on_conflict(
    message: Facts, holder: LockInfo, options: LockOptions, *, is_own_copy: bool, has_ended: HasEnded
) -> Decision:
    """What becomes of a run whose key is held.

    Copies, successors, work that has begun and messages with a reservation are no duplicates, and come back. So does a
    message whose sender may have seen the holder's run end, or that finds the key offered to the first in line, who has
    not begun and may never begin. For all others the task's policy decides.

    Where `is_own_copy`, the holder runs the same attempt, which then is another delivery of this message. `has_ended`
    is called only where the policy would drop the run, for it may ask the result backend.
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
    """The policy for a conflict with `holder`: the task's own, but for one case.

    In scope ``job`` a message is a duplicate of another job. A holder that is no task is no job, so the message waits.
    """
    return "wait" if options.scope == "job" and holder.task_id is None else options.on_conflict


def follows(causes: frozenset[str], holder: LockInfo) -> bool:
    """Whether a message is a successor of `holder`: the holder itself caused it, so it is no duplicate.

    The message's root is among its causes, for the first step of a chain may run once more when the last step arrives.
    """
    return holder.task_id is not None and holder.task_id in causes


def skip(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``skip``: the duplicate is the same work, and not needed."""
    if holder.state == "cooling":
        return Skip(f"cooling down after {shown(str(holder.task_id))}")
    return Skip(f"duplicate of {shown(holder.task_id) if holder.task_id else holder.who}")


def wait(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``wait``: the message is other work, and waits in line."""
    return take_turn(message, options)


def refuse(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``raise``: the run fails, and its caller decides what to do."""
    return Fail()


def join(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``join``: the run ends with the outcome of the first holder that its message has met.

    A holder that is no task has no outcome: where none is one, the message waits in line.
    """
    tasks = [one.task_id for one in holder.holders if one.task_id is not None]
    return take_turn(message, options, message.joins or next(iter(tasks), None))


def take_turn(message: Facts, options: LockOptions, joins: str | None = None) -> Decision:
    """Have the message wait in line, unless it has expired or `lock_wait_for` is over.

    A message that has expired must not wait: it may be sent to the broker again, which may drop it, and nobody would
    hear of it.
    """
    if message.has_expired:
        return Skip(EXPIRED)
    if options.wait_for is not None and message.waited >= options.wait_for:
        return Fail(is_late=True)
    return Wait(joins)


POLICIES: dict[str, Policy] = {"join": join, "raise": refuse, "skip": skip, "wait": wait}
"""What each value of `lock_on_conflict` does."""


# What becomes of a run that cannot ask for its key.


class Refuse(NamedTuple):
    """The run ends as FAILURE with LockUnavailable."""


class RunWithout(NamedTuple):
    """The body runs without the lock."""


def on_outage(message: Delivered, waited: float, options: LockOptions) -> Refuse | RunWithout | ComeBack:
    """What becomes of a run whose lock server cannot be asked; its message first had to wait `waited` seconds ago."""
    if options.on_outage == "retry" and options.wait_for is not None and waited >= options.wait_for:
        return Refuse()
    match options.on_outage:
        case "raise":
            return Refuse()
        case "run":
            return RunWithout()
        case _:
            return ComeBack(message.has_begun)


# What a run leaves behind, and what the attempt before may leave for it.


def leaves_note(state: str | None) -> bool:
    """Whether an attempt that ended with `state` is over, so that its release leaves a note for copies of its message.

    The state is None where nobody knows how the run ended, because it was cut short.
    """
    return state in OVER


def may_be_handed_a_key(retries: int | None, options: LockOptions) -> bool:
    """Whether the attempt before this one hands its key over to it, at its end, or has done so."""
    return bool(retries) and hands_over(options)


def hands_over(options: LockOptions) -> bool:
    """Whether a run that calls `self.retry()` hands its key over to the next attempt."""
    return options.scope == "job" or options.hold_on_retry


class Joining(Enum):
    """What a run does that has joined another task."""

    END = auto()
    """End with the other task's outcome."""
    ASK = auto()
    """Ask for the key. While somebody holds it, the other task may still get an outcome, and this run comes back."""
    COME_BACK = auto()
    """Release the key and come back: the other task is between two attempts and holds no key."""
    RUN = auto()
    """Run the body: the other task has died without an outcome."""


def on_joining(*, is_ready: bool, will_run_again: bool, has_key: bool, waited: float, options: LockOptions) -> Joining:
    """What a run does that has joined another task.

    Args:
        is_ready: Whether the other task has an outcome.
        will_run_again: Whether the other task's state is RETRY.
        has_key: Whether this run holds the key, so that the other task does not run.
        waited: Seconds since this run's message first had to wait.
        options: The task's options. A task in state RETRY that has not run for `lock_queue_ttl` counts as dead.
    """
    if is_ready:
        return Joining.END
    if not has_key:
        return Joining.ASK
    return Joining.COME_BACK if will_run_again and waited < options.queue_ttl else Joining.RUN


class Published(NamedTuple):
    """What is known of a message that is to be published, where nobody but the caller knows of it."""

    task: str
    """The task's name."""
    causes: frozenset[str]
    """The ids of the tasks that cause it, shortened as they are in tokens."""


class Answer(NamedTuple):
    """The message is not sent: the caller is given the result of this job, which is outstanding."""

    job: LockInfo


class AskAgain(NamedTuple):
    """The key, or the place in the queue, is asked for once more, and these jobs are passed over."""

    passed: Passed


def on_first(message: Published, taken: Iterable[LockInfo], has_ended: HasEnded) -> Answer | AskAgain:
    """What becomes of a publish that is told who has the key and the place in the queue.

    A job that the caller may have seen end is no answer, nor is one that has caused the message, for the message is to
    follow it. `has_ended` is called only where the caller would be given the job's result.
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
    """What becomes of a publish that is told so once more, though it passes over some; None: it is sent as it is.

    A job that was not there at the first time is newer than the call, so the caller cannot have seen it end.
    """
    known = passed.ended | passed.preceding
    return next((Answer(job) for job in taken if is_job(message, job) and job.task_id not in known), None)


def is_job(message: Published, holder: LockInfo) -> bool:
    """Whether `holder` is a job of the message's task, with a result that the caller can be given."""
    # An eager run, of `apply()`, has no result that others can read. Its host is not named as a worker is, with an "@".
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    return holder.task == message.task and has_a_result and holder.task_id is not None and is_whole(holder.task_id)
