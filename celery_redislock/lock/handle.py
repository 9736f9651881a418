"""Handle: what one `Lock` object holds, and what that object tells without asking Redis."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from redis.exceptions import LockError

from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockConfigError, LockLost
from celery_redislock.hold.held import HeldLock, State
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import limit_of
from celery_redislock.protocol.tokens import Token
from celery_redislock.shown import LONGEST, shown

from .reentry import Entry, check_fence, entry_of_context


class _Slot:
    """What one `Lock` object holds: its entry, how often the object has entered it, and the token, as in redis-py."""

    entry: Entry | None = None
    count = 0
    token: bytes | None = None


class _ThreadSlot(threading.local, _Slot):
    """A slot for each thread."""


class Handle:
    """The part of `Lock` that does not ask Redis.

    With `by_context` and `thread_local` only the context that has acquired the lock holds it; the rest is as in `Lock`.
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

    def __repr__(self) -> str:
        return f"<Lock {shown(self.key, LONGEST)} {self.state or 'not held'}>"

    @property
    def token(self) -> str | None:
        """The token that the key holds while this object holds the lock; None while it does not."""
        entry = self._entry()
        return entry.held.token.value.decode("utf-8", "replace") if entry else None

    @property
    def fence(self) -> int | None:
        """The fencing number, where the lock asked for one: greater than that of every earlier holder of the key."""
        entry = self._entry()
        return entry.held.fence if entry else None

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline; 0.0 while the lock is not held."""
        entry = self._entry()
        return entry.held.remaining if entry else 0.0

    @property
    def state(self) -> State | None:
        """``"held"``, ``"at_risk"`` (less than half of the timeout remains), ``"lost"``; None while not held."""
        entry = self._entry()
        return entry.held.state if entry else None

    def check(self) -> None:
        """Raise if the key is not held. Call it before what must not happen twice.

        Raises:
            LockLost: The key is not held by this object, or not any more.
        """
        entry = self._entry()
        if entry is None:
            raise LockLost(self.key, "it is not held by this object")
        entry.held.check()

    def _set(self, entry: Entry) -> None:
        """Note that the lock has been acquired, or entered again."""
        local = self.local
        local.count = local.count + 1 if local.entry is entry else 1
        local.entry, local.token = entry, entry.held.token.value

    def _unset(self) -> Entry:
        """Note one release, and return the entry that the object had entered.

        Raises:
            LockError: The lock is not held by this object.
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
        """Enter the lock again where the caller holds its key already; None where the key must be acquired.

        Raises:
            LockConfigError: The lock is held without a fence, and this object asks for one.
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
        if mine is not None and mine.held is held:  # this object has entered that lock before
            mine.count += 1
            return mine
        return Entry(held, None, is_own=False)

    def _held_around(self, store: LockStore) -> HeldLock | None:
        """The lock on the key that code around the caller holds, such as a task's run. A subclass looks for one."""
        return None

    def _entry(self) -> Entry | None:
        """The entry that the caller holds by this object; None where there is none."""
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
        """The entry of a lock whose token the user has stored in `local.token`, as users of redis-py's lock do.

        Raises:
            LockConfigError: The lock has a limit: the token alone does not tell which of its slots is held.
        """
        if limit_of(self.key) > 1:
            raise LockConfigError(f"lock {self.key}: a lock with a limit cannot take over the token of another object")
        held = HeldLock(LockServer.behind(self.redis).store, self.key, Token.of(token), self.timeout or math.inf)
        held.begin(time.monotonic())
        return Entry(held, None)

    def _limited(self, verb: str) -> HeldLock:
        """The held lock, if it has a timeout; else raise the error that redis-py's lock raises."""
        entry = self._entry()
        if entry is None:
            raise LockError(f"Cannot {verb} an unlocked lock", self.key)
        if self.timeout is None:
            raise LockError(f"Cannot {verb} a lock with no timeout", self.key)
        return entry.held
