"""Execution: one process running one delivered message, from asking for the key to giving it back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore, TaskRevokedError

from . import signals, tokens
from .abort import Abort
from .errors import LockConflict, LockUnavailable
from .held_by_request import held_by_request
from .info import LockInfo
from .keeper import HeldLock
from .message import Message
from .policies import POLICIES, skip_reason
from .reentry import check_fence, held_in_context
from .server import LockServer
from .store import Finished, Granted, Held

if TYPE_CHECKING:
    from celery.app.task import Context

    from .plan import LockPlan
    from .task import LockedTask

logger = logging.getLogger(__name__)

#: The first pause of a copy, a successor or begun work, in seconds: what it waits for mostly ends in a moment.
SOON = 0.05
#: Attempts that ended so are over: a copy of their message must not run again. A rejected or requeued message, a
#: body that raised SystemExit and a dead child leave no note: their message is to run again.
_OVER = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED})


class Execution:
    """Takes, keeps and gives back the key of one request.

    Attributes:
        task: The task object; many threads share it, so nothing of a run is kept there.
        plan: What is known once per task class.
        request: Celery's request.
        message: Its message.
        lock: The held lock; None while nothing is held.
        abort: Ends the body when the lock is lost; None where it may go on.
    """

    __slots__ = (
        "_attempt",
        "_is_inner",
        "_server",
        "abort",
        "lock",
        "message",
        "plan",
        "request",
        "task",
    )

    def __init__(self, task: LockedTask, plan: LockPlan, request: Context) -> None:
        self.task = task
        self.plan = plan
        self.request = request
        self.lock: HeldLock | None = None
        self.abort = Abort() if plan.options.on_lost == "abort" else None
        self._server = LockServer.of(plan.app)
        self.message = Message(task, plan, request)
        self._attempt = str(self.message.attempt)
        self._is_inner = False

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the key of this call, or end the run as its options say.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: They cannot make a key.
            LockConflict, LockUnavailable: By policy.
            Ignore, Reject: The run has ended without its body.
            TaskRevokedError: Skipped in eager mode.
        """
        key = self.plan.redis_key(args, kwargs)
        options, nonce = self.plan.options, self.message.nonce
        lock = HeldLock(self._server.store, key, self._mint(), nonce, options.lease, options.max_hold, self._on_lost)
        # Before the answer: where a time limit strikes while it is read, the postrun hook releases the key.
        self.lock = lock
        if self.request.is_eager:
            self._take_eagerly(lock)
        else:
            self._take(lock)

    def end(self, state: str | None) -> None:
        """Give the key back; whatever happens, the task's own outcome stands.

        Args:
            state: What the task ended with; None where nobody knows.
        """
        lock = self.lock
        if lock is None or self._is_inner:
            self.lock = None
            return
        self._server.keeper.remove(lock)
        over = state in _OVER and not self.request.is_eager
        note = self._note(lock.key) if over else None
        copy_may_wait = self.message.may_be_doubled or self.message.may_be_a_copy
        try:
            was_held = self._server.store.release(lock.key, lock.nonce, note, copy_may_wait=copy_may_wait)
        except LockUnavailable as error:
            soon = f"it is given back once Redis answers, or ends in {lock.lease:g} s"
            logger.warning("%s has ended, but %s; %s", self.message.name, error, soon)
            # Where the broker was away too, the message may not have been acked: its copy must find the note.
            self._server.keeper.release_later(lock, note, copy_may_wait=True)
            self.lock = None
            return
        self.lock = None  # only now: a time limit that strikes before leaves it to the postrun hook
        if not was_held and lock.was_granted:
            lock.lose("its key was not ours at the release")
        if signals.lock_released.receivers:
            signals.lock_released.send(sender=self.task, lock=lock)

    def _take(self, lock: HeldLock) -> None:
        while True:
            self.lock = lock
            # Only such a message reads the note that its attempt is over.
            note = self._note(lock.key) if self.message.returned.times or self.message.may_be_a_copy else None
            try:
                result = lock.store.acquire(
                    lock.key, lock.token, lock.nonce, lock.lease, note, fence=self.plan.options.fence
                )
            except LockUnavailable as error:
                self.lock = None
                if self._runs_without(error):
                    return
                lock.token = self._mint()  # the undo of the last one may still be on its way
                continue
            if isinstance(result, Granted):
                lock.granted(result)
                self._taken(lock)
                return
            self.lock = None
            if isinstance(result, Finished):
                logger.info("%s: dropped, it has finished in another delivery of its message", self.message.name)
                raise Ignore("finished in another delivery of its message")
            self._conflict(lock.key, result)

    def _taken(self, lock: HeldLock) -> None:
        self._server.keeper.add(lock)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=self.task, lock=lock)

    def _take_eagerly(self, lock: HeldLock) -> None:
        """In eager mode nothing can be sent again: skip, or block for the key."""
        options = self.plan.options
        if self._enter_again(lock):
            return
        try:
            conflict = self._server.take(
                lock, 0.0 if options.on_conflict == "skip" else options.wait, fence=options.fence
            )
        except LockUnavailable:
            self.lock = None
            if options.on_outage == "run":
                return
            raise
        if conflict is None:
            self._taken(lock)
            return
        self.lock = None
        holder = conflict.holder.info(lock.key, conflict.ttl)
        self._announce(holder, options.on_conflict)
        if options.on_conflict == "skip":
            raise TaskRevokedError(skip_reason(holder))
        raise LockConflict(lock.key, holder)

    def _enter_again(self, lock: HeldLock) -> bool:
        """Whether the caller holds the key already: the run that applies this one, or a block around it."""
        hold = held_in_context(lock.store, lock.key)
        outer = hold.held if hold else held_by_request(lock.store, lock.key)
        if outer is None:
            return False
        check_fence(outer, self.plan.options.fence)
        self.lock, self._is_inner = outer, True
        return True

    def _conflict(self, key: str, conflict: Held) -> None:
        holder = conflict.holder.info(key, conflict.ttl)
        begun = self.message.may_be_a_copy or conflict.holder.attempt == self.message.attempt
        if not (begun or self.message.attempt.retries or self._follows(holder)):
            policy = self.plan.options.on_conflict
            self._announce(holder, policy)
            POLICIES[policy](self, holder)
            return
        self._announce(holder, "come back")
        delay = self.message.returned.delay(SOON, self.plan.options.retry_max_delay)
        if self.message.send_back(delay, begun=begun):
            raise Ignore(f"the lock is held by {holder.who}; the message comes back")

    def _follows(self, holder: LockInfo) -> bool:
        """Whether the holder itself caused this message: no duplicate, but work that comes after it."""
        return holder.task_id is not None and holder.task_id in {self.request.id, self.request.parent_id}

    def _runs_without(self, error: LockUnavailable) -> bool:
        """What an outage does: True to run without the lock, False where the key must be asked for again."""
        policy = self.plan.options.on_outage
        signals.lock_unavailable.send(sender=self.task, key=error.key, error=error)
        if policy == "raise":
            raise error
        if policy == "run":
            logger.warning("%s runs without its lock, by lock_on_outage: %s", self.message.name, error)
            return True
        logger.debug("%s: %s; it comes back", self.message.name, error)  # the store has said so, once an outage
        options = self.plan.options
        if self.message.send_back(self.message.returned.delay(options.retry_delay, options.retry_max_delay)):
            raise Ignore("Redis could not be asked for the lock; the message comes back")
        return False

    def _announce(self, holder: LockInfo, policy: str) -> None:
        logger.info("%s: lock %s is held by %s: %s", self.message.name, holder.key, holder.who, policy)
        signals.lock_conflict.send(sender=self.task, key=holder.key, holder=holder, policy=policy)

    def _on_lost(self, lock: HeldLock, reason: str) -> None:
        if self.abort is not None:  # first: a receiver may take its time
            self.abort.strike(lock.key, reason)
        signals.lock_lost.send(sender=self.task, lock=lock, reason=reason)

    def _note(self, key: str) -> str:
        return f"{key}:note:{self._attempt}"

    def _mint(self) -> str:
        return tokens.mint(self.message.nonce, self._attempt, self.plan.origin(self.request.hostname))
