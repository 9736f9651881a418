"""A helper for the tests of an app: hold a lock as another process would."""

from __future__ import annotations

from contextvars import Context

from .lock.lock import Lock
from .lock.no_lock import NoLock
from .locked import Locked


def busy(lock: Lock | NoLock | Locked) -> Busy:
    """Hold `lock` as another process would: ``with busy(task.lock_for(5)): task.delay(5)``.

    Code inside ``with task.lock_for(5):`` is the holder, so a task that it runs eagerly meets no conflict. `busy` holds
    the key in a separate context: a task that runs eagerly meets a conflict, and ends as its options say.

    Args:
        lock: What `LockedTask.lock_for` or `locked` returns, or a `Lock`.

    Returns:
        A context manager that yields the held lock.

    Raises:
        LockConflict: When the block begins: the key is already held.
        LockUnavailable: When the block begins: Redis did not answer, or refused the command.
    """
    return Busy(lock)


class Busy:
    """What `busy` returns."""

    def __init__(self, lock: Lock | NoLock | Locked) -> None:
        self._lock = lock
        self._elsewhere = Context()

    def __repr__(self) -> str:
        return f"<busy {self._lock!r}>"

    def __enter__(self) -> Lock | NoLock:
        return self._elsewhere.run(self._lock.__enter__)

    def __exit__(self, *error: object) -> None:
        self._elsewhere.run(self._lock.__exit__, None, None, None)
