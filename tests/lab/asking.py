"""Asking a store for a key, for tests that are about the key and not about the life of the hold that asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_redislock import LockUnavailable
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Conflict, Finished, Granted, Outstanding, Reserved
from celery_redislock.protocol.scripts import Claim, Passed
from celery_redislock.protocol.tokens import Token


class Caller:
    """The owner of a hold, and nothing else."""

    def __init__(self, demand: Demand, token: Token, **about: Any) -> None:
        self.hold = Hold(demand, token, **about)


def answer_of(ask: Callable[[], Any]) -> Any:
    """What `ask` returns, or the error if the server counts as unavailable."""
    try:
        return ask()
    except LockUnavailable as error:
        return error


def acquire(
    store: LockStore,
    demand: Demand,
    token: Token,
    lease: float,
    note: str | None = None,
    *,
    fence: bool = False,
    call: bytes | None = None,
    claim: Claim | None = None,
) -> Granted | Conflict | Finished:
    """What `LockStore.acquire` answers a hold that nothing has happened to."""
    return store.acquire(Caller(demand, token, call=call, claim=claim), lease, note, fence=fence)


def reserve(store: LockStore, key: str, token: Token, ttl: float, passed: Passed) -> Reserved | Outstanding:
    """What `LockStore.reserve` answers a hold that nothing has happened to."""
    return store.reserve(Caller(Demand(key), token, places=(keys_of(key).queued,)), ttl, passed)
