"""Metrics: Prometheus counters and histograms, fed by the signals in each process that calls `connect`.

No other module imports this one. It starts no HTTP server: the app serves these metrics with its own.
"""

from __future__ import annotations

import os
import time
from typing import Any
from weakref import WeakKeyDictionary

from billiard import current_process
from celery import Task
from celery.signals import worker_process_init, worker_process_shutdown

from .hold.held_lock import HELD_TOO_LONG, KEY_GONE, NOT_OURS, PAST_DEADLINE, HeldLock
from .signals import (
    lock_acquired,
    lock_conflict,
    lock_lost,
    lock_merged,
    lock_released,
    lock_replaced,
    lock_superseded,
    lock_unavailable,
)

try:
    from prometheus_client import Counter, Histogram, values
    from prometheus_client.multiprocess import mark_process_dead
except ImportError as error:
    raise ImportError(
        f"celery_redislock.metrics needs prometheus_client ({error}): pip install 'celery-redislock[prometheus]'"
    ) from error

#: The value of the label ``reason`` for each way to lose a lock. A label must have few, fixed values.
REASONS = {PAST_DEADLINE: "deadline", HELD_TOO_LONG: "max_hold", KEY_GONE: "gone", NOT_OURS: "gone_at_release"}

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)

#: The name of a pool child's files, by its pid.
_names: dict[int, str] = {}
#: When each held lock was taken, by `time.monotonic()`.
_taken_at: WeakKeyDictionary[HeldLock, float] = WeakKeyDictionary()


def _process() -> str:
    """The name of this process's files in the multiprocess mode of prometheus_client."""
    pid = os.getpid()
    return _names.get(pid) or str(pid)


def _name_by_index(**_: Any) -> None:
    """Name the files of a new pool child by its index in the pool.

    By default each process has its own files, which outlive it so that its counts are kept. With
    `worker_max_tasks_per_child`, the files would pile up. So a new child continues the files of the child that it
    replaces: no two living children have the same index.
    """
    index = getattr(current_process(), "index", None)
    if index is not None:
        _names[os.getpid()] = f"{os.getppid()}-{index}"


_IS_MULTI_PROCESS = "PROMETHEUS_MULTIPROC_DIR" in os.environ
if _IS_MULTI_PROCESS:
    values.ValueClass = values.MultiProcessValue(_process)  # type: ignore[no-untyped-call]

ACQUIRED = Counter("celery_redislock_acquired", "Locks that runs have taken.", ["task"])
CONFLICTS = Counter(
    "celery_redislock_conflicts",
    "Runs and publishes that found their lock held, by policy.",
    ["task", "policy"],
)
LOST = Counter("celery_redislock_lost", "Locks that runs have lost before they released them.", ["task", "reason"])
MERGED = Counter("celery_redislock_merged", "Calls that were merged into a waiting message.", ["task"])
REPLACED = Counter("celery_redislock_replaced", "Runs that were revoked because a newer call replaced them.", ["task"])
SUPERSEDED = Counter(
    "celery_redislock_superseded", "Runs that were revoked because a newer call's run had begun.", ["task"]
)
UNAVAILABLE = Counter(
    "celery_redislock_unavailable", "Runs and publishes that could not reach the lock server.", ["task"]
)
HOLD = Histogram("celery_redislock_hold_seconds", "How long a run held its lock.", ["task"], buckets=_SECONDS)
WAIT = Histogram(
    "celery_redislock_wait_seconds",
    "How long a message waited for its lock, if it had to.",
    ["task"],
    buckets=_SECONDS,
)


def connect() -> None:
    """Count in this process, and in the children that it forks, from now on. A second call changes nothing.

    Call it in the app's module, so that workers and publishers both count. With a prefork pool, set the environment
    variable ``PROMETHEUS_MULTIPROC_DIR`` before the process starts.
    """
    lock_acquired.connect(_acquired, weak=False)
    lock_conflict.connect(_met, weak=False)
    lock_released.connect(_released, weak=False)
    lock_lost.connect(_lost, weak=False)
    lock_merged.connect(_merged, weak=False)
    lock_replaced.connect(_replaced, weak=False)
    lock_superseded.connect(_superseded, weak=False)
    lock_unavailable.connect(_unavailable, weak=False)
    if _IS_MULTI_PROCESS:
        worker_process_init.connect(_name_by_index, weak=False)
        worker_process_shutdown.connect(_forget_gauges, weak=False)


def _acquired(sender: Task[..., Any], lock: HeldLock, waited: float, **_: Any) -> None:
    _taken_at[lock] = time.monotonic()
    ACQUIRED.labels(sender.name).inc()
    if waited:
        WAIT.labels(sender.name).observe(waited)


def _met(sender: Task[..., Any], policy: str, **_: Any) -> None:
    CONFLICTS.labels(sender.name, policy).inc()


def _released(sender: Task[..., Any], lock: HeldLock, **_: Any) -> None:
    taken_at = _taken_at.pop(lock, None)
    if taken_at is not None:  # otherwise the lock was taken before `connect` was called
        HOLD.labels(sender.name).observe(time.monotonic() - taken_at)


def _lost(sender: Task[..., Any], reason: str, **_: Any) -> None:
    LOST.labels(sender.name, REASONS.get(reason, "other")).inc()


def _merged(sender: Task[..., Any], **_: Any) -> None:
    MERGED.labels(sender.name).inc()


def _replaced(sender: Task[..., Any], **_: Any) -> None:
    REPLACED.labels(sender.name).inc()


def _superseded(sender: Task[..., Any], **_: Any) -> None:
    SUPERSEDED.labels(sender.name).inc()


def _unavailable(sender: Task[..., Any], **_: Any) -> None:
    UNAVAILABLE.labels(sender.name).inc()


def _forget_gauges(**_: Any) -> None:
    """Remove the app's own ``live`` gauges from the files of an exiting child."""
    for name in {_process(), str(os.getpid())}:  # gauges set before `_name_by_index` ran are under the pid
        mark_process_dead(name)  # type: ignore[no-untyped-call]
