"""Celery port: the undocumented parts of Celery that the package uses in any process.

tests/contracts tests each function against the installed releases.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal, TypeVar

from celery import Celery, Task, _state, current_app
from celery.app import utils

R = TypeVar("R")

# Apps.


def app_of_this_thread() -> Celery | None:
    """The app that is current in this thread; None if Celery would make a new one without settings."""
    app: Celery | None = _state._tls.current_app or _state.default_app  # type: ignore[attr-defined]
    return None if app is None or app.main == "default" else app


def all_apps() -> list[Celery]:
    """All apps in the process."""
    return [*_state._get_active_apps()]  # type: ignore[attr-defined]


def current_apps() -> list[Celery]:
    """The apps made without ``set_as_current=False``: any of them may be current in some thread."""
    return [app for app in all_apps() if app.set_as_current]  # type: ignore[attr-defined]


def is_default(app: Celery) -> bool:
    """Whether threads without a current app use `app`, as all threads of its worker do."""
    return _state.default_app is app  # type: ignore[attr-defined]


def app_of_last_resort() -> Celery:
    """The app that Celery falls back to: the app itself, not Celery's proxy, which changes with the thread."""
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    return app


def bound_tasks(app: Celery) -> dict[str, Any]:
    """The tasks bound so far. ``app.tasks`` would bind the others too, in the middle of binding one."""
    tasks: dict[str, Any] = app._tasks  # type: ignore[attr-defined]
    return tasks


def hide_setting(name: str) -> None:
    """Have Celery show a setting as asterisks in ``report``, ``inspect conf`` and Flower, in any namespace.

    Celery recognizes a secret by the name of its setting, and offers no way to register one.
    """
    hidden: re.Pattern[str] | None = getattr(utils, "HIDDEN_SETTINGS", None)
    if hidden is not None and not hidden.search(name):
        utils.HIDDEN_SETTINGS = re.compile(f"{hidden.pattern}|{name.upper()}", hidden.flags)  # type: ignore[attr-defined]


# Tasks.


def declared_by(app: Celery) -> Iterator[Any]:
    """The functions of the tasks that were declared with ``@app.task`` and are not bound yet."""
    for promise in app._pending:  # type: ignore[attr-defined]
        try:
            function, *_ = object.__getattribute__(promise, "_Proxy__args")
        except AttributeError:  # already bound
            continue
        yield function


def maker_of_task() -> tuple[Literal["app.task", "shared_task"] | None, Any]:
    """Which decorator made the task that is being bound; None if unknown. For `app.task`, also from which function.

    For `shared_task`, also whether it defines the task just now: Celery binds it at once to each app that is finalized.

    Celery binds a task to every app of the process, and the task's class does not say where it comes from: only the
    call stack does.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_task_from_fun":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "_task_from_fun":  # a subclass may call it with `super()`
        frame = frame.f_back
    match frame and (frame.f_globals.get("__name__"), frame.f_code.co_name):
        case "celery.app.base", "cons":
            return "app.task", frame.f_locals["fun"] if frame else None
        case "celery.app", caller:
            return "shared_task", caller == "__inner"
    return None, None


def runs_system_checks() -> bool:
    """Whether Celery itself has called this code, to run Django's system checks when it imports an app's modules.

    It ignores what they report. Only the call stack tells it from ``manage.py check``.
    """
    stack = walk_stack(sys._getframe())
    return any(frame.f_globals.get("__name__") == "celery.fixups.django" for frame, _ in stack)


def bind(task: Task[..., Any] | type[Task[..., Any]]) -> Celery:
    """Bind a task or its class, unless it is bound already, and return its app."""
    app: Celery = task._get_app()  # type: ignore[union-attr]
    return app


def tasks_of_this_thread() -> Iterable[Task[..., Any]]:
    """The tasks running in this thread or greenlet: several if a task runs another eagerly."""
    stack: Sequence[Task[..., Any]] = _state._task_stack.stack  # type: ignore[attr-defined]
    return stack


def requests_of(task: Task[..., Any]) -> list[Any]:
    """The requests of `task` in all threads and greenlets; none if the variable ``USE_FAST_LOCALS`` hides them."""
    return [one for _, local in [*getattr(task.request_stack, "_local", ())] for one in local.get("stack", ())]


def as_in_this_thread(function: Callable[[], R]) -> Callable[[], R]:
    """Wrap `function` for another thread, where Celery then finds the running tasks of this one.

    Their requests tell Celery the parent and the root of what `function` publishes.
    """
    tasks = [*tasks_of_this_thread()]
    of_tasks = [(task.request_stack, request) for task in dict.fromkeys(tasks) for request in task.request_stack.stack]
    pushed = [*of_tasks, *((_state._task_stack, task) for task in tasks)]  # type: ignore[attr-defined]

    def run() -> R:
        with ExitStack() as ends:
            for stack, item in pushed:
                stack.push(item)
                ends.callback(stack.pop)
            return function()

    return run


def retried_body(task: Any) -> Callable[..., Any] | None:
    """The body of a task with ``autoretry_for``, which has replaced `run` with a wrapper; None for other tasks."""
    body: Callable[..., Any] | None = getattr(task, "_orig_run", None)
    return body


def set_retried_body(task: Any, body: Callable[..., Any]) -> None:
    """Have the wrapper of ``autoretry_for`` call another body."""
    task._orig_run = body


def as_sent(
    task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call as `apply_async` sends them: with ``pydantic=True``, models become dicts.

    Only pickle sends models as they are. `serializer` is the call's own, if it has one.
    """
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return (args, kwargs) if dump is None or (serializer or task.serializer) == "pickle" else dump(args, kwargs)
