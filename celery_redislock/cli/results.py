"""Results: what the result backend knows about a task, as a state and in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Celery, states
from kombu.exceptions import EncodeError, OperationalError

from celery_redislock.errors import LockConflict, RedisLockError, describe
from celery_redislock.policy.join import PRIVATE_BACKENDS, backend_scheme, joined_of, moment_of
from celery_redislock.policy.skip import is_skipped
from celery_redislock.policy.wait import LONGEST_PAUSE_WHILE_FULL

from .console import duration, moment
from .sentences import Say
from .workers import patiently

#: The errors that Celery stores for a task whose process died or was killed.
_CUT_SHORT = {
    WorkerLostError: "its process has died",
    TimeLimitExceeded: "it exceeded its time_limit, and its process was killed",
    Terminated: "its process was terminated",
}
#: Celery's functions that store a result or pass it to linked tasks: in a traceback, they show that the body had ended.
_STORES = ("mark_as_done", "_dispatch_callbacks_and_chain")
_BY_ITS_RULES = "the broker gives the message to another worker by its own rules"


class Result(NamedTuple):
    """What the result backend knows about a task."""

    task_id: str
    status: str = states.PENDING
    """The task's state in Celery."""
    value: Any = None
    done: Any = None
    """When the task ended, in the backend's own format; None if the backend does not say."""
    traceback: str = ""
    joined: str | None = None
    """The id of the joined task, whose outcome this task has; None if it joined none."""
    again: str = ""
    """When the broker redelivers a dead worker's message, in words."""
    unasked: str = ""
    """Why the backend could not be asked, as a sentence; empty if it was asked."""

    @property
    def has_ended(self) -> bool:
        """Whether the task's state is final."""
        return self.status in states.READY_STATES

    @property
    def is_waiting(self) -> bool:
        """Whether the task was waiting for its lock when its result was last stored."""
        # If the body met a conflict on another lock and retried the task itself, the result has a traceback.
        return self.status == states.RETRY and isinstance(self.value, LockConflict) and not self.traceback

    @property
    def may_be_of_a_chain(self) -> bool:
        """Whether this may be the result of an earlier task in a chain, which Celery stores for all later tasks too."""
        return self.status in {states.FAILURE, states.REVOKED} and self.joined is None

    @property
    def since(self) -> datetime | None:
        """When the task ended; None if unknown."""
        return moment_of(self.done)

    @property
    def key(self) -> str | None:
        """The key that the task waits for, or failed to get."""
        return self.value.key if isinstance(self.value, LockConflict) else None

    def described(self, now: datetime) -> tuple[str, str] | None:
        """The state as one word for programs, and as a sentence; None if the backend knows nothing.

        The sentence shows neither the value of a result nor the text of the task's own error.
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
        """Distinguish a task that its policy skipped from one that expired or was revoked by hand."""
        reason = str(self.value.args[0]) if isinstance(self.value, Exception) and self.value.args else ""
        if is_skipped(reason):
            return "skipped", Say.SKIPPED(reason=reason, **about)
        return "revoked", Say.REVOKED(reason=reason or "no reason is known", **about)


def result_of(app: Celery, task_id: str) -> Result:
    """Ask the result backend of `app` about the task `task_id`."""
    scheme = backend_scheme(app)
    if scheme in PRIVATE_BACKENDS:
        return Result(task_id, again=_again(app), unasked=Say.NO_BACKEND(scheme=scheme))
    try:
        meta: Mapping[str, Any] = patiently(lambda: app.backend.get_task_meta(task_id, cache=False))
    except Exception as error:  # noqa: BLE001 - errors from the backend's library
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
    """When the broker redelivers a dead worker's message, in words."""
    try:
        with app.connection_for_read() as connection:
            transport: Any = connection.transport
    except Exception:  # noqa: BLE001 - the broker's library may be missing here
        return _BY_ITS_RULES
    if transport.driver_type == "amqp":
        return "RabbitMQ gives the message to another worker as soon as it sees that the connection is lost"
    options = app.conf.broker_transport_options or {}
    seconds = options.get("visibility_timeout") or getattr(transport.Channel, "visibility_timeout", None)
    if not isinstance(seconds, int | float):
        return _BY_ITS_RULES
    received = f"{duration(seconds)} after the dead one has received it (visibility_timeout)"
    return f"the broker gives the message to another worker {received}"
