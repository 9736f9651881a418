"""Publishing from an event loop: in threads, one after the other."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

from celery import Celery

from celery_redislock.celery_port import as_in_this_thread
from celery_redislock.lock.lock_server import in_loop

_TURNS = "_redislock_turns"
#: The next publish begins when this one has ended, or after this many seconds: it then waits for a server. Publishes at
#: the same time would take the interpreter from each other and from the loop, which could not go on for many
#: milliseconds, and would be slower.
APART = 0.02

R = TypeVar("R")


async def in_thread(app: Celery, publish: Callable[[], R]) -> R:
    """Call `publish` in a thread, where Celery finds the running tasks of this one."""
    loop = asyncio.get_running_loop()
    run = as_in_this_thread(publish)
    turns: dict[AbstractEventLoop, asyncio.Lock] = vars(app).setdefault(_TURNS, {})
    async with in_loop(turns, asyncio.Lock):
        sent = loop.run_in_executor(None, copy_context().run, run)
        try:
            await asyncio.wait([sent], timeout=APART)
        except BaseException:
            sent.cancel()  # the thread goes on if it has begun
            raise
    return await sent
