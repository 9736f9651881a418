"""What a request holds: code that runs in it holds that already, whichever `Lock` it asks."""

from __future__ import annotations

from typing import Any

from celery._state import _task_stack  # type: ignore[attr-defined]

from celery_redislock.server.held import HeldLock
from celery_redislock.server.store import LockStore

#: The request attribute that holds the `Execution`.
EXECUTION = "redislock_execution"

_any_run = False


def attach(request: Any, execution: Any) -> None:
    """Let `held_by_request` find what `execution` holds, for as long as `request` is there."""
    global _any_run  # to look at Celery's stack costs a tenth of a command; most processes have none
    _any_run = True
    setattr(request, EXECUTION, execution)


def held_by_request(store: LockStore, key: str) -> HeldLock | None:
    """The lock on `key` that a request of this thread or greenlet holds and has not lost.

    There may be several: a task that is applied eagerly runs inside another.
    """
    if not _any_run:
        return None
    for task in _task_stack.stack:
        for request in task.request_stack.stack:
            # A message may have a header of this name: of a request without a lock, that is what is found here.
            lock = getattr(request.__dict__.get(EXECUTION), "lock", None)
            if isinstance(lock, HeldLock) and lock.key == key and lock.store is store and lock.remaining > 0:
                return lock
    return None
