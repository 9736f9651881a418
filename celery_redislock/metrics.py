"""Metrics: Prometheus counters and histograms, fed by the signals in each process that calls `connect`; and gauges.

No other module imports this one. It starts no HTTP server: the app serves these metrics with its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from billiard import current_process
from celery import Task
from celery.signals import worker_init, worker_process_init, worker_process_shutdown

from . import signals
from .hold.held_lock import HELD_TOO_LONG, KEY_GONE, NOT_OURS, PAST_DEADLINE, HeldLock

try:
    from prometheus_client import REGISTRY, Counter, Histogram, values
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.multiprocess import mark_process_dead
    from prometheus_client.registry import Collector
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
CONFLICTS = Counter("celery_redislock_conflicts", "Runs and publishes whose lock was held.", ["task", "policy"])
LOST = Counter("celery_redislock_lost", "Locks that runs have lost before they released them.", ["task", "reason"])
MERGED = Counter("celery_redislock_merged", "Calls that were merged into a waiting message.", ["task"])
REPLACED = Counter("celery_redislock_replaced", "Runs that were revoked because a newer call replaced them.", ["task"])
SUPERSEDED = Counter("celery_redislock_superseded", "Runs revoked because a newer call's run had begun.", ["task"])
UNAVAILABLE = Counter("celery_redislock_unavailable", "Runs and publishes that could not reach Redis.", ["task"])
HOLD = Histogram("celery_redislock_hold_seconds", "How long a run held its lock.", ["task"], buckets=_SECONDS)
WAIT = Histogram("celery_redislock_wait_seconds", "How long messages waited for locks.", ["task"], buckets=_SECONDS)


#: The gauges of a worker, with what they say. A counter among them has a name that Prometheus ends with ``_total``.
GAUGES = {
    "waiting": (GaugeMetricFamily, "Messages that wait in this worker for their lock."),
    "oldest_wait_seconds": (GaugeMetricFamily, "How long ago the first message that waits was published."),
    "longest_hold_seconds": (GaugeMetricFamily, "How long the longest run that holds its lock has been running."),
    "overflow": (CounterMetricFamily, "Messages that were sent back because they could not wait in this worker."),
}


class WorkerGauges(Collector):
    """What waits and what is held in this worker when it is scraped, and whether the lock server answers.

    `connect` registers one in prometheus_client's own registry. With a prefork pool, register one in the registry that
    the worker's main process serves. In any other process it has no samples.
    """

    def collect(self) -> Iterator[Metric]:
        """The gauges now. This waits for the lock server's answer."""
        app = _worker.get("app")
        if app is not None:
            from .worker.gauges import gauges_of, is_up

            yield from families({task: one._asdict() for task, one in gauges_of(app).items()}, is_up(app))


def families(gauges: Mapping[str, Mapping[str, float]], is_up: bool | None) -> Iterator[Metric]:
    """The metrics of a worker with these gauges, by task and name."""
    for name, (family, text) in GAUGES.items():
        metric = family(f"celery_redislock_worker_{name}", text, labels=["task"])
        for task, values_of in gauges.items():
            metric.add_metric([task], values_of[name])
        yield metric
    if is_up is not None:
        text = "1 if the lock server answers this worker, 0 if it does not."
        yield GaugeMetricFamily("celery_redislock_worker_server_up", text, int(is_up))


#: The app of the worker whose main process this is.
_worker: dict[str, Any] = {}


def _begin_worker(sender: Any = None, **_: Any) -> None:
    if not _worker:
        REGISTRY.register(WorkerGauges())
    _worker["app"] = sender.app


def connect() -> None:
    """Count in this process, and in the children that it forks, from now on. A second call changes nothing.

    Call it in the app's module, so that workers and publishers both count. With a prefork pool, set the environment
    variable ``PROMETHEUS_MULTIPROC_DIR`` before the process starts.
    """
    signals.lock_acquired.connect(_acquired, weak=False)
    signals.lock_conflict.connect(_met, weak=False)
    signals.lock_released.connect(_released, weak=False)
    signals.lock_lost.connect(_lost, weak=False)
    signals.lock_merged.connect(partial(_count, MERGED), weak=False, dispatch_uid=__name__)
    signals.lock_replaced.connect(partial(_count, REPLACED), weak=False, dispatch_uid=__name__)
    signals.lock_superseded.connect(partial(_count, SUPERSEDED), weak=False, dispatch_uid=__name__)
    signals.lock_unavailable.connect(partial(_count, UNAVAILABLE), weak=False, dispatch_uid=__name__)
    worker_init.connect(_begin_worker, weak=False)
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
    if (taken_at := _taken_at.pop(lock, None)) is not None:  # otherwise the lock was taken before `connect` was called
        HOLD.labels(sender.name).observe(time.monotonic() - taken_at)


def _lost(sender: Task[..., Any], reason: str, **_: Any) -> None:
    LOST.labels(sender.name, REASONS.get(reason, "other")).inc()


def _count(counter: Counter, sender: Task[..., Any], **_: Any) -> None:
    counter.labels(sender.name).inc()


def _forget_gauges(**_: Any) -> None:
    """Remove the app's own ``live`` gauges from the files of an exiting child."""
    for name in {_process(), str(os.getpid())}:  # gauges set before `_name_by_index` ran are under the pid
        mark_process_dead(name)  # type: ignore[no-untyped-call]
