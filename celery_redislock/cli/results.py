"""Results: what the result backend knows of a task, in words and in a state."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import states
from kombu.exceptions import EncodeError, OperationalError

from celery_redislock.errors import LockConflict, RedisLockError, describe
from celery_redislock.task.outcome import PRIVATE_BACKENDS, backend_scheme, joined_of, moment_of
from celery_redislock.task.worker_execution import LONGEST_PAUSE_WHILE_FULL

from .sentences import Say
from .table import duration, moment
from .workers import patiently

if TYPE_CHECKING:
    from celery import Celery


#: What Celery fails a task with whose process it has lost or ended.
_CUT_SHORT = {
    WorkerLostError: "its process has died",
    TimeLimitExceeded: "it exceeded its time_limit, and its process was killed",
    Terminated: "its process was terminated",
}
#: The calls of Celery's that store a result, or send it on to the tasks that are linked.
_STORES = ("mark_as_done", "_dispatch_callbacks_and_chain")
_BY_ITS_RULES = "the broker gives the message to another worker by its own rules"


class Result(NamedTuple):
    """What the result backend knows of a task."""

    task_id: str
    status: str = states.PENDING
    """Celery's state."""
    value: Any = None
    done: Any = None
    """When the task has ended, as the backend tells it; None where it does not."""
    traceback: str = ""
    joined: str | None = None
    """The id of the task whose outcome this is, by the policy ``join``."""
    again: str = ""
    """When the broker delivers the message of a dead worker again, in words."""
    unasked: str = ""
    """Why the backend could not be asked, as a sentence; empty where it was."""

    @property
    def has_ended(self) -> bool:
        """Whether the task has a final state."""
        return self.status in states.READY_STATES

    @property
    def is_waiting(self) -> bool:
        """Whether the task had to wait when its result was last stored."""
        # A retry by a body that has met another lock is stored with its traceback.
        return self.status == states.RETRY and isinstance(self.value, LockConflict) and not self.traceback

    @property
    def may_be_of_a_chain(self) -> bool:
        """Whether the result may be that of an earlier task of a chain: Celery gives it to all the later ones."""
        return self.status in {states.FAILURE, states.REVOKED} and self.joined is None

    @property
    def since(self) -> datetime | None:
        """When the task has ended."""
        return moment_of(self.done)

    @property
    def key(self) -> str | None:
        """The key for which the task waits, or has failed."""
        return self.value.key if isinstance(self.value, LockConflict) else None

    def described(self, now: datetime) -> tuple[str, str] | None:
        """The state in a word for programs, and what is to be said; None where the backend knows nothing.

        A result's value, and the text of an error of the task's own, are not shown.
        """
        about = {"id": self.task_id, "at": f" at {moment(self.since, now)}" if self.since else ""}
        error = type(self.value).__name__
        match self.status:
            case states.PENDING:
                return None
            case states.SUCCESS | states.FAILURE if self.joined is not None:
                return "joined", Say.JOINED(other=self.joined, status=self.status, **about)
            case states.SUCCESS:
                return "done", Say.DONE(**about)
            case states.REVOKED:
                return self._revoked(about)
            case states.FAILURE:
                return "failed", self._failed(about, error)
            case states.RETRY if self.is_waiting:
                pause = duration(LONGEST_PAUSE_WHILE_FULL)
                return "waiting", Say.HAD_TO_WAIT(conflict=self.value, pause=pause, again=self.again, **about)
            case states.RETRY:
                return "retry", Say.RETRIES(after=f" after {error}" if self.value is not None else "", **about)
            case states.STARTED:
                return "started", Say.STARTED(again=self.again, **about)
            case _:
                return self.status.lower(), Say.STATUS(status=self.status, **about)

    def _failed(self, about: Mapping[str, str], error: str) -> str:
        if isinstance(self.value, RedisLockError):
            return Say.REFUSED(reason=self.value, **about)
        for kind, how in _CUT_SHORT.items():
            if isinstance(self.value, kind):
                return Say.CUT_SHORT(how=how, error=error, **about)
        if isinstance(self.value, EncodeError | OperationalError) and any(name in self.traceback for name in _STORES):
            return Say.NOT_STORED(error=error, **about)
        return Say.FAILED(error=error, **about)

    def _revoked(self, about: Mapping[str, str]) -> tuple[str, str]:
        """Why a task was revoked: by a policy of its lock; or it has expired, or somebody has revoked it."""
        reason = str(self.value.args[0]) if isinstance(self.value, Exception) and self.value.args else ""
        if reason.startswith(("duplicate of", "cooling down after")):
            return "skipped", Say.SKIPPED(reason=reason, **about)
        return "revoked", Say.REVOKED(reason=reason or "no reason is known", **about)


def result_of(app: Celery, task_id: str) -> Result:
    """Ask the result backend of `app` for the task `task_id`."""
    scheme = backend_scheme(app)
    if scheme in PRIVATE_BACKENDS:
        return Result(task_id, again=_again(app), unasked=Say.NO_BACKEND(scheme=scheme))
    try:
        meta: Mapping[str, Any] = patiently(lambda: app.backend.get_task_meta(task_id, cache=False))
    except Exception as error:  # noqa: BLE001 - each backend has its own
        return Result(task_id, again=_again(app), unasked=Say.BACKEND_AWAY(error=describe(error)))
    return Result(
        task_id,
        str(meta["status"]),
        meta.get("result"),
        meta.get("date_done"),
        str(meta.get("traceback") or ""),
        joined_of(meta.get("children")),
        _again(app),
    )


def _again(app: Celery) -> str:
    """When the broker gives the message of a dead worker to another one, in words."""
    try:
        with app.connection_for_read() as connection:
            transport: Any = connection.transport
    except Exception:  # noqa: BLE001 - its library may be missing here
        return _BY_ITS_RULES
    if transport.driver_type == "amqp":
        return "RabbitMQ gives the message to another worker as soon as it sees that the connection is lost"
    options = app.conf.broker_transport_options or {}
    seconds = options.get("visibility_timeout") or getattr(transport.Channel, "visibility_timeout", None)
    if not isinstance(seconds, int | float):
        return _BY_ITS_RULES
    received = f"{duration(seconds)} after the dead one has received it (visibility_timeout)"
    return f"the broker gives the message to another worker {received}"
