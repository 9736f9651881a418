"""Outcome: how another task has ended, as the result backend knows it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states
from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock.errors import describe
from celery_redislock.info import LockInfo
from celery_redislock.shown import fields, shown

if TYPE_CHECKING:
    from celery import Celery, Task

logger = logging.getLogger(__name__)

#: How long a publish or an eager run waits for the key of a run whose outcome is stored already, in seconds.
MOMENT = 1.0
#: The schemes of result backends whose results only the caller, or only one process, can read.
PRIVATE_BACKENDS = ("rpc", "cache+memory", "cache+locmem", "disabled")


class Outcome(NamedTuple):
    """The state of a task, and its result if it has ended."""

    state: str
    value: Any
    """The task's result, or its error."""

    @property
    def is_ready(self) -> bool:
        """Whether the task has ended."""
        return self.state in states.READY_STATES

    @property
    def will_run_again(self) -> bool:
        """Whether the task is to run again, so that it may hold no key now: it is between two attempts."""
        return self.state == states.RETRY


def backend_scheme(app: Celery) -> str:
    """The scheme of the URL of an app's result backend; ``"disabled"`` where the app has none."""
    return str(app.conf.result_backend or "disabled").split("://")[0]


def outcome_of(task: Task[..., Any], task_id: str) -> Outcome:
    """The outcome of `task_id` so far. A result backend that cannot be reached counts as RETRY: ask again later.

    Args:
        task: Any task of the same app.
        task_id: The id of the task whose outcome is wanted.
    """
    try:
        meta = task.backend.get_task_meta(task_id, cache=False)
    except Exception as error:
        if not task.backend.exception_safe_to_retry(error):
            raise
        logger.warning(
            "task %s cannot ask how %s ended: %s; it comes back",
            *(task.name, shown(task_id), describe(error)),
            extra=fields("not_read", task=task.name, holder_id=task_id),
        )
        return Outcome(states.RETRY, None)
    return Outcome(meta["status"], meta["result"])


def has_ended(task: Task[..., Any], holder: LockInfo) -> bool:
    """Whether a caller may have seen the holder's run end, although its key is not free yet.

    Celery stores a result before `on_success` and `after_return` run, and so before the key is released. Where the
    result backend cannot tell, the run counts as not ended.

    Args:
        task: Any task of the holder's app.
        holder: Who holds the key.
    """
    if holder.state != "held" or holder.task_id is None or backend_scheme(task.app) in PRIVATE_BACKENDS:
        return False
    try:
        meta = task.backend.get_task_meta(holder.task_id, cache=False)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - each backend has its own
        logger.debug("task %s cannot ask whether %s has ended: %s", task.name, shown(holder.task_id), describe(error))
        return False
    if meta["status"] not in states.READY_STATES:
        return False
    done = _moment(meta.get("date_done"))
    # A result that is older than the lock is that of an earlier run under the same id. Both times are by the clock of
    # the holder's host, so they can be compared.
    return done is None or holder.since is None or done >= holder.since


def _moment(value: Any) -> datetime | None:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
