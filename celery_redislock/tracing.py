"""Tracing: adds what happens to a run's lock to the run's OpenTelemetry span, as events and attributes; and metrics.

No other module imports this one. It creates no spans: Celery's instrumentation or the app does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery.signals import worker_init
from celery.utils.dispatch import Signal

from . import signals
from .errors import LockInfo, LockUnavailable
from .hold.held_lock import HeldLock

try:
    from opentelemetry.metrics import CallbackOptions, Observation, get_meter
    from opentelemetry.trace import Span, get_current_span
except ImportError as error:
    raise ImportError(
        f"celery_redislock.tracing needs OpenTelemetry ({error}): pip install 'celery-redislock[opentelemetry]'"
    ) from error

#: The gauges of a worker, with their units. Their values are in `celery_redislock.worker.gauges`.
GAUGES = {"waiting": "{message}", "oldest_wait_seconds": "s", "longest_hold_seconds": "s", "overflow": "{message}"}

#: The span that was current when each held lock was taken. A loss is reported by a thread without a current span.
_spans: WeakKeyDictionary[HeldLock, Span] = WeakKeyDictionary()
_meter = get_meter("celery_redislock")


def connect() -> None:
    """Trace in this process, and in the children that it forks, from now on. A second call changes nothing.

    Call it in the app's module, so that workers and publishers are both traced.
    """
    signals.lock_acquired.connect(_acquired, weak=False)
    signals.lock_conflict.connect(_met, weak=False)
    signals.lock_released.connect(_released, weak=False)
    signals.lock_lost.connect(_lost, weak=False)
    signals.lock_unavailable.connect(_unavailable, weak=False)
    for name in ("merged", "replaced", "superseded"):
        signal: Signal = getattr(signals, f"lock_{name}")
        signal.connect(partial(_by_another, name), weak=False, dispatch_uid=f"redislock.{name}")
    worker_init.connect(_observe_worker, weak=False)


def _observe_worker(sender: Any = None, **_: Any) -> None:
    """Report the gauges of a worker, whose main process this is, whenever the app's own metric reader asks."""

    def observe(name: str, _: CallbackOptions) -> Iterator[Observation]:
        from .worker.gauges import gauges_of

        for task, gauges in gauges_of(sender.app).items():
            yield Observation(getattr(gauges, name), {"redislock.task": task})

    def observe_server(_: CallbackOptions) -> Iterator[Observation]:
        from .worker.gauges import is_up

        if (answers := is_up(sender.app)) is not None:
            yield Observation(int(answers))

    for name, unit in GAUGES.items():
        _meter.create_observable_gauge(f"redislock.worker.{name}", [partial(observe, name)], unit)
    _meter.create_observable_gauge("redislock.worker.server_up", [observe_server])


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
    _add_event(lock, "redislock.lost", **{"redislock.reason": reason})


def _by_another(name: str, key: str, task_id: str, **_: Any) -> None:
    """Handle a call that was merged into another message, and a run that was replaced or superseded by another."""
    get_current_span().add_event(f"redislock.{name}", {"redislock.key": key, "redislock.other": task_id})


def _unavailable(key: str, error: LockUnavailable, **_: Any) -> None:
    about = {"redislock.key": key, "redislock.reason": error.reason}
    get_current_span().add_event("redislock.unavailable", about)


def _add_event(lock: HeldLock, name: str, **more: str) -> None:
    """Add an event to the span that was current when `lock` was taken, unless the span ended with the run."""
    if (span := _spans.get(lock)) is not None and span.is_recording():
        span.add_event(name, {"redislock.key": lock.key, **more})
