"""NoLock: the stand-in for a lock in code that runs without one. AsyncNoLock: the same for coroutines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from celery_redislock.errors import LockConfigError


class NoHandle:
    """The part of `NoLock` that coroutines use too."""

    token: None = None
    fence: None = None
    replaced: None = None
    remaining = 0.0
    state: Literal["none"] = "none"

    def __init__(self, key: str = "", calls: Sequence[tuple[Any, Any]] = (), mistake: str = "") -> None:
        self.key = self.name = key
        self.calls = calls
        self._mistake = mistake

    def __repr__(self) -> str:
        return f"<NoLock {self.key}>" if self.key else "<NoLock>"

    def check(self) -> None:
        """Do nothing, except in a thread that a locked run has started.

        Raises:
            LockConfigError: The run holds a lock, but this thread was not given it.
        """
        if self._mistake:
            raise LockConfigError(self._mistake)


class NoLock(NoHandle):
    """Stands in for a lock in a direct call, in a run without a lock, and when `redislock_enabled` is False.

    Its methods succeed without asking Redis, and its `state` is ``"none"``.
    """

    def acquire(self, *args: Any, **kwargs: Any) -> Literal[True]:
        """Do nothing; return True."""
        return True

    def release(self) -> None:
        """Do nothing."""

    extend = reacquire = owned = acquire  # code that checks that it owns its lock carries on

    def locked(self) -> bool:
        """Return False: no key is held."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


class AsyncNoLock(NoHandle):
    """`NoLock` for coroutines."""

    async def acquire(self, *args: Any, **kwargs: Any) -> Literal[True]:
        """Do nothing; return True."""
        return True

    async def release(self) -> None:
        """Do nothing."""

    extend = reacquire = owned = acquire

    async def locked(self) -> bool:
        """Return False: no key is held."""
        return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Do nothing."""
