"""Results in the test's own process, of which Celery's client may miss the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult


def look_once_more() -> None:
    """Have `AsyncResult.get` look at the result backend before it gives up.

    Celery's client on Redis subscribes over one connection and looks over another. A busy server may meet the look
    before the subscription: of a result that is stored between the two the client never hears.
    """
    AsyncResult.get = _looking(AsyncResult.get)


def _looking(get: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get)
    def looking(self: AsyncResult, *args: Any, **options: Any) -> Any:
        try:
            return get(self, *args, **options)
        except CeleryTimeoutError:
            if not self.ready():
                raise
            return get(self, *args, **options)

    return looking
