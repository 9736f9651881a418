"""Metrics: counters and histograms of prometheus_client, made of the signals, in each process that calls `connect`.

Nothing else imports this module. It starts no HTTP server: the app serves the metrics as it serves its own.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from billiard import current_process
from celery.signals import worker_process_init, worker_process_shutdown

from .hold.held_lock import HELD_TOO_LONG, KEY_GONE, NOT_OURS, PAST_DEADLINE, HeldLock
from .signals import lock_acquired, lock_conflict, lock_lost, lock_released, lock_unavailable

try:
    from prometheus_client import Counter, Histogram, values
    from prometheus_client.multiprocess import mark_process_dead
except ImportError as error:
    raise ImportError(
        f"celery_redislock.metrics needs prometheus_client ({error}): pip install 'celery-redislock[prometheus]'"
    ) from error

if TYPE_CHECKING:
    from celery import Task

#: The words of the label ``reason``, for each way to lose a lock. They are few and fixed, as those of a label must be.
REASONS = {PAST_DEADLINE: "deadline", HELD_TOO_LONG: "max_hold", KEY_GONE: "gone", NOT_OURS: "gone_at_release"}

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)

#: The name of a pool child's files, by its pid.
_names: dict[int, str] = {}


def _process() -> str:
    """Whose files this process counts in, where prometheus_client is in its multi-process mode."""
    pid = os.getpid()
    return _names.get(pid) or str(pid)


def _name_by_index(**_: Any) -> None:
    """In a new child of the worker's pool: name its files by its index in the pool.

    By default each process has files of its own, which stay when it ends, for its counts must stay. With
    `worker_max_tasks_per_child` they would be more with each child. So the child that comes after another one in
    the pool goes on with its files: no two children have one index at once.
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
    "Runs and publishes that found their lock held, by what becomes of them.",
    ["task", "policy"],
)
LOST = Counter("celery_redislock_lost", "Locks that runs have lost before they released them.", ["task", "reason"])
UNAVAILABLE = Counter(
    "celery_redislock_unavailable", "Runs and publishes that could not ask the lock server.", ["task"]
)
HOLD = Histogram("celery_redislock_hold_seconds", "How long a run held its lock.", ["task"], buckets=_SECONDS)
WAIT = Histogram(
    "celery_redislock_wait_seconds",
    "How long a message waited for its lock, if it had to.",
    ["task"],
    buckets=_SECONDS,
)

#: When each lock that is held was taken, by `time.monotonic()`.
_taken_at: WeakKeyDictionary[HeldLock, float] = WeakKeyDictionary()


def connect() -> None:
    """Count in this process, and in the children that it forks, from now on. A second call changes nothing.

    Call it in the module of the app, so that workers and publishers do. Under a prefork pool, set the environment's
    ``PROMETHEUS_MULTIPROC_DIR`` before the process starts.
    """
    lock_acquired.connect(_acquired, weak=False)
    lock_conflict.connect(_met, weak=False)
    lock_released.connect(_released, weak=False)
    lock_lost.connect(_lost, weak=False)
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
    if taken_at is not None:  # else it was taken before `connect` was called
        HOLD.labels(sender.name).observe(time.monotonic() - taken_at)


def _lost(sender: Task[..., Any], reason: str, **_: Any) -> None:
    LOST.labels(sender.name, REASONS.get(reason, "other")).inc()


def _unavailable(sender: Task[..., Any], **_: Any) -> None:
    UNAVAILABLE.labels(sender.name).inc()


def _forget_gauges(**_: Any) -> None:
    """Remove the app's own gauges of live processes from the files of this child, which ends."""
    for name in {_process(), str(os.getpid())}:  # what was set before `_name_by_index` is under its pid
        mark_process_dead(name)  # type: ignore[no-untyped-call]
