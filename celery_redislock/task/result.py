"""LockedResult: what a publish returns, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.result import AsyncResult

if TYPE_CHECKING:

    class LockedResult(AsyncResult[Any]):
        """What `delay` and `apply_async` of a `LockedTask` return: Celery's own result, with one attribute more."""

        duplicate: bool
        """Whether the job had been sent before, and nothing was sent now."""

else:
    LockedResult = AsyncResult
