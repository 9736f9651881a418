"""Postrun: releases a key that `after_return` has not released. Celery sends this signal at every end of a run."""

from __future__ import annotations

import sys
from typing import Any

from celery.signals import task_postrun

from celery_redislock.message.delivery import is_requeued
from celery_redislock.message.header import HEADER, reservation_in

from .execution import execution_of
from .held_by_request import EXECUTION
from .locked_task import LockedTask
from .reservation import give_up_reservation


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
        # The run has ended before it asked for the key.
        plan, reservation = sender.lock_plan, reservation_in(getattr(request, HEADER, None))
        if reservation is not None and plan is not None and plan.enabled:
            give_up_reservation(plan, reservation, request.retries)
