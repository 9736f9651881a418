"""Tasks whose bodies look at their lock, or are told in mid-work that it is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery

from celery_redislock import LockConfigError, LockedTask, LockLost
from tests.lab.bodies import watch
from tests.lab.gate import spend, wait_for_file
from tests.lab.ledger import Ledger

from .decorator import decorator_of, is_chosen


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("bound", bind=True, lock_args=["account"], lock_on_conflict="skip")
    def bound(self: Any, amount: int, account: int, seconds: float | str = 0.0, file: str = "") -> dict[str, Any]:
        """A bound task that shows its lock."""
        with ledger.run(account, amount):
            lock = self.lock
            lock.check()
            lock.extend()
            spend(seconds, file)
            seen = {name: getattr(lock, name) for name in ("key", "state", "remaining", "fence")}
            return {**seen, "headers": self.request.headers}

    @locked("threaded", bind=True, lock_args=["key"])
    def threaded(self: Any, key: Any, seconds: float) -> tuple[str, str]:
        """Tells which lock it saw before and after its work."""
        before = self.lock.key
        spend(seconds)
        return before, self.lock.key

    @locked("helped", bind=True, lock_args=["key"])
    def helped(self: Any, key: Any) -> list[str]:
        """Tells what threads and greenlets that it starts see of its lock, and of one that they are given."""

        def look(lock: Any = None) -> str:
            try:
                (lock or self.lock).check()
            except LockConfigError as error:
                return str(error)
            return str((lock or self.lock).state)

        with ledger.run(key), ThreadPoolExecutor(1) as threads:
            alone, given = threads.submit(look).result(), threads.submit(look, self.lock).result()
            return [look(), given, alone, asyncio.run(asyncio.to_thread(look))]

    @locked("outlived", bind=True, lock_args=["key"])
    def outlived(self: Any, key: Any, file: str) -> None:
        """Leaves a thread behind, which looks at the lock that it was given when there is a file."""

        def look(lock: Any) -> None:
            wait_for_file(file)
            try:
                lock.check()
                seen = "held"
            except LockLost as error:
                seen = str(error)
            ledger.write({"event": "looked", "seen": seen, "state": lock.state, "remaining": lock.remaining})

        with ledger.run(key):
            threading.Thread(target=look, args=(self.lock,), daemon=True).start()

    @locked("takes_another", bind=True, lock_args=["number"])
    def takes_another(self: Any, number: int, key: Any) -> float:
        """Waits in its body for the key of a call of `work`; tells for how long."""
        began = time.monotonic()
        with ledger.run(f"outside {key}"), self.app.tasks["lab.work"].lock_for(key):
            return time.monotonic() - began

    @locked("hangs", bind=True, lock_args=["key"], lock_lease=2.0, lock_max_hold=1.0)
    def hangs(self: Any, key: Any, item: Any, seconds: float | str = 0.0) -> None:
        """Runs for longer than it may, and writes down what becomes of its lock."""
        with ledger.run(key, item):
            watch(self.lock, ledger, item, seconds)

    @locked("watches", bind=True, lock_args=["key"])
    def watches(self: Any, key: Any, item: Any, seconds: float | str = 0.0, file: str = "") -> None:
        """Writes down what becomes of its lock, and ends soon after it is lost, or when there is a file.

        Its options are the app's.
        """
        with ledger.run(key, item):
            watch(self.lock, ledger, item, seconds, after_loss=0.5, file=file)

    @locked("aborted", bind=True, lock_args=["key"], lock_lease=5.0, lock_on_lost="abort")
    def aborted(self: Any, key: Any, seconds: float = 30.0) -> str:
        """Is told in mid-work that its lock is lost."""
        with ledger.run(key):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.01)
        return "not aborted"

    _define_inner_calls(app, ledger)


def _define_inner_calls(app: Celery, ledger: Ledger) -> None:
    """``lab.base_body`` and ``lab.calls``: their bodies call bodies and then work on until their lock is lost."""

    class Base(LockedTask):
        name = "lab.base_body"
        lock_key = "{key}"
        lock_lease = 5.0
        lock_on_lost = "abort"
        ignore_result = False

        def run(self, key: str, how: str = "") -> str:
            return "base"

    class Calls(Base):
        name = "lab.calls"

        def run(self, key: str, how: str = "") -> str:
            if not how:
                return "inner"
            with ledger.run(key, how):
                self._call_a_body(key, how)
                end = time.monotonic() + 30
                while time.monotonic() < end:
                    time.sleep(0.01)
            return "not aborted"

        def _call_a_body(self, key: str, how: str) -> None:
            if how == "self.run":
                self.run(key)
            elif how == "super().run":
                super().run(key)
            elif how == "in a thread":
                thread = threading.Thread(target=self.run, args=(key,))
                thread.start()
                thread.join()
            elif how == "in a thread with the request":
                thread = threading.Thread(target=self._run_with, args=(self.request_stack.top, key))
                thread.start()
                thread.join()

        def _run_with(self, request: Any, key: str) -> None:
            self.request_stack.push(request)
            self.run(key)

    def register(**_: object) -> None:
        for task in (Base, Calls):  # the base first, so that its body is wrapped as well
            app.register_task(task())

    if is_chosen(app, "calls"):
        # A task that is registered at once would read the app's settings before a test sets them.
        app.on_after_finalize.connect(register, weak=False)
