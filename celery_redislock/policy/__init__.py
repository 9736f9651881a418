"""Policies: what happens to a run that finds its key held. One file each; this one has what they share.

A policy is a pure function. The decision that it returns ends the run: it raises LockConflict, or `Ended`, whose
verdict tells the worker's main process how the run has ended.
"""

from collections.abc import Callable
from enum import Enum
from sys import intern
from typing import NamedTuple, Self

from celery import states
from celery.exceptions import Ignore

from celery_redislock.message.header import Header
from celery_redislock.options import LockOptions
from celery_redislock.protocol.names import Demand

#: An attempt that ended in one of these states is over: a copy of its message must not run. An attempt is not over if
#: its message was rejected or requeued, its body raised SystemExit or its process died: the message must run again.
OVER = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED})

#: Whether an attempt that ended with this state is over, so that its release leaves a note for copies of its message.
#: The state is None if the run was cut short, so that its outcome is unknown.
leaves_note: Callable[[str | None], bool] = OVER.__contains__


class Reason(Enum):
    """Why a policy has ended a run. Each policy's file has its own reasons, a row each for the main process.

    Attributes:
        state: The state that the run has stored; None if it has stored none.
        text: What callers read, with a place for the task that is the reason; empty if that depends on the conflict.
        is_conflict: Whether the run has found its key held.
        has_run: Whether the body has begun.
    """

    def __init__(self, state: str | None, text: str = "", is_conflict: bool = True, has_run: bool = False) -> None:
        self.state, self.text, self.is_conflict, self.has_run = state, text, is_conflict, has_run

    def is_told_by(self, text: str) -> bool:
        """Whether `text`, which is stored with a result, tells this reason."""
        return text.startswith(self.text.partition("{")[0])


class Place(NamedTuple):
    """The place in line of a message that waits in the worker's main process."""

    demand: Demand
    """What its run has asked for, and was refused."""
    header: Header
    """What the message carries for the plugin from now on, its rank in the line for the key included."""
    asks_if_cooling: bool = False
    """If the key begins to cool down, the message asks again, and its policy applies."""
    sleeps_for: float = 0.0
    """The message stands in no line, but asks again after this many seconds; 0 if it stands in line."""
    wants: tuple[Demand, ...] = ()
    """If its run needs several keys: all of them, in the order in which they are asked for."""

    def shared(self) -> Self:
        """The same place, but sharing its keys with the other places of this process: thousands may wait for one."""
        demand, *wants = (one._replace(key=intern(one.key)) for one in (self.demand, *self.wants))
        return self._replace(demand=demand, wants=tuple(wants))


class Verdict(NamedTuple):
    """How a policy has ended a run: nearly always before its body has begun."""

    policy: str
    """The policy, as log lines name it."""
    reason: Reason
    text: str
    """The reason in words."""
    place: Place | None = None
    """Where the message waits in this worker, if it does."""
    holder_id: str | None = None
    """The id of the task that the run has met, or that has overtaken it; None if it is not a task."""

    @property
    def runs_again(self) -> bool:
        """Whether the message waits or was sent back, so that it still needs what is reserved for it."""
        return self.reason.state not in states.READY_STATES

    def send_event(self, send: Callable[..., None]) -> None:
        """Send the event about the stored state, if there is one. It is the main process that sends a run's events."""
        match self.reason.state:
            case states.REVOKED:
                send("task-revoked", terminated=False, signum=None, expired=False)
            case states.RETRY:
                send("task-retried", exception=self.text, traceback="")


class Ended(Ignore):
    """The run has ended without its body. The main process unpickles this error from its only argument."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict

    def __str__(self) -> str:
        return self.verdict.text

    __repr__ = __str__  # Celery logs it, at INFO, among the data of its own line


def waiting_policy(options: LockOptions) -> str:
    """The policy that log lines name for a run that waits for its turn."""
    return options.on_conflict if options.on_conflict in {"join", "replace"} else "wait"


def may_be_handed_a_key(retries: int | None, options: LockOptions) -> bool:
    """Whether the previous attempt hands its key over to this one when it ends, or has done so."""
    return bool(retries) and hands_over(options)


def hands_over(options: LockOptions) -> bool:
    """Whether a run that calls `self.retry()` hands its key over to the next attempt."""
    return options.scope == "job" or options.hold_on_retry
