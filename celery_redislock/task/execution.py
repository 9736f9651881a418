"""Execution: one process running one delivered message, from asking for the key to giving it back."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states

from celery_redislock import signals
from celery_redislock.app import server_of
from celery_redislock.errors import LockUnavailable
from celery_redislock.info import LockInfo
from celery_redislock.message.facts import Facts
from celery_redislock.message.message import Message
from celery_redislock.server import tokens
from celery_redislock.server.answers import Claim, Conflict, Finished, Granted, Note
from celery_redislock.server.held import HeldLock
from celery_redislock.server.names import keys_of
from celery_redislock.server.store import LockStore
from celery_redislock.server.tokens import Token
from celery_redislock.shown import shown

from . import decisions
from .abort import Abort
from .decisions import Decision
from .held_by_request import EXECUTION
from .outcome import Outcome, has_ended
from .until_start import seconds_to_start

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

    from .plan import LockPlan

logger = logging.getLogger(__name__)

#: The first pause of a copy, a successor or begun work, in seconds: what it waits for mostly ends in a moment.
SOON = 0.05


class Execution(ABC):
    """Takes, keeps and gives back the key of one request. Its subclasses know what to do where the key is held.

    Attributes:
        task: The task object; many threads share it, so nothing of a run is kept there.
        plan: What is known once per task class.
        request: Celery's request.
        message: Its message.
        key: In Redis; empty until the arguments are known.
        lock: The held lock; None while nothing is held.
        abort: Ends the body when the lock is lost; None where it may go on.
        joined: The outcome that the run ends with instead of its body's.
    """

    __slots__ = (
        "_asked_for",
        "_claim",
        "_left_to",
        "_release_was_asked_for",
        "_server",
        "abort",
        "joined",
        "key",
        "lock",
        "message",
        "plan",
        "request",
        "task",
    )

    def __init__(self, task: Task[..., Any], plan: LockPlan, request: Context) -> None:
        self.task = task
        self.plan = plan
        self.request = request
        self.message = Message(task, plan.broker, request, plan.options.retry_for)
        self.key = ""
        self.lock: HeldLock | None = None
        self.abort = Abort() if plan.options.on_lost == "abort" else None
        self.joined: Outcome | None = None
        self._server = server_of(plan.app)
        self._asked_for: HeldLock | None = None  # its answer has not been read: it may be ours
        self._claim: Claim | None = None
        claim = self.message.header.claim
        if claim is not None:
            options = {"expires": request.expires}
            self._claim = Claim(claim, seconds_to_start(plan.app, plan.options, options, task.expires))
        self._left_to: tuple[Token, float] | None = None
        self._release_was_asked_for = False

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the key of this call, or end the run as its options say.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: They cannot make a key.
            LockConflict, LockUnavailable: By policy.
            Ignore, Reject: The run has ended without its body.
        """
        self.key = key = self.plan.redis_key(args, kwargs)
        if self._claim is not None and self.message.header.key not in {key, None}:
            self._leave_other_key()
        options = self.plan.options
        lock = HeldLock(self._server.store, key, self._mint(), options.lease, options.max_hold, self._on_lost)
        self._take(lock)

    def leave_key_to(self, token: Token, seconds: float) -> None:
        """Leave the key to the next attempt, which has been sent: once this one has ended.

        Args:
            token: That of the next attempt while it waits.
            seconds: How long the key is kept for it.
        """
        self._left_to = token, seconds

    def end(self, state: str | None) -> None:
        """Give the key back; whatever happens, the task's own outcome stands.

        Args:
            state: What the task ended with; None where nobody knows.
        """
        lock = self.lock or self._asked_for
        if lock is not None:
            self._give_back(lock, state)
        if not self.message.was_sent_back:
            self._give_up_claim()

    @abstractmethod
    def _take(self, lock: HeldLock) -> None:
        """Take the key, or end the run, as `begin` says. Where it sets no `lock`, the body runs without one."""

    def _ask(self, lock: HeldLock, waits: bool | None) -> Granted | Conflict | Finished:
        # Where a time limit strikes while the answer is read, the postrun hook must release the key.
        self._asked_for = lock
        note = self._note(lock.key) if self.message.delivered.may_be_a_copy else None
        fence = self.plan.options.fence
        if self._claim is None:
            return lock.store.acquire(lock.key, lock.token, lock.lease, note, fence=fence, waits=waits)
        return lock.store.claim(lock.key, lock.token, lock.lease, self._claim, note, fence=fence, waits=waits)

    def _taken(self, lock: HeldLock) -> None:
        self.lock, self._asked_for = lock, None
        self._server.keeper.add(lock)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=self.task, lock=lock)

    def _give_back(self, lock: HeldLock, state: str | None) -> None:
        self._server.keeper.remove(lock)
        note = self._note_after(lock, state)
        # Interrupted amid the answer, it may have released the key already.
        asked_before, self._release_was_asked_for = self._release_was_asked_for, True
        try:
            was_held = self._last_word(lock, state, note)(self._server.store)
        except LockUnavailable as error:
            soon = f"it is given back once Redis answers, or ends in {lock.lease:g} s"
            logger.warning("%s has ended, but %s; %s", self.message.name, error, soon)
            # Where the broker was away too, the message may not have been acked: its copy must find the note.
            note = note and note._replace(in_any_case=True)
            self._server.keeper.later(self._last_word(lock, state, note))
            self._has_none()
            return
        self._has_none()  # only now: a time limit that strikes before leaves it to the postrun hook
        if not was_held and lock.was_granted and not asked_before:
            lock.lose("its key was not ours at the release")
        if signals.lock_released.receivers:
            signals.lock_released.send(sender=self.task, lock=lock)

    def _has_none(self) -> None:
        self.lock = self._asked_for = None

    def _note_after(self, lock: HeldLock, state: str | None) -> Note | None:
        if not decisions.leaves_note(state):
            return None
        delivered = self.message.delivered
        copy_may_wait = delivered.may_be_a_copy
        is_sent_back_only = copy_may_wait and not delivered.is_delivered_again
        ttl = self.plan.broker.note_ttl(is_sent_back_only=is_sent_back_only)
        return Note(self._note(lock.key), ttl, copy_may_wait)

    def _last_word(self, lock: HeldLock, state: str | None, note: Note | None) -> Callable[[LockStore], bool]:
        """How the key is given back: to the next attempt, after its cooldown, or at once."""
        key, token, left_to, cooldown = lock.key, lock.token, self._left_to, self.plan.options.cooldown
        if left_to is not None:
            return lambda store: store.hand_over(key, token, *left_to, note)
        if cooldown and state == states.SUCCESS:
            return lambda store: store.cool_down(key, token, cooldown, note)
        return lambda store: store.release(key, token, note)

    def _leave_other_key(self) -> None:
        """The publisher made another key of the same arguments: its code is older or newer."""
        header = self.message.header
        logger.warning(
            "%s: its publisher took lock %s, but its arguments make %s here: that one is given up, and this one asked "
            "for; do the publisher and this worker run the same code?",
            *(self.message.name, shown(str(header.key)), self.key),
        )
        self._give_up_claim()
        self.message.header = header._replace(claim=None, key=None)

    def _give_up_claim(self) -> None:
        """What was left to the message is not needed: it does not run, or runs without."""
        left = self.message.header.reservation
        if self._claim is not None and left is not None:
            is_to_come = decisions.may_be_handed_a_key(self.message.attempt.retries, self.plan.options)
            self._server.give_up(*left, is_to_come=is_to_come)
        self._claim = None

    def _decide(self, message: Facts, conflict: Conflict, holder: LockInfo) -> Decision:
        return decisions.on_conflict(
            *(message, holder, self.plan.options),
            is_own_copy=str(conflict.holder.attempt) == str(message.attempt),
            has_ended=partial(has_ended, self.task),
        )

    def _announce(self, holder: LockInfo, policy: str) -> None:
        signals.lock_conflict.send(sender=self.task, key=holder.key, holder=holder, policy=policy)

    def _tell(self, holder: LockInfo, what: str) -> None:
        """Log a conflict: who holds the key, the policy, and what becomes of this run, which Celery only calls ignored.

        Args:
            holder: Of the key.
            what: The policy and what is next, as ``retry: it comes back in 0.40 s``.
        """
        logger.info("%s: lock %s is held by %s: %s", self.message.name, holder.key, holder.who, what)

    def _on_lost(self, lock: HeldLock, reason: str) -> None:
        if self.abort is not None:  # first: a receiver may take its time
            self.abort.strike(lock.key, reason)
        signals.lock_lost.send(sender=self.task, lock=lock, reason=reason)

    def _note(self, key: str) -> str:
        return keys_of(key).note(self.message.attempt)

    def _mint(self) -> Token:
        return tokens.mint(self.message.nonce, self.message.attempt, self.plan.origin(self.request.hostname))


def execution_of(request: Any) -> Execution | None:
    """What runs for Celery's `request`; None where there is none, or it has not asked for its key."""
    execution = None if request is None else request.__dict__.get(EXECUTION)
    return execution if isinstance(execution, Execution) else None
