"""Reservation: how long a key is reserved for a message that has not started, and how the reservation is given up."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redislock.app import server_of
from celery_redislock.message.header import Reservation
from celery_redislock.options import LockOptions

from .decisions import may_be_handed_a_key

if TYPE_CHECKING:
    from celery import Celery

    from .plan import LockPlan


def reservation_ttl(app: Celery, lock: LockOptions, options: Mapping[str, Any], expires: Any) -> float:
    """Seconds that a key is reserved: `lock_queue_ttl` and the message's delay, but at most until the message expires.

    Of the `options` of the publish, `countdown`, `eta` and `expires` count; `expires` is the task's own, for a publish
    without one.
    """
    ttl = lock.queue_ttl + max(0.0, _seconds(app, options.get("countdown") or options.get("eta")) or 0.0)
    end = _seconds(app, options.get("expires", expires))
    return ttl if end is None else min(ttl, end)


def give_up_reservation(plan: LockPlan, reservation: Reservation, retries: int | None, eta: Any = None) -> None:
    """Have the keeper give up the reservation of a message that does not run, or runs without its lock.

    Args:
        plan: The plan of the message's task.
        reservation: What is given up.
        retries: How often the task had called `self.retry()` before it sent the message.
        eta: When the message is due, where that may be in the future.
    """
    ttl = reservation_ttl(plan.app, plan.options, {"eta": eta}, None)
    is_to_come = may_be_handed_a_key(retries, plan.options)
    server_of(plan.app).give_up(plan.in_any_slot(reservation.key), reservation.claim, ttl, is_to_come=is_to_come)


def _seconds(app: Celery, moment: Any) -> float | None:
    """Seconds from now until `moment`, which Celery takes as a number of seconds, as ISO 8601 text, or as a date.

    None where there is no moment. None also for a value that Celery refuses: Celery raises the error itself, when it
    sends the message or in the worker.
    """
    if moment is None:
        return None
    try:
        if isinstance(moment, int | float):
            return float(moment)
        text = moment if isinstance(moment, str) else moment.isoformat()
        due: datetime = maybe_make_aware(maybe_iso8601(text), app.timezone)  # type: ignore[arg-type]
        return (due - datetime.now(UTC)).total_seconds()
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
