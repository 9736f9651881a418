"""The policy ``join``: the run ends with the outcome of the first holder that its message met.

Outcome: how another task ended, according to the result backend.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, tzinfo
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

from celery import Celery, Task, states
from celery.result import AsyncResult, GroupResult

from celery_redislock.app import PRIVATE_BACKENDS, backend_scheme
from celery_redislock.errors import STRIKES, LockConflict, LockInfo, describe, fields, shown
from celery_redislock.message.delivery import Facts
from celery_redislock.message.message import Message
from celery_redislock.message.republish import ignores_result
from celery_redislock.options import LockOptions
from celery_redislock.policy import Ended, Reason, Verdict
from celery_redislock.protocol.replies import Conflict
from celery_redislock.protocol.tokens import RUNNING, known_as

from .raise_ import Fail
from .skip import Skip, revoke
from .wait import LONGEST_PAUSE, Wait, only_warns, show_as_retry, wait

logger = logging.getLogger(__name__)

#: The id of the group that holds the joined task, among the children of a result.
JOINED = "redislock-joined"
#: The shortest pause of a run whose joined task is between two attempts, in seconds.
SHORTEST_LOOK = 0.05


class Joined(Reason):
    """Why a run that has joined another task ends without its outcome."""

    REVOKED = states.REVOKED, "joined {}, which was revoked"
    BETWEEN_ATTEMPTS = (states.RETRY,)


class Join(NamedTuple):
    """The message waits for the outcome of another task. The run is shown as RETRY."""

    joins: str
    """The id of the joined task. The run ends with that task's outcome as soon as there is one."""

    def end(self, message: Message, holder: LockInfo, conflict: Conflict) -> None:
        """End the run. Its message waits in line only while the joined task holds the key."""
        if any(one.task_id == self.joins and one.state in RUNNING for one in holder.holders):
            Wait().end(message, holder, conflict, self.joins)
        else:
            come_back(message, self.joins)


def join(message: Facts, holder: LockInfo, options: LockOptions) -> Skip | Fail | Wait | Join:
    """Have the message wait for the outcome of the first holder that it met.

    A holder that is not a task has no outcome. If no holder is a task, the message waits in line.
    """
    tasks = [one.task_id for one in holder.holders if one.task_id is not None]
    joins, turn = message.joins or next(iter(tasks), None), wait(message, holder, options)
    return Join(joins) if joins is not None and isinstance(turn, Wait) else turn


class Outcome(NamedTuple):
    """The state of a task, and its result if it has ended."""

    state: str
    value: Any
    """The task's result, or its error."""

    @property
    def is_ready(self) -> bool:
        """Whether the task has ended."""
        return self.state in states.READY_STATES


class Joining(Enum):
    """What a run that has joined another task does next."""

    END = auto()
    """End with the joined task's outcome."""
    ASK = auto()
    """Ask for the key. If it is held, wait: the joined task may still get an outcome."""
    COME_BACK = auto()
    """Release the key and try again later: the joined task is between two attempts and holds no key."""
    RUN = auto()
    """Run the body: the joined task died without an outcome."""


def on_joining(outcome: Outcome, options: LockOptions, waited: float, *, has_key: bool) -> Joining:
    """Decide what a run that has joined another task does next.

    Args:
        outcome: What is known of the joined task.
        options: The message's options. A joined task in state RETRY counts as dead once `waited` reaches
            `lock_queue_ttl`.
        waited: Seconds since this run's message first had to wait.
        has_key: Whether this run holds the key, which means that the joined task is not running.
    """
    if outcome.is_ready:
        return Joining.END
    if not has_key:
        return Joining.ASK
    return Joining.COME_BACK if outcome.state == states.RETRY and waited < options.queue_ttl else Joining.RUN


def come_back(message: Message, joins: str) -> None:
    """End the run: its message is sent back to wait for the next attempt of the task `joins`, which holds no key now.

    Return only if the message cannot be sent back: the broker is out of reach, and the message is acked.
    """
    holder = LockInfo(message.demand.key, joins, message.task.name, None, None, None)
    decision = wait(message.facts, holder, message.options)
    if not isinstance(decision, Wait):
        decision.end(message, holder)
    error = LockConflict(holder.key, holder)
    show_as_retry(message, error)
    pause = message.pause(SHORTEST_LOOK, LONGEST_PAUSE)
    message.tell(holder, f"trying again in {pause:.2f} s (join)")
    if message.send_back(pause, joins=joins):
        raise Ended(Verdict("join", Joined.BETWEEN_ATTEMPTS, str(error), holder_id=joins))


def revoke_like(message: Message, joins: str) -> NoReturn:
    """End the run as REVOKED, as the task `joins` has ended.

    Raises:
        Ended: Always.
    """
    whom, about = shown(joins), message.fields("joined", key=message.demand.key, holder_id=joins)
    logger.info("%s: joined task %s, which was revoked; its result is REVOKED (join)", message.name, whom, extra=about)
    revoke(message, Verdict("join", Joined.REVOKED, Joined.REVOKED.text.format(whom), holder_id=joins))


def show_as_ignored(message: Message) -> None:
    """Replace the stored RETRY of an earlier attempt, or of this one while it waited, with IGNORED.

    Celery stores nothing for an `Ignore`, so a run that has joined this task would keep waiting for its next attempt.
    """
    task, request = message.task, message.request
    if not _is_readable(message):
        return  # no run can have joined it
    with only_warns(message, "%s: could not store IGNORED, so runs that joined it keep waiting: %s"):
        if task.backend.get_task_meta(str(request.id), cache=False)["status"] == states.RETRY:
            task.backend.store_result(str(request.id), None, states.IGNORED, request=request)


def _is_readable(message: Message) -> bool:
    """Whether other processes can read the outcome of the message's task."""
    task = message.task
    return not (ignores_result(task, message.request) or backend_scheme(task.app) in PRIVATE_BACKENDS)


def has_ended_once(message: Message) -> bool:
    """Whether the message's task has an outcome already, or none that could be overwritten."""
    return not _is_readable(message) or outcome_of(message, message.attempt.task_id).is_ready


def outcome_of(message: Message, task_id: str) -> Outcome:
    """The outcome of `task_id` so far, according to the result backend of the message's task.

    If the backend cannot be reached, the outcome counts as RETRY, so that the run asks again later.
    """
    try:
        meta = message.task.backend.get_task_meta(task_id, cache=False)
    except Exception as error:
        if not message.task.backend.exception_safe_to_retry(error):
            raise
        text = "%s: could not read the result of task %s, which it joined: %s; trying again later"
        about = message.fields("not_read", holder_id=task_id)
        logger.warning(text, message.name, shown(task_id), describe(error), extra=about)
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
    may_have_ended = holder.state in {*RUNNING, "queued"} and backend_scheme(task.app) not in PRIVATE_BACKENDS
    if holder.task_id is None or not may_have_ended:
        return False
    try:
        meta = task.backend.get_task_meta(holder.task_id, cache=False)
    except STRIKES:  # raised in a body that publishes
        raise
    except Exception as error:  # noqa: BLE001 - each backend has its own errors
        about = fields("not_read", task=task.name, key=holder.key, holder_id=holder.task_id)
        text = "task %s: could not read whether task %s has ended: %s"
        logger.debug(text, task.name, shown(holder.task_id), describe(error), extra=about)
        return False
    if meta["status"] not in states.READY_STATES:
        return False
    is_run = holder.state in RUNNING and holder.task == known_as(task.name)
    if cools_down and meta["status"] == states.SUCCESS and is_run:
        return False
    done = moment_of(meta.get("date_done"), task.app.timezone)
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


def moment_of(value: Any, zone: tzinfo = UTC) -> datetime | None:
    """When a task ended, from the date in its result; None if the result has no valid date.

    A date without a zone is in UTC or, from some databases, in the app's `zone`: then the later of the two.
    """
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        if moment.tzinfo:
            return moment
        # A zone of pytz has an interface of its own. In the hour that autumn repeats, the later one.
        local = zone.localize(moment) if hasattr(zone, "localize") else moment.replace(tzinfo=zone, fold=1)
        return max(moment.replace(tzinfo=UTC), local.astimezone(UTC))
    except (TypeError, ValueError, OverflowError):
        return None
