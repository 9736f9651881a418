"""Advice: what a worker says at its start of locks that work: where they are, and what may disturb them later."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis import exceptions

from celery_redislock.app import is_enabled
from celery_redislock.message.broker import Broker
from celery_redislock.task.locked_task import LockedTask

if TYPE_CHECKING:
    import redis
    from celery import Celery

logger = logging.getLogger(__name__)

#: The server's clock is far off from here on, in seconds. Hosts that keep their clocks differ by milliseconds.
FAR_OFF = 5.0


def introduce(app: Celery, prefix: str, where: str) -> None:
    """Log one line: which server the tasks of `app` lock on, with which prefix, and for how long.

    Args:
        app: The worker's app.
        prefix: With which its keys begin.
        where: The address of the lock server, without a password.
    """
    locked = _locked(app)
    if not locked:
        return
    leases = sorted({lease for _, lease in locked})
    spread = f"a lease of {leases[0]:g} s" if len(leases) == 1 else f"leases of {leases[0]:g} to {leases[-1]:g} s"
    logger.info("%d tasks lock on %s, with the prefix %r and %s", *(len(locked), where, prefix, spread))


def warn_of_early_copies(app: Celery) -> None:
    """Warn where a Redis broker delivers messages of late-acked tasks again before a dead holder's lock has ended."""
    broker = Broker(app)
    late = [(task.name, lease) for task, lease in _locked(app) if task.acks_late and lease > broker.visibility_timeout]
    if late and _is_redis(app):
        logger.warning(
            "the broker delivers a message again that is not acked after %g s (visibility_timeout), which is less than "
            "the lease of tasks that ack late: %s; copies come while their runs go on: set visibility_timeout in "
            "broker_transport_options to more than the longest run takes",
            *(broker.visibility_timeout, _listed(late)),
        )


def warn_of_server(client: redis.Redis, where: str) -> None:
    """Warn where the clock of the lock server is far off, or where it closes connections that are idle.

    Args:
        client: A client of the lock server.
        where: The address of the server, without a password.
    """
    ahead = _seconds_ahead(client)
    if abs(ahead) > FAR_OFF:
        logger.warning(
            "the clock of the lock server %s is %.0f s %s this host's: those who wait may get their locks in the wrong "
            "order; have both hosts keep the time (NTP)",
            *(where, abs(ahead), "ahead of" if ahead > 0 else "behind"),
        )
    seconds = _idle_timeout(client)
    if seconds:
        logger.warning(
            "the lock server %s closes connections that are idle for %d s (timeout): what is sent after that has to "
            "connect anew, and takes longer; set timeout 0",
            *(where, seconds),
        )


def _locked(app: Celery) -> Sequence[tuple[LockedTask, float]]:
    """The tasks of `app` that have a lock, and their leases in seconds."""
    tasks = [task for _, task in sorted(app.tasks.items()) if isinstance(task, LockedTask)]
    plans = [(task, task.lock_plan) for task in tasks]
    return [(task, plan.options.lease) for task, plan in plans if plan is not None] if is_enabled(app) else []


def _listed(late: Sequence[tuple[str, float]]) -> str:
    more = f" and {len(late) - 3} more" if len(late) > 3 else ""
    return ", ".join(f"{name} ({lease:g} s)" for name, lease in late[:3]) + more


def _is_redis(app: Celery) -> bool:
    with app.connection_for_read() as connection:  # it is not opened
        return bool(connection.transport.driver_type == "redis")


def _seconds_ahead(client: redis.Redis) -> float:
    """How far the server's clock is ahead of this host's, at least; 0.0 where it may not be asked."""
    asked_at = time.time()
    try:
        told: Any = client.time()
    except exceptions.ResponseError:
        return 0.0
    answered_at, now = time.time(), told[0] + told[1] / 1e6
    return float(now - min(max(now, asked_at), answered_at))


def _idle_timeout(client: redis.Redis) -> int:
    """After how many seconds the server closes an idle connection; 0 for never, or where it may not be asked."""
    try:
        told: Any = client.config_get("timeout")
    except exceptions.ResponseError:  # many hosted servers have no CONFIG
        return 0
    return int(told.get("timeout") or 0)
