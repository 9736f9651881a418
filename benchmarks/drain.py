"""What a task costs from its publish to its end: publishing many, and draining their queue with one real worker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from .queue_app import CLOCK, KINDS, make_app
from .report import Report
from .server import valkey
from .timing import Rounds

#: What `LockedTask` may cost in all, Celery's own base class being 1.00.
BOUNDS = {"LockedTask": 1.10, 'LockedTask, scope "job"': 1.15, 'LockedTask, scope "queue"': 1.20}
ROUNDS, MESSAGES = 30, 200
#: The queue that the worker consumes until it is told to consume another: an empty one.
IDLE = "idle"


def main() -> None:
    publishing: dict[str, list[float]] = {kind: [] for kind in KINDS}
    draining: dict[str, list[float]] = {kind: [] for kind in KINDS}
    # Without a time-out of its own: redis-py 8 has one, and a busy machine may need longer.
    with valkey() as url, _worker(url) as app, redis.Redis.from_url(url, socket_timeout=None) as client:
        kinds = list(KINDS)
        for _ in range(-1, ROUNDS):  # the first round warms up, and does not count
            for kind in kinds:
                publishing[kind].append(_publish(app, kind))
                draining[kind].append(_drain(app, client, kind))
            kinds.append(kinds.pop(0))  # so that no kind always follows the same other one
        if client.keys("redislock:*"):
            raise RuntimeError("a lock was left: what was measured is no run of the tasks alone")
    baseline = "Celery's own base class"
    report = Report("drain: an empty task from its publish to its end", baseline)
    published = {kind: Rounds(seconds[1:]) for kind, seconds in publishing.items()}
    drained = {kind: Rounds(seconds[1:]) for kind, seconds in draining.items()}
    in_all = {kind: published[kind] + drained[kind] for kind in KINDS}
    for name, rounds in (("publish", published), ("drain", drained), ("both", in_all)):
        report.section(name)
        for kind in KINDS:
            bound = BOUNDS.get(kind) if name == "both" else None
            report.add(kind, rounds[kind], next(iter(rounds.values())), bound)
    report.show()


def _publish(app: Any, kind: str) -> float:
    """Seconds for each of `MESSAGES` publishes, every one with a key of its own.

    A `CLOCK` task stands before and behind them in the queue.
    """
    app.tasks[CLOCK].apply_async(queue=kind)
    task = app.tasks[kind]
    start = time.perf_counter()
    for number in range(MESSAGES):
        task.apply_async((number,), queue=kind)
    seconds = time.perf_counter() - start
    app.tasks[CLOCK].apply_async(queue=kind)
    return seconds / MESSAGES


def _drain(app: Any, client: redis.Redis, kind: str) -> float:
    """Seconds that the worker takes for each message, between the times that the two `CLOCK` tasks note."""
    app.control.add_consumer(kind, reply=True)
    start, end = (float(_popped(client)) for _ in range(2))
    app.control.cancel_consumer(kind, reply=True)
    return (end - start) / MESSAGES


def _popped(client: redis.Redis) -> bytes:
    popped: Any = client.blpop([CLOCK], timeout=60)
    if popped is None:
        raise RuntimeError("the worker has stopped draining its queue")
    value: bytes = popped[1]
    return value


@contextmanager
def _worker(url: str) -> Iterator[Any]:
    """Start a worker that consumes only the queue `IDLE`; yields its app."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.queue_app", url, IDLE]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # the worker prints its banner there
    try:
        app: Any = make_app(url)
        while not app.control.ping(timeout=0.2):
            if process.poll() is not None:
                raise RuntimeError("the worker has not started")
        yield app
    finally:
        process.terminate()
        process.wait(30)
