"""EagerExecution: a run in the caller's own process, where nothing can be sent again."""

from __future__ import annotations

from typing import Any

from celery.exceptions import TaskRevokedError

from celery_redislock.errors import LockConfigError, LockConflict, LockUnavailable
from celery_redislock.lock.reentry import check_fence, held_in_context
from celery_redislock.server.held import HeldLock

from .execution import Execution
from .held_by_request import held_by_request
from .outcome import has_ended
from .policies import skip_reason
from .publish import MOMENT

#: These do not block for the key.
_AT_ONCE = frozenset({"skip", "raise"})


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
        options = self.plan.options
        if self._enter_again(lock):
            return
        self.lock = lock
        try:
            timeout = 0.0 if options.on_conflict in _AT_ONCE else options.wait
            conflict = self._server.take(lock, timeout, fence=options.fence)
            if conflict is not None and not timeout and has_ended(self.task, conflict.holder.info(lock.key, None)):
                conflict = self._server.take(lock, MOMENT, fence=options.fence)
        except LockUnavailable:
            self.lock = None
            if options.on_outage == "run":
                return
            raise
        except LockConfigError:  # to wait would stop an event loop
            self.lock = None
            raise
        if conflict is None:
            self._taken(lock)
            return
        self.lock = None
        holder = conflict.holder.info(lock.key, conflict.ttl)
        self._announce(holder, options.on_conflict)
        if options.on_conflict == "skip":
            self.tell(holder, "skip: it raises TaskRevokedError")
            raise TaskRevokedError(skip_reason(holder))
        self.tell(holder, f"{options.on_conflict}: it raises LockConflict")
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
