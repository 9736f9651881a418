"""Reentry: which context holds a lock already, and how often it has entered the lock.

The owner of an entry is a context of `contextvars`, within one thread or greenlet and one asyncio task. A copy of that
context in another thread, greenlet or asyncio task is another owner.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextvars import ContextVar
from typing import Any

from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockConfigError
from celery_redislock.hold.held import HeldLock
from celery_redislock.hold.keeper import Keeper

from .event_loop import running_task

#: The entries of the current context. The references are weak, so that the renewal of a lock that is dropped without a
#: release ends, although its context lives on.
_entries: ContextVar[tuple[weakref.ref[Entry], ...]] = ContextVar("redislock_entries", default=())


class Entry:
    """A held lock, and how many `Lock` objects of its owner have entered it and not left it yet.

    Args:
        held: The lock.
        keeper: The keeper that renews the lock until this object is gone; None where other code renews it, or nobody.
        is_own: Whether the last release of this entry releases the key. False where a task's request owns the lock.
    """

    def __init__(self, held: HeldLock, keeper: Keeper | None, *, is_own: bool = True) -> None:
        self.held = held
        self.is_own = is_own
        self.count = 1
        self._keeper = keeper
        self._pid = os.getpid()
        self._owner: Any = None

    def __del__(self) -> None:
        self.end_renewal()

    def end_renewal(self) -> None:
        """Let the keeper renew the lock no more."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.remove(self.held)

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made the entry. A child that is forked later does not hold the lock."""
        return self._pid == os.getpid()

    @property
    def is_mine(self) -> bool:
        """Whether the calling context owns the entry, or the entry belongs to no context."""
        return self._owner is None or self._owner == _owner()

    def own_by_context(self) -> None:
        """Let the calling context own this entry, so that `entry_of_context` finds it there."""
        self._owner = _owner()
        _entries.set((*_not_ended(), weakref.ref(self)))

    def leave(self) -> bool:
        """Note that one `Lock` object has left; return whether it was the last."""
        self.count -= 1
        return self.count == 0


def entry_of_context(store: LockStore, key: str) -> Entry | None:
    """The entry of the calling context that holds `key`, if there is one and its lock is not lost."""
    for reference in _entries.get():
        entry = reference()
        if (
            entry is not None
            and entry.held.key == key
            and entry.held.store is store
            and entry.count > 0
            and entry.held.remaining > 0
            and entry.is_of_this_process
            and entry.is_mine
        ):
            return entry
    return None


def check_fence(held: HeldLock, fence: bool) -> None:
    """Refuse to enter a lock that is held without a fence, where a fence is asked for.

    Raises:
        LockConfigError: `fence` is True, and the lock is held without one.
    """
    if fence and held.fence is None:
        raise LockConfigError(
            f"the lock {held.key} is held already, without a fence: ask for one in the outermost block"
        )


def _not_ended() -> tuple[weakref.ref[Entry], ...]:
    """The entries of this context that have not ended: the others are forgotten with the next one."""
    return tuple([one for one in _entries.get() if (entry := one()) is not None and entry.count > 0])


def _owner() -> tuple[int, Any]:
    task = running_task()
    # `get_ident` is looked up in its module, because gevent replaces it there. The asyncio task is kept as a weak
    # reference, because a new task may have the `id()` of a dead one.
    return threading.get_ident(), task and weakref.ref(task)
