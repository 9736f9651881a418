"""NoLock: what stands for a lock where `redislock_enabled` is False."""

from __future__ import annotations

import math
from typing import Any, Literal, Self


class NoLock:
    """Always held, and nobody else's business."""

    name = key = ""
    token = fence = None
    state = "held"
    remaining = math.inf

    def acquire(self, *args: Any, **kwargs: Any) -> Literal[True]:
        """True."""
        return True

    def release(self) -> None:
        """Nothing."""

    def check(self) -> None:
        """Nothing."""

    def extend(self, *args: Any, **kwargs: Any) -> Literal[True]:
        """True."""
        return True

    def reacquire(self) -> Literal[True]:
        """True."""
        return True

    def locked(self) -> bool:
        """False: nobody holds it against anybody."""
        return False

    def owned(self) -> bool:
        """True."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""
