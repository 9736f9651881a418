"""Ended early: how a run ends without its body.

Such a run raises an `Ignore` whose class tells the worker's main process why.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded, TaskRevokedError

from celery_redislock.errors import LockConflict, describe
from celery_redislock.message.header import Header
from celery_redislock.message.message import Message
from celery_redislock.message.republish import ignores_result
from celery_redislock.protocol.names import Demand

from .outcome import PRIVATE_BACKENDS, backend_scheme

logger = logging.getLogger(__name__)


class Skipped(Ignore):
    """The run was skipped. Its outcome, REVOKED, is stored; the main process still has to send the event."""


class CameBack(Ignore):
    """The message was sent back or waits in line. A key reserved for it is still needed."""


class WaitsInLine(CameBack):
    """The message waits in line, in the room of the worker's main process.

    Args:
        reason: Why the message waits, as text.
        demand: What its run has asked for.
        rank: The message's rank in the line for the key, in microseconds since the epoch.
        header: What the message carries for the plugin from now on.
        is_shown: Whether the state RETRY is stored; the main process still has to send the event.
    """

    def __init__(self, reason: str, demand: Demand, rank: int, header: Header, is_shown: bool) -> None:
        super().__init__(reason, demand, rank, header, is_shown)  # the main process unpickles it from these arguments
        self.demand, self.rank, self.header, self.is_shown = demand, rank, header, is_shown


class CameBackInOutage(CameBack):
    """The message was sent back because the lock server did not answer or refused the command."""


class CameBackAsRetry(CameBack):
    """The message was sent back. The state RETRY is stored; the main process still has to send the event."""


def drop(message: Message) -> NoReturn:
    """End the run of a copy: the attempt ended in another delivery of the message, and that outcome stands.

    Raises:
        Ignore: Always.
    """
    about = message.fields("dropped")
    logger.info("%s: dropped, it has finished in another delivery of its message", message.name, extra=about)
    raise Ignore("finished in another delivery of its message")


def revoke(task: Task[..., Any], request: Context, reason: str) -> NoReturn:
    """End the run as REVOKED: `get()` raises TaskRevokedError with `reason`.

    A bare `Ignore` would leave callers waiting. Celery's `mark_as_revoked` would leave the rest of a chain waiting.

    Raises:
        Skipped: Always.
    """
    task.backend.mark_as_failure(
        str(request.id),
        TaskRevokedError(reason),
        request=request,
        store_result=not ignores_result(task, request),
        call_errbacks=False,
        state=states.REVOKED,
    )
    raise Skipped(reason)


def show_as_retry(task: Task[..., Any], request: Context, message: Message, error: LockConflict) -> None:
    """Store the state RETRY. If the result backend cannot be reached, only log a warning."""
    if ignores_result(task, request):
        return
    try:
        task.backend.mark_as_retry(str(request.id), error, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as problem:  # noqa: BLE001 - each backend has its own errors
        about = message.fields("not_stored", key=error.key)
        logger.warning("%s comes back, but cannot be shown as RETRY: %s", message.name, describe(problem), extra=about)


def show_as_ignored(task: Task[..., Any], request: Context, message: Message) -> None:
    """Replace the stored RETRY of an earlier attempt, or of this one while it waited, with IGNORED.

    Celery stores nothing for an `Ignore`, so a run that has joined this task would keep waiting for its next attempt.
    """
    if ignores_result(task, request) or backend_scheme(task.app) in PRIVATE_BACKENDS:
        return  # no run can have joined it
    try:
        if task.backend.get_task_meta(str(request.id), cache=False)["status"] == states.RETRY:
            task.backend.store_result(str(request.id), None, states.IGNORED, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - each backend has its own errors
        logger.warning(
            "%s cannot be shown as IGNORED, so runs that joined it wait in vain: %s",
            *(message.name, describe(error)),
            extra=message.fields("not_stored"),
        )
