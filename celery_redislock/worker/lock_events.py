"""LockEvents: tells Celery's event consumers what happens to locks, if the worker sends task events (``-E``).

The events are of a group of their own, ``redislock``, which Celery's `State` ignores: an unknown event of the group
``task`` would become the task's state. A run's process has no event dispatcher. It reports through a pipe what its lock
does, and the main process sends the events. They have no arguments of the task.
"""

from __future__ import annotations

import io
import json
import os
import select
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from celery import bootsteps, states

from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.policy import Verdict
from celery_redislock.signals import lock_acquired, lock_lost, lock_released

_LOCK_EVENTS = "_redislock_lock_events"
#: Seconds between two reads of the pipe, which takes about 250 reports. What does not fit is lost.
EVERY = 0.1


class LockEvents(bootsteps.StartStopStep):
    """A consumer step: sends what the runs have reported, every now and then, and how policies have ended runs."""

    requires = ("celery.worker.consumer:Events",)

    def __init__(self, parent: Any, task_events: bool = False, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.enabled = bool(task_events)
        if not self.enabled:
            return
        self._consumer, self._sending = parent, threading.Lock()
        self._timer: Any = None
        reader, self._writer = os.pipe()  # the pool has not forked its children yet
        for end in (reader, self._writer):
            os.set_blocking(end, False)
        self._pipe, self._rest = io.FileIO(reader), b""
        for what, signal in (("acquired", lock_acquired), ("released", lock_released), ("lost", lock_lost)):
            signal.connect(partial(self._report, what), weak=False)
        vars(parent.app)[_LOCK_EVENTS] = self

    def start(self, parent: Any) -> None:
        """Start to send."""
        self._timer = parent.timer.call_repeatedly(EVERY, self._send)

    def stop(self, parent: Any) -> None:
        """Send the last, while the connection to the broker is still open."""
        if self._timer is not None:
            self._timer.cancel()
            self._send()

    def _report(self, what: str, lock: HeldLock, waited: float | None = None, reason: str = "", **_: Any) -> None:
        """Report what a run's lock does. Called in the run's process."""
        attempt, since = lock.token.attempt, lock.token.since
        if attempt is None or since is None:  # pragma: no cover - a run has both
            return
        now = time.time()
        about: dict[str, Any] = {"uuid": attempt.task_id, "name": lock.token.task, "key": lock.key, "timestamp": now}
        about |= {"held": round(max(0.0, now - since.timestamp()), 3)} if waited is None else {"waited": waited}
        line = json.dumps([what, about | ({"reason": reason} if reason else {})]).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:  # a longer one could mix with those of other children
            with suppress(BlockingIOError):
                os.write(self._writer, line)

    def _send(self, *more: tuple[str, dict[str, Any]]) -> None:
        """Send what was reported, and then `more`."""
        with self._sending:
            while chunk := self._pipe.read(select.PIPE_BUF):
                self._rest += chunk
            *lines, self._rest = self._rest.split(b"\n")
            dispatcher = self._consumer.event_dispatcher
            for what, about in (*map(json.loads, lines), *more) if dispatcher else ():
                dispatcher.send(f"redislock-{what}", **about)

    def ended(self, request: Any, verdict: Verdict) -> None:
        """Send what a policy has made of the run of `request`."""
        demands = [verdict.place.demand] if verdict.place else [one.demand for one in request.run.holds]
        key, is_skipped = demands[0].key if demands else None, verdict.reason.state == states.REVOKED
        about = {"uuid": request.id, "name": request.task.name, "key": key, "policy": verdict.policy}
        about |= {"holder": verdict.holder_id} | ({"reason": verdict.text} if is_skipped else {})
        if not verdict.reason.has_run and (is_skipped or verdict.reason.is_conflict):
            self._send(("skipped" if is_skipped else "waiting", about))


def lock_events_of(app: Any) -> LockEvents | None:
    """The step of the worker of `app` in this process; None if there is none, or it sends no task events."""
    step = vars(app).get(_LOCK_EVENTS)
    return step if isinstance(step, LockEvents) else None
