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
from celery_redislock.server.tokens import Token

from .reentry import Hold


class _Slot:
    """The hold and how often this object has taken it; the token, by which redis-py's users know it."""

    hold: Hold | None = None
    count = 0
    token: bytes | None = None


class _ThreadSlot(threading.local, _Slot):
    """One for each thread."""


class Handle:
    """The part of `Lock` that asks nobody.

    Args:
        client: Of the lock's server.
        key: The key in Redis.
        timeout: Of a hold, in seconds; None for ever.
        thread_local: Whether each thread has a hold of its own.
        by_context: Whether, besides, only the context that took it may use it.
    """

    def __init__(self, client: Any, key: str, timeout: float | None, *, thread_local: bool, by_context: bool) -> None:
        self.redis = client
        self.key = key
        self.timeout = timeout
        self.thread_local = thread_local
        self.local = _ThreadSlot() if thread_local else _Slot()
        self._by_context = by_context and thread_local

    @property
    def token(self) -> str | None:
        """What the key holds while it is ours; None while it is not held."""
        hold = self._hold()
        return hold.held.token.value.decode("utf-8", "replace") if hold else None

    @property
    def fence(self) -> int | None:
        """The fencing number, where it was asked for: greater than that of every earlier holder of the key."""
        hold = self._hold()
        return hold.held.fence if hold else None

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline; 0.0 while it is not held."""
        hold = self._hold()
        return hold.held.remaining if hold else 0.0

    @property
    def state(self) -> State | None:
        """``"held"``, ``"at_risk"`` (less than half of the timeout is left), ``"lost"``; None while it is not held."""
        hold = self._hold()
        return hold.held.state if hold else None

    def check(self) -> None:
        """Raise if the key is not held. Call it before what must not happen twice.

        Raises:
            LockLost: It is not held by this object, or not any more.
        """
        hold = self._hold()
        if hold is None:
            raise LockLost(self.key, "it is not held by this object")
        hold.held.check()

    def _set(self, hold: Hold) -> None:
        """It has been taken, or taken again."""
        local = self.local
        local.count = local.count + 1 if local.hold is hold else 1
        local.hold, local.token = hold, hold.held.token.value

    def _unset(self) -> Hold:
        """It is given back, once.

        Raises:
            LockError: It is not held.
        """
        hold = self._hold()
        if hold is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", self.key)
        local = self.local
        if local.count > 1:
            local.count -= 1
        else:
            local.hold = local.token = None
        return hold

    def _hold(self) -> Hold | None:
        """What the caller holds by this object."""
        local = self.local
        hold, token = local.hold, local.token
        if token is None:
            return None
        if hold is None or hold.held.token.value != token:
            return self._adopt(token)
        if not hold.is_of_this_process or (self._by_context and not hold.is_mine):
            return None
        return hold

    def _adopt(self, token: bytes) -> Hold:
        """Of a token that somebody who knows it has set in `local`, as users of redis-py's lock do."""
        held = HeldLock(LockServer.behind(self.redis).store, self.key, Token.of(token), self.timeout or math.inf)
        held.renewed(time.monotonic())
        return Hold(held, None)

    def _limited(self, verb: str) -> HeldLock:
        """What is held, if it has a timeout; in redis-py's words if not."""
        hold = self._hold()
        if hold is None:
            raise LockError(f"Cannot {verb} an unlocked lock", self.key)
        if self.timeout is None:
            raise LockError(f"Cannot {verb} a lock with no timeout", self.key)
        return hold.held
