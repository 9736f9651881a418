"""Celery port: what any process needs of Celery that it does not promise to keep.

Each function says what it needs and why. tests/contracts has a test of each with the installed releases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from celery import Celery, Task, _state, current_app
from celery.app import utils

# Apps.


def app_of_this_thread() -> Celery | None:
    """The app that is current in this thread; None where Celery would make a new one, without settings, for it."""
    app: Celery | None = _state._tls.current_app or _state.default_app  # type: ignore[attr-defined]
    return None if app is None or app.main == "default" else app


def current_apps() -> list[Celery]:
    """The apps of this process that may be the current one, in any thread."""
    return [app for app in _state._get_active_apps() if app.set_as_current]  # type: ignore[attr-defined]


def app_of_last_resort() -> Celery:
    """The app that Celery uses where there is none: its proxy would change with the thread."""
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    return app


def bound_tasks(app: Celery) -> dict[str, Any]:
    """The tasks that were bound so far. ``app.tasks`` would bind all others too, while one is being bound."""
    tasks: dict[str, Any] = app._tasks  # type: ignore[attr-defined]
    return tasks


def hide_setting(name: str) -> None:
    """Have Celery show a setting as asterisks in ``report``, ``inspect conf`` and Flower, in whatever namespace it is.

    Celery knows a secret by the name of its setting, and has no way to register one.
    """
    hidden: re.Pattern[str] | None = getattr(utils, "HIDDEN_SETTINGS", None)
    if hidden is not None and not hidden.search(name):
        utils.HIDDEN_SETTINGS = re.compile(f"{hidden.pattern}|{name.upper()}", hidden.flags)  # type: ignore[attr-defined]


# Tasks.


def bind(task: Task[..., Any]) -> Celery:
    """Bind a task, if it is not yet, and return its app: the property `app` would be looked up on the class as well."""
    app: Celery = task._get_app()  # type: ignore[attr-defined]
    return app


def tasks_of_this_thread() -> Iterable[Task[..., Any]]:
    """The tasks that run in this thread or greenlet: one that is applied eagerly runs inside another."""
    stack: Sequence[Task[..., Any]] = _state._task_stack.stack  # type: ignore[attr-defined]
    return stack


def retried_body(task: Any) -> Callable[..., Any] | None:
    """The body that ``autoretry_for`` calls: it has put a function of its own in the place of `run`."""
    body: Callable[..., Any] | None = getattr(task, "_orig_run", None)
    return body


def set_retried_body(task: Any, body: Callable[..., Any]) -> None:
    """Have ``autoretry_for`` call another body."""
    task._orig_run = body


def as_sent(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call as `apply_async` sends them: with ``pydantic=True`` it makes dicts of models."""
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return (args, kwargs) if dump is None else dump(args, kwargs)
