"""Postrun: releases a key that `after_return` has not released. Celery sends this signal at every end of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from celery.signals import task_postrun

from celery_redislock.app import server_of
from celery_redislock.message.delivery import is_requeued
from celery_redislock.message.header import HEADER, Header

from .decisions import may_be_handed_a_key
from .execution import execution_of
from .held_by_request import EXECUTION
from .locked_task import LockedTask

if TYPE_CHECKING:
    from celery.app.task import Context


def connect() -> None:
    """Have Celery call `release` whenever a task has run in this process."""
    task_postrun.connect(release, weak=False)


def release(sender: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    """Release the key of a run for which Celery has not called `after_return`.

    Celery does not do so for RETRY, Ignore, Reject, replace(), an error in a hook and SystemExit.

    Args:
        sender: The task.
        state: The state that Celery reports.
        retval: The result, or the exception that ended the run.
    """
    if not isinstance(sender, LockedTask):
        return
    request = sender.request_stack.top
    execution = execution_of(request)
    if execution is not None:
        # Celery reports SUCCESS also for a run that a shutdown's SystemExit or a hook's Reject has cut short. Its
        # result may not be stored, nor the next step of its chain sent, so the attempt must not count as over.
        execution.end(state if sys.exception() is None else None)
        # The execution and the request refer to each other: together they would keep the arguments in memory.
        delattr(execution.request, EXECUTION)
    elif not is_requeued(sender, retval):
        _give_up_reservation(sender, request)


def _give_up_reservation(task: LockedTask, request: Context) -> None:
    """Give up the key that was reserved for a message whose run has ended before it asked for that key."""
    plan, reservation = task.lock_plan, Header.read(getattr(request, HEADER, None)).reservation
    if reservation is not None and plan is not None and plan.enabled:
        server_of(plan.app).give_up(*reservation, is_to_come=may_be_handed_a_key(request.retries, plan.options))
