"""Tasks whose users write classes: bodies that call bodies, requests of their own.

A worker is ``celery -A tests.lab.classes worker``.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.worker.request import Request

from celery_redislock import LockedTask
from tests.lab.app import Config
from tests.lab.ledger import Ledger


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


def define_classes(app: Celery, ledger: Ledger) -> None:
    """The tasks of this module."""
    _define_inner_calls(app, ledger)
    for name, request in {"named_request": "tests.lab.classes:OwnRequest", "own_request": OwnRequest}.items():

        @app.task(name=f"lab.{name}", base=LockedTask, shared=False, lock_args=["key"], Request=request)
        def run(key: str, item: str, seconds: float = 0.0) -> str:
            with ledger.run(key, item):
                time.sleep(seconds)
            return item


def _define_inner_calls(app: Celery, ledger: Ledger) -> None:
    """``lab.base_body`` and ``lab.calls``: their bodies call bodies and then work on until their lock is lost."""

    class Base(LockedTask):
        name = "lab.base_body"
        lock_key = "{key}"
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

    for task in (Base, Calls):  # the base first, so that its body is wrapped as well
        app.register_task(task())


if "LAB_CONFIG" in os.environ:  # a worker
    from tests.lab.worker import app as worker_app

    app = worker_app
    define_classes(app, Ledger(Path(Config.from_env().ledger)))
