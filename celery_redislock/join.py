"""Join: the outcome of another task, for a duplicate that ends with it instead of running."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states

from .errors import LockConfigError, describe

if TYPE_CHECKING:
    from celery import Celery, Task

logger = logging.getLogger(__name__)

#: Result backends that only the caller, or only one process, can read.
PRIVATE_BACKENDS = ("rpc", "cache+memory", "cache+locmem", "disabled")


class Outcome(NamedTuple):
    """How a task ended, or that it is still on its way."""

    state: str
    value: Any
    """Its result, or its error."""

    @property
    def is_ready(self) -> bool:
        """Whether it has ended."""
        return self.state in states.READY_STATES

    @property
    def will_run_again(self) -> bool:
        """Whether it has no key just now because it waits for its next attempt, as far as anybody can say."""
        return self.state == states.RETRY


def outcome_of(task: Task[..., Any], task_id: str) -> Outcome:
    """The outcome of `task_id` so far, from the result backend; one that is away is to be asked again later."""
    try:
        meta = task.backend.get_task_meta(task_id, cache=False)
    except Exception as error:
        if not task.backend.exception_safe_to_retry(error):
            raise
        logger.warning("task %s cannot ask how %s ended: %s; it comes back", task.name, task_id, describe(error))
        return Outcome(states.RETRY, None)
    return Outcome(meta["status"], meta["result"])


def check_backend(app: Celery, task: str, ignores_result: bool) -> None:
    """Refuse what leaves no outcome to join.

    Args:
        app: The task's app.
        task: Its name, for the message.
        ignores_result: Whether its results are not stored.

    Raises:
        LockConfigError: Results are not stored, or nobody else can read them.
    """
    backend = app.conf.result_backend
    scheme = str(backend or "disabled").split("://")[0]
    if ignores_result or scheme in PRIVATE_BACKENDS:
        why = "its results are ignored" if ignores_result else f"result_backend = {scheme!r} cannot be read by others"
        raise LockConfigError(
            f"{task}: lock_on_conflict = 'join' needs the holder's result, but {why}; use another policy, or a result "
            "backend such as Redis or a database"
        )
