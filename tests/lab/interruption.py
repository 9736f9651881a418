"""A time limit, or a shutdown, that strikes while a reply is awaited, or anywhere."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import celery_redislock
from tests.lab.proxy import Fault

PACKAGE = str(Path(celery_redislock.__file__).parent)


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


def at_each_point(call: Callable[[], object]) -> Iterator[int]:
    """Call `call` again and again, and raise KeyboardInterrupt at a later point each time, first where its body begins.

    Python handles signals when a function begins and when a C function returns. Only the package's own are counted, and
    no finalizers, in which Python ignores errors. The last call is not interrupted.
    """
    for point in itertools.count(1):
        seen = 0

        def strike(frame: FrameType, event: str, _: object, point: int = point) -> None:
            nonlocal seen
            is_ours = frame.f_code.co_filename.startswith(PACKAGE)
            if event in {"call", "c_return"} and is_ours and "__del__" not in _names_of(frame):
                seen += 1
                if seen == point + 1:  # the first is the call itself, before its body
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        try:
            sys.setprofile(strike)
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if seen <= point:
            return
        yield point


def _names_of(frame: FrameType | None) -> Iterator[str]:
    """The names of the functions that are being called, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
