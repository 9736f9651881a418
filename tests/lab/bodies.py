"""What bodies of tasks do that is more than a line."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from celery_redislock import LockLost
from tests.lab.ledger import Ledger


def watch(
    lock: Any, ledger: Ledger, item: Any, seconds: float | str, after_loss: float = float("inf"), file: str = ""
) -> None:
    """In a body: write down each new state of its lock, and each new deadline, as the body itself sees them.

    It takes so many seconds; or where a file is named, until it is there.
    """
    gate = Path(file or seconds) if file or isinstance(seconds, str) else None
    end, state, deadline = time.monotonic() + (60 if isinstance(seconds, str) else seconds), None, 0.0
    while time.monotonic() < end and not (gate and gate.exists()):
        now, remaining = time.monotonic(), lock.remaining
        if lock.state != state:
            state = lock.state
            ledger.write({"event": "lock", "item": item, "state": state, "check": _check(lock)})
            end = min(end, now + after_loss) if state == "lost" else end
        if remaining and now + remaining > deadline + 0.05:
            deadline = now + remaining
            ledger.write({"event": "deadline", "item": item, "at": deadline})
        time.sleep(0.01)


def _check(lock: Any) -> str | None:
    """The name of what ``lock.check()`` raises."""
    try:
        lock.check()
    except LockLost as error:
        return type(error).__name__
    return None


def sleep_on(seconds: float) -> None:
    """Sleep, whatever signals come."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(BaseException):
            time.sleep(end - time.monotonic())


@contextmanager
def unmoved() -> Iterator[None]:
    """In the block, SIGTERM does nothing to this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
