"""The decorator by which the tasks of the tests are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_redislock import LockedTask


def decorator_of(app: Celery) -> Callable[..., Callable[[Callable[..., Any]], Any]]:
    """As ``app.task``, with a short name first; the base is `LockedTask` where none is named."""

    def locked(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        return app.task(name=f"lab.{name}", shared=False, **{"base": LockedTask, **options})

    return locked
