"""Binding: checks a task's lock options and wraps its body, once, when the task is bound to its app.

Another lock plugin's options on a task have no effect, and are warned about.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

from celery import Celery, Task

from celery_redislock import celery_port
from celery_redislock.app import is_nobodys
from celery_redislock.errors import LockConfigError, LockConflict, LockLost, LockReplaced
from celery_redislock.options import ATTRIBUTES
from celery_redislock.policy.raise_ import expect
from celery_redislock.policy.replace import end_replaced

from .execution import execution_of
from .plan import LockAttributes, LockPlan

TaskClass: TypeAlias = "type[Task[..., Any]]"


logger = logging.getLogger(__name__)

#: The options of other lock plugins, and which plugin each belongs to.
_PLUGINS = {"once": "celery-once", "unique_on": "celery-singleton", "raise_on_duplicate": "celery-singleton"}
#: The pairs of task and option that this process has warned about: several apps may bind one task.
_said: set[tuple[str, str]] = set()
#: The errors of the tasks that cannot be locked, by name, while all tasks of an app are checked. Otherwise None: the
#: first error is raised.
REFUSED: ContextVar[dict[str, LockConfigError] | None] = ContextVar("REFUSED", default=None)


def body_of(cls: TaskClass) -> tuple[Callable[..., Any], bool]:
    """The body of a task class, as a function that is not bound; and whether its first parameter is the task."""
    static = inspect.getattr_static(cls, "run")
    is_method = not isinstance(static, staticmethod)
    return static if is_method else static.__func__, is_method


def checked_plan(app: Celery, cls: TaskClass, name: str) -> LockPlan:
    """Check the body, options and result backend of a task class, and make its plan.

    Raises:
        LockConfigError: One of them cannot be used with a lock.
    """
    body, is_method = body_of(cls)
    unguarded = getattr(body, "__redislock__", body)
    refuse_what_outlives_its_call(f"{name}: its body", unguarded, "let a plain body run it: asyncio.run()")
    if inspect.isfunction(inspect.getattr_static(cls, "Strategy", None)):  # which calls the body without hooks
        raise LockConfigError(f"{name}: its Strategy is a method, like celery-batches'; its body would run unlocked")
    own = own_options(cls)
    plan = LockPlan(app, name, body, is_method, own, ignores_result=bool(cls.ignore_result), serializer=cls.serializer)
    warn_of_leftovers(cls, plan)
    if plan.options.on_conflict == "raise":
        expect(cls, LockConflict)
    spare_lost_locks(cls)
    return plan


def spare_lost_locks(cls: TaskClass) -> None:
    """Have ``autoretry_for=(Exception,)`` let LockLost pass: another run may hold the key already.

    A task that names LockLost itself among its errors is retried.
    """
    retried, spared = (tuple(getattr(cls, name, ())) for name in ("autoretry_for", "dont_autoretry_for"))
    if retried and LockLost not in (*retried, *spared):
        cls.dont_autoretry_for = (*spared, LockLost)  # type: ignore[attr-defined]


def checked_name(app: Celery, cls: TaskClass) -> str:
    """The name of the task of a class. The lock belongs to the class, so it has one task, and that has no options.

    Raises:
        LockConfigError: The class has a second task, which is not registered then, or its task has options of its own.
    """
    known, name = celery_port.bound_tasks(app), cls.name or app.gen_task_name(str(cls.__name__), cls.__module__)
    if "_decorated" in vars(cls) and type(known.get(name)) is cls:  # a class of its own: no need to look at all tasks
        return name
    tasks: list[Any] = [*{task.name: task for task in known.values() if type(task) is cls}.values()]  # not its aliases
    own = sorted(ATTRIBUTES & vars(tasks[-1]).keys()) if tasks else []
    if len(tasks) > 1 or own:
        known.pop(tasks[-1].name, None)  # it was just registered
        shared = f"{tasks[0].name} is a task of the same class, whose lock they would share: give each its own class"
        problem = f"set {', '.join(own)} on the task's class, not on the task itself" if own else shared
        raise LockConfigError(f"{tasks[-1].name}: {problem}")
    return str(tasks[0].name) if tasks else name


def guard_body(app: Celery, cls: TaskClass, name: str, is_locked: Callable[[], bool]) -> None:
    """Wrap the body of a task class with `guard`, unless it is wrapped already."""
    body, is_method = body_of(cls)
    if not hasattr(body, "__redislock__"):
        guarded = guard(cls, name, body, is_locked)
        setattr(cls, "run", guarded if is_method else staticmethod(guarded))  # noqa: B010 - mypy
    task = celery_port.bound_tasks(app).get(name)
    original = celery_port.retried_body(task)
    if original is not None and not hasattr(original, "__redislock__"):
        celery_port.set_retried_body(task, guard(cls, name, original, is_locked))


def own_options(cls: TaskClass) -> dict[str, Any]:
    """The ``lock_*`` attributes of a task class and its bases, by name without the prefix.

    Unknown names are included so that they can be refused. Two kinds are not meant for this plugin and are left out:
    attributes of other plugins' task classes, such as celery-singleton's `lock_expiry`, and methods and properties of a
    class. A callable passed to the decorator is never a method, so it is included.
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
        if name != "lock_plan"  # set on a base class that was bound earlier
    }


def warn_of_leftovers(cls: TaskClass, plan: LockPlan) -> None:
    """Warn once per process about each option of another plugin on a task, and say what to write instead.

    What is said before logging is set up does not count: a worker says it again at its start, and then its log has it.
    """
    has_own_key = plan.options.args is not None or plan.options.key is not None
    key = "" if has_own_key else " Until then, its key is made of all its arguments."
    for name, value in _leftovers_of(cls):
        if (plan.task, name) not in _said:
            if logger.hasHandlers():
                _said.add((plan.task, name))
            logger.warning(
                "task %s: the option %r belongs to %s and has no effect here; instead, set %s.%s",
                *(plan.task, name, _PLUGINS[name], _instead_of(name, value), key),
            )


def is_of_another_plugin(base: type) -> bool:
    """Whether a base of a locked task's class is Celery's or another plugin's, so that its options work there."""
    return issubclass(base, Task) and not issubclass(base, LockAttributes)


def _leftovers_of(cls: TaskClass) -> Iterator[tuple[str, Any]]:
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
    """Whether the task being bound to `app` was defined for another app, and Celery shares it with this one.

    A shared task belongs to all apps equally. It counts as another app's if another app is set up, unless `app` is the
    default app, as a worker's app is. So does one that is defined after `app` was finalized without a broker: such an
    app may be that of a pytest plugin, and the task's own app may be made later.
    """
    maker, made = celery_port.maker_of_task()
    match maker:
        case "app.task":  # the decorator of any app, this one included
            return not any(declared is made for declared in celery_port.declared_by(app))
        case "shared_task":
            is_alone = all(is_nobodys(other) for other in celery_port.all_apps() if other is not app)
            return not celery_port.is_default(app) and not (is_alone and (app.conf.broker_write_url or not made))
    return False


def refused_in(app: Celery, error: LockConfigError) -> LockConfigError:
    """The LockConfigError for using a task in an app that only shares it; `error` is the reason."""
    return LockConfigError(
        f"{error} (in the app {app.main!r}, which has this task because Celery shares tasks among all apps of a "
        "process: set up that app for it, or call the task through the app that defines it)"
    )


def guard(cls: TaskClass, name: str, body: Callable[..., Any], is_locked: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap a task's body so that it runs only after its lock was requested.

    The wrapper raises LockConfigError if a worker did not run `LockedTask.before_start`, and raises that hook's error
    again if it was swallowed. If the run has joined another task, it returns that task's outcome instead of running the
    body. With `lock_on_lost="abort"`, LockLost can end the body; with `lock_on_conflict="replace"`, LockReplaced can. A
    direct call runs none of Celery's hooks, so there the wrapper only calls the body.
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
        if execution.refusal is not None:  # the task's own before_start has swallowed it
            raise execution.refusal
        if execution.joined is not None:
            return execution.joined.value
        abort = execution.abort
        if abort is None or abort.is_armed:
            # An armed `abort` means that the body itself called this wrapper, through `self.run()` or `super().run()`.
            return body(*args, **kwargs)
        try:
            with abort:
                return body(*args, **kwargs)
        except LockReplaced as error:
            if error.key != execution.key:  # that of a run around this one
                raise
            end_replaced(execution.message, error.task_id, has_run=True)

    run.__redislock__ = body  # type: ignore[attr-defined]
    return run


def refuse_what_outlives_its_call(what: str, function: Any, remedy: str) -> None:
    """Refuse an async function or a generator: its lock would be released before it runs.

    Calling one only creates an object, which runs later.

    Raises:
        LockConfigError: `function` is async or a generator. The message contains `what` and `remedy`.
    """
    call = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(function) or kind(call) for kind in kinds):
        raise LockConfigError(
            f"{what} is async or a generator: it would run after its call has returned and released the lock; {remedy}"
        )
