"""Tasks whose key several customers share, and where they take turns; and the same without turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    decorate = decorator_of(app)

    def locked(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        # A test may set these for the whole app, and they do not go with turns.
        fixed = {"lock_scope": "run", "lock_fence": False, "lock_cooldown": 0, "lock_on_conflict": "wait"}
        return decorate(name, **{**fixed, **options})

    def weight(call: Any) -> Any:
        return 1 / call["weight"] if call["weight"] == 0 else call["weight"]

    @locked("by_turns", lock_key="{key}", lock_limit=2, lock_fair="customer", lock_weight=weight)
    def by_turns(key: str, customer: str, item: Any = "", seconds: float | str = 0.0, weight: float = 1) -> Any:
        """Two at once; the customers take turns."""
        with ledger.run(key, f"{customer}{item}"):
            spend(seconds)
        return item

    @locked("one_by_turns", lock_key="{key}", lock_fair="of {customer}")
    def one_by_turns(key: str, customer: str, item: Any = "", seconds: float | str = 0.0) -> Any:
        """One at once; the customers take turns."""
        return by_turns.run(key, customer, item, seconds)

    @locked("by_time", lock_key="{key}", lock_limit=2)
    def by_time(key: str, customer: str, item: Any = "", seconds: float | str = 0.0) -> Any:
        """Two at once; who came first goes first."""
        return by_turns.run(key, customer, item, seconds)

    @locked("again_by_turns", bind=True, lock_key="{key}", lock_fair="customer", max_retries=10)
    def again_by_turns(self: Any, key: str, customer: str, item: Any = "", times: int = 0) -> Any:
        """Retries itself `times` times."""
        with ledger.run(key, f"{customer}{item}{self.request.retries}"):
            if self.request.retries < times:
                raise self.retry(countdown=0)
        return item
