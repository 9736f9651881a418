"""Abort: `lock_on_lost="abort"`, a LockLost raised in the body whose lock is lost."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Any, Self

from celery_redislock.errors import LockLost

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


class Abort:
    """Around a body: what is raised between its begin and its end reaches the body or nobody.

    The interpreter raises it between two bytecodes of the body's thread: a body inside a C call (a query, a sleep)
    gets it when that returns. A green thread cannot be reached; there, and in long C calls, use ``self.lock.check()``.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._thread: int | None = None
        self._error: type[Exception] | None = None

    @property
    def is_armed(self) -> bool:
        """Whether a body runs within it: what that calls, in whichever thread, is a part of it."""
        return self._thread is not None

    def strike(self, key: str, reason: str) -> None:
        """Raise LockLost in the body, if it runs; if it is still to begin, then there."""
        with self._changing:
            if self._error is not None:
                return
            self._error = _lost(key, reason)
            if self._thread is not None:
                _raise_in(self._thread, self._error)

    def __enter__(self) -> Self:
        with self._changing:
            if self._error is not None:
                raise self._error()
            self._thread = threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An error that strikes in here leaves through the body's end, and it is the only one: see `strike`.
        with self._changing:
            thread = self._thread
            self._thread = None
            if self._error is not None and thread is not None:
                _raise_in(thread, ctypes.py_object())  # NULL: takes back what has not been raised yet


def _lost(key: str, reason: str) -> type[Exception]:
    """LockLost with its arguments: the interpreter raises a class, which it calls without any."""

    class Lost(LockLost):
        def __init__(self) -> None:
            super().__init__(key, reason)

        def __reduce__(self) -> tuple[Any, ...]:
            return LockLost, (key, reason)

    Lost.__name__, Lost.__qualname__, Lost.__module__ = "LockLost", "LockLost", LockLost.__module__
    return Lost
