"""Tasks of which at most one job is sent in a window."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery

from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of

#: The longest window of these tasks, in seconds: it does not end during a test.
HOUR = 3600.0
#: The shortest one, in seconds.
BRIEF = 2.0


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = partial(decorator_of(app), lock_args=["key"], lock_scope="job", bind=True)

    for name, options in {
        "windowed": {"lock_window": HOUR},
        "windowed_skip": {"lock_window": HOUR, "lock_on_conflict": "skip", "acks_late": True},
        "windowed_late": {"lock_window": HOUR, "acks_late": True, "reject_on_worker_lost": True},
        "windowed_blind": {"lock_window": HOUR, "ignore_result": True},
        "windowed_brief": {"lock_window": BRIEF, "lock_lease": 1.5, "acks_late": True, "reject_on_worker_lost": True},
    }.items():

        @locked(name, **options)
        def windowed(self: Any, key: Any, item: Any = "", seconds: float | str = 0.0, how: str = "") -> Any:
            """End as `how` says: by a failure, after a retry, or with the id that a call of its own gets."""
            with ledger.run(key, item):
                spend(seconds)
                if how == "call":
                    return self.delay(key).id
                if how == "retry" and not self.request.retries:
                    raise self.retry(countdown=0)
                if how == "failure":
                    raise ValueError(f"{item} fails")
            return item
