"""Results: what the result backend knows of a task, in words and in a state."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states

from celery_redislock.errors import LockConflict, RedisLockError, describe
from celery_redislock.shown import shown
from celery_redislock.task.outcome import PRIVATE_BACKENDS, backend_scheme, moment_of

from .deadline import patiently
from .table import moment

if TYPE_CHECKING:
    from celery import Celery


#: What Celery fails a task with whose process it has lost or ended.
_CUT_SHORT = {
    "WorkerLostError": "its process has died",
    "TimeLimitExceeded": "its time_limit was over, and its process was killed",
    "Terminated": "its process was terminated",
}


class Result(NamedTuple):
    """What the result backend knows of a task."""

    status: str = states.PENDING
    """Celery's state."""
    value: Any = None
    done: Any = None
    """When the task has ended, as the backend tells it; None where it does not."""
    unasked: str = ""
    """Why the backend could not be asked, as a sentence; empty where it was."""

    @property
    def has_ended(self) -> bool:
        """Whether the task has a final state."""
        return self.status in states.READY_STATES

    @property
    def since(self) -> datetime | None:
        """When the task has ended."""
        return moment_of(self.done)

    @property
    def key(self) -> str | None:
        """The key for which the task waits, or has failed."""
        return self.value.key if isinstance(self.value, LockConflict) else None

    def told(self, now: datetime) -> tuple[str, str] | None:
        """The state in a word for programs, and what is to be said; None where the backend knows nothing.

        A result's value, and the text of an error of the task's own, are not shown.
        """
        done = f" at {moment(self.since, now)}" if self.since else ""
        match self.status:
            case states.PENDING:
                return None
            case states.SUCCESS:
                return "done", f"HAS RUN: its result is SUCCESS{done}."
            case states.REVOKED:
                return self._revoked(done)
            case states.FAILURE if isinstance(self.value, RedisLockError):
                return "failed", f"FAILED{done}: {shown(str(self.value))}."
            case states.FAILURE if (cut := _CUT_SHORT.get(type(self.value).__name__)) is not None:
                error = type(self.value).__name__
                return "failed", f"WAS CUT SHORT{done}: {cut} ({error}). Its work may be done in part."
            case states.FAILURE:
                error = type(self.value).__name__
                return "failed", f"HAS RUN: its result is FAILURE{done}, by {error}; the body's own error."
            case states.RETRY if isinstance(self.value, LockConflict):
                return "waiting", (
                    f"WAITS: {shown(str(self.value))}. That was so when it met its key.\n"
                    "No worker that answers keeps it: it comes from the broker within 30 s, or its worker is silent."
                )
            case states.RETRY:
                return "retry", f"HAS RUN, and is to run again: `self.retry()`, by {type(self.value).__name__}."
            case states.STARTED:
                return "started", (
                    "STARTED, and no worker that answers runs it: its worker is too busy to answer, or dead."
                )
            case _:
                return self.status.lower(), f"has the state {shown(self.status)}{done}."

    def _revoked(self, done: str) -> tuple[str, str]:
        """Why a task was revoked: by a policy of its lock; or it has expired, or somebody has revoked it."""
        reason = shown(str(self.value.args[0])) if isinstance(self.value, Exception) and self.value.args else ""
        if reason.startswith(("duplicate of", "cooling down after")):
            return "skipped", f"WAS SKIPPED{done}: {reason} (lock_on_conflict is skip)."
        return "revoked", f"WAS REVOKED{done}: {reason or 'nobody has said why'}."


def result_of(app: Celery, task_id: str) -> Result:
    """Ask the result backend of `app` for the task `task_id`."""
    scheme = backend_scheme(app)
    if scheme in PRIVATE_BACKENDS:
        return Result(unasked=f"The app has no result backend that could be asked ({scheme}).")
    try:
        meta: Mapping[str, Any] = patiently(lambda: app.backend.get_task_meta(task_id, cache=False))
    except Exception as error:  # noqa: BLE001 - each backend has its own
        return Result(unasked=f"The result backend could not be asked: {describe(error)}.")
    return Result(str(meta["status"]), meta.get("result"), meta.get("date_done"))
