"""Check: finds what is wrong with the lock options of an app's tasks. All tasks, not only the first wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from celery import Celery

from celery_redislock.app import settings_of
from celery_redislock.errors import LockConfigError
from celery_redislock.options import ATTRIBUTES, resolve_settings

from .binding import REFUSED
from .plan import LockAttributes


class Finding(NamedTuple):
    """Something that is wrong."""

    level: Literal["error", "warning"]
    text: str
    task: str | None = None
    """The task's name; None if it is not about one task."""


def check_tasks(app: Celery) -> list[Finding]:
    """Import the modules of `app`, bind its tasks, and return what is wrong with their lock options.

    A wrong task stays unlocked until it is used; then its error is raised.
    """
    refused: dict[str, LockConfigError] = {}
    collecting = REFUSED.set(refused)
    try:
        app.loader.import_default_modules()
        app.finalize()
        resolve_settings(settings_of(app))
    except LockConfigError as wrong:
        refused[""] = wrong
    finally:
        REFUSED.reset(collecting)
    tasks: dict[str, list[str]] = {}  # a wrong setting gives all tasks the same error
    for task, error in sorted(refused.items()):
        tasks.setdefault(str(error), []).append(task)
    errors = [Finding("error", text, (names[0] or None) if len(names) == 1 else None) for text, names in tasks.items()]
    return errors + [Finding("warning", text, task) for task, text in unlocked_tasks(app)]


def unlocked_tasks(app: Celery) -> Iterator[tuple[str, str]]:
    """The tasks that have lock options but no lock, because they are not a `LockedTask`; each with a warning.

    Celery's own have them if `task_annotations` sets options for all tasks.
    """
    for name, task in sorted(app.tasks.items()):
        options = sorted(option for option in ATTRIBUTES if hasattr(type(task), option))
        if options and not (isinstance(task, LockAttributes) or name.startswith("celery.")):
            yield name, f"task {name} has {', '.join(options)} but no lock: add base=LockedTask"
