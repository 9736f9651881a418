"""Begin: a delivered message, or a call of `apply()`, gets its `Execution`, which takes the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject

from celery_redislock.message.delivery import Delivery
from celery_redislock.message.early_acks import EARLY_ACKS

from .eager import EagerExecution
from .execution import Execution
from .failures import report
from .held_by_request import attach
from .join import JoiningExecution
from .plan import LockPlan
from .worker_execution import WorkerExecution

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context


def begin(
    task: Task[..., Any],
    plan_of: Callable[[], LockPlan | None],
    request: Context,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """Take the lock of a run, or end the run as its options say. Where it has none, or locks are off, nothing happens.

    An error that ends the run is logged as well, so that error trackers see it.

    Args:
        task: The task.
        plan_of: Returns the task's plan, or None; or raises what keeps the task from being locked.
        request: Celery's request for the run. From now on its execution is attached to it.
        args: The positional arguments of the run.
        kwargs: Its keyword arguments.

    Returns:
        Whether the run ends with the outcome of another task, by the policy ``join``.

    Raises:
        Exception: As `Execution.begin`.
    """
    try:
        plan = plan_of()
        if plan is None or not plan.enabled:
            _has_begun(Delivery.of(request))
            return False
        execution = _execution_type(plan, request)(task, plan, request)
        attach(request, execution)
        execution.begin(args, kwargs)
    except (Ignore, Reject):
        raise
    except Exception as error:
        report(task, request, error)
        raise
    _has_begun(execution.message.delivery)
    return execution.joined is not None


def _has_begun(delivery: Delivery | None) -> None:
    """Have the worker's main process ack the message of a run that begins, if it is acked early."""
    if delivery is not None and delivery.acks_at_begin:
        EARLY_ACKS.begins(delivery.nonce)


def _execution_type(plan: LockPlan, request: Context) -> type[Execution]:
    if request.is_eager:
        return EagerExecution
    return JoiningExecution if plan.options.on_conflict == "join" else WorkerExecution
