"""The two kinds of `Execution`, which carry out the decisions about a run.

`WorkerExecution` runs in a worker: if it has to wait for its key, the run ends and its message waits in line or is sent
back. `EagerExecution` runs in the caller's own process and blocks.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import states
from celery.exceptions import TaskRevokedError

from celery_redislock import signals
from celery_redislock.app import WITHOUT_REDIS
from celery_redislock.errors import LockConflict, LockUnavailable
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.info import LockInfo
from celery_redislock.lock.handle import check_fence, entry_of_context
from celery_redislock.message.delivery import ASKED_KEYS
from celery_redislock.protocol.hold import Phase
from celery_redislock.protocol.replies import Conflict, Finished, Granted

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

#: The shortest and the longest pause of a message that is sent back, in seconds. While the worker's room is full, the
#: longest is higher: thousands of messages may then come back, and each costs a run and a few commands.
SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_WHILE_FULL = 1.0, 30.0, 300.0


class WorkerExecution(Execution):
    """A run in a worker. It carries out what `celery_redislock.task.decisions` decides on a conflict or an outage."""

    _may_leave_retry = True

    def end(self, state: str | None) -> None:
        """Release the key. If the task ends without an outcome, show that to the runs that have joined it."""
        try:
            if state == states.IGNORED and self.lock is not None:
                self.leave_no_retry()
        finally:  # otherwise a time limit that fires in the backend leaves the keeper renewing the key forever
            super().end(state)
            ASKED_KEYS.forget(self.message.delivery.nonce)  # no effect in a child

    def leave_no_retry(self) -> None:
        """Show IGNORED instead of the RETRY of the previous attempt, or of this one while it waited."""
        if self._may_leave_retry and (self.message.attempt.retries or self.message.header.times):
            self._may_leave_retry = False  # a later RETRY is the replacement's
            show_as_ignored(self.task, self.request, self.message)

    def acquire(self, lock: HeldLock) -> None:
        """See `Execution.acquire`."""
        may_be_a_copy, fence = self.message.delivered.may_be_a_copy, self.plan.options.fence
        note = self._note(lock.key) if may_be_a_copy else None
        while True:
            # Note the key before sending the command, because this process may die as soon as the key is granted.
            ASKED_KEYS.asks(self.message.delivery.nonce, lock.key)
            if lock.hold.phase is Phase.IN_DOUBT:
                lock.hold = lock.hold.minted(self._mint())
            try:
                answer = self._server.store.acquire(lock, lock.lease, note, fence=fence)
            except LockUnavailable as error:
                if not self._runs_without(error):
                    continue
                if lock.hold.claim is not None:
                    self._give_up_reservation()
                    lock.hold = lock.hold.unclaimed()
                return
            if isinstance(answer, Granted):
                lock.granted(answer)
                self._taken(lock)
                return
            if isinstance(answer, Finished):
                drop(self.message)
            self._conflict(answer)

    # Conflicts: the key is held.

    def _conflict(self, conflict: Conflict) -> None:
        """End the run. Return only if the run must ask for the key again, as `_wait` describes."""
        holder, message = conflict.info(self.key), self.message.facts
        decision = self._decide(message, conflict, holder)
        policy = "come back" if isinstance(decision, ComeBack) else decisions.policy_for(holder, self.plan.options)
        self._announce(holder, policy)
        self._carry_out(decision, holder, conflict)

    def _carry_out(self, decision: Decision, holder: LockInfo, conflict: Conflict) -> None:
        """Carry out a decision.

        Args:
            decision: What happens to the run.
            holder: The key's holder.
            conflict: The conflict as the lock server reported it.
        """
        match decision:
            case Skip():
                self._skip(decision, holder)
            case Fail():
                self._fail(decision, holder)
            case Wait():
                # Store RETRY before the message waits. If it were stored afterwards, as Celery does for its own
                # Retry, it could overwrite the outcome of the message's next run.
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
        """End the run. Its message waits in line, or is sent back if it cannot wait in this worker.

        Return only if the message cannot be sent back either: the broker is out of reach, and the message is acked.

        Args:
            holder: The key's holder.
            conflict: As for `_carry_out`.
            what: The policy as the log line names it.
            is_shown: Whether the run is shown as RETRY.
            is_begun: As for `Message.wait`.
            joins: As for `Message.wait`.
        """
        rank = self.message.header.rank_at(conflict.now or time.time_ns() // 1000)
        header = None if conflict.cannot_wait else self.message.wait(rank, is_begun=is_begun, joins=joins)
        if header is not None:
            self._tell(holder, f"{what}: it waits in line")
            reason = f"{LockConflict(holder.key, holder)}; it waits in line"
            raise WaitsInLine(reason, self.demand, rank, header, is_shown)
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

    # Outages: Redis does not answer, or refuses the command.

    def _runs_without(self, error: LockUnavailable) -> bool:
        """End the run, or return whether it runs without the lock. If not, it must ask for the key again.

        That happens if the broker is down too and the message is already acked, so that no other process has the
        message.
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
    """A run in the caller's process. It blocks while it waits for its key. It has no message, so it leaves no note.

    A run inside a run or block that holds the key shares that lock and does not release it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shares_lock = False

    def end(self, state: str | None) -> None:
        """Release the key, unless it belongs to the run or block around this one."""
        if not self._shares_lock:
            super().end(state)

    def _note_after(self, lock: HeldLock, state: str | None) -> None:
        """Leave no note: there is no message, so there can be no copy."""

    def acquire(self, lock: HeldLock) -> None:
        """Take the key.

        Raises:
            TaskRevokedError: The key is held, and the policy is ``skip``.
            LockConflict: The key is held and the policy is ``raise``, or is still held after `lock_block_for`.
            LockUnavailable: Redis did not answer, or refused the command, and `lock_on_outage` is not ``run``.
            LockConfigError: The run would have to wait, which would block the caller's event loop; or it would share a
                lock that has no fence, and `lock_fence` is True.
        """
        if self._share_lock(lock):
            return
        try:
            conflict = self._server.take(lock, 0.0, fence=self.plan.options.fence)
            if conflict is not None:
                self._wait_or_end(lock, conflict)
        except LockUnavailable as error:
            if isinstance(on_outage(self.message.delivered, 0.0, self.plan.options), RunWithout):
                return
            raise LockUnavailable(error.key, f"{error.reason}; {WITHOUT_REDIS}") from error
        self._taken(lock)

    def _wait_or_end(self, lock: HeldLock, conflict: Conflict) -> None:
        """Block until `lock` is granted, or raise."""
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
        """Use the lock of the run that calls `apply()`, or of a block around it. Return whether there is one."""
        store = self._server.store
        entry = entry_of_context(store, lock.key)
        outer = entry.held if entry else held_by_request(store, lock.key)
        if outer is None:
            return False
        check_fence(outer, self.plan.options.fence)
        self.held, self._shares_lock = outer, True
        return True
