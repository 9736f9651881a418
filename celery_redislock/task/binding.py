"""Binding: what is done once, when a task class meets its app."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Task
from celery.utils.imports import symbol_by_name

from celery_redislock.errors import LockConflict
from celery_redislock.options import ATTRIBUTES

from .body import guard

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker.request import Request

    TaskClass = type[Task[..., Any]]


class Body(NamedTuple):
    """The function of a task."""

    function: Callable[..., Any]
    is_method: bool
    """Its first parameter is the task."""


def body_of(cls: TaskClass) -> Body:
    """The function of a task class."""
    static = inspect.getattr_static(cls, "run")
    is_method = not isinstance(static, staticmethod)
    return Body(static if is_method else static.__func__, is_method)


def guard_body(app: Celery, cls: TaskClass, name: str, body: Body, is_locked: Callable[[], bool]) -> None:
    """Wrap the body of a task class, once; see `guard`."""
    if not hasattr(body.function, "__redislock__"):
        guarded = guard(cls, name, body.function, is_locked)
        setattr(cls, "run", guarded if body.is_method else staticmethod(guarded))  # noqa: B010 - mypy
    task = tasks_of(app).get(name)
    original = getattr(task, "_orig_run", None)  # where autoretry_for had taken the body before it was wrapped
    if task is not None and original is not None and not hasattr(original, "__redislock__"):
        task._orig_run = guard(cls, name, original, is_locked)


def own_options(cls: TaskClass, ours: TaskClass) -> dict[str, Any]:
    """The ``lock_*`` attributes of a task class and its bases, without the prefix.

    What is unknown in a task class that is not ours, as celery-singleton's `lock_expiry`, is not meant for us; nor is a
    method or a property, but in a decorator, where there are none.

    Args:
        cls: The task's class.
        ours: `LockedTask`.
    """
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        is_foreign = issubclass(base, Task) and not issubclass(base, ours)
        is_decorator = "_decorated" in vars(base)
        own |= {
            name: value
            for name, value in vars(base).items()
            if name in ATTRIBUTES
            or (name.startswith("lock_") and not is_foreign and (is_decorator or not hasattr(value, "__get__")))
        }
    return {
        name.removeprefix("lock_"): value.__func__ if isinstance(value, staticmethod) else value
        for name, value in own.items()
        if name not in vars(ours)
    }


def expect_conflicts(cls: TaskClass) -> None:
    """A conflict that was asked for is no error: Celery logs what a task `throws` as one line, without a traceback."""
    throws = cls.throws if isinstance(cls.throws, tuple) else (cls.throws,)  # Celery takes a class alone as well
    if LockConflict not in throws:
        cls.throws = (*throws, LockConflict)


def request_class(name: str, request: Any) -> type[Request]:
    """The class of a task's requests, with what the worker's main process does for locks.

    Args:
        name: The task's name, for the message.
        request: Its attribute ``Request``: a class or its name.

    Raises:
        LockConfigError: That is no request class.
    """
    # By its name, as Celery names request classes: a publisher does without the worker's modules.
    locked_request = symbol_by_name("celery_redislock.worker.request:locked_request")
    made: type[Request] = locked_request(name, symbol_by_name(request))
    return made


def tasks_of(app: Celery) -> dict[str, Any]:
    """The tasks bound so far; ``app.tasks`` would finalize the app, in the middle of it."""
    tasks: dict[str, Any] = app._tasks  # type: ignore[attr-defined]
    return tasks
