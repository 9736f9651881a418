"""An empty task of each base class, and the worker that drains it: `python -m benchmarks.queue_app URL QUEUE POOL`."""

from __future__ import annotations

import sys
import time
from typing import Any

import celery_once.backends.redis
import celery_singleton.backends
import redis
from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_redislock import LockedTask

from .floor import BareJob, BareRun

#: The task, and the list in Redis, by which the worker notes when it begins and ends to drain a queue.
CLOCK = "clock"
#: The base classes to compare, with what their decorators need.
KINDS: dict[str, dict[str, Any]] = {
    "Celery's own base": {},
    "LockedTask": {"base": LockedTask},
    'LockedTask, scope "job"': {"base": LockedTask, "lock_scope": "job"},
    'LockedTask, scope "queue"': {"base": LockedTask, "lock_scope": "queue", "lock_on_conflict": "wait"},
    "the commands of a run alone": {"base": BareRun},
    "the commands of a job alone": {"base": BareJob},
    "celery-once": {"base": QueueOnce},
    "celery-singleton": {"base": Singleton},
}


def make_app(url: str) -> Celery:
    """An app with a task of each base class. Its broker and the locks of all plugins are on the server at `url`."""
    _forget_other_servers()
    app = Celery("queue", broker=url, set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        singleton_backend_url=url,
        redislock_url=url,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
    )
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": url, "default_timeout": 3600}}
    for name, options in KINDS.items():
        decorate: Any = app.task(name=name, shared=False, **options)
        decorate(_empty)

    @app.task(name=CLOCK, shared=False)
    def clock() -> None:
        now = time.perf_counter()  # the system's clock, so that two processes' times can be compared
        with redis.Redis.from_url(url) as client:
            client.rpush(CLOCK, now)

    return app


def _forget_other_servers() -> None:
    """The other libraries keep the first server that a process has asked, whatever the app says."""
    celery_once.backends.redis.redis = None
    celery_singleton.backends._backend = None


def _empty(number: int) -> None: ...


if __name__ == "__main__":
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    make_app(sys.argv[1]).worker_main(
        ["worker", "--concurrency=1", f"--queues={sys.argv[2]}", f"--pool={sys.argv[3]}", *quiet]
    )
