"""How long a key is kept for a message that has not started."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redislock.options import LockOptions

if TYPE_CHECKING:
    from celery import Celery


def seconds_to_start(app: Celery, lock: LockOptions, options: Mapping[str, Any], expires: Any) -> float:
    """Seconds that a key is kept: `lock_queue_ttl` and the message's delay, but no longer than until it expires.

    Args:
        app: The task's app.
        lock: Of the task.
        options: Of the publish.
        expires: The task's own.
    """
    ttl = lock.queue_ttl + max(0.0, _seconds(app, options.get("countdown") or options.get("eta")) or 0.0)
    end = _seconds(app, options.get("expires", expires))
    return ttl if end is None else min(ttl, end)


def _seconds(app: Celery, moment: Any) -> float | None:
    """From now, as Celery reads it: a number, ISO 8601, or what has an `isoformat`, as dates have.

    None also for what Celery refuses: it does so itself, when it sends the message or in the worker.
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
