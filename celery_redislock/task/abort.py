"""Abort: raises LockLost or LockReplaced in the thread of a body whose run has lost its lock, or is asked to stop."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
from types import FrameType
from typing import Any, Self

from celery_redislock.errors import LockLost, LockReplaced

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
#: Packages that would swallow the error: a log handler prints what it fails with, and a publish goes on. While the body
#: is in one of them, `strike` waits, for at most so many pauses of up to so many seconds. The slice is the switch
#: interval meanwhile.
_CAREFUL, _PAUSES, _PAUSE, _SLICE = frozenset({"logging", "celery_redislock"}), 200, 0.001, 0.0002
_slicing = threading.Lock()
_random = random.SystemRandom()


class Abort:
    """A context manager around a body. `strike` raises an error inside the body, and nowhere else in its thread.

    The interpreter raises the error between two bytecodes, so a body inside a C call (a query, a sleep) gets it when
    the call returns. A greenlet never gets it. There, and around long C calls, a body should call
    ``self.lock.check()``.

    Source: `PyThreadState_SetAsyncExc` in CPython's C API.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._thread: int | None = None
        self._caller: FrameType | None = None
        self._error: type[Exception] | None = None

    @property
    def is_armed(self) -> bool:
        """Whether a body is running in this context. Nested calls, such as ``super().run()``, must not re-enter it."""
        return self._thread is not None

    def strike(self, error: LockLost | LockReplaced) -> None:
        """Raise `error` in the body, or, if the body has not started, when it starts.

        Only the first call has an effect, except that a LockLost may follow a LockReplaced.
        """
        struck = _without_arguments(error)  # takes longer than a look at the body
        with self._changing:
            if self._is_struck_by(struck):
                return
        # This thread gets the interpreter when the body does I/O, as in a log handler, or after the switch interval.
        # That interval is short for a moment, so that the body is not always found in the handler.
        with _slicing:
            interval = sys.getswitchinterval()
            sys.setswitchinterval(_SLICE)
            try:
                for pauses_left in reversed(range(_PAUSES)):
                    # A body that logs at the pace of these pauses would be found in its handler each time.
                    time.sleep(_random.uniform(0, _PAUSE))
                    with self._changing:
                        if self._is_struck_by(struck, in_any_case=not pauses_left):
                            return
            finally:
                sys.setswitchinterval(interval)

    def _is_struck_by(self, struck: type[Exception], *, in_any_case: bool = False) -> bool:
        """Strike, unless the error would be swallowed; return whether nothing is left to do."""
        may_follow = self._error is None or (issubclass(self._error, LockReplaced) and issubclass(struck, LockLost))
        if may_follow and self._thread is not None:
            frame = sys._current_frames().get(self._thread)
            seen_at = frame and frame.f_lasti
            # A body that has moved since it was looked at may be anywhere. Between this comparison and the strike it
            # cannot move: the interpreter changes threads where a call ends, a function begins or a loop turns.
            if not in_any_case and (self._would_be_swallowed_in(frame) or (frame and frame.f_lasti != seen_at)):
                return False
            _raise_in(self._thread, struck)
        if may_follow:
            self._error = struck
        return True

    def _would_be_swallowed_in(self, frame: FrameType | None) -> bool:
        """Whether a body that is in this frame is in code that would swallow the error."""
        while frame is not None and frame is not self._caller:
            if frame.f_globals.get("__name__", "").partition(".")[0] in _CAREFUL:
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Self:
        with self._changing:
            if self._error is not None:
                raise self._error()
            self._thread, self._caller = threading.get_ident(), sys._getframe(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The error may be raised while this method runs. It then propagates and ends the body, like any other error.
        with self._changing:
            thread, self._thread, self._caller = self._thread, None, None
            if self._error is not None and thread is not None and kind is not self._error:
                _take_back(thread)


class _TakenBack(BaseException):
    """Raised in place of an error that comes too late, and caught at once."""


def _take_back(thread: int) -> None:
    """Cancel the error scheduled for `thread`, the current thread, unless it has already been raised.

    Passing NULL would also cancel it. But CPython 3.11 and 3.12 would then look for an error at every call and loop
    iteration until one is raised, and in 3.11 the next function call would never return under a debugger or coverage.
    """
    try:
        while _raise_in(thread, _TakenBack):  # 0 in a greenlet, whose id is not a thread's: nothing is scheduled
            pass
    except _TakenBack:
        pass
    except BaseException:  # a time limit was raised first
        _raise_in(thread, ctypes.py_object())  # nothing is scheduled then
        raise


def _without_arguments(error: LockLost | LockReplaced) -> type[Exception]:
    """Create a subclass of the error's class that takes no arguments: the interpreter instantiates it without any."""
    kind: Any = type(error)

    class Struck(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(*error.args)

        def __reduce__(self) -> tuple[Any, ...]:
            return kind, error.args

    Struck.__name__, Struck.__qualname__, Struck.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Struck
