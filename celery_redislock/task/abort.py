"""Abort: raises LockLost in a body whose lock is lost, for the option `lock_on_lost="abort"`."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Any, Self

from celery_redislock.errors import LockLost

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NOTHING = ctypes.py_object()


class Abort:
    """A context manager around a body. `strike` raises LockLost inside it, and nowhere else in the body's thread.

    The interpreter raises the error between two bytecodes of that thread, so a body that is inside a C call (a query, a
    sleep) gets it when the call returns. It reaches no green thread. There, and around long C calls, a body should call
    ``self.lock.check()``.

    Source: `PyThreadState_SetAsyncExc` in CPython's C API.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._thread: int | None = None
        self._error: type[Exception] | None = None

    @property
    def is_armed(self) -> bool:
        """Whether a body runs inside this object. A body that it calls, as ``super().run()``, must not enter again."""
        return self._thread is not None

    def strike(self, key: str, reason: str) -> None:
        """Raise LockLost in the body. A body that has not begun yet gets the error when it begins.

        Only the first call does anything.
        """
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
        # LockLost may be raised while this method runs. The error then leaves the method and ends the body, as any
        # error does. No second LockLost can follow, for `strike` raises only one.
        with self._changing:
            thread = self._thread
            self._thread = None
            if self._error is not None and thread is not None and kind is not self._error:
                _take_back(thread)


class _TakenBack(BaseException):
    """Is raised instead of a LockLost that comes too late, and caught at once."""


def _take_back(thread: int) -> None:
    """Forget the error that was to be raised in `thread`, which is this thread, if it has not been raised yet.

    NULL alone would take it back. But from then on CPython 3.11 and 3.12 look for an error to raise at every call and
    every turn of a loop, until one was raised; and in CPython 3.11 the next call of a function never ends where a
    debugger, or coverage, traces the thread.
    """
    try:
        while _raise_in(thread, _TakenBack):  # 0 in a green thread, which has another number: nothing was to be raised
            pass
    except _TakenBack:
        pass
    except BaseException:  # a time limit has come first
        _raise_in(thread, _NOTHING)
        raise


def _lost(key: str, reason: str) -> type[Exception]:
    """A LockLost that needs no arguments: the interpreter is given a class, and makes the error itself."""

    class Lost(LockLost):
        def __init__(self) -> None:
            super().__init__(key, reason)

        def __reduce__(self) -> tuple[Any, ...]:
            return LockLost, (key, reason)

    Lost.__name__, Lost.__qualname__, Lost.__module__ = "LockLost", "LockLost", LockLost.__module__
    return Lost
