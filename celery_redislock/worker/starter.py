"""Starter: has waiting messages given to the pool in the thread that gives it all others."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.concurrency import solo

logger = logging.getLogger(__name__)


class Starter:
    """Calls `run` in the event loop. A worker without one has a thread for it, or ``solo`` its main thread.

    Args:
        run: Gives messages to the pool.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._consumer: Any = None
        #: The pipe that wakes the event loop up.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._woken = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        #: Seconds after which the thread wakes up by itself; None for never.
        self._again: float | None = None
        #: The same for the event loop: the one entry in its timer.
        self._entry: Any = None

    def start(self, consumer: Any) -> None:
        """Begin to call `run`."""
        self._consumer = consumer

    def stop(self) -> None:
        """Call `run` no more."""
        self._consumer = None

    def register(self, hub: Any) -> None:
        """Be called by the event loop, which begins."""
        hub.add_reader(self._reader, self._woken_up)

    def wake_up(self) -> None:
        """Have `run` called at once. It is for any thread."""
        consumer = self._consumer
        if consumer is None:
            return
        if consumer.hub is not None:
            with suppress(BlockingIOError):  # the pipe is full: the event loop will wake up in any case
                os.write(self._writer, b"!")
        elif isinstance(consumer.pool, solo.TaskPool):
            consumer.call_soon(self._run)
        else:
            self._wake_thread()

    def look_again(self, seconds: float) -> None:
        """Have `run` called after so many seconds, and not at the time that was set before.

        If they are not 0, this is called where `run` is.
        """
        consumer = self._consumer
        if not seconds or consumer is None:
            self.wake_up()
        elif consumer.hub is not None:
            if self._entry is not None:  # else each call would begin a series of its own
                self._entry.cancel()
            self._entry = consumer.hub.call_later(seconds, self._run)
        else:
            self._again = seconds

    def _woken_up(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        self._run()

    def _wake_thread(self) -> None:
        self._woken.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="redislock-starter", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while True:
            self._woken.wait(self._again)
            self._woken.clear()
            self._again = None
            try:
                self._run()
            except Exception:
                logger.exception("a waiting message could not be started; it is delivered again when its worker ends")
