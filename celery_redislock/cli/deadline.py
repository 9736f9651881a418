"""Deadline: what asks a broker or a result backend, which may be silent, ends all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

#: Seconds that a broker or a result backend has for an answer. Celery's own commands wait for a silent one for ever.
PATIENCE = 4.0


def patiently(ask: Callable[[], Answer], waits: float = 0.0) -> Answer:
    """What `ask` returns.

    Args:
        ask: Asks. A thread in which it takes longer than it may is left behind: it ends with the process.
        waits: For how many seconds it waits by itself, besides `PATIENCE`.

    Raises:
        TimeoutError: It took longer.
        Exception: What `ask` has raised.
    """
    done: list[Answer] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(ask())
        except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="redislock-ask", daemon=True)
    thread.start()
    thread.join(PATIENCE + waits)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {PATIENCE + waits:g} s")
    return done[0]
