"""Tasks that many callers call at once."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from celery import Celery

from celery_redislock import LockedTask
from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of

#: Seconds for which a run keeps its key after its result is stored, at least: callers may see that end meanwhile. Where
#: a task is called with a `file`, it keeps its key until that is there.
LINGERS = 0.01


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = partial(decorator_of(app), lock_args=["key"], bind=True, base=_asking(ledger), ignore_result=False)

    for policy in ("wait", "skip", "raise", "join"):

        @locked(f"one_job_{policy}", lock_scope="job", lock_on_conflict=policy)
        def one_job(
            self: Any, key: Any, item: Any = "", seconds: float | str = 0.0, how: str = "", file: str = ""
        ) -> Any:
            return _body(self, ledger, key, item, seconds, how)

    @locked("one_queued", lock_scope="queue")
    def one_queued(
        self: Any, key: Any, item: Any = "", seconds: float | str = 0.0, how: str = "", file: str = ""
    ) -> Any:
        return _body(self, ledger, key, item, seconds, how)


def _body(self: Any, ledger: Ledger, key: Any, item: Any, seconds: float | str, how: str) -> Any:
    """End as `how` says: by a failure, or after a retry."""
    with ledger.run(key, item):
        spend(seconds)
        if how == "retry" and not self.request.retries:
            raise self.retry(countdown=0)
        if how == "failure":
            raise ValueError(item)
    return item


def _asking(ledger: Ledger) -> type[LockedTask]:
    class Asking(LockedTask):
        """Writes down when it asks for its key: soon after, it is queued no more."""

        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            ledger.write({"event": "asks", "task_id": task_id, "at": time.monotonic()})
            super().before_start(task_id, args, kwargs)

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: dict[str, Any]) -> None:
            spend(LINGERS, kwargs.get("file", ""))

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: dict[str, Any], einfo: Any) -> None:
            spend(LINGERS, kwargs.get("file", ""))

    return Asking
