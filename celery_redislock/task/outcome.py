"""Outcome: how another task ended, according to the result backend."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, NamedTuple

from celery import Celery, Task, states
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult, GroupResult

from celery_redislock.errors import LockConfigError, describe
from celery_redislock.info import LockInfo, shown
from celery_redislock.message.message import Message

logger = logging.getLogger(__name__)

#: The URL schemes of result backends whose results only the caller, or only one process, can read.
PRIVATE_BACKENDS = ("rpc", "cache+memory", "cache+locmem", "disabled")
#: The id of the group that holds the joined task, among the children of a result.
JOINED = "redislock-joined"


class Outcome(NamedTuple):
    """The state of a task, and its result if it has ended."""

    state: str
    value: Any
    """The task's result, or its error."""

    @property
    def is_ready(self) -> bool:
        """Whether the task has ended."""
        return self.state in states.READY_STATES

    @property
    def will_run_again(self) -> bool:
        """Whether the task is between two attempts, and so might hold no key now."""
        return self.state == states.RETRY


def backend_scheme(app: Celery) -> str:
    """The URL scheme of an app's result backend; ``"disabled"`` if the app has none."""
    return str(app.conf.result_backend or "disabled").split("://")[0]


def check_backend(app: Celery, task: str, option: str, ignores_result: bool) -> None:
    """Refuse the policy ``join`` if other processes cannot read the task's outcome.

    Raises:
        LockConfigError: The task's results are not stored, or only one process can read them.
    """
    scheme = backend_scheme(app)
    if ignores_result or scheme in PRIVATE_BACKENDS:
        why = "its results are ignored" if ignores_result else f"result_backend = {scheme!r} cannot be read by others"
        raise LockConfigError(
            f"{task}: {option} = 'join' needs the holder's result, but {why}; use another policy, or a result "
            "backend such as Redis or a database"
        )


def outcome_of(task: Task[..., Any], task_id: str, message: Message) -> Outcome:
    """The outcome of `task_id` so far, according to the result backend of `task`.

    If the backend cannot be reached, the outcome counts as RETRY, so that the run asks again later. `message` is the
    message of that run; a warning names it.
    """
    try:
        meta = task.backend.get_task_meta(task_id, cache=False)
    except Exception as error:
        if not task.backend.exception_safe_to_retry(error):
            raise
        logger.warning(
            "%s cannot ask how task %s ended: %s; it comes back",
            *(message.name, shown(task_id), describe(error)),
            extra=message.fields("not_read", holder_id=task_id),
        )
        return Outcome(states.RETRY, None)
    return Outcome(meta["status"], meta["result"])


def has_ended(task: Task[..., Any], holder: LockInfo, *, cools_down: bool) -> bool:
    """Whether a caller may have seen the holder's task end, although its key is not free yet.

    Celery stores a result before `on_success` and `after_return` run, and so before the key is released. If a message
    fails or is revoked without a run, its result is stored before its reservation is given up.

    If the result backend cannot tell, the holder counts as not ended. A run of `task` that succeeded also counts as not
    ended if the task's keys cool down (`cools_down`): the policy then applies to a newcomer, as it will during the
    cooldown, and the newcomer does not wait in line until the cooldown is over.
    """
    if holder.state not in {"held", "queued"} or holder.task_id is None or backend_scheme(task.app) in PRIVATE_BACKENDS:
        return False
    try:
        meta = task.backend.get_task_meta(holder.task_id, cache=False)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - each backend has its own errors
        logger.debug("task %s cannot ask whether %s has ended: %s", task.name, shown(holder.task_id), describe(error))
        return False
    if meta["status"] not in states.READY_STATES:
        return False
    if cools_down and meta["status"] == states.SUCCESS and (holder.state, holder.task) == ("held", task.name):
        return False
    done = moment_of(meta.get("date_done"))
    # A result older than the lock belongs to an earlier run under the same id. Both times come from the clock of the
    # holder's host. For a reservation, `since` comes from the publisher's clock and `done` from a worker's.
    return done is None or holder.since is None or done >= holder.since


def note_joined(app: Celery, request: Any, joins: str) -> None:
    """Record among the children of the result of `request` that this result is the outcome of the task `joins`."""
    request.children.append(GroupResult(JOINED, [AsyncResult(joins, app=app)], app=app))


def joined_of(children: Any) -> str | None:
    """The id of the task that a run joined, from the stored children of its result; None if it joined none."""
    match children:
        case [[[str(group), _], [[[str(joins), _], _]]], *_] if group == JOINED:  # links and chains come after it
            return joins
    return None


def moment_of(value: Any) -> datetime | None:
    """When a task ended, from the date in its result; None if the result has no valid date."""
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
