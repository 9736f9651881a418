"""NoLock: the stand-in for a lock in code that runs without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self


class NoLock:
    """Stands in for a lock in a direct call, in a run without a lock, and when `redislock_enabled` is False.

    Its methods succeed without asking Redis, and its `state` is ``"none"``.
    """

    token: None = None
    fence: None = None
    replaced: None = None
    remaining = 0.0
    state: Literal["none"] = "none"

    def __init__(self, key: str = "", calls: Sequence[tuple[Any, Any]] = ()) -> None:
        self.key = self.name = key
        self.calls = calls

    def __repr__(self) -> str:
        return f"<NoLock {self.key}>" if self.key else "<NoLock>"

    def acquire(self, *args: Any, **kwargs: Any) -> Literal[True]:
        """Do nothing; return True."""
        return True

    def release(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    extend = reacquire = acquire

    def locked(self) -> bool:
        """Return False: no key is held."""
        return False

    def owned(self) -> bool:
        """Return True, so that code which checks that it owns its lock carries on."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""
