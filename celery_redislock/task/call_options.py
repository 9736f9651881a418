"""Options of the lock in a call: they belong to the task, and Celery itself would drop them without a word."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery_redislock.errors import LockConfigError
from celery_redislock.options import KEY_OPTIONS, OPTIONS, meant_by
from celery_redislock.shown import fields, run_named, shown

from .lost import is_in_hook
from .publish import is_bare

if TYPE_CHECKING:
    from celery import Task

logger = logging.getLogger(__name__)


def refuse_lock_options(task: Task[..., Any], options: dict[str, Any]) -> None:
    """Refuse names that begin with ``lock_`` among the options of a call.

    Where a worker publishes the message for Celery, as the next step of a chain or a retry, the run before it has
    ended, and its work would be lost with the message: there they are logged, and removed from `options`.

    Raises:
        LockConfigError: `options` have such a name.
    """
    for name in [option for option in options if option.startswith("lock_")]:
        refusal = _refusal(str(task.name), name)
        # Celery publishes an errback in the main process with the id of the task that has failed.
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
