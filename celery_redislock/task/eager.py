"""A run in the caller's own process, as by `apply()`. It blocks if it has to wait for its key."""

from __future__ import annotations

from typing import Any

from celery.exceptions import TaskRevokedError

from celery_redislock.app import WITHOUT_REDIS
from celery_redislock.errors import LockConflict, LockUnavailable
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.lock.handle import check_fence, entry_of_context
from celery_redislock.protocol.replies import Conflict

from .decisions import POLICIES, ComeBack, Fail, RunWithout, Skip, on_outage, policy_for
from .execution import Execution, held_by_request

#: How long an eager run waits for a key that is about to become free, in seconds.
MOMENT = 1.0


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
