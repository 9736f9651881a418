"""Sharing: whether Celery gives a task to an app that has not defined it.

When an app is finalized, Celery makes every task of every other app of the process for it too, and every shared task.
The task's class is told nothing of that. Only the call that makes the task differs, so it is looked for on the stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_redislock.app import is_nobodys
from celery_redislock.celery_port import all_apps, declared_by, is_default, maker_of_task
from celery_redislock.errors import LockConfigError

if TYPE_CHECKING:
    from celery import Celery


def is_given(app: Celery) -> bool:
    """Whether the task that is being bound to `app` is another app's, and Celery has made it for `app` as well.

    A shared task belongs to every app alike. It counts as another's where somebody has set up another app, unless `app`
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
