"""What a task costs from its publish to its end: publishing many, and draining their queue with one real worker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis
from rich.table import Table

from .delay import delayed
from .findings import Findings
from .queue_app import CLOCK, KINDS, make_app
from .report import Report, is_noisy
from .server import valkey
from .timing import Rounds

BASELINE, RUN, JOB, QUEUE = "Celery's own base", "LockedTask", 'LockedTask, scope "job"', 'LockedTask, scope "queue"'
RUN_ALONE, JOB_ALONE = "the commands of a run alone", "the commands of a job alone"
OTHERS = "celery-once", "celery-singleton"
#: What a kind may cost in all, its commands alone being 1.00, where the server is near and where it is far. Near, what
#: is more is Python: for a run some 250 calls, beside the 4,000 of Celery and of its commands alone.
BOUNDS = [(RUN, RUN_ALONE, 1.15, 1.10), (JOB, JOB_ALONE, 1.20, 1.10), (QUEUE, JOB_ALONE, 1.20, 1.10)]
#: And beside the other libraries, where the server is near and a millisecond away. A job costs more than theirs: its
#: run asks for its key and waits for the answer, so that no copy of its message runs beside it, while theirs only
#: delete their keys at the end. The commands of a job alone cost about as much as theirs do in all.
BESIDE_OTHERS = {RUN: {0.0: 1.05, 0.001: 0.95}, JOB: {0.0: 1.25, 0.001: 1.1}}
#: The queue that the worker consumes until it is told to consume another: an empty one.
IDLE = "idle"


class Setting(NamedTuple):
    """Where a measurement is taken."""

    pool: str
    far: float
    """How much longer a round trip to the server takes, in seconds."""
    messages: int
    """In each round, of each kind."""
    rounds: int

    def __str__(self) -> str:
        return f"{self.pool}, {1000 * self.far:g} ms"


#: Many short rounds: on a machine that others share, a CPU may be half as fast for some seconds.
BRIEF = [Setting("prefork", 0.0, 25, 80), Setting("prefork", 0.001, 25, 12)]
FULL = [
    *(Setting(pool, 0.0, 25, 240) for pool in ("prefork", "solo")),
    *(Setting(pool, 0.001, 25, 36) for pool in ("prefork", "solo")),
    *(Setting(pool, 0.005, 12, 24) for pool in ("prefork", "solo")),
]


def main(findings: Findings) -> None:
    findings.chapter("A queue: empty tasks from their publish to their end")
    ratios: dict[str, dict[str, float]] = {}
    for setting in FULL if findings.full else BRIEF:
        published, drained = _measure(setting)
        in_all = {kind: published[kind] + drained[kind] for kind in KINDS}
        report = Report(findings, f"drain: empty tasks, {setting} added to a round trip", BASELINE)
        for name, rounds in (("publish", published), ("drain", drained), ("both", in_all)):
            report.section(f"{name}, {setting}")
            for kind in KINDS:
                report.add(kind, rounds[kind], rounds[BASELINE])
        report.show()
        ratios[str(setting)] = {kind: in_all[kind].ratio(in_all[BASELINE]).median for kind in KINDS}
        beside_alone = [(kind, alone, far if setting.far else near) for kind, alone, near, far in BOUNDS]
        beside_others = [
            (kind, other, bounds[setting.far])
            for kind, bounds in BESIDE_OTHERS.items()
            for other in OTHERS
            if setting.far in bounds
        ]
        for kind, other, bound in [*beside_alone, *beside_others]:
            ratio = in_all[kind].ratio(in_all[other])
            what = f"drain: {kind}, {other} being 1.00, {setting}"
            findings.judge(what, round(ratio.median, 2), bound, noisy=is_noisy(ratio, setting.rounds))
        if setting.pool == "prefork":
            times = {kind: rounds.microseconds() for kind, rounds in in_all.items()}
            label = f"µs for publish + drain of a task, {1000 * setting.far:g} ms added to a round trip"
            findings.bars(
                f"drain-{1000 * setting.far:g}-ms", f"Publish and drain of an empty task, {setting}", times, label
            )
    if findings.full:
        _tell(findings, ratios)


def _tell(findings: Findings, ratios: dict[str, dict[str, float]]) -> None:
    table = Table(
        title="drain: publish and drain together, Celery's own base being 1.00", title_justify="left", caption=None
    )
    table.add_column("pool, added to a round trip")
    for kind in KINDS:
        table.add_column(kind, justify="right")
    for setting, of_kinds in ratios.items():
        table.add_row(setting, *(f"{of_kinds[kind]:.2f}" for kind in KINDS))
    findings.show(table)
    findings.say(
        "**How it grows.** Where the server is far away, what counts is how often one waits for it. In scope `run` a "
        "publish asks it nothing, and a run waits for it once, for its acquire; in the scopes `job` and `queue` a "
        "publish waits for it once more. What it costs Celery itself to fetch, ack and publish grows in the same "
        "way, so the ratio changes little, and the difference in time grows with the round trip.\n\n"
        "*The commands of a run alone* and *of a job alone* are tasks that send the commands of these scopes and do "
        "nothing else: no token of their own, no renewal, nobody who looks after a run whose process dies. No lock "
        "that asks at the start of a run can cost less. Where the server is a millisecond away, `LockedTask` costs "
        "about as much as they do.\n\n"
        "celery-once and celery-singleton ask for the key at the publish, and their runs ask for nothing: a copy of a "
        "message runs beside it. A run of ours asks, so a job costs more than theirs where the server is near, and "
        "about as much where it is not. Scope `run` asks for nothing at the publish."
    )


def _measure(setting: Setting) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
    """Publish and drain messages of each kind in turns; return what each of both took."""
    publishing: dict[str, list[float]] = {kind: [] for kind in KINDS}
    draining: dict[str, list[float]] = {kind: [] for kind in KINDS}
    # Without a time-out of its own: redis-py 8 has one, and a busy machine may need longer.
    with (
        valkey() as url,
        delayed(url, setting.far) as far,
        _worker(far, setting.pool) as app,
        redis.Redis.from_url(url, socket_timeout=None) as client,
    ):
        kinds = list(KINDS)
        for _ in range(-1, setting.rounds):  # the first round warms up, and does not count
            for kind in kinds:
                publishing[kind].append(_publish(app, kind, setting.messages))
                draining[kind].append(_drain(app, client, kind, setting.messages))
            kinds.append(kinds.pop(0))  # so that no kind always follows the same other one
        if client.keys("redislock:*"):
            raise RuntimeError("a lock was left: what was measured is no run of the tasks alone")
    published, drained = (
        {kind: Rounds(taken[1:]) for kind, taken in all_of.items()} for all_of in (publishing, draining)
    )
    return published, drained


def _publish(app: Any, kind: str, messages: int) -> float:
    """Seconds for each of so many publishes, every one with a key of its own.

    A `CLOCK` task stands before and behind them in the queue.
    """
    app.tasks[CLOCK].apply_async(queue=kind)
    task = app.tasks[kind]
    start = time.perf_counter()
    for number in range(messages):
        task.apply_async((number,), queue=kind)
    seconds = time.perf_counter() - start
    app.tasks[CLOCK].apply_async(queue=kind)
    return seconds / messages


def _drain(app: Any, client: redis.Redis, kind: str, messages: int) -> float:
    """Seconds that the worker takes for each message, between the times that the two `CLOCK` tasks note."""
    app.control.add_consumer(kind, reply=True, limit=1)
    _wake(app)
    start, end = (float(_popped(client)) for _ in range(2))
    app.control.cancel_consumer(kind, reply=True, limit=1)
    _wake(app)
    return (end - start) / messages


def _wake(app: Any) -> None:
    """Have the worker look at its queues anew: it waits for a message of those that it knew, for up to a second."""
    app.tasks[BASELINE].apply_async((0,), queue=IDLE)


def _popped(client: redis.Redis) -> bytes:
    popped: Any = client.blpop([CLOCK], timeout=60)
    if popped is None:
        raise RuntimeError("the worker has stopped draining its queue")
    value: bytes = popped[1]
    return value


@contextmanager
def _worker(url: str, pool: str) -> Iterator[Any]:
    """Start a worker that consumes only the queue `IDLE`; yields its app."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.queue_app", url, IDLE, pool]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # the worker prints its banner there
    try:
        app: Any = make_app(url)
        while not app.control.ping(timeout=0.2):
            if process.poll() is not None:
                raise RuntimeError("the worker has not started")
        yield app
    finally:
        process.kill()  # a shutdown waits half a minute for a child whose last result the worker has not read
        process.wait(30)
