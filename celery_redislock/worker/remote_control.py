"""Remote control: `celery inspect locks`, and the other questions that a worker answers about its locks.

The worker's event loop answers, so nothing here waits long for the lock server. `RunCounts` counts what no other module
knows: the runs that have ended without their bodies.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from celery.worker import state as worker
from celery.worker.control import control_command, inspect_command
from celery.worker.request import Request

from celery_redislock.app import server_of
from celery_redislock.connection.connect import address
from celery_redislock.errors import LockConflict, LockInfo, RedisLockError
from celery_redislock.line.room import Room
from celery_redislock.message.header import HEADER, Header
from celery_redislock.policy import Ended
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import info_of

from .children import Run, is_dead, run_of
from .lock_events import lock_events_of
from .waiting import waiting_room_of
from .waiting_message import WaitingMessage
from .worker_port import limited_requests, listed

logger = logging.getLogger(__name__)

#: Minimum seconds between two reminders of an outage.
REMIND_EVERY = 60.0
#: A run that is sent back more than this many seconds after those before it belongs to another outage.
OTHER_OUTAGE_AFTER = 600.0
#: Seconds that a worker waits for the lock server before it answers without it.
PATIENCE = 0.5


def connect() -> None:
    """Add the commands to Celery's workers and to its command line."""
    inspect_command()(locks)
    inspect_command(args=[("key", str)], signature="[key]")(redislock_waiting)
    inspect_command(args=[("task_id", str)], signature="<task id>")(redislock_task)
    inspect_command()(redislock_counts)
    control_command(args=[("key", str)], signature="<key>")(redislock_drop)


def locks(state: Any, **_: Any) -> list[dict[str, Any]]:
    """The locks that the runs of a worker hold, and the messages that wait in it for locks.

    What a run holds is looked up on the lock server, because a pool child takes and loses its lock on its own, and
    this process knows only the nonce of the run's token.

    Returns:
        The result of `LockInfo.to_json` for each. ``waiting`` counts the messages in this worker that wait for the key
        of a run. The state is ``unknown`` if the lock server did not answer, and ``waiting`` for a waiting message.
    """
    waiting = _waiting_in(state)
    counts = Counter(one.key for one in waiting)
    return [*_held(state.hostname, counts), *(_waits(one, state.hostname) for one in waiting)]


def redislock_waiting(state: Any, key: str | None = None, **_: Any) -> list[dict[str, Any]]:
    """The messages that wait in line in a worker, in the order of their ranks.

    Args:
        state: Celery's state of the worker.
        key: The key that they wait for; None for any.

    Returns:
        For each: its ``id``, the ``name`` of its task, its ``lock``, how long it has ``waited`` in seconds, and its
        ``rank``: when it was published, in microseconds since the epoch; or with `lock_fair`, the virtual time of its
        group's turn, and the ``group``.
    """
    return [one.to_json for one in _waiting_in(state) if key in {None, one.key}]


def redislock_task(state: Any, task_id: str, **_: Any) -> list[dict[str, Any]]:
    """What a worker does with the messages of a task.

    Returns:
        For each message: ``is``, one of ``waiting`` (in line), ``asleep`` (until its debounce is over), ``called`` (to
        its lock), ``running``, ``dead`` (its process has died), ``reserved`` (for the pool), ``scheduled`` (for its
        eta) and ``limited`` (by the rate limit); the ``name`` of the task; its ``lock``, or None if that is unknown;
        and the fields that `_described` or `_waiting` adds. A message on its way to the pool may be missing for a
        moment.
    """
    waiting = [_waiting(state, one) for one in _waiting_in(state) if str(one.request.id) == task_id]
    return waiting + [_described(what, one) for what, one in _requests(state.consumer) if str(one.id) == task_id]


def _waiting_in(state: Any) -> list[WaitingMessage]:
    room = waiting_room_of(state.app, state.hostname)
    return [] if room is None else room.waiting


def _waiting(state: Any, one: WaitingMessage) -> dict[str, Any]:
    """Describe a waiting message: its rank, what its worker lacks to run it, and the server of its lock."""
    room, server = waiting_room_of(state.app, state.hostname), server_of(state.app)
    return {
        "is": "asleep" if one.is_asleep else "waiting",
        "lacks": room and room.lacks(one),
        "limit": one.demand.capacity,
        "server": address(server.client),
        **one.to_json,
    }


def _described(what: str, request: Request) -> dict[str, Any]:
    """Describe a message that does not wait in line.

    Returns:
        What `redislock_task` shows. ``reserved`` is the lock that its publisher reserved for it; ``since`` is when
        its run began; ``comes_again`` is whether it would be delivered again, or its next attempt published, if its
        process died now.
    """
    run = run_of(request)
    keys = [hold.demand.key for hold in run.holds] if run is not None else []
    is_called = what == "reserved" and run is not None and run.call is not None
    return {
        "is": "called" if is_called else what,
        "name": request.task.name,
        "lock": keys[0] if keys else None,
        "locks": keys,
        "reserved": Header.read(request.request_dict.get(HEADER)).key,
        "needs_lock": run is not None,
        "since": request.time_start,
        "eta": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(request.eta.timestamp())) if request.eta else None,
        "comes_again": getattr(request, "comes_again_if_lost", None),
    }


def redislock_counts(state: Any, **_: Any) -> dict[str, Any]:
    """How many messages wait in a worker, and how many of its runs have found their key held.

    Returns:
        ``lines``: for each lock and task, the key, the task's name, how many wait, and when the first was published or
        began to wait, in microseconds since the epoch. A message that sleeps does not wait. ``rooms``: the names under
        which these messages are in line in Redis; the callers of a `Lock` in this process have another.
        ``conflicts``: the number of conflicts since the worker started. ``events``: whether it sends `LockEvents`.
    """
    room = waiting_room_of(state.app, state.hostname)
    rooms = [] if room is None else room.rooms
    return {
        "lines": lines_in(rooms),
        "rooms": [room.token.nonce for room in rooms],
        "conflicts": RUN_COUNTS.conflicts,
        "events": lock_events_of(state.app) is not None,
    }


def lines_in(rooms: Iterable[Room]) -> list[tuple[str, str, int, int]]:
    """The ``lines`` of `redislock_counts`."""
    found: dict[tuple[str, str], list[int]] = {}
    for waiter in (one for room in rooms for one in room.waiting() if not one.is_asleep):
        found.setdefault((waiter.key, waiter.group), []).append(waiter.published)
    return [(key, task, len(begins), min(begins)) for (key, task), begins in found.items()]


def redislock_drop(state: Any, key: str, spared: Sequence[str] = (), **_: Any) -> int:
    """End the messages that wait for `key`; see `WaitingRoom.drop`. Return how many there are."""
    room = waiting_room_of(state.app, state.hostname)
    return 0 if room is None else room.drop(key, spared)


def _requests(consumer: Any) -> Iterator[tuple[str, Request]]:
    """Yield the state and the request of each message in this worker that does not wait for a lock."""
    active = set(listed(worker.active_requests))
    for request in active:  # Celery may count the run of a dead child as active for another ten seconds
        yield "dead" if request.worker_pid and is_dead(request.worker_pid) else "running", request
    yield from (("reserved", request) for request in set(listed(worker.reserved_requests)) - active)
    for entry in list(consumer.timer.schedule.queue):
        request = next(iter(getattr(entry.entry, "args", None) or ()), None)
        if isinstance(request, Request):
            yield "scheduled", request
    yield from (("limited", request) for request in limited_requests(consumer))


def _waits(one: WaitingMessage, hostname: str) -> dict[str, Any]:
    task: Any = one.request.task
    info = LockInfo(one.key, str(one.request.id), task.name, hostname, one.began_at, None, "waiting")
    run = run_of(one.request)
    return info.to_json((task.lock_plan if run is None else run).options.scope)


def _held(hostname: str, waiting: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the locks of accepted runs, except runs that hold nothing according to the lock server."""
    given = [run_of(request) for request in listed(worker.active_requests)]
    runs = [(run, hold.demand) for run in given if run is not None for hold in run.holds]
    answers: dict[tuple[str, str], LockInfo | None] = {
        (run.nonce, demand.key): LockInfo(demand.key, run.task_id, run.plan.task, hostname, None, None, "unknown")
        for run, demand in runs
    }
    asks = threading.Thread(target=_ask, args=(runs, answers), name="redislock-inspect", daemon=True)
    asks.start()
    asks.join(PATIENCE)
    for run, demand in runs:
        answer = answers[run.nonce, demand.key]
        if answer is not None:
            yield answer.to_json(run.options.scope, waiting[demand.key])


def _ask(runs: Sequence[tuple[Run, Demand]], answers: dict[tuple[str, str], LockInfo | None]) -> None:
    """Look up the keys of `runs`, and store in `answers`, by nonce and key, what each run holds; None for nothing."""
    for run, demand in runs:
        try:
            found = server_of(run.plan.app).store.look(demand)
        except RedisLockError:
            return
        mine = [one for one in (found.holders if found else ()) if one.nonce == run.nonce and one.is_running]
        answers[run.nonce, demand.key] = info_of(mine[0], demand.key, found.ttl) if found and mine else None


class RunCounts:
    """Counts the runs that a conflict has ended, and those that this worker's children send back in an outage.

    Each child logs only when an outage begins and ends. Counting a run logs a reminder if one is due, so this needs no
    thread: as long as no runs are sent back, no reminder is due.

    Attributes:
        conflicts: How many runs a conflict has ended since the worker started. A message that waits twice counts twice.
    """

    def __init__(self) -> None:
        self.conflicts = 0
        self._sent_back, self._since = 0, -math.inf
        self._counting = threading.Lock()  # in a thread pool, several threads count

    def ended_by(self, error: object) -> None:
        """Count a run that ended with `error`."""
        if isinstance(error, LockConflict) or (isinstance(error, Ended) and error.verdict.reason.is_conflict):
            with self._counting:
                self.conflicts += 1
        elif isinstance(error, Ended) and error.verdict.policy == "lock_on_outage":
            self._was_sent_back()

    def _was_sent_back(self) -> None:
        now = time.monotonic()
        with self._counting:
            if now - self._since > OTHER_OUTAGE_AFTER:
                self._sent_back, self._since = 0, now
            self._sent_back += 1
            seconds = now - self._since
            if seconds < REMIND_EVERY:
                return
            self._since = -math.inf
        text = "the lock server cannot be used: messages went back to the broker %d times in %.0f s, to run once it can"
        logger.warning(text, self._sent_back, seconds)


RUN_COUNTS = RunCounts()
