"""Why: works out why a task has not run, from its workers, its result and the lock server."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from celery import Celery

from celery_redislock.info import LockInfo
from celery_redislock.protocol.tokens import known_as

from .console import counted, duration, moment
from .locks import Locks, scope_of
from .results import Result, result_of
from .scan import Row
from .sentences import Say, silent
from .workers import Workers

#: What a key with the task's token says about the task, by the key's state.
_TELLS = {"held": Say.HOLDS_SOMEWHERE, "queued": Say.QUEUED, "cooling": Say.COOLS}

#: What to say about a message that neither waits nor runs, by what its worker does with it.
_IN_WORKER = {"called": Say.CALLED, "reserved": Say.RESERVED, "scheduled": Say.SCHEDULED, "limited": Say.LIMITED}

#: Why a message waits in line although its key is free, by what its worker lacks to run it.
_LACKS = {"slot": Say.NO_PROCESS, "rate": Say.NO_RATE, "server": Say.NO_SERVER}


class Said(NamedTuple):
    """One part of the answer."""

    text: str
    """For people."""
    about: Mapping[str, Any] | None = None
    """For programs: the task or the holder of its key, in `LockInfo.to_json` form; None if there is nothing to add."""


class Seen(NamedTuple):
    """A worker that has a message of the task."""

    worker: str
    what: Mapping[str, Any]
    """One answer of `celery_redislock.worker.remote_control.redislock_task`."""


class Why:
    """Asks the workers, the result backend and the lock server about a task.

    Args:
        app: The app.
        locks: Its locks.
        workers: Its workers.
        task_id: The id of the task.

    Attributes:
        is_known: Whether a worker, the result backend or the lock server knew the task.
    """

    def __init__(self, app: Celery, locks: Locks, workers: Workers, task_id: str) -> None:
        self._app = app
        self._locks = locks
        self._workers = workers
        self._id = task_id
        self.is_known = True

    def said(self) -> Iterator[Said]:
        """The answer, part by part, beginning with the task itself.

        Raises:
            RedisError: The lock server did not answer, or refused the command.
        """
        seen, result = self._seen(), result_of(self._app, self._id)
        for one in seen:
            yield from self._in_worker(one, result)
        found: list[Said] = []
        if result.has_ended:
            found = [*self._in_result(result)]
        elif not seen:
            rows = [row for row in self._locks.all() if self._is_mine(row)]
            if not (result.is_waiting and any(row.info.state == "held" for row in rows)):  # otherwise it is stale
                found = [*self._in_result(result)]
            found += self._in_redis(rows, result)
        yield from found
        self.is_known = bool(found or seen)
        if not self.is_known:
            yield self._unknown(result)
        if self._workers.problem is not None:
            yield Said(Say.WORKERS_AWAY(error=self._workers.problem))

    @property
    def _now(self) -> datetime:
        return datetime.now(UTC)

    def _about(self, state: str, **known: Any) -> dict[str, Any]:
        """What programs are told about the task, in the form used for the holder of a lock."""
        scope = scope_of(self._app, known.get("task"))
        nothing = dict.fromkeys(("key", "task", "hostname", "since", "ttl"))
        return LockInfo(**{**nothing, **known}, task_id=self._id, state=state).to_json(scope)

    # What the workers know.

    def _seen(self) -> list[Seen]:
        answers = self._workers.ask("redislock_task", {"task_id": self._id})
        self._answered = list(answers)
        return [Seen(worker, what) for worker, found in sorted(answers.items()) for what in found]

    def _in_worker(self, seen: Seen, result: Result) -> Iterator[Said]:
        worker, what = seen
        lock = what["lock"]
        about = {"key": lock, "task": str(what["name"]), "hostname": worker}
        named = {"task": about["task"], "worker": worker}
        match what["is"]:
            case "waiting":
                waited = what["waited"]
                since = self._now - timedelta(seconds=waited)
                text = Say.WAITS(lock=lock, waited=duration(waited), **named)
                yield Said(text, self._about("waiting", **about, since=since))
                yield from self._waiting(what)
            case "running":
                yield from self._running(what, about, named)
            case "dead":
                yield Said(Say.DIED(**named), self._about("died", **about))
                if what["comes_again"] is not None and not result.has_ended:
                    yield Said((Say.COMES_AGAIN if what["comes_again"] else Say.COMES_NOT)())
            case state:
                text = _IN_WORKER[state](lock=lock, eta=what["eta"], **named)
                yield Said(text, self._about(state, **about))

    def _waiting(self, what: Mapping[str, Any]) -> Iterator[Said]:
        """Say who holds a waiting message's key, why it waits if the key is free, and how many are ahead of it."""
        lock, answers = what["lock"], self._workers.ask("redislock_waiting", {"key": what["lock"]}, to=self._answered)
        line = [one["rank"] for found in answers.values() for one in found]
        before = sum(rank < what["rank"] for rank in line)
        holders = yield from self._holders(lock)
        # A worker that did not answer this time may have an earlier message.
        if holders < what["limit"] and (what["lacks"] in _LACKS or len(answers) == len(self._answered)):
            yield Said(self._why_not(what, lock if not holders else f"A permit of {lock}", before))
        workers, messages = counted(len(answers), "worker"), counted(len(line), "message")
        if len(line) > 1:
            text = f"{counted(before, 'message')} {'is' if before == 1 else 'are'}"
            yield Said((Say.BEHIND if before else Say.FIRST)(before=text, messages=messages, workers=workers))
        elif line:
            yield Said(Say.ALONE(workers=workers))

    def _why_not(self, what: Mapping[str, Any], free: str, before: int) -> str:
        """Why a message waits although its key is free."""
        if what["lacks"] in _LACKS:
            return _LACKS[what["lacks"]](free=free)
        if what["server"] != self._locks.server:
            return Say.ELSEWHERE(free=free, here=self._locks.server, there=what["server"])
        return (Say.FREE if before else Say.NEXT)(free=free)

    def _holders(self, lock: str) -> Generator[Said, None, int]:
        """Say who holds `lock`, or for whom it is kept. Return the number of holders."""
        rows = [row for row in self._locks.of(lock) if row.part.kind != "queued"]
        for row in rows:
            yield Said(self._locks.held(row, self._now), self._locks.to_json(row))
        if self._workers.problem is None:
            yield from map(Said, silent(rows, self._answered))
        return len(rows)

    def _running(self, what: Mapping[str, Any], about: Mapping[str, Any], named: Mapping[str, str]) -> Iterator[Said]:
        """What to say about a running task and its lock."""
        lock, since = what["lock"], what["since"] and datetime.fromtimestamp(what["since"], UTC)
        rows = self._locks.of(lock) if lock is not None else []
        mine = [row for row in rows if self._is_mine(row)]
        text = Say.RUNS(since=moment(since, self._now), **named)
        yield Said(text, self._locks.to_json(mine[0]) if mine else self._about("running", **about, since=since))
        if lock is None:
            yield Said((Say.NOT_ASKED if what["needs_lock"] else Say.NEEDS_NONE)())
        elif not mine:
            yield Said(Say.HOLDS_NOTHING(lock=lock))
            yield from (Said(self._locks.held(row, self._now), self._locks.to_json(row)) for row in rows)
        for row in mine:
            yield Said(Say.HOLDS(lock=row.part.key, since=moment(row.token.since, self._now)))

    def _is_mine(self, row: Row) -> bool:
        attempt = row.token.attempt
        return attempt is not None and attempt.task_id == known_as(self._id)

    # What the result backend knows.

    def _in_result(self, result: Result) -> Iterator[Said]:
        described = result.described(self._now)
        if described is None:
            return
        state, text = described
        yield Said(text, self._about(state, key=result.key, since=result.since))
        if result.may_be_of_a_chain:
            yield Said(Say.CHAIN())
        if result.is_waiting and result.key is not None:
            yield from self._holders(result.key)

    # What the lock server knows.

    def _in_redis(self, rows: Sequence[Row], result: Result) -> Iterator[Said]:
        for row in rows:
            attempt, state = row.token.attempt, row.info.state
            is_next = state == "queued" and attempt is not None and (attempt.retries or attempt.replaced)
            say = Say.NEXT_ATTEMPT if is_next else _TELLS[state]
            yield Said(say(again=result.again), self._locks.to_json(row))
            yield Said(self._locks.held(row, self._now))
        if any(row.info.state == "held" for row in rows):
            yield from map(Said, silent(rows, self._answered))

    def _unknown(self, result: Result) -> Said:
        asked = [f"the lock server {self._locks.where}"]
        if self._workers.problem is None:
            asked.insert(0, counted(len(self._answered), "worker"))
        if not result.unasked:
            asked.append("the result backend")
        return Said(Say.UNKNOWN(asked=", ".join(asked), unasked=result.unasked), self._about("unknown"))
