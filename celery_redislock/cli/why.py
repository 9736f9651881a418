"""Why: the reason that a task has not run, in words: from what its workers, its result and the lock server tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states

from celery_redislock.errors import LockConflict, RedisLockError, describe
from celery_redislock.server.tokens import known_as
from celery_redislock.shown import shown
from celery_redislock.task.outcome import PRIVATE_BACKENDS, backend_scheme

from .locks import Locks
from .scan import Row
from .table import duration, moment
from .workers import Workers

if TYPE_CHECKING:
    from celery import Celery


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

    def lines(self) -> Iterator[str]:
        """The answer.

        Raises:
            RedisError: The lock server did not answer or refused.
        """
        seen = self._seen()
        for one in seen:
            yield from self._in_worker(one)
        meta = self._meta()
        has_ended = meta["status"] in states.READY_STATES
        told = [*self._result(meta)] if has_ended or not seen else []
        if not has_ended and not seen:
            told += self._in_redis()
        yield from told
        self.is_known = bool(told or seen)
        if not self.is_known:
            yield from self._unknown()
        if self._workers.problem is not None:
            yield f"The workers could not be asked: {self._workers.problem}."

    # What the workers know.

    def _seen(self) -> list[Seen]:
        answers = self._workers.ask("redislock_task", {"task_id": self._id})
        self._answered = list(answers)
        return [Seen(worker, what) for worker, found in sorted(answers.items()) for what in found]

    def _in_worker(self, seen: Seen) -> Iterator[str]:
        worker, what = seen
        name, lock = f"Task {shown(str(what['name']))}", what["lock"]
        match what["is"]:
            case "waiting":
                yield f"{name} WAITS in line for {shown(lock)}, in worker {worker}, for {duration(what['waited'])} now."
                yield from self._holders(lock)
                yield self._before(lock, what["place"])
            case "running":
                yield f"{name} RUNS in worker {worker}."
                yield from self._own(lock)
            case "reserved":
                yield f"{name} has NOT STARTED: worker {worker} has its message, and no free process for it yet."
                yield "It has not asked for its lock. `celery inspect active` shows what keeps the processes busy."
            case "scheduled":
                yield f"{name} is NOT DUE: worker {worker} keeps its message until its eta, {shown(str(what['eta']))}."
            case _:
                yield f"{name} has NOT STARTED: worker {worker} keeps its message back, by the task's rate_limit."

    def _holders(self, lock: str) -> Iterator[str]:
        rows = [row for row in self._locks.of(lock) if row.place.part != "queued"]
        for row in rows:
            yield f"{held(row, self._now)}."
        if not rows:
            yield "Nobody holds it now: its turn should come within seconds. If not, look into its worker's log."

    def _before(self, lock: str, place: int) -> str:
        answers = self._workers.ask("redislock_waiting", {"key": lock}, to=self._answered)
        waiting = [one for found in answers.values() for one in found]
        before = sum(one["place"] < place for one in waiting)
        return f"Before it: {before}; in all {len(waiting)} wait for this lock, in {len(answers)} workers that answer."

    def _own(self, lock: str | None) -> Iterator[str]:
        """What is to be said of the lock of a task that runs."""
        if lock is None:
            yield "It needs no lock."
            return
        mine = [row for row in self._locks.of(lock) if self._is_mine(row)]
        if not mine:
            yield f"It does not hold {shown(lock)}: it begins or ends just now, lost its lock, or runs without it."
        for row in mine:
            yield f"It holds {shown(row.place.key)} since {moment(row.token.since, self._now)}."

    def _is_mine(self, row: Row) -> bool:
        attempt = row.token.attempt
        return attempt is not None and attempt.task_id == known_as(self._id)

    # What the result backend knows.

    def _meta(self) -> Mapping[str, Any]:
        unknown = {"status": states.PENDING, "result": None}
        scheme = backend_scheme(self._app)
        if scheme in PRIVATE_BACKENDS:
            self._no_results = f"The app has no result backend that could be asked ({scheme})."
            return unknown
        self._no_results = ""
        try:
            meta: Mapping[str, Any] = self._app.backend.get_task_meta(self._id, cache=False)
        except Exception as error:  # noqa: BLE001 - each backend has its own
            self._no_results = f"The result backend could not be asked: {describe(error)}."
            return unknown
        return meta

    def _result(self, meta: Mapping[str, Any]) -> Iterator[str]:
        """What the result says. A result's value, and the text of an error of the task's own, are not shown."""
        state, result, name = str(meta["status"]), meta.get("result"), f"Task {shown(self._id)}"
        done = f" at {meta['date_done']}" if meta.get("date_done") else ""
        match state:
            case states.SUCCESS:
                yield f"{name} HAS RUN: its result is SUCCESS{done}."
            case states.REVOKED:
                yield f"{name} WAS {_revoked(result, done)}."
            case states.FAILURE if isinstance(result, RedisLockError):
                yield f"{name} FAILED{done}: {shown(str(result))}."
            case states.FAILURE:
                yield f"{name} HAS RUN: its result is FAILURE{done}, by {type(result).__name__}; the body's own error."
            case states.RETRY if isinstance(result, LockConflict):
                yield f"{name} WAITS: {shown(str(result))}. That was so when it met its key."
                yield "No worker that answers keeps it: it comes from the broker within 30 s, or its worker is silent."
                yield from self._holders(result.key)
            case states.RETRY:
                yield f"{name} HAS RUN, and is to run again: `self.retry()`, by {type(result).__name__}."
            case states.STARTED:
                yield f"{name} STARTED, and no worker that answers runs it: its worker is too busy to answer, or dead."
            case states.PENDING:
                return
            case _:
                yield f"{name} has the state {shown(state)}{done}."

    # What the lock server knows.

    def _in_redis(self) -> Iterator[str]:
        for row in self._locks.all():
            if self._is_mine(row):
                yield _TELLS[row.info.state]
                yield f"{held(row, self._now)}."

    def _unknown(self) -> Iterator[str]:
        yield "It holds no lock, waits in no worker, and has no result."
        yield f"Asked: {len(self._answered)} workers, the lock server, the result backend. {self._no_results}".rstrip()
        yield "It may be in the broker's queue, have ended without a stored result, or never have been sent."
        yield "Look for its id in the log of the workers, and at the length of its queue."


_TELLS = {
    "held": "The task HOLDS a lock, and no worker that answers runs it: its worker is too busy to answer, or dead.",
    "queued": "The task has NOT STARTED: its message is in the broker's queue, on its way, or lost.",
    "cooling": "The task HAS RUN with success.",
}


def held(row: Row, now: datetime) -> str:
    """Who holds a key, since when and until when, in words."""
    key, info = shown(row.place.key), row.info
    if info.state != "held":
        return f"{key} is kept for {info.who}, since {moment(info.since, now)}, for {duration(row.ttl or 0.0)} yet"
    ends = "it never ends by itself" if row.ttl is None else f"it ends in {duration(row.ttl)} unless it is renewed"
    if info.since is None:
        return f"{key} is held by a lock of another library, or of a `Lock` with a token of its own; {ends}"
    return f"{key} is held by {info.who}, since {moment(info.since, now)}; {ends}"


def _revoked(result: Any, done: str) -> str:
    """Why a task was revoked: by a policy of its lock; or it has expired, or somebody has revoked it."""
    reason = shown(str(result.args[0])) if isinstance(result, Exception) and result.args else ""
    if reason.startswith(("duplicate of", "cooling down after")):
        return f"SKIPPED{done}: {reason} (lock_on_conflict is skip)"
    return f"REVOKED{done}: {reason or 'nobody has said why'}"
