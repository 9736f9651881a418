"""LockedResult: what a publish returns. It is Celery's own class; type checkers see one attribute more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.result import AsyncResult

if TYPE_CHECKING:

    class LockedResult(AsyncResult[Any]):
        """What `delay` and `apply_async` of a `LockedTask` return: Celery's own result, with one attribute more."""

        duplicate: bool
        """Whether an equal job was queued or ran already, so that nothing was sent and this is that job's result."""

else:
    LockedResult = AsyncResult
