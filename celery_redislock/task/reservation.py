"""Reservation: how long a key is reserved for a message that has not started."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redislock.options import LockOptions

if TYPE_CHECKING:
    from celery import Celery


def reservation_ttl(app: Celery, lock: LockOptions, options: Mapping[str, Any], expires: Any) -> float:
    """Seconds that a key is reserved: `lock_queue_ttl` and the message's delay, but at most until the message expires.

    Args:
        app: The task's app.
        lock: The task's lock options.
        options: The options of the publish: `countdown`, `eta` and `expires` count.
        expires: The task's own `expires`, for a publish without one.
    """
    ttl = lock.queue_ttl + max(0.0, _seconds(app, options.get("countdown") or options.get("eta")) or 0.0)
    end = _seconds(app, options.get("expires", expires))
    return ttl if end is None else min(ttl, end)


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
