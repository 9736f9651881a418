"""The callers: several publishers in a loop of one job's key, some of which wait for the results."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from celery import Celery, states

from celery_redislock import signals
from chaos.turns import RESERVED
from tests.lab.ledger import Ledger

CALLERS = 8
#: They have another key every so many seconds: one may be kept for an hour for a message that a broker has lost.
SPELL = 4.0
#: How many of the calls wait for their result, for so many seconds at most, before the next one.
WAITING, PATIENCE = 0.6, 2.0
#: The least and the most seconds between two calls of a caller, and those that a body takes.
PAUSE, BODY = (0.0, 0.01), (0.0, 0.03)
#: How many of the jobs retry themselves once.
AGAIN = 0.2
#: Seconds between two looks for a result. A caller that sees an end calls again while the job may still hold its key.
LOOK_EVERY = 0.002


class Callers:
    """Call until `enough` is set."""

    def __init__(self, app: Celery, ledger: Ledger, seed: str) -> None:
        self.enough = threading.Event()
        self._app, self._ledger = app, ledger
        self._task: Any = app.tasks["chaos.contended"]
        self._sent: list[str] = []
        #: What is known of the call that goes on in this thread.
        self._call_here = threading.local()
        signals.lock_unavailable.connect(self._is_unasked)
        self._threads = [
            threading.Thread(target=self._call_on, args=(random.Random(f"{seed} {number}"), number), daemon=True)
            for number in range(CALLERS)
        ]

    def start(self) -> None:
        """Begin to call."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all have stopped."""
        for thread in self._threads:
            thread.join()

    def write_down_states(self) -> None:
        """Write down the outcome of every job, for the check."""
        for task_id in self._sent:
            self._ledger.write({"event": "final", "task_id": task_id, "state": self._state(task_id)})

    def _call_on(self, chance: random.Random, number: int) -> None:
        calls = 0
        while not self.enough.wait(chance.uniform(*PAUSE)):
            calls += 1
            again = int(chance.random() < AGAIN)
            task_id = self._call(f"caller{number}-{calls}", round(chance.uniform(*BODY), 3), again)
            if chance.random() < WAITING:
                self._see_the_end(task_id)

    def _call(self, item: str, seconds: float, again: int) -> str:
        self._call_here.is_unasked = False
        asked_at = time.monotonic()
        key = f"{RESERVED}-{asked_at // SPELL:.0f}"
        result = self._task.delay(key, item, seconds, again)
        returned_at = time.monotonic()
        if result.duplicate:
            self._ledger.write({"event": "answered", "task_id": result.id})
        else:
            self._sent.append(result.id)
            call = {"key": key, "asked_at": asked_at, "returned_at": returned_at, "retries": again}
            call["unasked"] = self._call_here.is_unasked
            self._ledger.write({"event": "sent", "task_id": result.id, "kind": "contended", "after": "", **call})
        return str(result.id)

    def _is_unasked(self, **_: object) -> None:
        """The lock server is unavailable, so the message is sent without its key."""
        self._call_here.is_unasked = True

    def _see_the_end(self, task_id: str) -> None:
        end = time.monotonic() + PATIENCE
        while self._state(task_id) not in states.READY_STATES and time.monotonic() < end:
            if self.enough.wait(LOOK_EVERY):
                return

    def _state(self, task_id: str) -> str:
        return str(self._app.backend.get_task_meta(task_id, cache=False)["status"])
