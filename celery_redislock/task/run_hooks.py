"""Run hooks: what Celery calls right before and after a body.

`before_body` gives the run its `Execution`, which takes the keys. The tracer of `set_tracer` releases what
`after_return` did not; `end_eager` does so for eager runs.
"""

from __future__ import annotations

import logging
import sys
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from celery.signals import task_postrun

from celery_redislock.celery_port import as_sent
from celery_redislock.errors import LockConfigError, describe, fields, run_named
from celery_redislock.message.delivery import ASKED_KEYS, ON_BEGIN, Delivery, is_requeued
from celery_redislock.message.header import HEADER, Header
from celery_redislock.options import may_have_several

from .execution import EXECUTION, Execution, attach, delivered, execution_of
from .executions import EagerExecution, JoiningExecution, WorkerExecution
from .plan import LockPlan, give_up_reservation

logger = logging.getLogger(__name__)

#: In a thread or a greenlet, Celery does not ack the message of a run that one of these ends. If one of `_SHUTDOWNS`
#: does, the broker is to deliver it again.
_EXITS, _SHUTDOWNS = (SystemExit, KeyboardInterrupt, CancelledError), (WorkerShutdown, WorkerTerminate)
#: The request of the run in this thread or greenlet and, once the run asks for its keys, its execution. Empty after it.
_RUN: ContextVar[list[Any] | None] = ContextVar("_RUN", default=None)


class _TracebackOnce(logging.Filter):
    """Keeps the traceback out of `report`'s line: Celery logs it. Error trackers read it from `exc_info`."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "redislock_event", None) == "failed":
            record.exc_text = "(its traceback is in Celery's own line)"  # formatters write this instead
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
        LockConfigError: No tracer of `set_tracer` runs the task, so that the keys might not be released.
        Exception: As in `Execution.demands`, `acquire` and `take_several`.
    """
    try:
        plan = plan_of()
        if plan is None or not plan.enabled:
            _report_begin(Delivery.of(request))
            return False
        message = delivered(task, plan, request)
        execution: Execution
        if request.is_eager:
            task_postrun.connect(end_eager, weak=False)  # if `LockedTask.apply` was passed by
            execution, (args, kwargs) = EagerExecution(plan, message), as_sent(task, args, kwargs)  # as elsewhere
        else:
            execution = (JoiningExecution if message.options.on_conflict == "join" else WorkerExecution)(plan, message)
            _run_by_tracer(task).append(execution)
        attach(request, execution)
        if plan.may_have_several and (message.options is plan.options or may_have_several(message.options)):
            execution.take_several(args, kwargs)
        else:
            execution.acquire(execution.demands(args, kwargs))
    except BaseException as error:
        if (refused := execution_of(request)) is not None:
            refused.refusal = error
        if isinstance(error, Ignore | Reject):
            error.__traceback__ = None  # Celery formats and copies each of its frames twice
        elif isinstance(error, Exception):
            report(task, request, error)
        raise
    _report_begin(message.delivery)
    return execution.joined is not None


def _run_by_tracer(task: Task[..., Any]) -> list[Any]:
    if not (run := _RUN.get()):
        raise LockConfigError(f"{task.name} is run by a tracer that is not its __trace__ and would not free its lock")
    return run


def _report_begin(delivery: Delivery | None, *, exits: bool = False) -> None:
    """Tell the worker's main process that a run begins, or exits, so that it acks a message that is acked early."""
    if delivery is not None and delivery.acks_at_begin:
        for report_begin in ON_BEGIN:
            report_begin(delivery.nonce, exits=exits)


def report(task: Task[..., Any], request: Context, error: Exception) -> None:
    """Log the error that keeps a body from running, unless the task `throws` it or it is reported elsewhere.

    Celery also logs the error, right after this line.
    """
    execution = execution_of(request)
    if isinstance(error, task.throws or ()) or request.is_eager or (execution and execution.joined is not None):
        return  # an eager run's caller gets the error; a joined task's error came from its own body
    about = fields("failed", task=task.name, task_id=request.id, key=(execution and execution.key) or None)
    name = run_named(task.name, request.id)
    logger.error("%s: its body did not run: %s", name, describe(error), exc_info=error, extra=about)


def set_tracer(task: Any, trace: Callable[..., Any] | None) -> None:
    """Set the tracer with which a worker runs `task`. When it has returned or raised, the run's keys are free.

    It is Celery's own, wrapped: for RETRY, Ignore, Reject, replace(), an error in a hook and SystemExit, Celery does
    not call `after_return`. It sends the signal `task_postrun`, but a receiver of that would cost a twentieth of what a
    lock does, and runs without a lock would pay for it too.

    Args:
        task: The task.
        trace: Celery's tracer; None to have Celery make another one.
    """

    def trace_and_end(uuid: str, args: Any, kwargs: Any, request: Mapping[str, Any] | None = None) -> Any:
        run: list[Any] = [request]
        outer = _RUN.get()
        if outer and outer[0] is request:  # someone has wrapped the tracer that was set before
            return trace(uuid, args, kwargs, request)  # type: ignore[misc]
        token = _RUN.set(run)
        # A shutdown's SystemExit or a hook's Reject cuts a run short, and leaves its state unknown. It might not have
        # stored its result or sent the next step of its chain, so its attempt must not count as over.
        state = error = None
        try:
            traced = trace(uuid, args, kwargs, request)  # type: ignore[misc] # Celery calls this only if it is set
            state, error = (states.SUCCESS, None) if traced[1] is None else (traced[1].state, traced[1].retval)
            if isinstance(error, Ignore):
                # Nothing reads Celery's copies of its frames: 35 KB for the main process, and a cycle with the frames.
                error.__traceback__ = traced[0].tb = None
            return traced
        finally:
            # A next attempt that was sent has taken over what this one has not used. A user's own Retry has no `sig`.
            is_sent_on = isinstance(error, Retry) and error.sig is not None  # type: ignore[attr-defined]
            try:
                # Several: before_start has called super() again after an error. Only the last may hold the key.
                for one in reversed(run[1:]):
                    _end(one, state)
                exits = isinstance(ended_by := sys.exception(), _EXITS) and not isinstance(ended_by, _SHUTDOWNS)
                # SUCCESS without a run is that of `worker_deduplicate_successful_tasks`, or of one without a lock.
                if request and (exits or (len(run) == 1 and state == states.SUCCESS)):
                    _report_begin(Delivery.of(Context({**request})), exits=exits)
                if len(run) == 1 and request and not is_sent_on and not is_requeued(task, error or ended_by):
                    _give_up(task, Header.read(request.get(HEADER)), request)  # it ended before it asked for the key
            except Exception:  # the task's own outcome stands
                key = run[1].key if len(run) > 1 else None
                about = fields("release_failed", task=task.name, task_id=uuid, key=key)
                name = run_named(task.name, uuid)
                logger.exception("%s: an error interrupted the release of its lock", name, extra=about)
            finally:
                run.clear()  # a copy of the context, as in a greenlet of the body's, may live on
                _RUN.reset(token)

    task._lock_trace = trace and trace_and_end


def end_eager(sender: Any = None, state: str | None = None, **_: Any) -> None:
    """Release what an eager run still holds. Called at `task_postrun`: for eager runs, Celery makes a tracer each time.

    Args:
        sender: The task.
        state: The state that Celery reports.
    """
    execution = execution_of(sender.request_stack.top) if isinstance(sender, Task) else None
    if isinstance(execution, EagerExecution):
        _end(execution, state if sys.exception() is None else None)


def _end(execution: Execution, state: str | None) -> None:
    try:
        execution.end(state)
    except (SystemExit, KeyboardInterrupt):  # the process ends, and the renewals with it
        raise
    except BaseException:  # such as a time limit's. It strikes once, and may have left keys that are still renewed.
        execution.end(state)
        raise
    finally:
        # The execution and the request reference each other, which would keep the arguments in memory.
        vars(execution.request).pop(EXECUTION, None)
        execution.refusal = None  # whose traceback references it
        ASKED_KEYS.forget(execution.message.delivery.nonce)  # no effect in a child


def _give_up(task: Any, header: Header, request: Mapping[str, Any]) -> None:
    plan = task.lock_plan
    if header.reservation is not None and plan is not None and plan.enabled:
        give_up_reservation(plan, plan.options_for(header), header.reservation, request.get("retries") or 0)
