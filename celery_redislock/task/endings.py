"""How a run ends without its body: by an Ignore of ours, which the worker's main process knows again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

from celery import states
from celery.exceptions import Ignore, SoftTimeLimitExceeded, TaskRevokedError

from celery_redislock.errors import LockConflict, describe
from celery_redislock.message.comeback import ignores_result

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

    from celery_redislock.message.message import Message

logger = logging.getLogger(__name__)


class Skipped(Ignore):
    """The run was skipped: its outcome, REVOKED, is stored; only the event is still to be sent."""


class CameBack(Ignore):
    """The message was sent again: what was left to it is still needed."""


class CameBackInOutage(CameBack):
    """As that, because the lock server could not be asked."""


class SentBack(CameBack):
    """The message was sent again; besides, its state, RETRY, is stored, and only the event is still to be sent."""


def drop(message: Message) -> NoReturn:
    """End the run of a copy: its attempt has ended in another delivery, and its outcome stands.

    Raises:
        Ignore: Always.
    """
    logger.info("%s: dropped, it has finished in another delivery of its message", message.name)
    raise Ignore("finished in another delivery of its message")


def revoke(task: Task[..., Any], request: Context, reason: str) -> NoReturn:
    """End the run as REVOKED.

    `Ignore` alone would leave callers waiting; `mark_as_revoked` would leave the tail of a chain waiting.

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
    """Store the state RETRY. A result backend that is away costs the state, not the run."""
    if ignores_result(task, request):
        return
    try:
        task.backend.mark_as_retry(str(request.id), error, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as problem:  # noqa: BLE001 - each backend has its own
        logger.warning("%s comes back, but cannot be shown as RETRY: %s", message.name, describe(problem))


def show_no_retry(task: Task[..., Any], request: Context, message: Message) -> None:
    """Store the state IGNORED where it is RETRY: `Ignore` stores nothing, and who joins would wait for another try."""
    try:
        if task.backend.get_task_meta(str(request.id), cache=False)["status"] == states.RETRY:
            task.backend.store_result(str(request.id), None, states.IGNORED, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - each backend has its own
        logger.warning("%s cannot be shown as IGNORED, who joins it waits in vain: %s", message.name, describe(error))
