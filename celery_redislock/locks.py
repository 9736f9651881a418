"""Lock: the lock of a task's key, for code outside the task."""

from __future__ import annotations

import math
import random
import socket
import time
from types import TracebackType
from typing import Self

from . import tokens
from .errors import LockConflict, LockLost
from .keeper import HeldLock, Keeper
from .store import Held, LockStore

#: Between two looks at a held key, in seconds.
POLL = (0.02, 0.1)


class Lock:
    """A lock on one key, renewed while it is held. Made by ``task.lock_for(...)``.

    One object is one owner: do not share it between threads.

    Args:
        store: Where the key is.
        keeper: Renews it.
        name: The full key in Redis.
        lease: Seconds that the key outlives a dead holder.
        blocking_timeout: How long to wait for the key, in seconds.
    """

    def __init__(self, store: LockStore, keeper: Keeper, name: str, lease: float, blocking_timeout: float) -> None:
        self.name = name
        self.lease = lease
        self.blocking_timeout = blocking_timeout
        self._store = store
        self._keeper = keeper
        self._origin = tokens.origin(socket.gethostname(), None)
        self._held: HeldLock | None = None

    def acquire(self, blocking: bool = True, blocking_timeout: float | None = None) -> bool:
        """Take the key.

        Args:
            blocking: Wait for it.
            blocking_timeout: For how long, in seconds; None for the lock's own.

        Returns:
            Whether it is held now.

        Raises:
            LockUnavailable: Redis did not answer or refused.
        """
        if blocking_timeout is None:
            blocking_timeout = self.blocking_timeout
        return self._acquire(blocking_timeout if blocking else 0.0) is None

    def _acquire(self, timeout: float) -> Held | None:
        nonce = tokens.mint_nonce()
        token = tokens.mint(nonce, None, self._origin)
        held = HeldLock(self._store, self.name, token, nonce, self.lease)
        try:
            conflict = wait_for(held, timeout)
            if conflict is None:
                self._keeper.add(held)
                self._held = held
        except BaseException:
            self._keeper.remove(held)  # nobody else knows it: its lease must end it
            raise
        return conflict

    def release(self) -> None:
        """Give the key back.

        Raises:
            LockLost: It is not held, or not any more.
            LockUnavailable: Redis did not answer or refused; the key ends with its lease.
        """
        held = self._current()
        self._keeper.remove(held)  # before it is forgotten: what is interrupted here must not be renewed for ever
        self._held = None
        if not self._store.release(held.key, held.nonce):
            held.lose("its key was not ours at the release")
            held.check()

    @property
    def token(self) -> str | None:
        """What the key holds while it is ours; None while it is not held."""
        return self._held.token if self._held else None

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline; 0.0 while it is not held."""
        return self._held.remaining if self._held else 0.0

    @property
    def state(self) -> str | None:
        """``"held"``, ``"at_risk"`` or ``"lost"``; None while it is not held."""
        return self._held.state if self._held else None

    def check(self) -> None:
        """Raise LockLost unless the key is held."""
        self._current().check()

    def extend(self) -> None:
        """Renew now; see `HeldLock.extend`."""
        self._current().extend()

    def _current(self) -> HeldLock:
        if self._held is None:
            raise LockLost(self.name, "it is not held by this object")
        return self._held

    def __enter__(self) -> Self:
        """Take the key.

        Raises:
            LockConflict: Another held it to the end of `blocking_timeout`.
            LockUnavailable: Redis did not answer or refused.
        """
        conflict = self._acquire(self.blocking_timeout)
        if conflict is not None:
            raise LockConflict(self.name, conflict.holder.info(self.name, conflict.ttl))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class NoLock:
    """What stands for a lock where `redislock_enabled` is False: always held, and nobody else's business."""

    name = key = ""
    token = None
    state = "held"
    remaining = math.inf

    def acquire(self, blocking: bool = True, blocking_timeout: float | None = None) -> bool:
        """True."""
        return True

    def release(self) -> None:
        """Nothing."""

    def check(self) -> None:
        """Nothing."""

    def extend(self) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""


def wait_for(held: HeldLock, timeout: float) -> Held | None:
    """Acquire `held`, looking again and again for up to `timeout` seconds.

    Returns:
        None once it is granted, else who had it at the last look.

    Raises:
        LockUnavailable: Redis did not answer or refused.
    """
    end = time.monotonic() + timeout
    while True:
        result = held.store.acquire(held.key, held.token, held.nonce, held.lease)
        if isinstance(result, float):
            held.granted(result)
            return None
        left = end - time.monotonic()
        if isinstance(result, Held) and left <= 0:
            return result
        time.sleep(min(left, random.uniform(*POLL)))  # noqa: S311 - jitter, no secret
