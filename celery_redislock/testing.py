"""For the tests of an app: a key that somebody else holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context

from .lock.lock import Lock
from .lock.no_lock import NoLock
from .locked import Locked


@contextmanager
def busy(lock: Lock | NoLock | Locked) -> Iterator[Lock | NoLock]:
    """Hold `lock` as somebody else would: ``with busy(task.lock_for(5)): task.delay(5)``.

    Code in ``with task.lock_for(5):`` holds the key itself, so a task that it runs eagerly meets no conflict. `busy`
    holds the key in a context of its own: a task that runs eagerly meets a conflict, and ends as its options say.

    Args:
        lock: What `LockedTask.lock_for` or `locked` returns, or a `Lock`.

    Returns:
        The lock, held.

    Raises:
        LockConflict: Another holds the key already.
        LockUnavailable: Redis did not answer or refused.
    """
    elsewhere = Context()
    entered = elsewhere.run(lock.__enter__)
    try:
        yield entered
    finally:
        elsewhere.run(lock.__exit__, None, None, None)
