"""Leftovers: warns of options of celery-once and celery-singleton on a task that uses this plugin instead.

Celery takes any option as a plain attribute of the task, so without this nobody says that these do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Task

from .attributes import LockAttributes

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
