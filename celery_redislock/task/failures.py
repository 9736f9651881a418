"""Failures: errors that keep a body from running.

Celery logs them as it logs those of a body. Error trackers, as Sentry, hear of those of a body alone: they wrap it, and
ignore Celery's log. What is logged here, they see.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery_redislock.errors import describe
from celery_redislock.shown import shown

from .execution import execution_of

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

logger = logging.getLogger(__name__)

#: Characters that are shown of an error.
_MAX_ERROR = 1000


class _TracebackOnce(logging.Filter):
    """Keeps the traceback out of the text of a record, and in its `exc_info`, which is what error trackers read."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_text = "(its traceback is in Celery's own line)"  # else formatters write the traceback
        return True


logger.addFilter(_TracebackOnce())


def report(task: Task[..., Any], request: Context, error: Exception) -> None:
    """Log what keeps a body from running, unless the task `throws` it or somebody else sees it.

    Celery is to log it as well, right after.
    """
    if task.throws and isinstance(error, task.throws):
        return
    execution = execution_of(request)
    if request.is_eager or (execution is not None and execution.joined is not None):
        return  # its caller gets it; or it was raised by the body of the task that was joined
    name = f"task {task.name}[{shown(str(request.id))}]"
    logger.error("%s: its body is not run: %s", name, shown(describe(error), _MAX_ERROR), exc_info=error)
