"""The tasks of a chaos run: several kinds that share a few keys."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import after_task_publish, before_task_publish

from celery_redislock import LockedTask
from tests.lab.bodies import sleep_on
from tests.lab.ledger import Ledger

LEASE = 3.0
#: How many tasks of kind `three` may run at once under one key.
LIMIT = 3
#: The hard time limit of the tasks of kind `limited`, in seconds.
TIME_LIMIT = 1.0
#: For how many seconds a task of kind `contended` keeps its key after its result is stored.
LINGERS = 0.01
#: The name of the header by which a publish is known when a worker receives its message.
PUBLISH = "chaos_publish"
_LATE = {"acks_late": True, "reject_on_worker_lost": True}


def define_tasks(app: Celery, ledger: Ledger) -> None:
    """Define the tasks. Every run writes ``<item>/<retries>`` into the ledger, and ``done`` if it came to its end."""

    def define(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        defaults = {"base": LockedTask, "bind": True, "shared": False, "lock_key": "chaos:{key}", "lock_lease": LEASE}
        return app.task(name=f"chaos.{name}", **{**defaults, **options})

    def work(task: Any, key: str, item: str, seconds: float, sleep: Callable[[float], None] = time.sleep) -> str:
        request = task.request
        run = {"task_id": request.id, "item": f"{item}/{request.retries}", "pid": os.getpid()}
        with ledger.run(key, run["item"]):
            sleep(seconds)
            ledger.write({"event": "done", **run, "at": time.monotonic()})
        return item

    @app.task(name="chaos.slow", bind=True, shared=False)
    def slow(self: Any, key: str, item: str, seconds: float) -> str:
        """Has no lock."""
        return work(self, key, item, seconds)

    @define("late", lock_on_conflict="wait", **_LATE)
    def late(self: Any, key: str, item: str, seconds: float) -> str:
        """Takes its turn; acked after it ran. A step of a chain, too."""
        return work(self, key, item, seconds)

    @define("link", lock_on_conflict="skip", **_LATE)
    def link(self: Any, key: str, item: str, seconds: float) -> str:
        """A step of a chain that has its key for itself: a step that is skipped was taken for a duplicate."""
        return work(self, key, item, seconds)

    def again_and_again(task: Any, key: str, item: str, seconds: float, times: int) -> str:
        work(task, key, item, seconds)
        if task.request.retries < times:
            raise task.retry(countdown=0.05)
        return item

    @define("again", lock_on_conflict="wait", max_retries=None, **_LATE)
    def again(self: Any, key: str, item: str, seconds: float, times: int) -> str:
        """Retries itself."""
        return again_and_again(self, key, item, seconds, times)

    @define("job", lock_scope="job", max_retries=None, **_LATE)
    def job(self: Any, key: str, item: str, seconds: float, times: int) -> str:
        """Unique from its publish to its end, across its retries."""
        return again_and_again(self, key, item, seconds, times)

    @define("contended", base=Lingering, lock_scope="job", max_retries=None, **_LATE)
    def contended(self: Any, key: str, item: str, seconds: float, times: int) -> str:
        """As `job`, but keeps its key for a moment when its end may have been seen."""
        return again_and_again(self, key, item, seconds, times)

    @define("last", lock_scope="queue", max_retries=None, **_LATE)
    def last(self: Any, key: str, item: str, seconds: float, times: int) -> str:
        """One runs, one waits."""
        return again_and_again(self, key, item, seconds, times)

    @define("three", lock_on_conflict="wait", lock_limit=LIMIT, **_LATE)
    def three(self: Any, key: str, item: str, seconds: float) -> str:
        """Runs with others, up to a limit; acked after it ran."""
        return work(self, key, item, seconds)

    @define("early", lock_on_conflict="wait")
    def early(self: Any, key: str, item: str, seconds: float) -> str:
        """Takes its turn; acked before it runs."""
        return work(self, key, item, seconds)

    @define("once", lock_on_conflict="skip")
    def once(self: Any, key: str, item: str, seconds: float) -> str:
        """Is skipped while another runs; acked before it runs."""
        return work(self, key, item, seconds)

    @define("limited", lock_on_conflict="wait", time_limit=TIME_LIMIT)
    def limited(self: Any, key: str, item: str, seconds: float) -> str:
        """Runs into its hard time limit, unless its worker hangs, and does not go when it is told to."""
        return work(self, key, item, seconds, sleep_on)


class Lingering(LockedTask):
    """Keeps its key for a moment when its end may have been seen."""

    abstract = True
    lingers = LINGERS

    def on_success(self, *args: Any) -> None:
        """Hold the key for that moment."""
        time.sleep(self.lingers)


def write_down_publishing(ledger: Ledger) -> Callable[[], object]:
    """Write down what this process publishes from now on, each publish under its own name; return what ends that."""

    def name(headers: dict[str, Any], **_: object) -> None:
        headers[PUBLISH] = uuid4().hex

    def write(headers: dict[str, Any], **_: object) -> None:
        line = {"event": "published", "task_id": headers["id"], "publish": headers[PUBLISH]}
        ledger.write({**line, "at": time.monotonic()})

    before_task_publish.connect(name, weak=False)
    after_task_publish.connect(write, weak=False)
    return lambda: (before_task_publish.disconnect(name), after_task_publish.disconnect(write))
