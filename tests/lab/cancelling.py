"""Cancelling a coroutine at each of its awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class CancelledAt:
    """Awaits a coroutine, and cancels the running task at its nth suspension.

    Args:
        coroutine: The coroutine.
        nth: Counted from 1.
        late: Cancel once what it waits for has happened, just before it learns of that; otherwise, as soon as it waits.

    Attributes:
        has_struck: Whether it was suspended that often.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], nth: int, *, late: bool) -> None:
        self._coroutine, self._left, self._late = coroutine, nth, late
        self.has_struck = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as over:
                return over.value
            self._left -= 1
            if self._left == 0:
                self._strike(waits_for)
            try:
                yield waits_for
                error = None
            except BaseException as thrown:  # noqa: BLE001 - it is passed on
                error = thrown

    def _strike(self, waits_for: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.has_struck = True
        if self._late and waits_for is not None:
            waits_for.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
