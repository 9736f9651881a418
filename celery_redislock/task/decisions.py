"""Decisions: what becomes of a run, of its message and of a publish, as values.

Pure functions of what is known of a message (see `message.facts`), of a key's holder, and of the task's options.
`WorkerExecution`, its subclasses and `Publication` carry out what they return. The model in tests/model imports them,
so a rule that is changed here is changed there as well.

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

#: Attempts that ended so are over: a copy of their message must not run again. A rejected or requeued message, a body
#: that raised SystemExit and a dead child leave no note: their message is to run again.
OVER = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED})

#: The reason why a run is skipped that has waited for its turn for too long.
EXPIRED = "expired"

HasEnded = Callable[[LockInfo], bool]
"""Asks the result backend whether a holder's run has ended, although its key is not free yet."""


# What becomes of a run that finds its key held.


class Skip(NamedTuple):
    """It ends as REVOKED, and with it the rest of its chain and its chord, so that nobody hangs."""

    reason: str


class Fail(NamedTuple):
    """It ends as FAILURE with LockConflict."""

    is_late: bool = False
    """It has waited for `lock_retry_for`."""


class Wait(NamedTuple):
    """It blocks in its worker slot for up to `lock_wait`, and then takes its turn."""


class TakeTurn(NamedTuple):
    """Its message is sent back, shown as RETRY, until the key is free."""

    joins: str | None = None
    """The task whose outcome it ends with, once there is one."""


class ComeBack(NamedTuple):
    """Its message is sent back in a moment: it is no duplicate, and meets no policy."""

    is_begun: bool
    """It stays so when it comes back."""


Decision = Skip | Fail | Wait | TakeTurn | ComeBack
Policy = Callable[[Facts, LockInfo, LockOptions], Decision]


def on_conflict(
    message: Facts, holder: LockInfo, options: LockOptions, *, is_own_copy: bool, has_ended: HasEnded
) -> Decision:
    """What becomes of a run whose key is held.

    Args:
        message: Its message.
        holder: Who holds the key.
        options: Of the task.
        is_own_copy: The holder runs the same attempt: another delivery of this message.
        has_ended: Asked only where a policy would drop the run.
    """
    is_begun = is_own_copy or message.delivered.has_begun
    if is_begun or message.attempt.retries or follows(message.causes, holder) or _is_owed_its_key(message, options):
        return ComeBack(is_begun)
    policy = policy_for(holder, options)
    if policy not in GIVE_TURNS and has_ended(holder):
        return ComeBack(is_begun=False)
    return POLICIES[policy](message, holder, options)


def policy_for(holder: LockInfo, options: LockOptions) -> str:
    """The policy of a task at a conflict. In scope ``job`` a lock outside tasks is no job that could be duplicated."""
    return "retry" if options.scope == "job" and holder.task_id is None else options.on_conflict


def follows(causes: frozenset[str], holder: LockInfo) -> bool:
    """Whether the holder itself caused a message: no duplicate, but work that comes after it.

    Its parent, or its root: the first step of a chain may run once more while its last one arrives.
    """
    return holder.task_id is not None and holder.task_id in causes


def _is_owed_its_key(message: Facts, options: LockOptions) -> bool:
    """Its key had been kept for it, for too short a time. In scope ``queue`` only a place in the queue is kept."""
    return message.is_claimed and options.scope != "queue"


def skip(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The same work: the duplicate is not needed."""
    if holder.state == "cooling":
        return Skip(f"cooling down after {shown(str(holder.task_id))}")
    return Skip(f"duplicate of {shown(holder.task_id) if holder.task_id else holder.who}")


def retry(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """Other work: it comes back until the key is free."""
    return take_turn(message, options)


def wait(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The same, in its worker slot for a while; who has come back has waited.

    Not for a holder that does not run: it may be this very worker slot that is to run it.
    """
    if message.delivered.has_come_back or holder.state != "held":
        return take_turn(message, options)
    return Wait()


def refuse(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """The policy ``raise``: its caller decides."""
    return Fail()


def join(message: Facts, holder: LockInfo, options: LockOptions) -> Decision:
    """End with the outcome of the first holder that was met. A holder that is no task has none."""
    return take_turn(message, options, message.joins or holder.task_id)


def take_turn(message: Facts, options: LockOptions, joins: str | None = None) -> Decision:
    """Come back, unless the message has expired meanwhile or `lock_retry_for` is over.

    A broker may drop a message that has expired, and nobody would hear of it.
    """
    if message.has_expired:
        return Skip(EXPIRED)
    if options.retry_for is not None and message.waited >= options.retry_for:
        return Fail(is_late=True)
    return TakeTurn(joins)


POLICIES: dict[str, Policy] = {"join": join, "raise": refuse, "retry": retry, "skip": skip, "wait": wait}
"""By the values of `lock_on_conflict`."""
GIVE_TURNS = frozenset({"retry", "wait"})
"""Under these the duplicate runs all the same, once the key is free."""


# What becomes of a run that joins another.


class Joining(Enum):
    """What a run does that joins another task."""

    END = auto()
    """End with its outcome."""
    ASK = auto()
    """Ask for the key: while somebody holds it, there may be an outcome still."""
    COME_BACK = auto()
    """Give the key back, and come back: the other one waits for its next attempt."""
    RUN = auto()
    """Run in its place: it died without an outcome."""


def on_joining(*, is_ready: bool, will_run_again: bool, has_key: bool, waited: float, options: LockOptions) -> Joining:
    """What a run does that joins another task.

    Args:
        is_ready: The other has an outcome.
        will_run_again: Its state is RETRY.
        has_key: This run has been granted the key, so that nobody runs under it.
        waited: Seconds since this message came back for the first time.
        options: Of the task. Who was to run again, and has not within `lock_queue_ttl`, has died.
    """
    if is_ready:
        return Joining.END
    if not has_key:
        return Joining.ASK
    return Joining.COME_BACK if will_run_again and waited < options.queue_ttl else Joining.RUN


# What becomes of a run that cannot ask for its key.


class Refuse(NamedTuple):
    """It ends as FAILURE with LockUnavailable."""


class RunWithout(NamedTuple):
    """It runs without the lock."""


def on_outage(message: Delivered, options: LockOptions) -> Refuse | RunWithout | ComeBack:
    """What becomes of a run whose lock server cannot be asked."""
    match options.on_outage:
        case "raise":
            return Refuse()
        case "run":
            return RunWithout()
        case _:
            return ComeBack(message.has_begun)


# What a run leaves behind, and what may be left to it.


def leaves_note(state: str | None) -> bool:
    """Whether an attempt is over that ended with `state`, so that a copy of its message must not run.

    Args:
        state: Of Celery; None where nobody knows, for the run was cut short.
    """
    return state in OVER


def may_be_handed_a_key(retries: int | None, options: LockOptions) -> bool:
    """Whether the run before this attempt may leave it the key when it ends, or has left it."""
    return bool(retries) and hands_over(options)


def hands_over(options: LockOptions) -> bool:
    """Whether a run leaves its key to its `self.retry()`."""
    return options.scope == "job" or options.hold_on_retry


# What becomes of a publish that finds its key held.


class Published(NamedTuple):
    """What is known of a message that is to be published."""

    task: str
    is_bare: bool
    """Nobody but its caller knows of it, so that the caller may be given another's result."""
    causes: frozenset[str]


class Publishing(Enum):
    """What becomes of a publish whose key is held."""

    SEND = auto()
    """It is sent, and meets its policy when it starts."""
    ANSWER = auto()
    """It is not sent: its caller is given the holder's result."""
    OUTLIVE = auto()
    """The caller may have seen the holder end: it waits for the key, or for the place after it."""


def on_publish(message: Published, holder: LockInfo, has_ended: HasEnded) -> Publishing:
    """What becomes of a publish in the scopes ``job`` and ``queue`` whose key, or whose place in the queue, is held."""
    # Not the result of `apply()`, which nobody else can read; its host is no worker's name.
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    is_known = holder.task_id is not None and is_whole(holder.task_id)
    is_job = holder.task == message.task and has_a_result and is_known
    if not (is_job and message.is_bare) or follows(message.causes, holder):
        return Publishing.SEND
    return Publishing.OUTLIVE if has_ended(holder) else Publishing.ANSWER
