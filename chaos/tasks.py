"""The tasks of a chaos run: several kinds that share a few keys."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import after_task_publish, before_task_publish

from celery_redislock import Also, LockedTask, LockReplaced
from tests.lab.bodies import sleep_on
from tests.lab.ledger import Ledger

LEASE = 3.0
#: How many tasks of kind `three` may run at once under one key.
LIMIT = 3
#: The hard time limit of the tasks of kind `limited`, in seconds.
TIME_LIMIT = 1.0
#: For how many seconds a task of kind `contended` keeps its key after its result is stored.
LINGERS = 0.01
#: Each run of kind `several` needs one of the `LIMIT` permits of this key, besides two keys.
SHARED = "three-several"
#: So many runs of a key of kind `rated` may begin in so many seconds.
RATE = (3, 2.0)
#: Calls of kind `latest` and `all` are merged until none has come for so many seconds; those of `latest` for at most
#: `DEBOUNCE_MAX`.
DEBOUNCE, DEBOUNCE_MAX = 0.3, 1.0
#: A body that may be replaced works in steps of so many seconds.
STEP = 0.05
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

    def merge(task: Any, kind: str, key: str, calls: list[str], seconds: float) -> str:
        """The work of merged calls: it writes down whose arguments the run was given, and whether it was replaced."""
        run = {"task_id": task.request.id, "pid": os.getpid()}
        item = f"{kind}/{task.request.retries}"
        with ledger.run(key, item):
            ledger.write({"event": "given", **run, "key": key, "calls": calls, "at": time.monotonic()})
            try:
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(STEP)
                ledger.write({"event": "done", **run, "item": item, "at": time.monotonic()})
            except LockReplaced:
                ledger.write({"event": "done", **run, "item": item, "at": time.monotonic(), "replaced": True})
                raise
        return calls[-1]

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

    @define(
        "several",
        lock_key=["chaos:{key}", "chaos:{other}"],
        lock_also=[Also(f"chaos:{SHARED}", limit=LIMIT)],
        lock_on_conflict="wait",
        **_LATE,
    )
    def several(self: Any, key: str, other: str, item: str, seconds: float) -> str:
        """Needs two keys, and a permit of a third one. Writes down a run of each."""
        request = self.request
        with ExitStack() as runs:
            for one in (key, other, SHARED):
                runs.enter_context(ledger.run(one, f"{item}@{one}/{request.retries}"))
            time.sleep(seconds)
            done = {"event": "done", "task_id": request.id, "item": item, "pid": os.getpid()}
            ledger.write({**done, "at": time.monotonic()})
        return item

    @define("rated", lock_rate=RATE, **_LATE)
    def rated(self: Any, key: str, item: str, seconds: float) -> str:
        """Holds nothing; only so many begin in a time."""
        return work(self, key, item, seconds)

    @define("fair", lock_fair="group", **_LATE)
    def fair(self: Any, key: str, group: str, item: str, seconds: float) -> str:
        """Takes its turn in its group, and the groups take turns."""
        return work(self, key, item, seconds)

    @define(
        "latest",
        lock_scope="queue",
        lock_arguments="latest",
        lock_debounce=DEBOUNCE,
        lock_debounce_max=DEBOUNCE_MAX,
        **_LATE,
    )
    def latest(self: Any, key: str, call: str, seconds: float) -> str:
        """Runs for the last of its calls."""
        return merge(self, "latest", key, [call], seconds)

    @define("all", lock_scope="queue", lock_arguments="all", lock_debounce=DEBOUNCE, **_LATE)
    def together(self: Any, key: str, call: str, seconds: float) -> str:
        """Runs once for all of its calls."""
        return merge(self, "all", key, [kwargs["call"] for _, kwargs in self.lock.calls], seconds)

    @define("newest", lock_scope="queue", lock_arguments="latest", lock_on_conflict="replace", **_LATE)
    def newest(self: Any, key: str, call: str, seconds: float) -> str:
        """Is stopped for a newer call."""
        return merge(self, "newest", key, [call], seconds)


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
