"""Execution: one process running one delivered message, from asking for the key to giving it back."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded, TaskRevokedError

from . import signals, tokens
from .abort import Abort
from .comeback import HEADER, Return, publish_again
from .delivery import DELIVERY, Delivery
from .errors import LockConflict, LockUnavailable, describe
from .info import LockInfo
from .keeper import HeldLock
from .locks import wait_for
from .policies import POLICIES, skip_reason
from .server import LockServer
from .store import Finished, Held
from .tokens import Attempt

if TYPE_CHECKING:
    from celery.app.task import Context

    from .plan import LockPlan
    from .task import LockedTask

logger = logging.getLogger(__name__)

#: The first pause of a copy, a successor or begun work, in seconds: what it waits for mostly ends in a moment.
SOON = 0.05
#: Of the broker's visibility timeout: a message held for longer is taken to wait in the queue once more. Not the whole:
#: the broker began to count before the worker did, and gets the ack later than the key is free.
OVERDUE = 0.9
#: Attempts that ended so are over: a copy of their message must not run again. A rejected or requeued message, a
#: body that raised SystemExit and a dead child leave no note: their message is to run again.
_OVER = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED})


_FIRST = Return()


class Execution:
    """Takes, keeps and gives back the key of one request.

    Attributes:
        task: The task object; many threads share it, so nothing of a run is kept there.
        plan: What is known once per task class.
        request: Celery's request.
        returned: How often the message has come back.
        lock: The held lock; None while nothing is held.
        abort: Ends the body when the lock is lost; None where it may go on.
    """

    __slots__ = (
        "_attempt",
        "_copy_may_wait",
        "_release_was_asked_for",
        "_server",
        "abort",
        "attempt",
        "lock",
        "plan",
        "received_at",
        "request",
        "returned",
        "task",
    )

    def __init__(self, task: LockedTask, plan: LockPlan, request: Context) -> None:
        self.task = task
        self.plan = plan
        self.request = request
        self.lock: HeldLock | None = None
        self.abort = Abort() if plan.options.on_lost == "abort" else None
        self._server = LockServer.of(plan.app)
        self.attempt = Attempt(str(request.id), request.retries or 0, request.replaced_task_nesting or 0)
        self._attempt = str(self.attempt)
        self.returned = _FIRST
        self._copy_may_wait = False
        self._release_was_asked_for = False

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
        nonce = self._read_request()
        options = self.plan.options
        token = self._mint(nonce)
        lock = HeldLock(self._server.store, key, token, nonce, options.lease, options.max_hold, self._on_lost)
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
        if lock is None:
            return
        self._server.keeper.remove(lock)
        over = state in _OVER and not self.request.is_eager
        note = self._note(lock.key) if over else None
        copy_may_wait = self._copy_may_wait or self._may_be_a_copy()
        # Interrupted amid the answer, it may have released the key already.
        asked_before, self._release_was_asked_for = self._release_was_asked_for, True
        try:
            was_held = self._server.store.release(lock.key, lock.nonce, note, copy_may_wait=copy_may_wait)
        except LockUnavailable as error:
            soon = f"it is given back once Redis answers, or ends in {lock.lease:g} s"
            logger.warning("%s has ended, but %s; %s", self._name, error, soon)
            # Where the broker was away too, the message may not have been acked: its copy must find the note.
            self._server.keeper.release_later(lock, note, copy_may_wait=True)
            self.lock = None
            return
        self.lock = None  # only now: a time limit that strikes before leaves it to the postrun hook
        if not was_held and lock.was_granted and not asked_before:
            lock.lose("its key was not ours at the release")
        if signals.lock_released.receivers:
            signals.lock_released.send(sender=self.task, lock=lock)

    def send_back(self, delay: float, *, begun: bool = False) -> bool:
        """Publish the message again, to be tried after about `delay` seconds.

        Args:
            delay: Seconds; what the broker demands may change it.
            begun: It has met its own attempt: also when it comes back, it is no duplicate.

        Returns:
            Whether it was sent. Else the broker is away too and the message has been acked, so that it must be held
            here: then this call has slept.

        Raises:
            Reject: The broker is away, and will deliver the message again by itself.
            LockUnavailable: It has been held here for `lock_retry_for`; the run is lost.
        """
        countdown = max(min(delay, self.plan.longest_countdown), self.plan.shortest_countdown)
        self.returned = self.returned.next(begun=begun or self._may_be_a_copy())
        try:
            publish_again(self.task, self.request, self.returned, countdown)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            if self.task.acks_late:
                time.sleep(min(countdown, 1.0))  # the broker may give it back at once
                raise Reject(describe(error), requeue=True) from error
            self._copy_may_wait = True  # the broker may have it all the same, and have failed to say so
            self._hold_here(error, countdown)
            return False
        return True

    def _hold_here(self, error: Exception, pause: float) -> None:
        """Wait with an acked message that cannot be sent again: only this process still has it."""
        retry_for = self.plan.options.retry_for
        if retry_for is not None and time.time() - self.returned.since >= retry_for:
            raise LockUnavailable(
                self.plan.task,
                f"its lock was not free and its message, already acked, could not be sent again ({describe(error)}) "
                f"for {retry_for} s: this run is lost",
            ) from error
        logger.warning("%s cannot be sent again (%s): it is held and tried here", self._name, describe(error))
        time.sleep(pause)

    @property
    def _name(self) -> str:
        return f"task {self.task.name}[{self.request.id}]"

    def _read_request(self) -> str:
        """Read what the message and the main process say; return the nonce."""
        delivery, header = getattr(self.request, DELIVERY, None), getattr(self.request, HEADER, None)
        if header is not None:
            self.returned = Return.read(header)
        if isinstance(delivery, Delivery):
            self.received_at = delivery.received_at
            return delivery.nonce
        self.received_at = time.monotonic()
        return tokens.mint_nonce()

    def _take(self, lock: HeldLock) -> None:
        while True:
            self.lock = lock
            # Only such a message reads the note that its attempt is over.
            note = self._note(lock.key) if self.returned.times or self._may_be_a_copy() else None
            try:
                result = lock.store.acquire(lock.key, lock.token, lock.nonce, lock.lease, note)
            except LockUnavailable as error:
                self.lock = None
                if self._runs_without(error):
                    return
                lock.token = self._mint(lock.nonce)  # the undo of the last one may still be on its way
                continue
            if isinstance(result, float):
                lock.granted(result)
                self._taken(lock)
                return
            self.lock = None
            if isinstance(result, Finished):
                logger.info("%s: dropped, it has finished in another delivery of its message", self._name)
                raise Ignore("finished in another delivery of its message")
            self._conflict(lock.key, result)

    def _taken(self, lock: HeldLock) -> None:
        self._server.keeper.add(lock)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=self.task, lock=lock)

    def _take_eagerly(self, lock: HeldLock) -> None:
        """In eager mode nothing can be sent again: skip, or block for the key."""
        options = self.plan.options
        try:
            conflict = wait_for(lock, 0.0 if options.on_conflict == "skip" else options.wait)
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

    def _conflict(self, key: str, conflict: Held) -> None:
        holder = conflict.holder.info(key, conflict.ttl)
        begun = self._may_be_a_copy() or conflict.holder.attempt == self.attempt
        if not (begun or self.attempt.retries or self._follows(holder)):
            policy = self.plan.options.on_conflict
            self._announce(holder, policy)
            POLICIES[policy](self, holder)
            return
        self._announce(holder, "come back")
        delay = self.returned.delay(SOON, self.plan.options.retry_max_delay)
        if self.send_back(delay, begun=begun):
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
            logger.warning("%s runs without its lock, by lock_on_outage: %s", self._name, error)
            return True
        logger.debug("%s: %s; it comes back", self._name, error)  # the store has said so, once an outage
        options = self.plan.options
        if self.send_back(self.returned.delay(options.retry_delay, options.retry_max_delay)):
            raise Ignore("Redis could not be asked for the lock; the message comes back")
        return False

    def _announce(self, holder: LockInfo, policy: str) -> None:
        logger.info("%s: lock %s is held by %s: %s", self._name, holder.key, holder.who, policy)
        signals.lock_conflict.send(sender=self.task, key=holder.key, holder=holder, policy=policy)

    def _on_lost(self, lock: HeldLock, reason: str) -> None:
        if self.abort is not None:  # first: a receiver may take its time
            self.abort.strike(lock.key, reason)
        signals.lock_lost.send(sender=self.task, lock=lock, reason=reason)

    def _note(self, key: str) -> str:
        return f"{key}:note:{self._attempt}"

    def _mint(self, nonce: str) -> str:
        return tokens.mint(nonce, self._attempt, self.plan.origin(self.request.hostname))

    def _may_be_a_copy(self) -> bool:
        """Whether another delivery of this message may have begun before, or be still to come.

        The broker says so of the later one. It puts a message into the queue once more that was not acked in time:
        then the earlier one knows by its own clock.
        """
        overdue = time.monotonic() - self.received_at > OVERDUE * self.plan.visibility_timeout
        return overdue or self.returned.begun or bool((self.request.delivery_info or {}).get("redelivered"))
