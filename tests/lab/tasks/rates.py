"""Tasks of which only so many may begin in a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import Ignore

from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    plain = {"lock_scope": "run", "lock_fence": False, "lock_cooldown": 0, "lock_hold_on_retry": False}
    locked = partial(decorator_of(app), **plain)
    late = {"acks_late": True, "reject_on_worker_lost": True}

    for name, options in {
        "rated": {"lock_args": (), "lock_rate": "60/s", **late},
        "rated_by_key": {"lock_args": ["key"], "lock_rate": (2, 3)},
        "rated_slowly": {"lock_args": ["key"], "lock_rate": "2/m"},
        "rated_skip": {"lock_args": ["key"], "lock_rate": "2/m", "lock_on_conflict": "skip"},
        "rated_raise": {"lock_args": ["key"], "lock_rate": "2/m", "lock_on_conflict": "raise"},
        "rated_by_call": {"lock_args": ["key"], "lock_rate": lambda arguments: arguments["item"]},
    }.items():

        @locked(name, bind=True, **options)
        def rated(self: Any, key: Any, item: Any = "", seconds: float | str = 0.0, how: str = "") -> Any:
            """Tells what its lock is; or retries itself once."""
            with ledger.run(key, item):
                spend(seconds)
                if how == "ignore":
                    raise Ignore
                if how == "retry" and not self.request.retries:
                    raise self.retry(countdown=0)
            return self.lock.state
