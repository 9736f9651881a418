"""EagerExecution: a run in the caller's own process, of `apply()`. It has no message that could be sent back."""

from __future__ import annotations

from typing import Any

from celery.exceptions import TaskRevokedError

from celery_redislock.errors import LockConfigError, LockConflict, LockUnavailable
from celery_redislock.hold.held import HeldLock
from celery_redislock.lock.reentry import check_fence, entry_of_context
from celery_redislock.protocol.answers import Conflict
from celery_redislock.source import WITHOUT_REDIS

from .decisions import POLICIES, ComeBack, Fail, RunWithout, Skip, on_outage, policy_for
from .execution import Execution
from .held_by_request import held_by_request
from .outcome import MOMENT


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
