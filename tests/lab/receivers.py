"""Receivers of the package's signals that write down what they are told, and then fail."""

from __future__ import annotations

from typing import Any

from celery_redislock import signals
from tests.lab.ledger import Ledger


def break_receivers(ledger: Ledger) -> None:
    """From now on, have a receiver of every signal fail in this process and in those that it forks."""

    def fail(sender: Any = None, signal: Any = None, **told: Any) -> None:
        ledger.write({"event": "signal", "name": signal.name, "task": sender.name, "told": sorted(told)})
        raise RuntimeError(f"a receiver of {signal.name} is broken\nin two lines")

    for name in signals.__all__:
        getattr(signals, name).connect(fail, weak=False)
