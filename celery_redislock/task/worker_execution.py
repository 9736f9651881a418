"""WorkerExecution: a run in a worker. Where it has to wait for its key, its message waits in line."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import states
from celery.exceptions import TaskRevokedError

from celery_redislock import signals
from celery_redislock.app import WITHOUT_REDIS
from celery_redislock.errors import LockConfigError, LockConflict, LockUnavailable
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.info import LockInfo
from celery_redislock.lock.handle import check_fence, entry_of_context
from celery_redislock.message.delivery import ASKED_KEYS
from celery_redislock.protocol.scripts import Conflict, Finished, Granted

from . import decisions
from .decisions import POLICIES, ComeBack, Decision, Fail, Refuse, RunWithout, Skip, Wait, on_outage, policy_for
from .ended_early import (
    CameBack,
    CameBackAsRetry,
    CameBackInOutage,
    WaitsInLine,
    drop,
    revoke,
    show_as_ignored,
    show_as_retry,
)
from .execution import Execution, held_by_request
from .outcome import MOMENT

logger = logging.getLogger(__name__)

#: The shortest and the longest pause of a message that is sent back, in seconds; and the longest one while the room of
#: its worker is full: where thousands come back, each of them costs a run and some commands.
SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_WHILE_FULL = 1.0, 30.0, 300.0


class WorkerExecution(Execution):
    """Carries out what `celery_redislock.task.decisions` says of a conflict or an outage."""

    _may_leave_retry = True

    def end(self, state: str | None) -> None:
        """Release the key. Where the task ends without an outcome, the runs that have joined it hear of it."""
        try:
            if state == states.IGNORED and self.lock is not None:
                self.leave_no_retry()
        finally:  # a time limit may strike while the result backend is asked, and the keeper would go on for ever
            super().end(state)
            ASKED_KEYS.forget(self.message.delivery.nonce)  # in a child that is nothing

    def leave_no_retry(self) -> None:
        """Show the task as IGNORED where it is shown as RETRY, by the attempt before or by this one while it waited."""
        if self._may_leave_retry and (self.message.attempt.retries or self.message.header.times):
            self._may_leave_retry = False  # from now on RETRY is what its replacement stores
            show_as_ignored(self.task, self.request, self.message)

    def _take(self, lock: HeldLock) -> None:
        while self.lock is None:
            try:
                answer = self._ask(lock)
            except LockUnavailable as error:
                self._unanswered = None
                if self._runs_without(error):
                    self._give_up_reservation()
                    return
                # The failed acquire was undone by a release of its token, which may arrive late: it must not release
                # what the next acquire is granted.
                lock.token = self._mint()
                continue
            if isinstance(answer, Granted):
                self._claim = None
                lock.granted(answer)
                self._taken(lock)
                return
            self._unanswered = None
            if isinstance(answer, Finished):
                drop(self.message)
            self._conflict(answer)

    def _ask(self, lock: HeldLock) -> Granted | Conflict | Finished:
        # Before the command: as soon as the key is granted, this process may die.
        ASKED_KEYS.asks(self.message.delivery.nonce, lock.key)
        return super()._ask(lock)

    # Where another holds the key.

    def _conflict(self, conflict: Conflict) -> None:
        """End the run, or return, so that the key is asked for again."""
        holder, message = conflict.info(self.key), self.message.facts
        decision = self._decide(message, conflict, holder)
        policy = "come back" if isinstance(decision, ComeBack) else decisions.policy_for(holder, self.plan.options)
        self._announce(holder, policy)
        self._carry_out(decision, holder, conflict)

    def _carry_out(self, decision: Decision, holder: LockInfo, conflict: Conflict) -> None:
        """Carry out what was decided.

        Args:
            decision: What becomes of the run.
            holder: Who holds the key.
            conflict: The same, as the lock server has told it.
        """
        match decision:
            case Skip():
                self._skip(decision, holder)
            case Fail():
                self._fail(decision, holder)
            case Wait():
                # RETRY is stored before the message waits. Stored after it, as Celery does for its own Retry, it could
                # overwrite the outcome of the message's next run.
                show_as_retry(self.task, self.request, self.message, LockConflict(holder.key, holder))
                self._wait(holder, conflict, self._waiting_policy, is_shown=True, joins=decision.joins)
            case ComeBack():
                self._wait(holder, conflict, "come back", is_shown=False, is_begun=decision.is_begun)

    def _skip(self, decision: Skip, holder: LockInfo) -> None:
        expired = f"{self._waiting_policy}: it has expired: its result is REVOKED"
        self._tell(holder, expired if decision.reason == decisions.EXPIRED else "skip: its result is REVOKED")
        revoke(self.task, self.request, decision.reason)

    def _fail(self, decision: Fail, holder: LockInfo) -> None:
        waited = self.plan.options.wait_for or 0.0
        late = f"{self._waiting_policy}: after lock_wait_for ({waited:g} s) it fails with LockConflict"
        self._tell(holder, late if decision.is_late else "raise: it fails with LockConflict")
        raise LockConflict(holder.key, holder)

    def _wait(
        self,
        holder: LockInfo,
        conflict: Conflict,
        what: str,
        *,
        is_shown: bool,
        is_begun: bool = False,
        joins: str | None = None,
    ) -> None:
        """End the run; its message waits in line, or, where it cannot do so in this worker, is sent back.

        Args:
            holder: Who holds the key.
            conflict: As for `_carry_out`.
            what: What the log line calls it.
            is_shown: Whether the run is shown as RETRY.
            is_begun: As for `Message.wait`.
            joins: As for `Message.wait`.
        """
        rank = self.message.header.rank_at(conflict.now or time.time_ns() // 1000)
        header = None if conflict.cannot_wait else self.message.wait(rank, is_begun=is_begun, joins=joins)
        if header is not None:
            self._tell(holder, f"{what}: it waits in line")
            reason = f"{LockConflict(holder.key, holder)}; it waits in line"
            raise WaitsInLine(reason, self.key, rank, header, is_shown)
        is_full = not self.message.delivery.may_wait
        pause = self.message.pause(SHORTEST_PAUSE, LONGEST_PAUSE_WHILE_FULL if is_full else LONGEST_PAUSE)
        self._tell(holder, f"{what}: it comes back in {pause:.2f} s")
        if self.message.send_back(pause, self.key, is_begun=is_begun, joins=joins, rank=rank):
            ending = CameBackAsRetry if is_shown else CameBack
            raise ending(f"{LockConflict(holder.key, holder)}; it comes back")

    @property
    def _waiting_policy(self) -> str:
        """The policy that log lines name for a run that waits for its turn."""
        return "join" if self.plan.options.on_conflict == "join" else "wait"

    # Where Redis cannot be asked.

    def _runs_without(self, error: LockUnavailable) -> bool:
        """End the run, or return True where it runs without the lock, or False where it must ask for the key again.

        The run must ask again where the broker is away too, so that only this process has the message.
        """
        signals.lock_unavailable.send(sender=self.task, key=error.key, error=error)
        about = self.message.fields("unavailable", key=error.key, reason=error.reason)
        decision = decisions.on_outage(self.message.delivered, self.message.waited, self.plan.options)
        match decision:
            case Refuse():
                raise error
            case RunWithout():
                logger.warning("%s runs without its lock, by lock_on_outage: %s", self.message.name, error, extra=about)
                return True
        pause = self.message.pause(SHORTEST_PAUSE, LONGEST_PAUSE)
        logger.info("%s: %s; it comes back in %.2f s", self.message.name, error, pause, extra=about)
        if self.message.send_back(pause, self.key, is_begun=decision.is_begun):
            raise CameBackInOutage("Redis could not be asked for the lock; the message comes back")
        return False


class EagerExecution(Execution):
    """Blocks for the key where a worker would send the message back. It leaves no note, for no copy can come.

    A run inside another run, or inside a block, that holds the key shares that lock and does not release it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shares_lock = False

    def end(self, state: str | None) -> None:
        """Release the key, unless the run or the block around this one holds it."""
        if self._shares_lock:
            self.lock = None
        super().end(state)

    def _note_after(self, lock: HeldLock, state: str | None) -> None:
        """No note: there is no message of which a copy could come."""

    def _take(self, lock: HeldLock) -> None:
        """Take the key.

        Raises:
            TaskRevokedError: Another holds the key, and the policy is ``skip``.
            LockConflict: Another held the key for `lock_block_for`; or, by the policy ``raise``, holds it now.
            LockUnavailable: Redis did not answer or refused, and `lock_on_outage` is not ``run``.
            LockConfigError: The run would have to wait, and so stop the event loop that runs the caller.
        """
        if self._share_lock(lock):
            return
        self._unanswered = lock
        try:
            conflict = self._server.take(lock, 0.0, fence=self.plan.options.fence)
            if conflict is not None:
                self._wait_or_end(lock, conflict)
        except LockUnavailable as error:
            self._unanswered = None
            if isinstance(on_outage(self.message.delivered, 0.0, self.plan.options), RunWithout):
                return
            raise LockUnavailable(error.key, f"{error.reason}; {WITHOUT_REDIS}") from error
        except (LockConflict, LockConfigError, TaskRevokedError):
            self._unanswered = None
            raise
        self._taken(lock)

    def _wait_or_end(self, lock: HeldLock, conflict: Conflict) -> None:
        """Return as soon as the key is taken, or raise. The run blocks where a message would be sent back."""
        message, options = self.message.facts, self.plan.options
        holder = conflict.info(lock.key)
        policy = policy_for(holder, options)
        decision = self._decide(message, conflict, holder)
        if not isinstance(decision, Skip | Fail):
            is_for_a_moment = isinstance(decision, ComeBack) and policy != "wait"
            left = self._server.take(lock, MOMENT if is_for_a_moment else options.block_for, fence=options.fence)
            if left is None:
                return
            holder = left.info(lock.key)
            decision = POLICIES[policy](message, holder, options)
        self._announce(holder, policy)
        if isinstance(decision, Skip):
            self._tell(holder, "skip: it raises TaskRevokedError")
            raise TaskRevokedError(decision.reason)
        self._tell(holder, f"{policy}: it raises LockConflict")
        raise LockConflict(lock.key, holder)

    def _share_lock(self, lock: HeldLock) -> bool:
        """Use the lock of the run that calls `apply()`, or of a block around it, and return whether there is one."""
        entry = entry_of_context(lock.store, lock.key)
        outer = entry.held if entry else held_by_request(lock.store, lock.key)
        if outer is None:
            return False
        check_fence(outer, self.plan.options.fence)
        self.lock, self._shares_lock = outer, True
        return True
