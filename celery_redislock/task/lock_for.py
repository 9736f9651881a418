"""The locks of `lock_for` and `locked`. Code inside a run or block that holds a key shares that lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_redislock.app import server_of
from celery_redislock.connection.store import LockStore
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.lock.async_lock import Lock as AsyncLock
from celery_redislock.lock.handle import Handle
from celery_redislock.lock.lock import Lock
from celery_redislock.lock.lock_server import servers_of
from celery_redislock.lock.several import AsyncLocks, Locks
from celery_redislock.options import LockOptions
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.several import in_order

from .execution import held_by_request


class InRequests(Handle):
    """A lock that code inside a task's run with this key shares."""

    def __init__(self, app: Any, demand: Demand, options: LockOptions, *, thread_local: bool) -> None:
        super().__init__(
            *(server_of(app).client, demand.key, options.lease),
            blocking_timeout=options.block_for,
            thread_local=thread_local,
            renew=True,
            reentrant=True,
            fence=options.fence,
            limit=demand.capacity,
        )
        self._servers = servers_of(app)  # without an owner, they are stopped

    def _held_around(self, store: LockStore) -> HeldLock | None:
        return held_by_request(store, self.key)


class LockInRequests(InRequests, Lock):
    """`InRequests` for threads."""


class AsyncLockInRequests(InRequests, AsyncLock):
    """`InRequests` for coroutines."""


def lock_of(
    app: Any, demands: Sequence[Demand], options: LockOptions, *, thread_local: bool, is_async: bool = False
) -> Any:
    """The lock for these demands: a `Lock`, or `Locks` of several; their twins if `is_async`.

    The first demand stands for all, and has the fence.
    """
    kind: type[Any] = AsyncLockInRequests if is_async else LockInRequests
    if len(demands) == 1:
        return kind(app, demands[0], options, thread_local=thread_local)
    unfenced = options._replace(fence=False)
    locks = {
        one.key: kind(app, one, options if one.key == demands[0].key else unfenced, thread_local=thread_local)
        for one in in_order(demands)
    }
    return (AsyncLocks if is_async else Locks)([*locks.values()], locks[demands[0].key])
