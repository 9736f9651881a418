"""EagerExecution: a run in the caller's own process, where nothing can be sent again."""

from __future__ import annotations

from typing import Any

from celery.exceptions import TaskRevokedError

from celery_redislock.errors import LockConfigError, LockConflict, LockUnavailable
from celery_redislock.lock.reentry import check_fence, held_in_context
from celery_redislock.server.answers import Conflict
from celery_redislock.server.held import HeldLock

from .decisions import GIVE_TURNS, POLICIES, ComeBack, Fail, RunWithout, Skip, on_outage, policy_for
from .execution import Execution
from .held_by_request import held_by_request
from .outcome import MOMENT


class EagerExecution(Execution):
    """Blocks for the key instead of coming back, and leaves no note: there is no message."""

    __slots__ = ("_is_inner",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_inner = False

    def end(self, state: str | None) -> None:
        """As `Execution.end`; what another run or block holds is left to it."""
        if self._is_inner:
            self.lock = None
        super().end(state)

    def _note_after(self, lock: HeldLock, state: str | None) -> None:
        return None

    def _take(self, lock: HeldLock) -> None:
        """Take the key.

        Raises:
            TaskRevokedError: Another holds it, and the policy is ``skip``.
            LockConflict: Another held it for `lock_wait`; at once by the policy ``raise``.
            LockUnavailable: Redis did not answer or refused, unless `lock_on_outage` is ``run``.
            LockConfigError: It would have to wait, and stop the event loop that runs the caller.
        """
        if self._enter_again(lock):
            return
        self._asked_for = lock
        try:
            conflict = self._server.take(lock, 0.0, fence=self.plan.options.fence)
            if conflict is not None:
                self._wait_or_end(lock, conflict)
        except LockUnavailable:
            self._asked_for = None
            if isinstance(on_outage(self.message.delivered, self.plan.options), RunWithout):
                return
            raise
        except (LockConflict, LockConfigError, TaskRevokedError):
            self._asked_for = None
            raise
        self._taken(lock)

    def _wait_or_end(self, lock: HeldLock, conflict: Conflict) -> None:
        """Return once the key is taken; what a worker would send back blocks here."""
        message, options = self.message.facts, self.plan.options
        holder = conflict.holder.info(lock.key, conflict.ttl)
        policy = policy_for(holder, options)
        decision = self._decide(message, conflict, holder)
        if not isinstance(decision, Skip | Fail):
            is_for_a_moment = isinstance(decision, ComeBack) and policy not in GIVE_TURNS
            left = self._server.take(lock, MOMENT if is_for_a_moment else options.wait, fence=options.fence)
            if left is None:
                return
            holder = left.holder.info(lock.key, left.ttl)
            decision = POLICIES[policy](message, holder, options)
        self._announce(holder, policy)
        if isinstance(decision, Skip):
            self._tell(holder, "skip: it raises TaskRevokedError")
            raise TaskRevokedError(decision.reason)
        self._tell(holder, f"{policy}: it raises LockConflict")
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
