"""Tasks that are acked after they ran, and so may be delivered again."""

from __future__ import annotations

from typing import Any

from celery import Celery

from tests.lab.gate import spend
from tests.lab.ledger import Ledger

from .decorator import decorator_of


def define(app: Celery, ledger: Ledger) -> None:
    """Define the tasks of this module."""
    locked = decorator_of(app)

    @locked("late", lock_args=["key"], acks_late=True, lock_lease=6.0)
    def late(key: Any, item: Any = "", seconds: float | str = 0.0, fails: bool = False) -> Any:
        """Acked after it ran, with a short lease."""
        with ledger.run(key, item):
            spend(seconds)
            if fails:
                raise ValueError(f"{item} fails")
        return item

    @locked("tracked", lock_args=["key"], acks_late=True, lock_lease=6.0, track_started=True)
    def tracked(key: Any, item: Any = "", seconds: float | str = 0.0, fails: bool = False) -> Any:
        """As late, and shown as STARTED meanwhile."""
        return late.run(key, item, seconds, fails)

    @locked("once_late", lock_args=["key"], lock_on_conflict="skip", lock_lease=5.0, acks_late=True)
    def once_late(key: Any, item: Any = "", file: str = "") -> Any:
        """Is skipped while another runs, and acked after it ran."""
        with ledger.run(key, item):
            spend(0.0, file)
        return item

    @locked("restarted", lock_args=["key"], acks_late=True)
    def restarted(key: Any, item: Any, first: float | str = 0.0) -> Any:
        """Acked after it ran; takes its time only in its first run."""
        return ledger.take(key, item, first)

    @locked("cut_short", lock_args=["key"], acks_late=True, reject_on_worker_lost=True, lock_lease=6.0)
    def cut_short(key: Any, item: Any, first: float | str = 0.0) -> Any:
        """Raises SystemExit in its first run, when its body has ended and its result is not stored yet."""
        is_first = str(item) not in ledger.items()
        ledger.take(key, item, first)
        return _Leaves() if is_first else item


class _Leaves:
    """A result that ends the process which stores it."""

    def __json__(self) -> Any:
        raise SystemExit(1)
