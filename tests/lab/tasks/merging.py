"""Tasks whose calls are merged into the message that waits in the queue."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import Any

from celery import Celery
from kombu.serialization import register

from celery_redislock import LockedTask
from celery_redislock.message.calls import LONGEST_BODY
from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


class DiesOnce(LockedTask):
    """The process dies before its first run has asked for the key."""

    def before_start(self, task_id: str, args: Any, kwargs: dict[str, Any]) -> None:
        if not os.path.exists(args[4]):
            open(args[4], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        super().before_start(task_id, args, kwargs)


class RetriesFirst(LockedTask):
    """The first attempt retries itself before it has asked for the key."""

    def before_start(self, task_id: str, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.request.retries:
            raise self.retry(countdown=args[2])
        super().before_start(task_id, args, kwargs)


def _tuples(body: Any) -> Any:
    args, *others = json.loads(body)
    return (tuple(args), *others)


# A serializer whose positional arguments are a tuple.
register("tuples", json.dumps, _tuples, "application/x-tuples", "utf-8")


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = partial(decorator_of(app), lock_args=["key"], lock_scope="queue", bind=True)
    late = {"acks_late": True, "reject_on_worker_lost": True}

    for name, options in {
        "latest": {"lock_arguments": "latest", **late},
        "latest_again": {"lock_arguments": "latest", "retry_on_worker_lost": True, "default_retry_delay": 0},
        "latest_early": {"lock_arguments": "latest"},
        "latest_dying": {"lock_arguments": "latest", "base": DiesOnce, **late},
        "latest_put_off": {"lock_arguments": "latest", "base": RetriesFirst},
        "collected_put_off": {"lock_arguments": "all", "base": RetriesFirst},
        "latest_tuple": {"lock_arguments": "latest", "serializer": "tuples"},
        "latest_brief": {"lock_arguments": "latest", "lock_queue_ttl": 1.0},
        "latest_short": {"lock_arguments": "latest", "lock_lease": 1.5, **late},
        "latest_cooled": {"lock_arguments": "latest", "lock_cooldown": 1.0, "lock_fence": True, **late},
        "latest_retry": {"lock_arguments": "latest"},
        "latest_raise": {"lock_arguments": "latest", "lock_on_outage": "raise"},
        "latest_run": {"lock_arguments": "latest", "lock_on_outage": "run"},
        "collected": {"lock_arguments": "all", **late},
        "debounced": {"lock_arguments": "latest", "lock_debounce": 0.5},
        "debounced_long": {"lock_arguments": "latest", "lock_debounce": 4.0, **late},
        "debounced_max": {"lock_arguments": "latest", "lock_debounce": 0.5, "lock_debounce_max": 2.0},
        "collected_debounced": {"lock_arguments": "all", "lock_debounce": 600.0},
        "collected_brief": {"lock_arguments": "all", "lock_debounce": 4.0, "lock_queue_ttl": 1.0},
        "debounced_brief": {"lock_arguments": "latest", "lock_debounce": 4.0, "lock_queue_ttl": 1.0},
    }.items():

        @locked(name, **options)
        def merged(
            self: Any, key: Any, item: Any = "", seconds: float | str = 0.0, how: str = "", file: str = ""
        ) -> Any:
            """End as `how` says: by a failure, a death or a retry; or with the arguments of all calls."""
            with ledger.run(key, item):
                spend(seconds)
                if how == "calls":
                    return [args[1] for args, _ in self.lock.calls]
                if how == "fence":
                    return self.lock.fence
                if how == "dies" and not os.path.exists(file):
                    open(file, "w").close()
                    os._exit(9)
                if how == "overtaken" and not self.request.retries:
                    for number in range(2):
                        self.delay(key, number)
                    raise self.retry(countdown=1)
                if how == "grows" and not self.request.retries:
                    raise self.retry(args=(key, "x" * LONGEST_BODY), kwargs={}, countdown=0)
                if how == "renews" and not self.request.retries:
                    raise self.retry(args=(key, "renewed"), kwargs={"how": file}, countdown=0)
                if how == "swallows" and not self.request.retries:
                    self.retry(kwargs={"how": "calls"}, countdown=2, throw=False)
                    spend(file)
                if how == "retry" and not self.request.retries:
                    raise self.retry(countdown=float(file or 0))
                if how == "failure":
                    raise ValueError(f"{item} fails")
            return item
