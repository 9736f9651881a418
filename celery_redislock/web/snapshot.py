"""Snapshot: the locks and messages of one moment, from which the pages are rendered.

One thread takes them, only while someone looks, so any number of viewers cost Redis and the workers what one costs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from celery import Celery
from redis.exceptions import RedisError

from celery_redislock.cli.console import unreachable
from celery_redislock.cli.locks import Locks, silent
from celery_redislock.cli.rows import ORDERS, Row, Total, totals
from celery_redislock.cli.workers import Counts, Workers
from celery_redislock.errors import describe

logger = logging.getLogger(__name__)

#: Minimum seconds between the starts of two snapshots. If one takes long, the servers rest for a quarter of that time.
EVERY = 2.0
#: Seconds that the first viewer waits for a snapshot.
PATIENCE = 4.0
#: With more waiting messages than this, they are only counted: to list them takes the workers about 5 us each.
MOST_LISTED = 5000
NOTHING = Total()
#: How many answers `Asked` keeps.
MOST_ASKED = 100


class Waiter(NamedTuple):
    """A message that waits in line."""

    place: int
    """Its place in the line of its key, in the workers that answered; 1 is next."""
    task_id: str
    task: str
    key: str
    worker: str
    since: datetime
    group: str

    @property
    def text(self) -> str:
        """What a search looks at."""
        return "\n".join((self.key, self.task_id, self.task, self.worker)).lower()


class Line(NamedTuple):
    """A key and what a search looks at."""

    row: Row
    text: str

    @classmethod
    def of(cls, row: Row) -> Line:
        """Make one from the row of a key."""
        info = row.info
        return cls(row, "\n".join((info.key, info.task_id or "", info.task or "", info.hostname or "")).lower())


@dataclass(frozen=True)
class Snapshot:
    """What was seen.

    Attributes:
        number: Counts the attempts to take one; a failed one repeats the last snapshot, with its `problem`.
        at: When it was begun; None before the first one.
        lines: The keys, the oldest first.
        locks: The same keys by their lock.
        waiting: The messages in line, key by key; empty if there are more than `MOST_LISTED`.
        counts: What the workers count.
        total: The sums over all tasks.
        problem: Why the last attempt failed, as a sentence.
        living: The ids of the tasks that have a key or wait for one.
        silent: A sentence for each worker that does not answer although a run of it holds a key.
    """

    number: int = 0
    at: datetime | None = None
    lines: Sequence[Line] = ()
    locks: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    waiting: Sequence[Waiter] = ()
    counts: Counts = field(default_factory=Counts)
    total: Total = NOTHING
    problem: str | None = None
    living: Set[str] = frozenset()
    silent: Sequence[str] = ()
    _sorted: dict[str, Sequence[Line]] = field(default_factory=dict)

    def sorted_by(self, order: str) -> Sequence[Line]:
        """The keys in one of the `ORDERS`. They are sorted once for all viewers."""
        if order == "age":
            return self.lines
        if order not in self._sorted:
            self._sorted[order] = sorted(self.lines, key=lambda line: ORDERS[order](line.row))
        return self._sorted[order]

    @property
    def age(self) -> float:
        """How old it is, in seconds."""
        return (datetime.now(UTC) - self.at).total_seconds() if self.at else 0.0


class Snapshots:
    """Takes snapshots while someone looks.

    Args:
        app: The app, with its tasks loaded.
        timeout: Seconds to wait for the workers' answers.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app, self._locks, self._workers = app, Locks(app), Workers(app, timeout)
        self._latest, self._ended_at, self._is_taking = Snapshot(), float("-inf"), False
        self._wanted, self._over, self._changed = threading.Event(), threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="redislock-snapshots", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the snapshot that it is taking."""
        self._over.set()
        self._wanted.set()

    def latest(self) -> Snapshot:
        """The latest one. Someone looks, so another one is taken."""
        self._wanted.set()
        return self._latest

    def fresh(self) -> Snapshot:
        """The latest one; if no one has looked for a while, a new one, if it comes in time."""
        with self._changed:
            latest = self.latest()
            is_old = time.monotonic() - self._ended_at > 2 * EVERY
            if (is_old and not self._is_taking) or not latest.number:
                self._changed.wait_for(lambda: self._latest is not latest, PATIENCE)
            return self._latest

    def _run(self) -> None:
        while self._wanted.wait() and not self._over.is_set():
            self._wanted.clear()
            self._is_taking, began = True, time.monotonic()
            try:
                latest = self._take()
            except RedisError as error:
                latest = replace(self._latest, problem=unreachable(self._app, error))
            except Exception as error:  # the page goes on
                logger.exception("the web page could not look at the locks")
                latest = replace(self._latest, problem=describe(error))
            with self._changed:
                self._latest = replace(latest, number=self._latest.number + 1)
                self._is_taking, self._ended_at = False, time.monotonic()
                self._changed.notify_all()
            took = self._ended_at - began
            self._over.wait(max(EVERY - took, took / 4))

    def _take(self) -> Snapshot:
        at = datetime.now(UTC)
        counts = self._locks.counts = Counts(self._workers)
        rows = sorted(self._locks.all(), key=ORDERS["age"])
        lines, locks = [Line.of(row) for row in rows], defaultdict[str, list[Row]](list)
        for row in rows:
            locks[row.part.lock].append(row)
        waiting = [*self._line(counts)]
        holders = (row.token.attempt for row in rows)
        living = {one.task_id for one in holders if one} | {one.task_id for one in waiting}
        # A worker that did not answer may have died meanwhile; without any answer, the broker is the problem.
        missing = () if counts.unasked else silent(rows, counts.conflicts)
        total = sum(totals(rows).values(), NOTHING)
        return Snapshot(0, at, lines, dict(locks), waiting, counts, total, None, living, missing)

    def _line(self, counts: Counts) -> Iterator[Waiter]:
        """The waiting messages, by key and in their order."""
        listed = sum(waits.number for tasks in counts.locks.values() for waits in tasks.values())
        inside = {worker for workers in counts.inside.values() for worker in workers}
        if inside and listed <= MOST_LISTED:
            yield from waiters(self._workers.ask("redislock_waiting", to=sorted(inside)))


def waiters(answers: dict[str, Any]) -> Iterator[Waiter]:
    """The messages of the workers' answers to ``redislock_waiting``, by key and in their order."""
    now, key, place = datetime.now(UTC), None, 0
    found = [(str(one["lock"]), one["rank"], worker, one) for worker, told in answers.items() for one in told]
    for lock, _, worker, one in sorted(found, key=lambda one: one[:3]):
        key, place = lock, place + 1 if lock == key else 1
        since = now - timedelta(seconds=one["waited"])
        yield Waiter(place, str(one["id"]), str(one["name"]), lock, worker, since, str(one.get("group") or ""))


class Asked:
    """What no snapshot has is asked for, one question at a time, and kept for `EVERY` seconds for the next viewer."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[float, Any]] = {}
        self._asking = threading.Lock()

    def __call__(self, question: Hashable, ask: Callable[[], Any]) -> Any:
        """The answer to `question`, at most `EVERY` seconds old, or what `ask` returns."""
        with self._asking:
            at, answer = self._answers.get(question, (float("-inf"), None))
            if time.monotonic() - at > EVERY:
                answer = ask()
                self._answers.pop(question, None)
                self._answers[question] = time.monotonic(), answer
                while len(self._answers) > MOST_ASKED:
                    self._answers.pop(next(iter(self._answers)))
            return answer
