"""Decisions: what becomes of a run, of its message and of a publish, as values.

They are pure functions of what is known of a message (`celery_redislock.message.facts`), of a key's holder
(`LockInfo`), and of the task's options. `WorkerExecution`, its subclasses and `Publication` carry out what they return.
The model in tests/model imports them too, so that a wrong rule breaks one of the model's promises.

A new policy is one function here, its name in `POLICIES`, and its name in `options.ConflictPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from celery import states

from celery_redislock.info import LockInfo
from celery_redislock.message.facts import Delivered, Facts
from celery_redislock.options import LockOptions
from celery_redislock.server.tokens import is_whole
from celery_redislock.shown import shown

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
    """The reason is that the message has come back for longer than `lock_retry_for`."""


class Wait(NamedTuple):
    """The run blocks in its worker slot for up to `lock_wait`. If the key is still held then, it takes its turn."""


class TakeTurn(NamedTuple):
    """The message is sent back until the key is free, and the run is shown as RETRY."""

    joins: str | None = None
    """The id of the task whose outcome the run ends with, as soon as there is one."""


class ComeBack(NamedTuple):
    """The message is no duplicate and meets no policy: it is sent back, to be tried again in a moment."""

    is_begun: bool
    """The message is marked as work that has begun, so that no policy may drop it when it comes back either."""


Decision = Skip | Fail | Wait | TakeTurn | ComeBack
Policy = Callable[[Facts, LockInfo, LockOptions], Decision]


def on_conflict(
    message: Facts, holder: LockInfo, options: LockOptions, *, is_own_copy: bool, has_ended: HasEnded
) -> Decision:
    """What becomes of a run whose key is held.

    Copies, successors, work that has begun and messages with a reservation are no duplicates, and come back. So does a
    message whose sender may have seen the holder's run end. For all others the task's policy decides.

    Args:
        message: What is known of the run's message.
        holder: Who holds the key.
        options: The task's options.
        is_own_copy: Whether the holder runs the same attempt, which then is another delivery of this message.
        has_ended: Called only where the policy would drop the run, for it may ask the result backend.
    """
    is_begun = is_own_copy or message.delivered.has_begun
    if is_begun or message.attempt.retries or follows(message.causes, holder) or _is_owed_its_key(message, options):
        return ComeBack(is_begun)
    policy = policy_for(holder, options)
    if policy not in GIVE_TURNS and has_ended(holder):
        return ComeBack(is_begun=False)
    return POLICIES[policy](message, holder, options)


def policy_for(holder: LockInfo, options: LockOptions) -> str:
    """The policy for a conflict with `holder`: the task's own, but for one case.

    In scope ``job`` a message is a duplicate of another job. A holder that is no task is no job, so the message takes
    its turn.
    """
    return "retry" if options.scope == "job" and holder.task_id is None else options.on_conflict


def follows(causes: frozenset[str], holder: LockInfo) -> bool:
    """Whether a message is a successor of `holder`: the holder itself caused it, so it is no duplicate.

    Args:
        causes: The ids of the tasks that caused the message. Its root is among them, for the first step of a chain may
            run once more when the last step arrives.
        holder: Who holds the key.
    """
    return holder.task_id is not None and holder.task_id in causes


def _is_owed_its_key(message: Facts, options: LockOptions) -> bool:
    """Whether the key was reserved for the message, and the reservation has ended before the message began.

    In scope ``queue`` the reservation is of the place in the queue, and says nothing of the key.
    """
    return message.is_claimed and options.scope != "queue"


def skip(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``skip``: the duplicate is the same work, and not needed."""
    if holder.state == "cooling":
        return Skip(f"cooling down after {shown(str(holder.task_id))}")
    return Skip(f"duplicate of {shown(holder.task_id) if holder.task_id else holder.who}")


def retry(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``retry``: the message is other work, and comes back until the key is free."""
    return take_turn(message, options)


def wait(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``wait``: as ``retry``, but the run first blocks in its worker slot for a while.

    A message that has come back has done so before, and does not block again. Nor does one whose key is reserved or
    cools down: the reservation's message may need this very worker slot to run.
    """
    if message.delivered.has_come_back or holder.state != "held":
        return take_turn(message, options)
    return Wait()


def refuse(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``raise``: the run fails, and its caller decides what to do."""
    return Fail()


def join(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``join``: the run ends with the outcome of the first holder that its message has met.

    A holder that is no task has no outcome: the message comes back until the key is free.
    """
    return take_turn(message, options, message.joins or holder.task_id)


def take_turn(message: Facts, options: LockOptions, joins: str | None = None) -> Decision:
    """Have the message come back, unless it has expired or `lock_retry_for` is over.

    A message that has expired must not be sent back: a broker may drop it, and nobody would hear of it.
    """
    if message.has_expired:
        return Skip(EXPIRED)
    if options.retry_for is not None and message.waited >= options.retry_for:
        return Fail(is_late=True)
    return TakeTurn(joins)


POLICIES: dict[str, Policy] = {"join": join, "raise": refuse, "retry": retry, "skip": skip, "wait": wait}
"""What each value of `lock_on_conflict` does."""
GIVE_TURNS = frozenset({"retry", "wait"})
"""The policies under which a duplicate runs once the key is free, and so is never dropped."""


# What becomes of a run that joins another.


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
        waited: Seconds since this run's message came back for the first time.
        options: The task's options. A task in state RETRY that has not run for `lock_queue_ttl` counts as dead.
    """
    if is_ready:
        return Joining.END
    if not has_key:
        return Joining.ASK
    return Joining.COME_BACK if will_run_again and waited < options.queue_ttl else Joining.RUN


# What becomes of a run that cannot ask for its key.


class Refuse(NamedTuple):
    """The run ends as FAILURE with LockUnavailable."""


class RunWithout(NamedTuple):
    """The body runs without the lock."""


def on_outage(message: Delivered, options: LockOptions) -> Refuse | RunWithout | ComeBack:
    """What becomes of a run whose lock server cannot be asked, by `lock_on_outage`."""
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

    Args:
        state: Celery's state; None where nobody knows how the run ended, because it was cut short.
    """
    return state in OVER


def may_be_handed_a_key(retries: int | None, options: LockOptions) -> bool:
    """Whether the attempt before this one hands its key over to it, at its end, or has done so.

    Args:
        retries: The `retries` of this attempt's request.
        options: The task's options.
    """
    return bool(retries) and hands_over(options)


def hands_over(options: LockOptions) -> bool:
    """Whether a run that calls `self.retry()` hands its key over to the next attempt."""
    return options.scope == "job" or options.hold_on_retry


# What becomes of a publish that finds its key held.


class Published(NamedTuple):
    """What is known of a message that is to be published."""

    task: str
    """The task's name."""
    is_bare: bool
    """Nobody but the caller knows of the message, so that the caller may be given another job's result instead."""
    causes: frozenset[str]
    """The ids of the tasks that cause it, shortened as they are in tokens."""


class Publishing(Enum):
    """What becomes of a publish whose key is held."""

    SEND = auto()
    """The message is sent, and meets its policy when it starts."""
    ANSWER = auto()
    """The message is not sent: the caller is given the holder's result."""
    OUTLIVE = auto()
    """The caller may have seen the holder's run end, so that it wants a new one: the message is sent with the key as
    soon as that is released, or else with the place in the queue, to run after the holder."""


def on_publish(message: Published, holder: LockInfo, has_ended: HasEnded) -> Publishing:
    """What becomes of a publish in the scopes ``job`` and ``queue`` whose key, or whose place in the queue, is held.

    Args:
        message: What is known of the message.
        holder: Who holds the key, or the place in the queue.
        has_ended: Called only where the caller would be given the holder's result.
    """
    # An eager run, of `apply()`, has no result that others can read. Its host is not named as a worker is, with an "@".
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    is_known = holder.task_id is not None and is_whole(holder.task_id)
    is_job = holder.task == message.task and has_a_result and is_known
    if not (is_job and message.is_bare) or follows(message.causes, holder):
        return Publishing.SEND
    return Publishing.OUTLIVE if has_ended(holder) else Publishing.ANSWER
