"""Why: the reason that a task has not run: from what its workers, its result and the lock server tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_redislock.info import LockInfo
from celery_redislock.server.tokens import known_as
from celery_redislock.shown import shown

from .holders import held, silent
from .locks import Locks, scope_of
from .results import Result, result_of
from .scan import Row
from .table import counted, duration, in_line, moment
from .workers import Workers

if TYPE_CHECKING:
    from celery import Celery

#: What a key that holds the task's token tells of the task, by the state of that key.
_TELLS = {
    "held": "The task HOLDS a lock, and no worker that answers runs it: its worker is too busy to answer, or dead.",
    "queued": "The task has NOT STARTED: its message is in the broker's queue, on its way, or lost.",
    "cooling": "The task HAS RUN with success.",
}

_BUSY = "`celery inspect active` shows what keeps the processes busy."

#: Why a message waits in line though nobody holds its key, by what its worker lacks to run it.
_FREE = {
    "slot": f"Nobody holds it now, and the worker has no free process for it yet. {_BUSY}",
    "token": "Nobody holds it now, and the worker keeps the message back, by the task's rate_limit.",
    None: "Nobody holds it now: its turn should come within seconds. If not, look into its worker's log.",
}


class Said(NamedTuple):
    """A part of the answer."""

    text: str
    """For people."""
    told: Mapping[str, Any] | None = None
    """For programs: of the task, or of who holds its key, as `LockInfo.told`; None where there is nothing to add."""


class Seen(NamedTuple):
    """A worker that has a message of the task."""

    worker: str
    what: Mapping[str, Any]
    """As `celery_redislock.worker.inspect.redislock_task` answers."""


class Why:
    """Asks who can know about a task.

    Args:
        app: The app.
        locks: Its locks.
        workers: Its workers.
        task_id: The id of the task.

    Attributes:
        is_known: Whether anybody knew of the task.
    """

    def __init__(self, app: Celery, locks: Locks, workers: Workers, task_id: str) -> None:
        self._app = app
        self._locks = locks
        self._workers = workers
        self._id = task_id
        self._now = datetime.now(UTC)
        self.is_known = True

    def said(self) -> Iterator[Said]:
        """The answer, part by part; what is said of the task itself comes first.

        Raises:
            RedisError: The lock server did not answer or refused.
        """
        seen = self._seen()
        for one in seen:
            yield from self._in_worker(one)
        result = result_of(self._app, self._id)
        told = [*self._in_result(result)] if result.has_ended or not seen else []
        if not result.has_ended and not seen:
            told += self._in_redis()
        yield from told
        self.is_known = bool(told or seen)
        if not self.is_known:
            yield self._unknown(result)
        if self._workers.problem is not None:
            yield Said(f"The workers could not be asked: {self._workers.problem}.")

    def _about(self, state: str, *, scope: str | None = None, **known: Any) -> dict[str, Any]:
        """What programs are told of the task, as they are told who holds a lock."""
        nothing = dict.fromkeys(("key", "task", "hostname", "since", "ttl"))
        return LockInfo(**{**nothing, **known}, task_id=self._id, state=state).told(scope)

    # What the workers know.

    def _seen(self) -> list[Seen]:
        answers = self._workers.ask("redislock_task", {"task_id": self._id})
        self._answered = list(answers)
        return [Seen(worker, what) for worker, found in sorted(answers.items()) for what in found]

    def _in_worker(self, seen: Seen) -> Iterator[Said]:
        worker, what = seen
        task, lock = str(what["name"]), what["lock"]
        told = {"key": lock, "task": task, "hostname": worker, "scope": scope_of(self._app, task)}
        name, waited = f"Task {shown(task)}", what.get("waited", 0.0)
        match what["is"]:
            case "waiting":
                text = f"{name} WAITS in line for {shown(lock)}, in worker {worker}, for {duration(waited)} now."
                yield Said(text, self._about("waiting", **told, since=self._now - timedelta(seconds=waited)))
                yield from self._holders(lock, what.get("lacks"))
                yield Said(self._before(lock, what["place"]))
            case "running":
                yield from self._running(f"{name} RUNS in worker {worker}.", lock, told)
            case "dead":
                died = f"{name} RAN in worker {worker}, and its process HAS DIED:"
                text = f"{died} its result will be WorkerLostError, unless it comes again."
                yield Said(text, self._about("died", **told))
                again = "with retry_on_worker_lost, or with acks_late and reject_on_worker_lost"
                yield Said(f"Its worker releases its lock. It comes again {again}; else send it again.")
            case "reserved":
                text = f"{name} has NOT STARTED: worker {worker} has its message, and no free process for it yet."
                yield Said(text, self._about("reserved", **told))
                yield Said(f"It has not asked for its lock. {_BUSY}")
            case "scheduled":
                text = f"{name} is NOT DUE: worker {worker} keeps its message until its eta, {shown(str(what['eta']))}."
                yield Said(text, self._about("scheduled", **told))
            case _:
                text = f"{name} has NOT STARTED: worker {worker} keeps its message back, by the task's rate_limit."
                yield Said(text, self._about("limited", **told))

    def _holders(self, lock: str, lacks: str | None = None) -> Iterator[Said]:
        """Who holds `lock`; where nobody does, why the message waits, by what its worker `lacks`."""
        rows = [row for row in self._locks.of(lock) if row.place.part != "queued"]
        for row in rows:
            yield Said(f"{held(row, self._now)}.", self._locks.told(row))
        if not rows:
            yield Said(_FREE.get(lacks, _FREE[None]))
        if self._workers.problem is None:
            yield from map(Said, silent(rows, self._answered))

    def _before(self, lock: str, place: int) -> str:
        answers = self._workers.ask("redislock_waiting", {"key": lock}, to=self._answered)
        waiting = [one for found in answers.values() for one in found]
        before = sum(one["place"] < place for one in waiting)
        return f"Before it: {before}. In line: {in_line(len(waiting), len(answers))}."

    def _running(self, text: str, lock: str | None, told: Mapping[str, Any]) -> Iterator[Said]:
        """What is to be said of a task that runs, and of its lock."""
        mine = [row for row in self._locks.of(lock) if self._is_mine(row)] if lock is not None else []
        yield Said(text, self._locks.told(mine[0]) if mine else self._about("running", **told))
        if lock is None:
            yield Said("It needs no lock." if told["scope"] is None else "It has not asked for its lock.")
        elif not mine:
            why = "it begins or ends just now, lost its lock, or runs without it"
            yield Said(f"It does not hold {shown(lock)}: {why}.")
        for row in mine:
            yield Said(f"It holds {shown(row.place.key)} since {moment(row.token.since, self._now)}.")

    def _is_mine(self, row: Row) -> bool:
        attempt = row.token.attempt
        return attempt is not None and attempt.task_id == known_as(self._id)

    # What the result backend knows.

    def _in_result(self, result: Result) -> Iterator[Said]:
        told = result.told(self._now)
        if told is None:
            return
        state, text = told
        yield Said(f"Task {shown(self._id)} {text}", self._about(state, key=result.key, since=result.since))
        if state == "waiting" and result.key is not None:
            yield from self._holders(result.key)

    # What the lock server knows.

    def _in_redis(self) -> Iterator[Said]:
        for row in self._locks.all():
            if self._is_mine(row):
                yield Said(_TELLS[row.info.state], self._locks.told(row))
                yield Said(f"{held(row, self._now)}.")

    def _unknown(self, result: Result) -> Said:
        workers = counted(len(self._answered), "worker")
        return Said(
            "It holds no lock, waits in no worker, and has no result.\n"
            f"Asked: {workers}, the lock server {self._locks.where}, the result backend. {result.unasked}".rstrip()
            + "\nIt may be in the broker's queue, have ended without a stored result, have died with its worker, or"
            " never have been sent.\nLook for its id in the log of the workers, and at the length of its queue.",
            self._about("unknown"),
        )
