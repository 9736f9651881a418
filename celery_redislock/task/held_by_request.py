"""What a request holds: code that runs inside a request which holds a key holds that key already."""

from __future__ import annotations

from typing import Any

from celery_redislock.celery_port import tasks_of_this_thread
from celery_redislock.connection.store import LockStore
from celery_redislock.hold.held import HeldLock
from celery_redislock.lock.lock import Lock
from celery_redislock.options import LockOptions
from celery_redislock.protocol.names import limit_of

#: The request attribute that holds the `Execution`.
EXECUTION = "redislock_execution"

#: Whether any request of this process has had an execution. In most processes that use a `Lock` none has, and to look
#: at Celery's stack costs a tenth of a Redis command.
_any_run = False


def attach(request: Any, execution: Any) -> None:
    """Let `held_by_request` find what `execution` holds, for as long as `request` is on Celery's stack."""
    global _any_run
    _any_run = True
    setattr(request, EXECUTION, execution)


def held_by_request(store: LockStore, key: str) -> HeldLock | None:
    """The lock on `key` that a request of this thread or greenlet holds and has not lost; None where there is none.

    The thread may have several requests: a task that is applied eagerly runs inside another.
    """
    if not _any_run:
        return None
    for task in tasks_of_this_thread():
        for request in task.request_stack.stack:
            # Where the request has no execution, a header of the message that has the same name may stand here.
            lock = getattr(request.__dict__.get(EXECUTION), "lock", None)
            if isinstance(lock, HeldLock) and lock.key == key and lock.store is store and lock.remaining > 0:
                return lock
    return None


class LockInRequests(Lock):
    """The lock of a task's key or of `locked`: code inside a run or a block that holds the key holds it already."""

    def __init__(self, client: Any, key: str, options: LockOptions, *, thread_local: bool) -> None:
        super().__init__(
            *(client, key, options.lease),
            blocking_timeout=options.block_for,
            thread_local=thread_local,
            renew=True,
            reentrant=True,
            fence=options.fence,
            limit=limit_of(key),
        )

    def _held_around(self, store: LockStore) -> HeldLock | None:
        return held_by_request(store, self.key)
