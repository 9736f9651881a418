"""Why: works out why a task has not run, from its workers, its result and the lock server."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Celery, states
from celery.exceptions import Retry
from kombu.exceptions import EncodeError, OperationalError

from celery_redislock.app import PRIVATE_BACKENDS, backend_scheme
from celery_redislock.errors import LockConflict, LockInfo, RedisLockError, describe, shown
from celery_redislock.policy.join import joined_of, moment_of
from celery_redislock.policy.replace import Replaced
from celery_redislock.policy.skip import Skipped, is_skipped
from celery_redislock.policy.wait import LONGEST_PAUSE_WHILE_FULL
from celery_redislock.protocol.tokens import RUNNING, known_as

from .console import Nothing
from .locks import Locks, plan_of, scope_of, silent
from .rows import Row, with_one_spent
from .sentences import Say, counted, duration, moment
from .workers import Workers, groups_of, patiently, redelivery

#: What a key with the task's token says about the task, by the key's state.
_TELLS = dict.fromkeys(RUNNING, Say.HOLDS_SOMEWHERE)
_TELLS |= {"queued": Say.QUEUED, "sending": Say.SENDING, "cooling": Say.COOLS}
#: What to say about a message that neither waits nor runs, by what its worker does with it.
_IN_WORKER = {one.name.lower(): one for one in (Say.CALLED, Say.RESERVED, Say.SCHEDULED, Say.ASLEEP, Say.LIMITED)}
#: Why a message waits in line although its key is free, by what its worker lacks to run it.
_LACKS = {"slot": Say.NO_PROCESS, "rate": Say.NO_RATE, "server": Say.NO_SERVER}
#: Celery's functions that store a result or pass it to linked tasks: in a traceback, they show that the body had ended.
_STORES = ("mark_as_done", "_dispatch_callbacks_and_chain")


def _now() -> datetime:
    return datetime.now(UTC)


class Said(NamedTuple):
    """One part of the answer."""

    text: str
    """For people."""
    about: Mapping[str, Any] | None = None
    """For programs: the task or the holder of its key, in `LockInfo.to_json` form; None if there is nothing to add."""


class Result(NamedTuple):
    """What the result backend knows about a task."""

    status: str = states.PENDING
    """The task's state in Celery."""
    value: Any = None
    since: datetime | None = None
    """When the task ended; None if unknown."""
    traceback: str = ""
    joined: str | None = None
    """The id of the joined task, whose outcome this task has; None if it joined none."""
    unasked: str = ""
    """Why the backend could not be asked, as a sentence; empty if it was asked."""

    @classmethod
    def of(cls, app: Celery, task_id: str) -> Self:
        """Ask the result backend of `app` about the task `task_id`."""
        scheme = backend_scheme(app)
        if scheme in PRIVATE_BACKENDS:
            return cls(unasked=Say.NO_BACKEND(scheme=scheme))
        try:
            meta: Mapping[str, Any] = patiently(lambda: app.backend.get_task_meta(task_id, cache=False))
        except Exception as error:  # noqa: BLE001 - errors from the backend's library
            return cls(unasked=Say.BACKEND_AWAY(error=describe(error)))
        since, traceback = moment_of(meta.get("date_done")), str(meta.get("traceback") or "")
        return cls(str(meta["status"]), meta.get("result"), since, traceback, joined_of(meta.get("children")))

    @property
    def has_ended(self) -> bool:
        """Whether the task's state is final."""
        return self.status in states.READY_STATES

    @property
    def is_waiting(self) -> bool:
        """Whether the task was waiting for its lock when its result was last stored."""
        # If the body met a conflict on another lock and retried the task itself, the result has a traceback.
        return self.status == states.RETRY and isinstance(self.value, LockConflict) and not self.traceback

    @property
    def key(self) -> str | None:
        """The key that the task waits for, or failed to get."""
        return self.value.key if isinstance(self.value, LockConflict) else None

    def described(self) -> tuple[str, Say]:
        """The state as one word for programs, and the sentence for people."""
        match self.status, self.value:
            case ((states.SUCCESS | states.FAILURE), _) if self.joined is not None:
                return "joined", Say.JOINED
            case states.SUCCESS, _:
                return "done", Say.DONE
            case states.REVOKED, _:
                if Skipped.SUPERSEDED.is_told_by(self.reason):
                    return "superseded", Say.SUPERSEDED
                if Replaced.STOPPED.is_told_by(self.reason):
                    return "replaced", Say.REPLACED
                return ("skipped", Say.SKIPPED) if is_skipped(self.reason) else ("revoked", Say.REVOKED)
            case states.FAILURE, RedisLockError():
                return "failed", Say.REFUSED
            case states.FAILURE, WorkerLostError() | TimeLimitExceeded() | Terminated():
                return "failed", Say.CUT_SHORT
            case states.FAILURE, EncodeError() | OperationalError() if any(one in self.traceback for one in _STORES):
                return "failed", Say.NOT_STORED
            case states.FAILURE, _:
                return "failed", Say.FAILED
            case states.RETRY, Retry() if not self.traceback:  # Celery cancelled the run; `self.retry()` stores one
                return "retry", Say.CANCELLED
            case states.RETRY, _:
                return ("waiting", Say.HAD_TO_WAIT) if self.is_waiting else ("retry", Say.RETRIES)
            case states.STARTED, _:
                return "started", Say.STARTED
        return self.status.lower(), Say.STATUS

    @property
    def reason(self) -> str:
        """Why the task was revoked, or did not get its lock. The text of the task's own error is not shown."""
        if isinstance(self.value, RedisLockError):
            return str(self.value)
        is_revoked = self.status == states.REVOKED and isinstance(self.value, Exception) and self.value.args
        return (str(self.value.args[0]) if is_revoked else "") or "no reason is known"


class Why:
    """Asks the workers, the result backend and the lock server about a task.

    Args:
        locks: The locks of the app.
        workers: Its workers.
        task_id: The id of the task.
    """

    def __init__(self, locks: Locks, workers: Workers, task_id: str) -> None:
        self._locks, self._workers, self._id = locks, workers, task_id

    def said(self) -> Iterator[Said]:
        """The answer, part by part, beginning with the task itself.

        Raises:
            RedisError: The lock server did not answer, or refused the command.
            Nothing: At the end, if neither a worker nor the result backend nor the lock server knows the task.
        """
        answers = self._workers.ask("redislock_task", {"task_id": self._id})
        self._answered = list(answers)
        result = Result.of(self._locks.app, self._id)
        seen = [(worker, what) for worker, found in sorted(answers.items()) for what in found]
        for worker, what in seen:
            yield from self._in_worker(worker, what, result)
        for lock in {what["lock"] or what.get("reserved") for _, what in seen} - {None}:
            yield from map(self._row, (row for row in self._locks.of(lock) if row.calls and self._is_mine(row)))
        # Celery 5.7 stores a revoke at once, even if the task runs in a worker that does not answer.
        all_rows = () if seen or (result.has_ended and result.reason != "revoked") else self._locks.all()
        rows = [one for one in all_rows if self._is_mine(one) and (one.state in RUNNING or not result.has_ended)]
        is_stale = bool(seen) or (result.is_waiting and any(row.state in RUNNING for row in rows))
        found = [*(self._in_result(result) if result.has_ended or not is_stale else ()), *self._in_redis(rows)]
        yield from found
        is_known = bool(found or seen)
        if not is_known:
            yield self._unknown(result)
        if self._workers.problem is not None:
            yield Said(Say.WORKERS_AWAY(error=self._workers.problem))
        if not is_known:
            shortened = "; an id that ends in … is shortened" if "…" in self._id else ""
            raise Nothing(f"The task {shown(self._id)} is unknown{shortened}.")

    def _about(self, state: str, **known: Any) -> dict[str, Any]:
        """What programs get about the task, in the form used for the holder of a lock."""
        scope = scope_of(self._locks.app, known.get("task"))
        nothing = dict.fromkeys(("key", "task", "hostname", "since", "ttl"))
        return LockInfo(**{**nothing, **known}, task_id=self._id, state=state).to_json(scope)

    def _row(self, row: Row) -> Said:
        """Who holds a key, or for whom it is kept."""
        return Said(self._locks.held(row, _now()), self._locks.to_json(row))

    def _is_mine(self, row: Row) -> bool:
        attempt = row.token.attempt
        return attempt is not None and attempt.task_id == known_as(self._id) and row.state != "spent"

    # What the workers know.

    def _in_worker(self, worker: str, what: Mapping[str, Any], result: Result) -> Iterator[Said]:
        """What a worker does with a message of the task, by its answer to `remote_control.redislock_task`."""
        lock, task = what["lock"], str(what["name"])
        about, named = {"key": lock, "task": task, "hostname": worker}, {"task": task, "worker": worker}
        match what["is"]:
            case "waiting":
                waited = what["waited"]
                since = _now() - timedelta(seconds=waited)
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
                text = _IN_WORKER[state](lock=lock, eta=what.get("eta"), **named)
                yield Said(text, self._about(state, **about))
                if state == "scheduled" and plan_of(self._locks.app, task):
                    self._locks.of(f"{self._locks.prefix}}}")  # any key: in an outage, messages are sent back for later
        if lock is not None and what.get("reserved") not in {None, lock}:
            yield Said(Say.OTHER_KEY(reserved=what["reserved"], lock=lock))

    def _waiting(self, what: Mapping[str, Any]) -> Iterator[Said]:
        """Say who holds a waiting message's key, why it waits if the key is free, and how many are ahead of it."""
        lock, answers = what["lock"], self._workers.ask("redislock_waiting", {"key": what["lock"]}, to=self._answered)
        line = [one["rank"] for found in answers.values() for one in found]
        before = sum(rank < what["rank"] for rank in line)
        holders = yield from self._holders(lock, what["limit"])
        # A worker that did not answer this time may have an earlier message.
        if holders < what["limit"] and (what["lacks"] in _LACKS or len(answers) == len(self._answered)):
            yield Said(self._why_not(what, lock if not holders else f"A permit of {lock}", before))
        if line:
            ahead = f"{counted(before, 'message')} {'is' if before == 1 else 'are'}" if before else "No message is"
            workers, messages = counted(len(answers), "worker"), counted(len(line), "message")
            yield Said(Say.AHEAD(before=ahead, messages=messages, workers=workers))
        if group := what.get("group"):
            groups = groups_of(one for found in answers.values() for one in found)
            own, others = counted(groups[group], "message"), counted(len(groups.keys() - {group}), "other group")
            yield Said(Say.TURN(group=group, messages=own, others=others, rank=what["rank"]))

    def _why_not(self, what: Mapping[str, Any], free: str, before: int) -> str:
        """Why a message waits although its key is free."""
        if what["lacks"] in _LACKS:
            return _LACKS[what["lacks"]](free=free)
        if what["server"] != self._locks.server:
            return Say.ELSEWHERE(free=free, here=self._locks.server, there=what["server"])
        return (Say.FREE if before else Say.NEXT)(free=free)

    def _holders(self, lock: str, limit: int = 0) -> Generator[Said, None, int]:
        """Say who holds `lock`, or for whom it is kept. Return the number of holders.

        With a rate, nothing is said while fewer than `limit` permits are spent.
        """
        rows = [row for row in self._locks.of(lock) if row.part.kind != "queued"]
        is_used_up = len(rows) >= limit
        yield from map(self._row, (row for row in with_one_spent(rows) if is_used_up or row.state != "spent"))
        if self._workers.problem is None:
            yield from map(Said, silent(rows, self._answered))
        return len(rows)

    def _running(self, what: Mapping[str, Any], about: Mapping[str, Any], named: Mapping[str, str]) -> Iterator[Said]:
        """What to say about a running task and its lock."""
        lock, since = what["lock"], what["since"] and datetime.fromtimestamp(what["since"], UTC)
        rows = self._locks.of(lock) if lock is not None else []
        mine = [row for row in rows if self._is_mine(row)]
        text = Say.RUNS(since=moment(since, _now()), **named)
        yield Said(text, self._locks.to_json(mine[0]) if mine else self._about("running", **about, since=since))
        if lock is None:
            yield Said((Say.NOT_ASKED if what["needs_lock"] else Say.NEEDS_NONE)())
        elif not mine:
            yield Said(Say.HOLDS_NOTHING(lock=lock))
            yield from map(self._row, rows)
        for row in mine:
            yield Said(Say.HOLDS(lock=row.part.key, since=moment(row.token.since, _now())))
            if row.token.asked_by:
                yield Said(Say.STOPPING(newer=row.token.asked_by))

    # What the result backend knows.

    def _in_result(self, result: Result) -> Iterator[Said]:
        if result.status == states.PENDING:
            return
        state, say = result.described()
        at = f" at {moment(result.since, _now())}" if result.since else ""
        error = "" if result.value is None else type(result.value).__name__
        known: dict[str, Any] = {"id": self._id, "at": at, "error": error, "after": f" after {error}" if error else ""}
        known |= {"status": result.status, "reason": result.reason, "other": result.joined, "conflict": result.value}
        text = say(**known, pause=duration(LONGEST_PAUSE_WHILE_FULL), again=redelivery(self._locks.app))
        yield Said(text, self._about(state, key=result.key, since=result.since))
        if result.status in {states.FAILURE, states.REVOKED} and result.joined is None:
            yield Said(Say.CHAIN())  # Celery stores the result of an earlier task for all later tasks of a chain
        if result.is_waiting and result.key is not None:
            yield from self._holders(result.key)

    # What the lock server knows.

    def _in_redis(self, rows: Sequence[Row]) -> Iterator[Said]:
        for row in rows:
            attempt, state = row.token.attempt, row.info.state
            is_next = state == "queued" and attempt is not None and (attempt.retries or attempt.replaced)
            say = Say.NEXT_ATTEMPT if is_next else _TELLS[state]
            yield Said(say(again=redelivery(self._locks.app)), self._locks.to_json(row))
            yield Said(self._locks.held(row, _now()))
        if self._workers.problem is None and any(row.state in RUNNING for row in rows):
            yield from map(Said, silent(rows, self._answered))

    def _unknown(self, result: Result) -> Said:
        asked = [f"the lock server {self._locks.where}"]
        if self._workers.problem is None:
            asked.insert(0, counted(len(self._answered), "worker"))
        if not result.unasked:
            asked.append("the result backend")
        return Said(Say.UNKNOWN(asked=", ".join(asked), unasked=result.unasked), self._about("unknown"))
