"""Outcome: how another task has ended, as the result backend tells."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states
from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock.errors import describe
from celery_redislock.info import LockInfo
from celery_redislock.shown import shown

if TYPE_CHECKING:
    from celery import Celery, Task

logger = logging.getLogger(__name__)

#: How long it is waited for the key of a run whose end its caller may have seen, in seconds.
MOMENT = 1.0
#: Result backends that only the caller, or only one process, can read.
PRIVATE_BACKENDS = ("rpc", "cache+memory", "cache+locmem", "disabled")


class Outcome(NamedTuple):
    """How a task ended, or that it is still on its way."""

    state: str
    value: Any
    """Its result, or its error."""

    @property
    def is_ready(self) -> bool:
        """Whether it has ended."""
        return self.state in states.READY_STATES

    @property
    def will_run_again(self) -> bool:
        """Whether it has no key just now because it waits for its next attempt, as far as anybody can say."""
        return self.state == states.RETRY


def backend_scheme(app: Celery) -> str:
    """What kind of result backend an app has; ``"disabled"`` where it has none."""
    return str(app.conf.result_backend or "disabled").split("://")[0]


def outcome_of(task: Task[..., Any], task_id: str) -> Outcome:
    """The outcome of `task_id` so far, from the result backend; one that is away is to be asked again later."""
    try:
        meta = task.backend.get_task_meta(task_id, cache=False)
    except Exception as error:
        if not task.backend.exception_safe_to_retry(error):
            raise
        logger.warning("task %s cannot ask how %s ended: %s; it comes back", task.name, shown(task_id), describe(error))
        return Outcome(states.RETRY, None)
    return Outcome(meta["status"], meta["result"])


def has_ended(task: Task[..., Any], holder: LockInfo) -> bool:
    """Whether a caller may have seen the holder's run end, although its key is not free yet.

    A result is stored before `on_success` and `after_return` run, and so before the key is released. A result backend
    that cannot tell counts as one that says no.

    Args:
        task: Any task of the holder's app.
        holder: As Redis knows it.
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
    # An older one is of an earlier run under the same id. One clock has told both times: that of the holder's host.
    return done is None or holder.since is None or done >= holder.since


def _moment(value: Any) -> datetime | None:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
