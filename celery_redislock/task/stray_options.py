"""Stray options: lock options in a call, and another lock plugin's options on a task. Neither has any effect there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Task

from celery_redislock.errors import LockConfigError
from celery_redislock.info import fields, run_named, shown
from celery_redislock.options import KEY_OPTIONS, OPTIONS, meant_by

from .lost import is_in_hook
from .plan import LockAttributes
from .publish import is_bare

logger = logging.getLogger(__name__)

#: The options of other lock plugins, and which plugin each belongs to.
_PLUGINS = {"once": "celery-once", "unique_on": "celery-singleton", "raise_on_duplicate": "celery-singleton"}
#: The pairs of task and option that this process has warned about: several apps may bind one task.
_said: set[tuple[str, str]] = set()


def refuse_lock_options(task: Task[..., Any], options: dict[str, Any]) -> None:
    """Refuse options of a call whose names begin with ``lock_``.

    When Celery itself publishes in a worker (a retry, or the next step of a chain), the previous run has ended, and an
    error would lose its work. Such options are then logged and removed from `options`.

    Raises:
        LockConfigError: `options` has such a name.
    """
    for name in [option for option in options if option.startswith("lock_")]:
        refusal = _refusal(str(task.name), name)
        # Celery publishes an errback in the main process, with the failed task's id as `parent_id`.
        is_by_celery = task.app.current_worker_task or is_in_hook() or options.get("parent_id")
        if is_bare(options) or not is_by_celery:
            raise refusal
        del options[name]
        task_id = options.get("task_id")
        about = fields("call_option", task=task.name, task_id=task_id, reason=refusal)
        logger.error(
            "%s: it is sent without %s: %s", run_named(str(task.name), task_id), shown(name), refusal, extra=about
        )


def _refusal(task: str, option: str) -> LockConfigError:
    name = option.removeprefix("lock_")
    if name in KEY_OPTIONS or name in OPTIONS:
        setting = f", or redislock_{name} for the app" if name in OPTIONS else ""
        where = f"set it in the decorator or the class of the task{setting}"
        return LockConfigError(f"{task}: {option} is an option of the task, not of a call: {where}")
    meant = meant_by(name, "lock_", (*KEY_OPTIONS, *OPTIONS))
    return LockConfigError(
        f"{task}: {shown(option)} is not known, and lock options belong on the task, not on a call; {meant}"
    )


def warn_of_leftovers(cls: type[Task[..., Any]], task: str, key: str) -> None:
    """Warn once per process about each option of another plugin on a task, and say what to write instead.

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
    """Whether a base of a locked task's class is Celery's or another plugin's, so that its options work there."""
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
