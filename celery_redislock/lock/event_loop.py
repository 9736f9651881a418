"""The asyncio event loop that runs the caller, if one does."""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop, _get_running_loop


def running_loop() -> AbstractEventLoop | None:
    """The event loop that runs the caller, or None: a caller that blocks would stop the whole loop."""
    loop = _get_running_loop()
    if loop is None:
        return None
    # To asyncio all greenlets of gevent are one thread, so the loop of another greenlet may be found here. An asyncio
    # loop notes in `_thread_id` the greenlet that runs it. (A loop of uvloop does not.)
    runs_in = getattr(loop, "_thread_id", None)
    return loop if runs_in in {None, threading.get_ident()} else None


def running_task() -> asyncio.Task[object] | None:
    """The asyncio task that runs the caller, or None."""
    loop = running_loop()
    return None if loop is None else asyncio.current_task(loop)
