"""Run hooks: what Celery calls right before and after a body.

`before_body` gives the run its `Execution`, which takes the key. `release` releases what `after_return` did not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun

from celery_redislock.errors import describe, fields, run_named
from celery_redislock.message.delivery import ASKED_KEYS, ON_BEGIN, Delivery, is_requeued
from celery_redislock.message.header import HEADER, Header
from celery_redislock.message.message import Message
from celery_redislock.options import may_have_several

from .execution import EXECUTION, Execution, attach, delivered, execution_of
from .executions import EagerExecution, JoiningExecution, WorkerExecution
from .plan import LockAttributes, LockPlan, give_up_reservation

logger = logging.getLogger(__name__)


class _TracebackOnce(logging.Filter):
    """Keeps tracebacks out of this module's log lines: Celery logs them. Error trackers read them from `exc_info`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_text = "(its traceback is in Celery's own line)"  # formatters write this instead of the traceback
        return True


logger.addFilter(_TracebackOnce())


def before_body(
    task: Task[..., Any],
    plan_of: Callable[[], LockPlan | None],
    request: Context,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """Take the lock of a run, or end the run as its options say. Do nothing if the task has no lock or locks are off.

    An error that ends the run is also logged, so that error trackers see it.

    Args:
        task: The task.
        plan_of: Returns the task's plan, or None; raises if the task cannot be locked.
        request: Celery's request for the run. The run's execution is attached to it.
        args: The positional arguments of the run.
        kwargs: Its keyword arguments.

    Returns:
        Whether the run ends with another task's outcome, by the policy ``join``.

    Raises:
        Exception: As in `Execution.demands`, `acquire` and `take_several`.
    """
    try:
        plan = plan_of()
        if plan is None or not plan.enabled:
            _report_begin(Delivery.of(request))
            return False
        message = delivered(task, plan, request)
        execution = _execution_type(message)(plan, message)
        attach(request, execution)
        if plan.may_have_several and (message.options is plan.options or may_have_several(message.options)):
            execution.take_several(args, kwargs)
        else:
            execution.acquire(execution.demands(args, kwargs))
    except (Ignore, Reject):
        raise
    except Exception as error:
        report(task, request, error)
        raise
    if message.delivery.acks_at_begin:
        _report_begin(message.delivery)
    return execution.joined is not None


def _report_begin(delivery: Delivery | None) -> None:
    """Tell the worker's main process that a run begins, so that it acks a message that is acked early."""
    if delivery is not None and delivery.acks_at_begin:
        for report_begin in ON_BEGIN:
            report_begin(delivery.nonce)


def _execution_type(message: Message) -> type[Execution]:
    if message.request.is_eager:
        return EagerExecution
    return JoiningExecution if message.options.on_conflict == "join" else WorkerExecution


def report(task: Task[..., Any], request: Context, error: Exception) -> None:
    """Log the error that keeps a body from running, unless the task `throws` it or it is reported elsewhere.

    Celery also logs the error, right after this line.
    """
    if task.throws and isinstance(error, task.throws):
        return
    execution = execution_of(request)
    if request.is_eager or (execution is not None and execution.joined is not None):
        return  # an eager run's caller gets the error; a joined task's error came from its own body
    about = fields("failed", task=task.name, task_id=request.id, key=(execution and execution.key) or None)
    name = run_named(task.name, request.id)
    logger.error("%s: its body did not run: %s", name, describe(error), exc_info=error, extra=about)


def connect() -> None:
    """Have Celery call `release` after every task that runs in this process."""
    task_postrun.connect(release, weak=False)


def release(sender: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    """Release the key of a run that ended without `after_return`.

    Celery does not call `after_return` for RETRY, Ignore, Reject, replace(), an error in a hook or SystemExit.

    Args:
        sender: The task.
        state: The state that Celery reports.
        retval: The result, or the exception that ended the run.
    """
    if not isinstance(sender, LockAttributes):
        return
    task: Any = sender
    request = task.request_stack.top
    execution = execution_of(request)
    if execution is not None:
        # Celery also reports SUCCESS for a run that a shutdown's SystemExit or a hook's Reject cut short. Such a run
        # might not have stored its result or sent the next step of its chain, so its attempt must not count as over.
        execution.end(state if sys.exception() is None else None)
        # The execution and the request reference each other, which would keep the arguments in memory.
        delattr(execution.request, EXECUTION)
        ASKED_KEYS.forget(execution.message.delivery.nonce)  # no effect in a child
    elif not is_requeued(task, retval):
        # The run ended before it asked for the key.
        plan, header = task.lock_plan, Header.read(getattr(request, HEADER, None))
        if header.reservation is not None and plan is not None and plan.enabled:
            give_up_reservation(plan, plan.options_for(header), header.reservation, request.retries)
