"""Publishing: the key is taken before the message is sent, so that a duplicate never waits in the queue."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware
from redis.exceptions import RedisError

from . import signals, tokens
from .comeback import HEADER, Return
from .errors import LockUnavailable, describe
from .server import LockServer
from .store import Granted, Held, beside
from .tokens import Attempt

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult

    from .execution import Execution
    from .info import LockInfo
    from .plan import LockPlan
    from .task import LockedTask

logger = logging.getLogger(__name__)

Options = Mapping[str, Any]
Send = Callable[[Options], "AsyncResult[Any]"]

#: A publish with one of these is not answered with another's result: somebody waits for this id, or it must go on.
CONTINUATIONS = ("task_id", "group_id", "chord", "chain", "link", "link_error")


def is_bare(options: Options) -> bool:
    """Whether nobody but the caller knows of the message.

    Any other may be published by Celery itself, at the end of another task, which must not fail for it.
    """
    return not any(options.get(name) for name in CONTINUATIONS)


def publish(
    task: LockedTask, plan: LockPlan, key: str, options: Options, execution: Execution | None, send: Send
) -> AsyncResult[Any]:
    """Send a message by the task's scope.

    Args:
        task: The task.
        plan: What is known of it.
        key: The key in Redis for its arguments.
        options: Of `Task.apply_async`.
        execution: Of the request that publishes, if it is one of this task.
        send: Sends the message with these options.

    Returns:
        Its result, or that of the job which it would duplicate, with ``duplicate`` True.

    Raises:
        LockUnavailable: Redis did not answer or refused, by `lock_on_outage`; for a bare publish alone.
        Exception: The broker's; then the key is free again.
    """
    if execution is not None and _is_next_attempt(options, execution):
        lock = execution.lock
        if lock is not None and lock.key == key and plan.hands_over:
            return _hand_over(task, plan, options, execution, send)
    elif options.get("retries"):  # by the worker's main process, which must not wait for Redis
        return send(options)
    return send(options) if plan.options.scope == "run" else _take(task, plan, key, options, send)


def _hand_over(
    task: LockedTask, plan: LockPlan, options: Options, execution: Execution, send: Send
) -> AsyncResult[Any]:
    """The key is left to the next attempt: once this one has ended, for its `finally` blocks run after this."""
    claim, ttl = tokens.mint_claim(), seconds_to_start(task, plan, options)
    result = send(_with_claim(options, claim))
    execution.leaves_to = tokens.mint(claim, _attempt(options), plan.origin(execution.request.hostname)), ttl
    return result


def _take(task: LockedTask, plan: LockPlan, key: str, options: Options, send: Send) -> AsyncResult[Any]:
    """Take the key, or in scope ``queue`` the place of the one that waits, and leave it to the message."""
    bare = is_bare(options)
    options = {**options, "task_id": options.get("task_id") or uuid()}
    place = beside(key, "queued") if plan.options.scope == "queue" else key
    claim = tokens.mint_claim()
    token = tokens.mint(claim, _attempt(options), plan.origin(socket.gethostname()))
    store = LockServer.of(plan.app).store
    try:
        answer = store.acquire(place, token, claim, plan.options.lease)
    except LockUnavailable as error:
        signals.lock_unavailable.send(sender=task, key=key, error=error)
        if plan.options.on_outage == "raise" and bare:
            raise
        return send(options)  # its run will ask again, and end as its options say
    if isinstance(answer, Held):
        holder = answer.holder.info(key, answer.ttl)
        if bare and holder.task == task.name and _has_a_result(holder) and not _is_successor(plan.app, holder, options):
            return _existing(task, holder, options)
    if not isinstance(answer, Granted):
        return send(options)  # it meets its policy when it starts
    try:
        result = send(_with_claim(options, claim))
    except BaseException:
        store.undo(place, claim)
        raise
    # Only now, so that a publisher that has died before keeps the key no longer than a lease. Where the message has
    # started meanwhile, the key is its run's, and this does nothing.
    try:
        store.lengthen(place, claim, seconds_to_start(task, plan, options))
    except RedisError as error:
        logger.warning(
            "task %s[%s] is sent, but its lock %s is kept for %g s only: %s",
            *(task.name, options["task_id"], key, plan.options.lease, describe(error)),
        )
    return result


def _existing(task: LockedTask, holder: LockInfo, options: Options) -> AsyncResult[Any]:
    policy = "return existing"
    logger.info("task %s is not sent: lock %s is held by %s: %s", task.name, holder.key, holder.who, policy)
    signals.lock_conflict.send(sender=task, key=holder.key, holder=holder, policy=policy)
    result: Any = task.AsyncResult(str(holder.task_id))
    result.duplicate = True
    result.ignored = options.get("ignore_result", task.ignore_result)  # as Celery: get() must not wait for ever
    return result  # type: ignore[no-any-return]


def seconds_to_start(task: LockedTask, plan: LockPlan, options: Options) -> float:
    """How long a key is kept for a message that has not started: `lock_queue_ttl` and its delay, until it expires."""
    ttl = plan.options.queue_ttl + max(0.0, _seconds(plan.app, options.get("countdown") or options.get("eta")) or 0.0)
    expires = _seconds(plan.app, options.get("expires", task.expires))
    return ttl if expires is None else min(ttl, expires)


def _seconds(app: Celery, moment: Any) -> float | None:
    """From now; Celery takes numbers, datetimes and ISO 8601."""
    if moment is None or isinstance(moment, int | float):
        return moment
    due: datetime = maybe_make_aware(maybe_iso8601(moment), app.timezone)  # type: ignore[arg-type]
    return (due - datetime.now(UTC)).total_seconds()


def _is_next_attempt(options: Options, execution: Execution) -> bool:
    """Whether this is the `self.retry()` of the run that publishes."""
    attempt = execution.message.attempt
    return options.get("task_id") == attempt.task_id and (options.get("retries") or 0) > attempt.retries


def _has_a_result(holder: LockInfo) -> bool:
    """Whether others can read the holder's result: not that of `apply()`, whose host is no worker's name."""
    return holder.state == "queued" or "@" in (holder.hostname or "")


def _is_successor(app: Celery, holder: LockInfo, options: Options) -> bool:
    """Whether the holder itself causes this message: see `Execution`; Celery has not given it its parent yet."""
    causes = {options.get("parent_id"), options.get("root_id")}
    parent = app.current_worker_task
    if parent is not None:
        causes |= {parent.request.id, parent.request.root_id}
    return holder.task_id in causes


def _attempt(options: Options) -> Attempt:
    """That of the message, as its `Execution` will name it."""
    return Attempt(str(options["task_id"]), options.get("retries") or 0, options.get("replaced_task_nesting") or 0)


def _with_claim(options: Options, claim: str) -> Options:
    headers = options.get("headers") or {}
    return {**options, "headers": {**headers, HEADER: Return(claim=claim)._asdict()}}
