"""Reentry: who holds a lock already, and how often.

The owner is a context of `contextvars`, within one thread or greenlet and one asyncio task: a context that was copied
from the holder's for another of these is another owner.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextvars import ContextVar
from typing import Any

from celery_redislock.errors import LockConfigError
from celery_redislock.server.event_loop import running_task
from celery_redislock.server.held import HeldLock
from celery_redislock.server.keeper import Keeper
from celery_redislock.server.store import LockStore

#: Weak: who drops a lock unreleased has its renewal ended, although its context lives on.
_entries: ContextVar[tuple[weakref.ref[Entry], ...]] = ContextVar("redislock_entries", default=())


class Entry:
    """A held lock, and how many `Lock` objects of its owner have entered it and not left it yet.

    Args:
        held: The lock.
        keeper: Renews it until this object is gone; None where somebody else sees to that.
        is_own: Whether the last one out releases the key; else its owner is a request.
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
        """Whatever happens next, it is renewed no more."""
        if self._keeper is not None:
            self._keeper.remove(self.held)

    @property
    def is_of_this_process(self) -> bool:
        """A child that was forked meanwhile holds nothing: its parent does."""
        return self._pid == os.getpid()

    @property
    def is_mine(self) -> bool:
        """Whether the calling context is the owner."""
        return self._owner is None or self._owner == _owner()

    def own_by_context(self) -> None:
        """Let `entry_of_context` find it in this context."""
        self._owner = _owner()
        _entries.set((*_others(self), weakref.ref(self)))

    def leave(self) -> bool:
        """One is out; returns whether it was the last."""
        self.count -= 1
        if self.count == 0 and self._owner is not None:
            _entries.set(_others(self))
        return self.count == 0


def entry_of_context(store: LockStore, key: str) -> Entry | None:
    """This context's entry into `key`, if it has one and has not lost it."""
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
    """Refuse to enter a lock that is held without a fence where one is asked for.

    Raises:
        LockConfigError: The number of an earlier holder must not be handed out again.
    """
    if fence and held.fence is None:
        raise LockConfigError(
            f"the lock {held.key} is held already, without a fence: ask for one in the outermost block"
        )


def _others(entry: Entry) -> tuple[weakref.ref[Entry], ...]:
    """The entries of this context, without `entry` and those that have ended."""
    entries = _entries.get()
    if not entries:
        return ()
    return tuple([reference for reference in entries if reference() not in {entry, None}])


def _owner() -> tuple[int, Any]:
    task = running_task()
    # By its module: gevent replaces it there. A weak reference: the number of a dead task may be another's by now.
    return threading.get_ident(), task and weakref.ref(task)
