"""The decorator by which the tasks of the tests are made."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from celery import Celery

from celery_redislock import LockedTask


def choose(app: Any, names: Collection[str] | None) -> None:
    """Let `app` have only the tasks of these names; None for all."""
    app.lab_tasks = names


def is_chosen(app: Any, name: str) -> bool:
    """Whether `app` has the task of this name."""
    return app.lab_tasks is None or name in app.lab_tasks


def decorator_of(app: Celery) -> Callable[..., Callable[[Callable[..., Any]], Any]]:
    """As ``app.task``, with a short name first; the base is `LockedTask` where none is named.

    A task that was not chosen for the app remains a function.
    """

    def locked(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        if not is_chosen(app, name):
            return lambda function: function
        return app.task(name=f"lab.{name}", shared=False, **{"base": LockedTask, **options})

    return locked
