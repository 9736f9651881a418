"""What `after_return` did not give back is given back at postrun, which Celery sends for every end of a run."""

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
    """Give the key back after RETRY, Ignore, Reject, replace(), an error in a hook, SystemExit."""
    if not isinstance(sender, LockedTask):
        return
    request = sender.request_stack.top
    execution = execution_of(request)
    if execution is not None:
        # Cut short (a shutdown's SystemExit, a hook's Reject), it says SUCCESS, but the result may not have been
        # stored, nor the next step sent; so a copy of the message must not take it for finished.
        execution.end(state if sys.exception() is None else None)
        delattr(execution.request, EXECUTION)  # each refers to the other, and the request to the arguments
    elif not is_requeued(sender, retval):
        _give_up_claim(sender, request)


def _give_up_claim(task: LockedTask, request: Context) -> None:
    """The run has ended before it asked for its key: what was left to its message is not needed."""
    plan, left = task.lock_plan, Header.read(getattr(request, HEADER, None)).reservation
    if left is not None and plan is not None and plan.enabled:
        server_of(plan.app).give_up(*left, is_to_come=may_be_handed_a_key(request.retries, plan.options))
