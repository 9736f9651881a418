"""A time limit, or a shutdown, that strikes while a reply is awaited."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.proxy import Fault


@contextmanager
def raised_at(fault: Fault, error: BaseException) -> Iterator[None]:
    """In the block, `error` is raised in this thread by a signal, once, as soon as `fault` has struck."""
    waiter = threading.get_ident()

    def strike() -> None:
        fault.wait()
        signal.pthread_kill(waiter, signal.SIGUSR1)

    def handle(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, handle)
    striker = threading.Thread(target=strike)
    striker.start()
    try:
        yield
    finally:
        striker.join()
        signal.signal(signal.SIGUSR1, before)
