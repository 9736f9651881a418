"""Tasks whose child is killed, and request classes of the user's that are told of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from celery import Celery
from celery.worker.request import Request

from celery_redislock import LockedTask
from tests.lab.bodies import unmoved
from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("stubborn", lock_args=["key"])
    def stubborn(key: Any, item: Any, seconds: float | str = 0.0, file: str = "") -> Any:
        """Does not end when it is told to."""
        with unmoved(), ledger.run(key, item):
            spend(seconds, file)
        return item

    @locked("given_back", lock_args=["key"], acks_late=True, reject_on_worker_lost=True)
    def given_back(key: Any, item: Any, first: float | str = 0.0) -> Any:
        """Is given back to the broker when its process dies; takes its time only in its first run."""
        return ledger.take(key, item, first)

    @locked("tried_again", lock_args=["key"], retry_on_worker_lost=True, default_retry_delay=0)
    def tried_again(key: Any, item: Any, first: float | str = 0.0) -> Any:
        """Is retried by the main process when its process dies, from Celery 5.7 on."""
        return ledger.take(key, item, first)

    def told(arguments: Any) -> str:
        ledger.write({"event": "key made", "pid": os.getpid()})
        return str(arguments["key"])

    def two(arguments: Any) -> int:
        ledger.write({"event": "key made", "pid": os.getpid()})
        return 2

    permits = {"lock_limit": two, "lock_scope": "run", "lock_fence": False, "lock_cooldown": 0}  # whatever the app sets
    for name, more in {"tells_key": {}, "tells_key_late": {**permits, "acks_late": True}}.items():

        @locked(name, lock_key=told, **more)
        def tells(key: Any, item: Any, seconds: float | str = 0.0) -> Any:
            """Tells which process makes its key, and its limit."""
            with ledger.run(key, item):
                spend(seconds)
            return item

    for name, more in {"job_tried_again": {}, "job_tried_once": {"max_retries": 0}}.items():

        @locked(name, lock_key=told, lock_scope="job", retry_on_worker_lost=True, default_retry_delay=2, **more)
        def tried_again_as_job(key: Any, item: Any, first: float | str = 0.0) -> Any:
            """The same in scope job; it tells which process makes its key."""
            return ledger.take(key, item, first)

    @locked("stands_still", lock_args=["key"], base=_StandingStill)
    def stands_still(key: Any, item: Any) -> Any:
        """Its process stops itself before its first run asks for the key."""
        with ledger.run(key, item):
            return item

    for name, request in {"named_request": f"{__name__}:OwnRequest", "own_request": OwnRequest}.items():

        @locked(name, lock_args=["key"], Request=request)
        def run(key: str, item: str, seconds: float | str = 0.0) -> str:
            """Its requests are of the user's own class."""
            with ledger.run(key, item):
                spend(seconds)
            return item


class _StandingStill(LockedTask):
    def before_start(self, *args: Any) -> None:
        ledger = Ledger(Path(self.app.conf.lab_ledger))
        if not any(line["event"] == "stands still" for line in ledger.lines()):
            ledger.write({"event": "stands still"})
            os.kill(os.getpid(), signal.SIGSTOP)
        super().before_start(*args)


class OwnRequest(Request):
    """A user's: it writes down what it is told."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        self._write("accepted")
        super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        self._write("failed")
        return super().on_failure(exc_info, *args, **options)

    def _write(self, what: str) -> None:
        Ledger(Path(self.app.conf.lab_ledger)).write({"event": f"own request {what}", "task_id": self.id})
