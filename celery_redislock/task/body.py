"""The body of a task, wrapped once: it runs only where its lock was asked for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_redislock.errors import LockConfigError

from .execution import execution_of

if TYPE_CHECKING:
    from celery import Task


def guard(
    cls: type[Task[..., Any]], name: str, body: Callable[..., Any], is_locked: Callable[[], bool]
) -> Callable[..., Any]:
    """`body`, but refusing to run in a worker where its lock was never asked for, and ended by `lock_on_lost`.

    Args:
        cls: The task's class.
        name: The task's name, for the message.
        body: The task's function.
        is_locked: Whether the task's lock is switched on, at this moment.
    """

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        request = cls.request_stack.top
        if request is None or request.called_directly:
            return body(*args, **kwargs)
        execution = execution_of(request)
        if execution is None:
            if not is_locked():
                return body(*args, **kwargs)
            raise LockConfigError(
                f"{name}: its before_start was overridden without super().before_start(task_id, args, kwargs), so the "
                "lock was not taken and the body was not run"
            )
        if execution.joined is not None:
            return execution.joined.value
        abort = execution.abort
        if abort is None or abort.is_armed:  # armed: the body itself has called, as by `self.run()` or `super().run()`
            return body(*args, **kwargs)
        with abort:
            return body(*args, **kwargs)

    run.__redislock__ = True  # type: ignore[attr-defined]
    return run


def refuse_what_outlives_its_call(what: str, function: Any, remedy: str) -> None:
    """Refuse a function whose call only makes what runs later: the lock would be held for no longer than that.

    Args:
        what: Its name, for the message.
        function: Anything that can be called.
        remedy: What to do instead, for the message.

    Raises:
        LockConfigError: It is async or a generator.
    """
    call = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(function) or kind(call) for kind in kinds):
        raise LockConfigError(
            f"{what} is async or a generator: it runs after its call has returned and its lock is gone; {remedy}"
        )
