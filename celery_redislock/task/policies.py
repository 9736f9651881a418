"""What a conflict does. A new policy is one function and its name in `POLICIES`.

A policy ends the run by raising; if it returns, the key is asked for again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery import states
from celery.exceptions import Ignore, SoftTimeLimitExceeded, TaskRevokedError

from celery_redislock.errors import LockConflict, describe
from celery_redislock.info import LockInfo
from celery_redislock.message.comeback import ignores_result
from celery_redislock.shown import shown

if TYPE_CHECKING:
    from .execution import Execution

logger = logging.getLogger(__name__)

Policy = Callable[["Execution", LockInfo], None]


class Skipped(Ignore):
    """The run was skipped: its outcome, REVOKED, is stored; only the event is still to be sent."""


class CameBack(Ignore):
    """The message was sent again: what was left to it is still needed."""


class CameBackInOutage(CameBack):
    """As that, because the lock server could not be asked."""


class SentBack(CameBack):
    """The message was sent again; besides, its state, RETRY, is stored, and only the event is still to be sent."""


def skip(execution: Execution, holder: LockInfo) -> None:
    """End as REVOKED at once, and with it the rest of a chain and a chord, so that nobody hangs."""
    execution.tell(holder, "skip: its result is REVOKED")
    revoke(execution, skip_reason(holder))


def skip_reason(holder: LockInfo) -> str:
    """Why a run was skipped."""
    if holder.state == "cooling":
        return f"cooling down after {shown(str(holder.task_id))}"
    return f"duplicate of {shown(holder.task_id) if holder.task_id else holder.who}"


def revoke(execution: Execution, reason: str) -> None:
    """End the run as REVOKED.

    `Ignore` alone would leave callers waiting; `mark_as_revoked` would leave the tail of a chain waiting.
    """
    task, request = execution.task, execution.request
    task.backend.mark_as_failure(
        execution.message.attempt.task_id,
        TaskRevokedError(reason),
        request=request,
        store_result=not ignores_result(task, request),
        call_errbacks=False,
        state=states.REVOKED,
    )
    raise Skipped(reason)


def retry(execution: Execution, holder: LockInfo, joins: str | None = None) -> None:
    """Be sent again, shown as RETRY, until the key is free or `lock_retry_for` is over."""
    options, message = execution.plan.options, execution.message
    error = LockConflict(holder.key, holder)
    policy = "join" if options.on_conflict == "join" else "retry"
    if message.has_expired:  # while it waited; a broker may drop what has expired, and nobody would hear of it
        execution.tell(holder, f"{policy}: it has expired: its result is REVOKED")
        revoke(execution, "expired")
    since = message.returned.since
    if options.retry_for is not None and since and time.time() - since >= options.retry_for:
        execution.tell(holder, f"{policy}: after lock_retry_for ({options.retry_for:g} s) it fails with LockConflict")
        raise error
    pause = execution.pause(options.retry_delay, None if joins else holder)
    execution.tell(holder, f"{policy}: it comes back in {pause:.2f} s")
    # Before it is sent: stored after it, as Celery's own Retry is, it could overwrite the outcome of its run.
    _show_as_retry(execution, error)
    if message.send_back(pause, joins=joins):
        raise SentBack(str(error))


def _show_as_retry(execution: Execution, error: LockConflict) -> None:
    """Store the state RETRY. A result backend that is away costs the state, not the run."""
    task, request, message = execution.task, execution.request, execution.message
    if ignores_result(task, request):
        return
    try:
        task.backend.mark_as_retry(message.attempt.task_id, error, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as problem:  # noqa: BLE001 - each backend has its own
        logger.warning("%s comes back, but cannot be shown as RETRY: %s", message.name, describe(problem))


def wait(execution: Execution, holder: LockInfo) -> None:
    """Block for `lock_wait`, woken by the release, then as `retry`; who has come back has waited.

    Not for a holder that does not run: it may be this child that is to run it.
    """
    is_running = holder.state == "held"
    if execution.message.returned.times or not is_running or not execution.wait_for_release(holder):
        retry(execution, holder)


def fail(execution: Execution, holder: LockInfo) -> None:
    """End as FAILURE: the policy ``raise``."""
    execution.tell(holder, "raise: it fails with LockConflict")
    raise LockConflict(holder.key, holder)


def join(execution: Execution, holder: LockInfo) -> None:
    """Come back until the holder is done, to end with its outcome; see `Execution`.

    Whose outcome it is, is decided at the first conflict. A holder that is no task has none.
    """
    retry(execution, holder, joins=execution.message.returned.joins or holder.task_id)


POLICIES: dict[str, Policy] = {"join": join, "raise": fail, "retry": retry, "skip": skip, "wait": wait}
"""By the values of `lock_on_conflict`."""
GIVE_TURNS = frozenset({"retry", "wait"})
"""Under these the duplicate runs all the same, once the key is free."""
