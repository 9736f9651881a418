"""What a task costs from its publish to its end: publishing many, and draining their queue with one real worker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis
from rich.table import Table

from .delay import delayed
from .findings import JOB as A_JOB
from .findings import LOCK, Findings
from .queue_app import CLOCK, KINDS, make_app
from .report import Report, is_noisy
from .server import valkey
from .timing import Rounds

BASELINE, RUN, JOB, QUEUE = "Celery's own base", "LockedTask", 'LockedTask, scope "job"', 'LockedTask, scope "queue"'
RUN_ALONE, JOB_ALONE = "the commands of a run alone", "the commands of a job alone"
OTHERS = "celery-once", "celery-singleton"
#: What a kind may cost in all, relative to its commands alone, with a near and with a far server. With a near one the
#: difference is Python: some 250 calls for a run, in addition to 4,000 of Celery and of its commands alone.
BOUNDS = [(RUN, RUN_ALONE, 1.15, 1.10), (JOB, JOB_ALONE, 1.20, 1.10), (QUEUE, JOB_ALONE, 1.20, 1.10)]
#: And relative to the other libraries, with the server near and a millisecond away. A job costs more than theirs: its
#: run asks for its key and waits for the reply, so that no copy of its message runs at the same time, while theirs only
#: delete their keys at the end. The commands of a job alone cost about as much as theirs do in all.
RELATIVE_TO_OTHERS = {RUN: {0.0: 1.05, 0.001: 0.95}, JOB: {0.0: 1.25, 0.001: 1.1}}
#: The queue that the worker consumes until it is told to consume another: an empty one.
IDLE = "idle"
#: The round trip, in seconds, of which the plot stands at the top of the page.
SHOWN_FIRST = 0.001


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
    findings.chapter("A queue: empty tasks from publish to end")
    measured: dict[str, Mapping[str, Rounds]] = {}
    for setting in FULL if findings.full else BRIEF:
        published, drained = _measure(setting)
        in_all = {kind: published[kind] + drained[kind] for kind in KINDS}
        report = Report(findings, f"drain: empty tasks, {setting} added to a round trip", BASELINE)
        for name, rounds in (("publish", published), ("drain", drained), ("both", in_all)):
            report.section(f"{name}, {setting}")
            for kind in KINDS:
                report.add(kind, rounds[kind], rounds[BASELINE])
        report.show()
        measured[str(setting)] = in_all
        to_alone = [(kind, alone, far if setting.far else near) for kind, alone, near, far in BOUNDS]
        to_others = [
            (kind, other, bounds[setting.far])
            for kind, bounds in RELATIVE_TO_OTHERS.items()
            for other in OTHERS
            if setting.far in bounds
        ]
        for kind, other, bound in [*to_alone, *to_others]:
            ratio = in_all[kind].ratio(in_all[other])
            what = f"drain: {kind} relative to {other}, {setting}"
            findings.judge(what, round(ratio.median, 2), bound, noisy=is_noisy(ratio, setting.rounds))
        if setting.pool == "prefork":
            _plot(findings, setting, in_all)
    if findings.full:
        _tell(findings, measured)
        _conclude(findings, measured)


def _plot(findings: Findings, setting: Setting, in_all: Mapping[str, Rounds]) -> None:
    times = {kind: rounds.microseconds() for kind, rounds in in_all.items() if kind not in {RUN_ALONE, JOB_ALONE}}
    more = in_all[RUN].ratio(in_all[BASELINE]).median - 1
    far = f"{1000 * setting.far:g} ms"
    where = f"{far} away" if setting.far else "on the same host"
    title = f"A lock adds {max(more, 0):.0%} to an empty task with Redis {where}"
    label = f"µs from publish to end, {far} added to a round trip, prefork"
    findings.bars(f"drain-{far.replace(' ', '-')}", title, times, label, first=setting.far == SHOWN_FIRST)


def _conclude(findings: Findings, measured: Mapping[str, Mapping[str, Rounds]]) -> None:
    near, far = measured["prefork, 0 ms"], measured["prefork, 1 ms"]

    def more(of: Mapping[str, Rounds], kind: str = RUN) -> str:
        return f"{of[kind].ratio(of[BASELINE]).median - 1:.0%}"

    def microseconds(of: Mapping[str, Rounds]) -> float:
        return of[RUN].microseconds().median - of[BASELINE].microseconds().median

    def times(of: Mapping[str, Rounds], kind: str) -> str:
        return f"{of[kind].ratio(of['celery-once']).median:.2f}"

    findings.sum_up(
        LOCK,
        f"+{more(near)} ({microseconds(near):.0f} µs); +{more(far)} ({microseconds(far):.0f} µs) with Redis 1 ms away",
        f"{times(near, RUN)} times as long as with celery-once; {times(far, RUN)} times",
    )
    findings.sum_up(
        A_JOB,
        f"+{more(near, JOB)}; +{more(far, JOB)} with Redis 1 ms away",
        f"{times(near, JOB)} times as long as with celery-once; {times(far, JOB)} times",
    )


def _tell(findings: Findings, measured: Mapping[str, Mapping[str, Rounds]]) -> None:
    table = Table(
        title="drain: publish and drain together, relative to Celery's own base",
        title_justify="left",
        caption="Each column's head names the worker's pool, and the time that is added to a round trip.",
        caption_justify="left",
    )
    table.add_column("task")
    for setting in measured:
        table.add_column(setting, justify="right")
    for kind in KINDS:
        table.add_row(kind, *(f"{of[kind].ratio(of[BASELINE]).median:.2f}" for of in measured.values()))
    findings.show(table)
    findings.say(
        "**The pool.** A `solo` worker does nothing else during the round trip for the lock, so a lock costs it a "
        "larger share of its time than it costs a prefork worker.\n\n"
        "**How it grows.** With a far server, all that matters is how often a process waits for it. In scope "
        "`run`, a publish does not ask the lock server, and a run waits for it once, to acquire its key; in scopes "
        "`job` and `queue`, a publish waits once more. Celery's own fetches, acks and publishes slow down in the "
        "same way, so the ratio changes little while the difference in time grows with the round trip.\n\n*The "
        "commands of a run alone* and *of a job alone* are tasks that send the commands of these scopes and do "
        "nothing else: they have no tokens of their own, no renewal, and nothing that frees the key if the process "
        "dies. No lock that asks at the start of a run can cost less. With the server a millisecond away, "
        "`LockedTask` costs about as much as they do.\n\ncelery-once and celery-singleton ask for the key at the "
        "publish and not when the task runs, so a second delivery of the message can run at the same time. A "
        "`LockedTask` also asks when it runs: with a near server a job costs more than theirs, with a far one about "
        "as much. Scope `run` asks for nothing at the publish."
    )


def _measure(setting: Setting) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
    """Publish and drain messages of each kind in turns; return what each of both took."""
    publishing: dict[str, list[float]] = {kind: [] for kind in KINDS}
    draining: dict[str, list[float]] = {kind: [] for kind in KINDS}
    # Without redis-py 8's own timeout: a busy machine may need longer.
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

    A `CLOCK` task is in the queue before them, and another one after them.
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
    """Make the worker check its queues again: it waits up to a second for a message in those that it knew."""
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
