"""The body of a task: a wrapper that keeps it from running where its lock was not asked for."""

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
    """Wrap a task's body, so that it runs only after its lock was asked for.

    The wrapper raises LockConfigError where a worker has run no `before_start` of `LockedTask`. It returns the outcome
    of another task, instead of running the body, where the run has joined one. With `lock_on_lost="abort"` it lets
    LockLost end the body. In a direct call, which runs none of Celery's hooks, it only calls the body.
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
        if abort is None or abort.is_armed:
            # Where `abort` is armed, the body itself has called this wrapper, by `self.run()` or `super().run()`.
            return body(*args, **kwargs)
        with abort:
            return body(*args, **kwargs)

    run.__redislock__ = body  # type: ignore[attr-defined]
    return run


def refuse_what_outlives_its_call(what: str, function: Any, remedy: str) -> None:
    """Refuse a function that has returned before it runs: its lock would be released at once.

    A call of an async function or of a generator only makes an object, which runs later.

    Raises:
        LockConfigError: `function` is async or a generator. The message names it by `what`, and the `remedy`.
    """
    call = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(function) or kind(call) for kind in kinds):
        raise LockConfigError(
            f"{what} is async or a generator: it runs after its call has returned and its lock is gone; {remedy}"
        )
