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
from .plan import LockPlan

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker.request import Request

    TaskClass = type[Task[..., Any]]


import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from celery import Task

from celery_redislock.app import is_nobodys
from celery_redislock.celery_port import all_apps, declared_by, is_default, maker_of_task
from celery_redislock.errors import LockConfigError

from .attributes import LockAttributes

if TYPE_CHECKING:
    from celery import Celery


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


logger = logging.getLogger(__name__)

#: The options by which the other plugins lock, and whose they are.
_PLUGINS = {"once": "celery-once", "unique_on": "celery-singleton", "raise_on_duplicate": "celery-singleton"}
#: The pairs of task and option that this process has warned of: several apps may bind one task.
_said: set[tuple[str, str]] = set()


def warn_of_leftovers(cls: type[Task[..., Any]], task: str, key: str) -> None:
    """Warn, once in a process, of each option of another plugin that a task has, and say what to write instead.

    `key` is a sentence about the task's key that ends the warning; it may be empty.
    """
    for name, value in _leftovers_of(cls):
        if (task, name) not in _said:
            _said.add((task, name))
            logger.warning(
                "task %s: %s is %s's and does nothing here; instead of it write %s.%s",
                *(task, name, _PLUGINS[name], _instead_of(name, value), key),
            )


def is_of_another_plugin(base: type) -> bool:
    """Whether a base of a locked task's class is Celery's or another plugin's: its options work there."""
    return issubclass(base, Task) and not issubclass(base, LockAttributes)


def _leftovers_of(cls: type[Task[..., Any]]) -> Iterator[tuple[str, Any]]:
    others = [base for base in cls.__mro__ if is_of_another_plugin(base)]
    for name in _PLUGINS:
        value = getattr(cls, name, None)
        if value is not None and not callable(value) and not any(name in vars(base) for base in others):
            yield name, value


def _instead_of(name: str, value: Any) -> str:
    if name == "raise_on_duplicate":
        return "lock_scope='job', and raise where the `duplicate` of what delay() returns is true"
    if name == "unique_on":
        return _written(value or None, "job")
    options = value if isinstance(value, Mapping) else {}
    return _written(options.get("keys"), "queue" if options.get("unlock_before_run") else "job")


def _written(names: Any, scope: str) -> str:
    names = [names] if isinstance(names, str) else names
    args = f"lock_args={list(names)!r}, " if isinstance(names, list | tuple | set) else ""
    return f"{args}lock_scope={scope!r}"


def is_given(app: Celery) -> bool:
    """Whether the task that is being bound to `app` is another app's, and Celery has made it for `app` as well.

    A shared task belongs to every app alike. It counts as another's where another app is set up, unless `app`
    is the default app, as a worker's is.
    """
    maker, function = maker_of_task()
    match maker:
        case "app.task":  # of any app, this one's too
            return not any(declared is function for declared in declared_by(app))
        case "shared_task":
            return not is_default(app) and any(other is not app and not is_nobodys(other) for other in all_apps())
    return False


def refused_in(app: Celery, error: LockConfigError) -> LockConfigError:
    """`error`, for the use of a task in an app to which Celery has given it."""
    return LockConfigError(
        f"{error} (in the app {app.main!r}, which has this task because Celery shares tasks among all apps of a "
        "process: set that app up for it, or call the task by the app that defines it)"
    )
