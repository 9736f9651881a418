"""Handle: what one `Lock` object holds, and tells of it."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from redis.exceptions import LockError

from celery_redislock.errors import LockLost
from celery_redislock.server.held import HeldLock, State
from celery_redislock.server.lock_server import LockServer
from celery_redislock.server.store import LockStore
from celery_redislock.server.tokens import Token

from .reentry import Entry, check_fence, entry_of_context


class _Slot:
    """The entry and how often this object has made it; the token, by which redis-py's users know it."""

    entry: Entry | None = None
    count = 0
    token: bytes | None = None


class _ThreadSlot(threading.local, _Slot):
    """One for each thread."""


class Handle:
    """The part of `Lock` that asks nobody.

    Args:
        client: Of the lock's server.
        key: The key in Redis.
        timeout: How long the key outlives a dead holder, in seconds; None for ever.
        thread_local: Whether what one thread holds is not held by the others.
        by_context: Whether, besides, only the context that took it may use it.
        fence: Whether it hands out fencing numbers.
    """

    def __init__(
        self, client: Any, key: str, timeout: float | None, *, thread_local: bool, by_context: bool, fence: bool
    ) -> None:
        self.redis = client
        self.key = key
        self.timeout = timeout
        self.thread_local = thread_local
        self.local = _ThreadSlot() if thread_local else _Slot()
        self._by_context = by_context and thread_local
        self._fence = fence

    @property
    def token(self) -> str | None:
        """What the key holds while it is ours; None while it is not held."""
        entry = self._entry()
        return entry.held.token.value.decode("utf-8", "replace") if entry else None

    @property
    def fence(self) -> int | None:
        """The fencing number, where it was asked for: greater than that of every earlier holder of the key."""
        entry = self._entry()
        return entry.held.fence if entry else None

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline; 0.0 while it is not held."""
        entry = self._entry()
        return entry.held.remaining if entry else 0.0

    @property
    def state(self) -> State | None:
        """``"held"``, ``"at_risk"`` (less than half of the timeout is left), ``"lost"``; None while it is not held."""
        entry = self._entry()
        return entry.held.state if entry else None

    def check(self) -> None:
        """Raise if the key is not held. Call it before what must not happen twice.

        Raises:
            LockLost: It is not held by this object, or not any more.
        """
        entry = self._entry()
        if entry is None:
            raise LockLost(self.key, "it is not held by this object")
        entry.held.check()

    def _set(self, entry: Entry) -> None:
        """It has been taken, or taken again."""
        local = self.local
        local.count = local.count + 1 if local.entry is entry else 1
        local.entry, local.token = entry, entry.held.token.value

    def _unset(self) -> Entry:
        """It is given back, once.

        Raises:
            LockError: It is not held.
        """
        entry = self._entry()
        if entry is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", self.key)
        local = self.local
        if local.count > 1:
            local.count -= 1
        else:
            local.entry = local.token = None
        return entry

    def _enter_again(self, store: LockStore) -> Entry | None:
        """The entry of who holds the key already; None where the caller does not, and must ask for it.

        Raises:
            LockConfigError: It is held without a fence, and one is asked for.
        """
        entry = entry_of_context(store, self.key)
        if entry is not None:
            check_fence(entry.held, self._fence)
            entry.count += 1
            return entry
        held = self._held_around(store)
        if held is None:
            return None
        check_fence(held, self._fence)
        mine = self._entry()
        if mine is not None and mine.held is held:  # this object has entered before
            mine.count += 1
            return mine
        return Entry(held, None, is_own=False)

    def _held_around(self, store: LockStore) -> HeldLock | None:
        """The lock on the key that belongs to what the caller runs in; for subclasses that know of such a thing."""
        return None

    def _entry(self) -> Entry | None:
        """What the caller holds by this object."""
        local = self.local
        entry, token = local.entry, local.token
        if token is None:
            return None
        if entry is None or entry.held.token.value != token:
            return self._adopt(token)
        if not entry.is_of_this_process or (self._by_context and not entry.is_mine):
            return None
        return entry

    def _adopt(self, token: bytes) -> Entry:
        """Of a token that somebody who knows it has set in `local`, as users of redis-py's lock do."""
        held = HeldLock(LockServer.behind(self.redis).store, self.key, Token.of(token), self.timeout or math.inf)
        held.renewed(time.monotonic())
        return Entry(held, None)

    def _limited(self, verb: str) -> HeldLock:
        """What is held, if it has a timeout; in redis-py's words if not."""
        entry = self._entry()
        if entry is None:
            raise LockError(f"Cannot {verb} an unlocked lock", self.key)
        if self.timeout is None:
            raise LockError(f"Cannot {verb} a lock with no timeout", self.key)
        return entry.held
