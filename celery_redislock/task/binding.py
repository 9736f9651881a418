"""Binding: what is done to a task class once, when it is bound to its app."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Task
from celery.utils.imports import symbol_by_name

from celery_redislock.app import settings_of
from celery_redislock.celery_port import bound_tasks, retried_body, set_retried_body
from celery_redislock.errors import LockConflict
from celery_redislock.options import ATTRIBUTES, name_of

from .body import guard, refuse_what_outlives_its_call
from .join import check_backend
from .leftovers import is_of_another_plugin, warn_of_leftovers
from .plan import LockPlan

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker.request import Request

    TaskClass = type[Task[..., Any]]


class Body(NamedTuple):
    """The function of a task."""

    function: Callable[..., Any]
    is_method: bool
    """Whether the function's first parameter is the task."""


def body_of(cls: TaskClass) -> Body:
    """The function of a task class, as its class has it and not yet bound to an object."""
    static = inspect.getattr_static(cls, "run")
    is_method = not isinstance(static, staticmethod)
    return Body(static if is_method else static.__func__, is_method)


def checked_plan(app: Celery, cls: TaskClass, name: str) -> LockPlan:
    """The plan of a task class whose body, options, request class and result backend are fit for a lock.

    Raises:
        LockConfigError: One of them is not fit.
    """
    request: Any = cls.Request
    if isinstance(request, type):  # where it is the class's dotted name, the worker resolves it
        request_class(name, request)
    body = body_of(cls)
    unguarded = getattr(body.function, "__redislock__", body.function)
    refuse_what_outlives_its_call(f"{name}: its body", unguarded, "let a plain body run it: asyncio.run()")
    own = own_options(cls)
    plan = LockPlan(app, name, body.function, body.is_method, own)
    has_own_key = plan.options.args is not None or plan.options.key is not None
    warn_of_leftovers(cls, name, "" if has_own_key else " Its key is made of all its arguments.")
    if plan.server_is_checked and plan.options.on_conflict == "join":
        check_backend(app, name, name_of("on_conflict", own, settings_of(app)), bool(cls.ignore_result))
    if plan.options.on_conflict == "raise":
        expect_conflicts(cls)
    return plan


def guard_body(app: Celery, cls: TaskClass, name: str, is_locked: Callable[[], bool]) -> None:
    """Wrap the body of a task class by `guard`, unless that has been done."""
    body = body_of(cls)
    if not hasattr(body.function, "__redislock__"):
        guarded = guard(cls, name, body.function, is_locked)
        setattr(cls, "run", guarded if body.is_method else staticmethod(guarded))  # noqa: B010 - mypy
    task = bound_tasks(app).get(name)
    original = retried_body(task)
    if original is not None and not hasattr(original, "__redislock__"):
        set_retried_body(task, guard(cls, name, original, is_locked))


def own_options(cls: TaskClass) -> dict[str, Any]:
    """The ``lock_*`` attributes of a task class and its bases, by their names without the prefix.

    Names that the plugin does not know are among them, so that they can be refused, but for two kinds that are not
    meant for it: attributes of other plugins' task classes, such as celery-singleton's `lock_expiry`, and methods and
    properties of a class. What stands in a decorator is never a method, so a callable there counts.
    """
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        is_foreign, is_decorator = is_of_another_plugin(base), "_decorated" in vars(base)
        own |= {
            name: value
            for name, value in vars(base).items()
            if name in ATTRIBUTES
            or (name.startswith("lock_") and not is_foreign and (is_decorator or not hasattr(value, "__get__")))
        }
    return {
        name.removeprefix("lock_"): value.__func__ if isinstance(value, staticmethod) else value
        for name, value in own.items()
        if name != "lock_plan"  # of a base class that was bound before
    }


def expect_conflicts(cls: TaskClass) -> None:
    """Add LockConflict to what the task `throws`, for which Celery logs one line without a traceback.

    Under the policy ``raise`` it is an expected outcome of the task.
    """
    throws = cls.throws if isinstance(cls.throws, tuple) else (cls.throws,)  # Celery allows a single class, too
    if LockConflict not in throws:
        cls.throws = (*throws, LockConflict)


def request_class(name: str, request: Any) -> type[Request]:
    """The class of a task's requests in the worker's main process: the user's class, with `LockedRequest` in front.

    Raises:
        LockConfigError: `request` is no request class.
    """
    # Imported by its name, and only now: a process that publishes does not load Celery's worker modules.
    locked_request = symbol_by_name("celery_redislock.worker.request:locked_request")
    made: type[Request] = locked_request(name, symbol_by_name(request))
    return made
