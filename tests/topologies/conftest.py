"""What the tests with real workers share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.ledger import Ledger
from tests.lab.servers import Valkey, wait_until


@pytest.fixture
def running(ledger: Ledger) -> Callable[..., int]:
    """Waits until a run of this item has begun; returns the child's pid."""

    def wait(item: object = "") -> int:
        wait_until(lambda: str(item) in ledger.items(), f"{item} runs")
        return [run.pid for run in ledger.runs() if run.item == str(item)][-1]

    return wait


@pytest.fixture
def nothing_is_left(locks: Valkey) -> Callable[[], None]:
    """Waits until Redis is empty. A lease is 30 s if nothing else is said, and a message keeps its key for an hour."""
    return lambda: wait_until(lambda: locks.held() == [], "nothing is left", 10)
