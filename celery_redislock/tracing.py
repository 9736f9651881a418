"""Tracing: adds what happens to a run's lock to the run's OpenTelemetry span, as events and attributes.

No other module imports this one. It creates no spans: Celery's instrumentation or the app does.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from .errors import LockInfo, LockUnavailable
from .hold.held_lock import HeldLock
from .signals import lock_acquired, lock_conflict, lock_lost, lock_released, lock_unavailable

try:
    from opentelemetry.trace import Span, get_current_span
except ImportError as error:
    raise ImportError(
        f"celery_redislock.tracing needs OpenTelemetry ({error}): pip install 'celery-redislock[opentelemetry]'"
    ) from error

#: The span that was current when each held lock was taken. A loss is reported by a thread without a current span.
_spans: WeakKeyDictionary[HeldLock, Span] = WeakKeyDictionary()


def connect() -> None:
    """Trace in this process, and in the children that it forks, from now on. A second call changes nothing.

    Call it in the app's module, so that workers and publishers are both traced.
    """
    lock_acquired.connect(_acquired, weak=False)
    lock_conflict.connect(_met, weak=False)
    lock_released.connect(_released, weak=False)
    lock_lost.connect(_lost, weak=False)
    lock_unavailable.connect(_unavailable, weak=False)


def _acquired(lock: HeldLock, waited: float, **_: Any) -> None:
    span = get_current_span()
    if not span.is_recording():
        return
    _spans[lock] = span
    span.set_attributes({"redislock.key": lock.key, "redislock.waited": waited})
    if lock.fence is not None:
        span.set_attribute("redislock.fence", lock.fence)
    span.add_event("redislock.acquired", {"redislock.key": lock.key})


def _met(key: str, holder: LockInfo, policy: str, **_: Any) -> None:
    about = {"redislock.key": key, "redislock.holder": holder.who, "redislock.policy": policy}
    get_current_span().add_event("redislock.conflict", about)


def _released(lock: HeldLock, **_: Any) -> None:
    _add_event(lock, "redislock.released")


def _lost(lock: HeldLock, reason: str, **_: Any) -> None:
    _add_event(lock, "redislock.lost", reason)


def _unavailable(key: str, error: LockUnavailable, **_: Any) -> None:
    about = {"redislock.key": key, "redislock.reason": error.reason}
    get_current_span().add_event("redislock.unavailable", about)


def _add_event(lock: HeldLock, name: str, reason: str | None = None) -> None:
    """Add an event to the span that was current when `lock` was taken, unless the span ended with the run."""
    span = _spans.get(lock)
    if span is not None and span.is_recording():
        about = {"redislock.key": lock.key}
        span.add_event(name, about if reason is None else {**about, "redislock.reason": reason})
