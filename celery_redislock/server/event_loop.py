"""The asyncio event loop that runs the caller, if one does."""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop, _get_running_loop


def running_loop() -> AbstractEventLoop | None:
    """The loop whose code calls this: what blocks here blocks all of it."""
    loop = _get_running_loop()
    if loop is None:
        return None
    # To asyncio all greenlets of gevent are one thread; its loops note by which of them they run. (uvloop's do not.)
    runs_in = getattr(loop, "_thread_id", None)
    return loop if runs_in in {None, threading.get_ident()} else None


def running_task() -> asyncio.Task[object] | None:
    """The asyncio task that calls this."""
    loop = running_loop()
    return None if loop is None else asyncio.current_task(loop)
