"""Tasks that keep their key for a while after their body has ended."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from celery import Celery

from celery_redislock import LockedTask
from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = partial(decorator_of(app), lock_args=["key"])

    for policy in ("skip", "wait", "raise", "join"):

        @locked(f"cools_{policy}", lock_on_conflict=policy, lock_cooldown=2.0, ignore_result=False)
        def cools(key: Any, item: Any = "", fails: bool = False) -> Any:
            """Its key cools down after its success."""
            with ledger.run(key, item):
                if fails:
                    raise ValueError(f"{item} fails")
            return item

    for policy, options in {
        **{policy: {"lock_on_conflict": policy, "ignore_result": False} for policy in ("skip", "raise", "join")},
        "job": {"lock_scope": "job"},
        "j" * 200: {"lock_scope": "job"},  # a token has only a part of its name
    }.items():

        @locked(f"lingers_then_cools_{policy}", base=_HeldUp, lock_cooldown=60.0, **options)
        def lingers_then_cools(key: Any, item: Any = "", file: str = "") -> Any:
            """Keeps its key until `file` is there, after its result is stored; then the key cools down."""
            with ledger.run(key, item):
                return item

    @locked("held_up", base=_HeldUp, ignore_result=False)
    def held_up(key: Any, item: Any = "", file: str = "") -> Any:
        """The same, but its key cools down only where a call says so."""
        with ledger.run(key, item):
            return item

    for policy in ("skip", "raise", "join"):

        @locked(f"lingers_{policy}", base=_Lingering, lock_on_conflict=policy, ignore_result=False)
        def lingers(key: Any, item: Any = "", fails: bool = False) -> Any:
            """Keeps its key for a while after its result is stored."""
            with ledger.run(key, item):
                if fails:
                    raise ValueError(f"{item} fails")
            return item

    @locked("lingering_job", base=_Lingering, lock_scope="job", ignore_result=False)
    def lingering_job(key: Any, item: Any = "", fails: bool = False) -> Any:
        """As `lingers`, but unique from its publish on."""
        return lingers.run(key, item, fails)

    @locked("cools_forever", lock_cooldown=sys.maxsize, lock_queue_ttl=1e300, lock_lease=1e15)
    def cools_forever(key: Any, item: Any = "") -> Any:
        """Its key cools down for longer than Redis can count."""
        with ledger.run(key, item):
            return item

    @locked("cooling_job", lock_scope="job", lock_cooldown=2.0)
    def cooling_job(key: Any, item: Any = "") -> Any:
        """Unique from its publish on; its key cools down after its success."""
        with ledger.run(key, item):
            return item


class _Lingering(LockedTask):
    def on_success(self, *args: Any) -> None:
        time.sleep(0.05)

    def on_failure(self, *args: Any) -> None:
        time.sleep(0.05)


class _HeldUp(LockedTask):
    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        spend(0.0, kwargs.get("file", ""))
