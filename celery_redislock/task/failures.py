"""Failures: the log lines of errors that keep a body from running.

Celery logs such an error as it logs an error of the body. An error tracker such as Sentry ignores Celery's log and
wraps the body instead, which has not run. Therefore this module logs the error too: the tracker sees that line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery_redislock.errors import describe
from celery_redislock.shown import fields, run_named

from .execution import execution_of

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

logger = logging.getLogger(__name__)


class _TracebackOnce(logging.Filter):
    """Keeps the traceback out of this line: Celery's own line shows it. Error trackers read it from `exc_info`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_text = "(its traceback is in Celery's own line)"  # formatters write this in place of the traceback
        return True


logger.addFilter(_TracebackOnce())


def report(task: Task[..., Any], request: Context, error: Exception) -> None:
    """Log what keeps a body from running, unless the task `throws` that error or somebody else sees it.

    Celery logs the error as well, right after this line.
    """
    if task.throws and isinstance(error, task.throws):
        return
    execution = execution_of(request)
    if request.is_eager or (execution is not None and execution.joined is not None):
        return  # the caller of an eager run gets the error; the error of a joined task came from that task's body
    about = fields("failed", task=task.name, task_id=request.id, key=(execution and execution.key) or None)
    name = run_named(task.name, request.id)
    logger.error("%s: its body is not run: %s", name, describe(error), exc_info=error, extra=about)
