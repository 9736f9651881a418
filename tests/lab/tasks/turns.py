"""Tasks that take their turn, or do not; their keys are made in every way there is."""

from __future__ import annotations

from typing import Any

from celery import Celery
from pydantic import BaseModel

from tests.lab.gate import spend, wait_for_file
from tests.lab.ledger import Ledger

from .decorator import decorator_of


class Order(BaseModel):
    """An argument of a task with ``pydantic=True``."""

    number: int
    lines: tuple[str, ...]
    file: str


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("work", lock_args=["key"])
    def work(key: Any, item: Any = "", seconds: float | str = 0.0, file: str = "") -> Any:
        """Takes its turn."""
        with ledger.run(key, item):
            spend(seconds, file)
        return item

    @locked("once", lock_args=["key"], lock_on_conflict="skip")
    def once(key: Any, item: Any = "", seconds: float | str = 0.0, fails: bool = False, file: str = "") -> Any:
        """Is skipped while another runs."""
        with ledger.run(key, item):
            spend(seconds, file)
            if fails:
                raise ValueError(f"{item} fails")
        return item

    @locked("until", lock_key="{key}", lock_on_conflict="skip", ignore_result=False)
    def until(key: Any, item: Any, file: str) -> Any:
        """Runs until the file is there; another is skipped meanwhile."""
        with ledger.run(key, item):
            wait_for_file(file)
        return item

    @locked("keyed", lock_key="stock:{sku}", lock_on_conflict="wait")
    def keyed(sku: Any, item: Any = "", seconds: float | str = 0.0) -> Any:
        """Shares its key with `keyed_too`."""
        with ledger.run(sku, item):
            spend(seconds)
        return item

    @locked("keyed_too", lock_key="stock:{sku}", lock_on_conflict="wait")
    def keyed_too(quantity: int, sku: Any, seconds: float | str = 0.0) -> int:
        with ledger.run(sku, quantity):
            spend(seconds)
        return quantity

    @locked("whole")
    def whole(account: Any, full: bool = False, file: str = "") -> None:
        """All arguments make its key."""
        with ledger.run(account):
            spend(0.0, file)

    @locked("model", pydantic=True)
    def model(order: Order) -> int:
        """Takes a pydantic model."""
        with ledger.run(order.number):
            spend(0.0, order.file)
        return order.number
