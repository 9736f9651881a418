"""Sharing: whether Celery gives a task to an app that has not defined it.

When an app is finalized, Celery makes every task of every other app of the process for it too, and every shared task.
The task's class is told nothing of that. Only the call that makes the task differs, so it is looked for on the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from celery import _state

from celery_redislock.app import is_nobodys
from celery_redislock.errors import LockConfigError

if TYPE_CHECKING:
    from celery import Celery


def is_given(app: Celery) -> bool:
    """Whether the task that is being bound to `app` is another app's, and Celery has made it for `app` as well.

    A shared task belongs to every app alike. It counts as another's where somebody has set up another app, unless `app`
    is the default app, as a worker's is.
    """
    caller = _maker()
    match caller and (caller.f_globals.get("__name__"), caller.f_code.co_name):
        case "celery.app.base", "cons":  # what the decorator of any app, this one's too, has left with Celery
            own = caller.f_locals["fun"] if caller else None
            return not any(function is own for function in _declared_by(app))
        case "celery.app", _:  # `shared_task`
            return _state.default_app is not app and any(_others(app))  # type: ignore[attr-defined]
    return False


def refused_in(app: Celery, error: LockConfigError) -> LockConfigError:
    """`error`, for the use of a task in an app to which Celery has given it."""
    return LockConfigError(
        f"{error} (in the app {app.main!r}, which has this task because Celery shares tasks among all apps of a "
        "process: set that app up for it, or call the task by the app that defines it)"
    )


def _maker() -> FrameType | None:
    """The call that has made the task that is being bound; None where it is bound otherwise."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_task_from_fun":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "_task_from_fun":  # a subclass may call it by `super()`
        frame = frame.f_back
    return frame


def _declared_by(app: Celery) -> Iterator[Any]:
    """The functions that the decorator of `app` has turned into tasks, of those that were not made before."""
    for promise in app._pending:  # type: ignore[attr-defined]
        try:
            function, *_ = object.__getattribute__(promise, "_Proxy__args")
        except AttributeError:  # it was made before
            continue
        yield function


def _others(app: Celery) -> Iterator[Celery]:
    apps: Any = _state._get_active_apps()  # type: ignore[attr-defined]
    return (other for other in apps if other is not app and not is_nobodys(other))
