"""Tasks without a lock."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery

from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("misdeclared", base=None, lock_args=["key"], lock_lease=5)
    def misdeclared(key: Any) -> None:
        """Its author forgot base=LockedTask."""

    @locked("breaks", base=None)
    def breaks() -> None:
        """Fails, for an errback to run."""
        raise ValueError("broken")

    @locked("plain", base=None)
    def plain(*args: Any, seconds: float | str = 0.0) -> str:
        """No lock: the end of a chain, a chord's body, a link."""
        with ledger.run("plain", time.monotonic_ns()):
            spend(seconds)
            return "plain"
