"""Tasks whose newest call replaces the run that holds the key."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import Any

from celery import Celery

from tests.lab.gate import spend, wait_for_file
from tests.lab.ledger import Ledger

from .decorator import decorator_of

STEP = 0.02


async def extend(lock: Any) -> None:
    """Extend a lock that the run around it holds."""
    async with lock:
        await lock.extend()


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    task = decorator_of(app)
    locked = partial(
        *(task,), lock_args=["key"], lock_scope="queue", lock_arguments="latest", lock_on_conflict="replace", bind=True
    )
    late = {"acks_late": True, "reject_on_worker_lost": True}

    for name, options in {
        "newest": late,
        "newest_autoretry": {"autoretry_for": (Exception,), "retry_backoff": 0.1},
        "newest_debounced": {"lock_debounce": 4.0},
        "newest_cooled": {"lock_cooldown": 1.0},
        "newest_shared": {"lock_args": None, "lock_key": "shared-{key}"},
    }.items():

        @locked(name, **options)
        def newest(
            self: Any, key: Any, item: Any = "", seconds: float | str = 0.0, how: str = "", file: str = ""
        ) -> Any:
            """Spend some time, and then end as `how` says if it is stopped."""
            with ledger.run(key, item):
                match how:
                    case "cleans":
                        try:
                            spend(seconds)
                        finally:
                            held, replaced = self.lock.state, self.lock.replaced
                            self.lock.extend()
                            asyncio.run(extend(self.alock_for(key)))
                            wait_for_file(file)
                            ledger.write({"event": "cleaned", "state": held, "replaced": replaced})
                    case "swallows":
                        try:
                            spend(seconds)
                        except Exception:  # noqa: BLE001 - what a careless body does
                            ledger.write({"event": "swallowed", "replaced": self.lock.replaced})
                        wait_for_file(file)
                    case "checks":
                        while not os.path.exists(file):
                            time.sleep(0.05)
                            self.lock.check()
                    case "dies":
                        try:
                            spend(seconds)
                        finally:
                            os._exit(9)
                    case "retries" if not self.request.retries:
                        try:
                            spend(seconds)
                        except Exception as error:  # noqa: BLE001 - what a careless body does
                            try:
                                raise self.retry(exc=error, countdown=0) from error
                            finally:
                                spend("", file)
                    case "fails" if not self.request.retries:
                        raise self.retry(countdown=float(file))
                    case "calls itself":
                        self.delay(key, "successor")
                        spend(seconds)
                    case _:
                        for _ in range(round(seconds / STEP) if isinstance(seconds, float) else 0):
                            time.sleep(STEP)  # a body that is stopped ends with the step
                        spend("" if isinstance(seconds, float) else seconds)
            return item

    @task("shares_newest", lock_key="shared-{key}", lock_on_conflict="wait")
    def shares_newest(key: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
        """Another task with the same key."""
        with ledger.run(key, item):
            spend(seconds)
        return item
