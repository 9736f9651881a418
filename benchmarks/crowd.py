"""What thousands of messages that wait cost their worker: memory, and its time for all that does not wait."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_ready
from celery.worker.control import inspect_command
from kombu.asynchronous import get_event_loop
from rich.table import Table

from celery_redislock import LockedTask

from .findings import Findings
from .server import valkey

#: The memory of a message that waits for its key, relative to that of one that waits for its eta.
MEMORY = 1.20
#: How late the worker's event loop and a task that does not wait may be, in 99 of 100 cases; in seconds.
LOOP, STRANGERS = 0.020, 0.100
#: How many messages wait in the end, and how many while strangers, tasks that do not wait, are published.
CROWD, FEWER = 10_000, 2_000
#: So many strangers are published, with a pause after each, in seconds.
PUBLISHED, PAUSE = 300, 0.01
#: The event loop is asked so often whether it is late, and is watched for so long, in seconds.
TICK, WATCHED = 0.01, 3.0
#: Of each watch; fewer in a brief run.
ROUNDS, BRIEF = 5, 3
STARTED, RAN, KEY = "started", "ran", "one"

#: What is measured, and its bound.
BOUNDS = {
    "memory of each, KB": MEMORY,
    f"another task while {FEWER:,} wait, ms late": 1000 * STRANGERS,
    f"the event loop while {CROWD:,} wait, ms late": 1000 * LOOP,
    "the event loop while other tasks are published, ms late": 1000 * LOOP,
    "the event loop while the waiting messages run, ms late": 1000 * LOOP,
}

#: How late the event loop of this worker was, each time that it was asked, in seconds.
_late: list[float] = []


def main(findings: Findings) -> None:
    findings.chapter("A crowd: thousands of messages wait in one worker")
    rounds = ROUNDS if findings.full else BRIEF
    table = Table(
        title=f"crowd: up to {CROWD:,} messages wait in one worker",
        title_justify="left",
        caption=f"The other tasks do not wait. Late: the 99th percentile, as the median of {rounds} watches. Too "
        "noisy: messages that wait for an eta miss the bound as well.",
        caption_justify="left",
    )
    table.add_column("case")
    for column in ("for an eta", "for their key", "ratio", "bound", "met"):
        table.add_column(column, justify="right")
    for_eta, for_key = _crowd("eta", rounds), _crowd("serial", rounds)
    for case, eta in for_eta.items():
        value, most = for_key[case], BOUNDS[case]
        cells = (f"{eta:.1f}", f"{value:.1f}", f"{value / eta:.2f}", f"{most:g}")
        table.add_row(case, *cells, _judge(findings, case, eta, value))
    findings.show(table)
    findings.say(
        "**How it grows.** A waiting message takes about as much memory as a message with an eta, in the main process "
        "of its worker, and none in Redis. `redislock_waiting_limit` bounds how many wait in one worker."
    )


def _judge(findings: Findings, case: str, eta: float, value: float) -> str:
    most = BOUNDS[case]
    if most == MEMORY:
        return findings.judge(f"crowd: {case}, relative to one with an eta", round(value / eta, 3), most)
    return findings.judge(f"crowd: {case}", round(value, 1), most, noisy=eta > most)


def _crowd(task: str, rounds: int) -> dict[str, float]:
    """Have a worker keep `CROWD` messages of `task`; return what was measured, by the names in `BOUNDS`."""
    with valkey() as url, _worker(url) as (app, process), redis.Redis.from_url(url) as client:
        _strangers(app, client)
        serial: Any = app.tasks["serial"]
        with serial.lock_for(KEY):
            _publish(app, task, 1)
            before = _memory(process)
            _publish(app, task, FEWER)
            strangers = median(_strangers(app, client) for _ in range(rounds))
            _publish(app, task, CROWD - FEWER)
            memory = (_memory(process) - before) / CROWD
            idle = _watched(app, rounds, lambda: time.sleep(WATCHED))
            busy = _watched(app, rounds, lambda: _strangers(app, client))
        in_turn = _watched(
            app, rounds, lambda: time.sleep(WATCHED)
        )  # those that wait for the key run one after the other
        if task == "serial" and not client.llen(RAN):
            raise RuntimeError("no message that has waited has run")
    return dict(zip(BOUNDS, (memory, *(1000 * late for late in (strangers, idle, busy, in_turn))), strict=True))


def _watched(app: Celery, rounds: int, what: Callable[[], object]) -> float:
    """How late the event loop is during `what`, in seconds."""
    late = []
    for _ in range(rounds):
        _tell(app)
        what()
        late.append(_tell(app)["late"])
    return median(late)


def _publish(app: Celery, task: str, number: int) -> None:
    """Publish messages that wait, until the worker keeps them all: its prefetch count grows by one for each."""
    kept = _tell(app)["prefetch"] + number
    options: dict[str, Any] = {"countdown": 3600} if task == "eta" else {}
    for one in range(number):
        app.tasks[task].apply_async((KEY, one), **options)
    while _tell(app)["prefetch"] < kept:
        time.sleep(0.2)


def _strangers(app: Celery, client: redis.Redis) -> float:
    """How late tasks start that need not wait, in seconds."""
    client.delete(STARTED)
    for _ in range(PUBLISHED):
        app.tasks["stranger"].delay(time.time())
        time.sleep(PAUSE)
    while client.llen(STARTED) < PUBLISHED:
        time.sleep(0.01)
    late: Any = client.lrange(STARTED, 0, -1)
    return _most([float(one) for one in late])


def _most(late: list[float]) -> float:
    return quantiles(late, n=100)[98]


def _memory(process: subprocess.Popen[bytes]) -> float:
    """What the main process of the worker takes of the memory, in KB."""
    return float(subprocess.check_output(["ps", "-o", "rss=", "-p", str(process.pid)]))


def _tell(app: Celery) -> dict[str, float]:
    """What the worker's main process tells of itself."""
    control: Any = app.control
    answers = control.broadcast("crowd", reply=True, limit=1, timeout=30)
    told: dict[str, float] = answers[0].popitem()[1]
    return told


def crowd(state: Any, **_: Any) -> dict[str, float]:
    """A command for the worker: its prefetch count, and how late its event loop was since the last command."""
    late = _most(_late) if len(_late) > 1 else 0.0
    _late.clear()
    return {"prefetch": state.consumer.qos.value, "late": late}


def _watch(**_: Any) -> None:
    """Have the event loop of this worker note how late it is."""
    last = [time.monotonic()]

    def tick() -> None:
        now = time.monotonic()
        _late.append(now - last[0] - TICK)
        last[0] = now

    hub: Any = get_event_loop()
    hub.call_repeatedly(TICK, tick)


def make_app(url: str) -> Celery:
    """An app with a task that waits for its key, one that waits for its eta, and one that need not wait."""
    app = Celery("crowd", broker=url, set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        redislock_waiting_limit=2 * CROWD,
    )
    client = redis.Redis.from_url(url)

    @app.task(name="serial", base=LockedTask, lock_args=["key"], shared=False)
    def serial(key: str, number: int) -> None:
        client.rpush(RAN, number)

    @app.task(name="eta", shared=False)
    def eta(key: str, number: int) -> None:
        pass

    @app.task(name="stranger", shared=False)
    def stranger(published: float) -> None:
        client.rpush(STARTED, time.time() - published)

    return app


@contextmanager
def _worker(url: str) -> Iterator[tuple[Celery, subprocess.Popen[bytes]]]:
    """Start a worker with four children; yields its app and its main process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.crowd", url]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        app = make_app(url)
        control: Any = app.control
        while not control.ping(timeout=0.5):
            if process.poll() is not None:
                raise RuntimeError("the worker has not started")
        yield app, process
    finally:
        process.kill()  # a shutdown would give thousands of messages back
        process.wait(30)


if __name__ == "__main__":
    inspect_command()(crowd)
    worker_ready.connect(_watch)
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    make_app(sys.argv[1]).worker_main(["worker", "--concurrency=4", *quiet])
