"""What a conflict does. A new policy is one function and its name in `POLICIES`.

A policy ends the run by raising; if it returns, the message could be neither sent again nor requeued, and the key
is asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery import states
from celery.exceptions import Ignore, TaskRevokedError

from .comeback import ignores_result
from .errors import LockConflict
from .info import LockInfo

if TYPE_CHECKING:
    from .execution import Execution

Policy = Callable[["Execution", LockInfo], None]


class Skipped(Ignore):
    """The run was skipped: its outcome, REVOKED, is stored; only the event is still to be sent."""


class SentBack(Ignore):
    """The run was sent back: its state, RETRY, is stored; only the event is still to be sent."""


def skip(execution: Execution, holder: LockInfo) -> None:
    """End as REVOKED at once, and with it the rest of a chain and a chord, so that nobody hangs."""
    task, request = execution.task, execution.request
    reason = skip_reason(holder)
    # `Ignore` alone would leave callers waiting; `mark_as_revoked` would leave the tail of a chain waiting.
    task.backend.mark_as_failure(
        execution.message.attempt.task_id,
        TaskRevokedError(reason),
        request=request,
        store_result=not ignores_result(task, request),
        call_errbacks=False,
        state=states.REVOKED,
    )
    raise Skipped(reason)


def skip_reason(holder: LockInfo) -> str:
    """Why a run was skipped."""
    return f"duplicate of {holder.task_id or holder.who}"


def retry(execution: Execution, holder: LockInfo) -> None:
    """Be sent again, shown as RETRY, until the key is free or `lock_retry_for` is over."""
    options, returned = execution.plan.options, execution.message.returned
    error = LockConflict(holder.key, holder)
    if options.retry_for is not None and returned.since and time.time() - returned.since >= options.retry_for:
        raise error
    task, request = execution.task, execution.request
    if not ignores_result(task, request):
        # Before it is sent: stored after it, as Celery's own Retry is, it could overwrite the outcome of its run.
        task.backend.mark_as_retry(execution.message.attempt.task_id, error, request=request)
    if execution.message.send_back(returned.delay(options.retry_delay, options.retry_max_delay)):
        raise SentBack(str(error))


POLICIES: dict[str, Policy] = {"retry": retry, "skip": skip}
