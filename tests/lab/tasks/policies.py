"""Tasks that meet a conflict with every policy."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject, WorkerLostError

from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    for policy in ("skip", "wait", "raise", "join"):
        _define_policy(locked, ledger, policy)

    for policy in ("skip", "raise"):

        @locked(
            f"auto_{policy}", lock_key="{key}", lock_on_conflict=policy, autoretry_for=(Exception,), retry_backoff=0.1
        )
        def auto(key: str) -> None:
            """Retries itself whatever its body raises."""
            with ledger.run(key):
                pass


def _define_policy(locked: Any, ledger: Ledger, policy: str) -> None:
    """The task `lab.on_<policy>`, and `lab.errback_<policy>` with a single parameter; they share their keys."""

    @locked(
        f"on_{policy}",
        bind=True,
        lock_key="{key}",
        lock_on_conflict=policy,
        autoretry_for=(OSError,),
        ignore_result=False,
    )
    def on_conflict(self: Any, key: str, item: Any = "", holds: str = "") -> Any:
        """Where `holds` is given: waits until other messages have met its lock, and ends in the way `holds` names."""
        with ledger.run(key, item):
            if holds:
                ledger.wait_for_conflict(self.request.id, seen=4 if holds == "waits for five" else 0, patience=60)
            if holds == "fails":
                raise ValueError(item)
            if holds == "retries" and not self.request.retries:
                raise self.retry(countdown=0.5)
            if holds == "ignores":
                if self.request.retries:
                    raise Ignore("nothing to do any more")
                raise self.retry(countdown=0.5)
            if holds == "replaces":
                raise self.replace(self.app.tasks["lab.plain"].si())
            if holds == "only ignores":
                raise Ignore("nothing to do")
            if holds == "exits":
                raise SystemExit(1)
            if holds == "rejects":
                raise Reject(item, requeue=False)
            if holds == "lacks memory":
                raise MemoryError(item)
            if holds == "loses its process":
                raise WorkerLostError(item)
            if holds == "hangs":
                time.sleep(60)
        return item

    @locked(f"errback_{policy}", lock_key="{key}", lock_on_conflict=policy, ignore_result=False)
    def errback(key: str) -> str:
        with ledger.run(key, "errback"):
            return "errback"
