"""Starter: gives waiting messages to the pool, in the same thread that gives it fetched ones.

`GatedSlots` and `SoloSlots` are the slots of workers whose fetched messages do not pass Celery's semaphore.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.concurrency import solo
from celery.signals import task_postrun
from celery.worker import state
from celery.worker.request import Request

from .slots import HELD_FOR, Slots, slots_of
from .worker_port import never_runs

logger = logging.getLogger(__name__)

#: Seconds between two checks of the gate while fetched messages are queued at it: a run may end without a signal.
LOOK_EVERY = 0.1
#: Seconds until the next try if messages could not be given to the pool.
AGAIN = 1.0


class Starter:
    """Calls `run` in the event loop. A worker without an event loop uses a thread; ``solo`` uses the main thread.

    Args:
        run: Gives messages to the pool. Returns after how many seconds to call it again, at the latest.
    """

    def __init__(self, run: Callable[[], float]) -> None:
        self._run = run
        self._consumer: Any = None
        #: The pipe that wakes the event loop up.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        # Closes the pipe when this object goes: a process may embed many workers, one after the other.
        weakref.finalize(self, lambda *ends: [*map(os.close, ends)], self._reader, self._writer).atexit = False
        self._woken = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        #: The timer's entry for the next call of `run`, except in the thread.
        self._entry: Any = None

    def start(self, consumer: Any) -> None:
        """Start calling `run`."""
        self._consumer = consumer

    def stop(self) -> None:
        """Stop calling `run`."""
        self._consumer = None
        self._woken.set()  # the thread ends; otherwise it would keep a stopped embedded worker in memory

    def register(self, hub: Any) -> None:
        """Add the pipe to the event loop, which is starting."""
        hub.add_reader(self._reader, self._woken_up)

    def wake_up(self) -> None:
        """Call `run` soon. Thread-safe."""
        consumer = self._consumer
        if consumer is None:
            return
        if consumer.hub is not None:
            with suppress(BlockingIOError):  # the pipe is full: the event loop will wake up anyway
                os.write(self._writer, b"!")
        elif isinstance(consumer.pool, solo.TaskPool):
            consumer.call_soon(self._run_in_turn)
        else:
            self._woken.set()
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name="redislock-starter", daemon=True)
                    self._thread.start()

    def _woken_up(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        self._run_in_turn()

    def _run_in_turn(self) -> None:
        """Call `run` now, and schedule the next call."""
        if self._entry is not None:  # otherwise each call would start a new series of calls
            self._entry.cancel()
            self._entry = None
        pause = AGAIN
        try:
            pause = self._run()
        finally:
            consumer = self._consumer
            if consumer is not None and pause < math.inf:
                in_loop = consumer.hub is not None
                self._entry = consumer.timer.call_after(pause, self._run_in_turn if in_loop else self.wake_up)

    def _loop(self) -> None:
        pause = math.inf
        while True:
            self._woken.wait(None if pause == math.inf else pause)
            self._woken.clear()
            with self._starting:
                if self._consumer is None:
                    self._thread = None
                    return
            pause = AGAIN
            try:
                pause = self._run()
            except Exception:
                logger.exception("a waiting message could not be started; it is delivered again when its worker stops")


class GatedSlots(Slots):
    """The slots of ``threads``, ``gevent`` and ``eventlet``, and of ``prefork`` in a worker without an event loop.

    While messages wait in the worker, fetched messages stop at the gate until a slot is free. Otherwise they pass.

    Args:
        consumer, hooks: See `Slots`.
    """

    def __init__(self, consumer: Any, *hooks: Any) -> None:
        super().__init__(consumer, *hooks)
        #: The requests that were given to the pool and have not ended.
        self._running: set[Request] = set()
        if not consumer.pool.uses_semaphore:  # a child would inherit it, with locks that were held as it was forked
            task_postrun.connect(self._run_ends)

    def admit(self, request: Request) -> None:
        """Pass `request` on to the pool, or stop it at the gate."""
        if self._fetched or (self._is_waited() and (self._claims or self._idle() <= 0)):
            self._fetched.append(request)
            self._wake_up()
        else:
            self._start(request)

    def settle(self, wanted: int, dead: int) -> float:
        """See `Slots.settle`."""
        pause = super().settle(wanted, dead)
        return min(pause, LOOK_EVERY) if self._fetched else pause

    def _fill(self) -> None:
        running = tuple(self._running)
        self._running -= {one for one in running if one not in state.reserved_requests or never_runs(one)}
        while self._fetched and not self._is_waited():
            self._start(self._fetched.popleft())
        while self._idle() > 0 and len(self._held) < self._claims + len(self._fetched):
            self._hold()

    def _start(self, request: Request) -> None:
        self._running.add(request)
        super()._start(request)

    def _run_ends(self, task_id: str = "", **_: Any) -> None:
        """Handle the end of a run, in the pools that run tasks in this process.

        If it ended with SystemExit, or another error that is not an Exception, make Celery forget its request: Celery
        5.7 fails while it handles such a run, and counts the request as running until the worker exits. The run would
        keep its slot, and messages that wait in this worker would not get it.
        """
        request, error = state.requests.get(task_id), sys.exception()
        if request is not None:
            if error is not None and not isinstance(error, Exception):
                state.task_ready(request)
            self._note_end(request)
            self._running.discard(request)
        if self._fetched or self._claims:
            self._wake_up()

    def _release(self) -> None:
        """Do nothing: a slot that no message has is idle."""

    def _idle(self) -> int:
        return slots_of(self._pool) - self._dead - len(self._running) - len(self._held)

    def free(self, starting: int = 0) -> int:
        """See `Slots.free`."""
        return max(0, self._idle() + len(self._held))


class SoloSlots(GatedSlots):
    """The one slot of ``solo``, which runs tasks in the thread that fetches messages.

    Before each fetched message, waiting ones may run: the thread stays at the gate until a room has decided.

    Args:
        consumer, hooks: See `Slots`.
        run_calls: Runs the called messages, and calls `settle`.
    """

    def __init__(self, consumer: Any, *hooks: Any, run_calls: Callable[[], object]) -> None:
        super().__init__(consumer, *hooks)
        self._run_calls = run_calls
        self._has_decided = threading.Event()

    def ends_round(self, wanted: int) -> bool:
        """See `Slots.ends_round`."""
        has_work = super().ends_round(wanted)
        self._has_decided.set()
        return has_work

    def admit(self, request: Request) -> None:
        """Run the waiting messages that are called, then `request`."""
        self._fetched.append(request)
        self._has_decided.clear()
        self._run_calls()
        while self._held:
            self._has_decided.wait(HELD_FOR)
            self._has_decided.clear()
            self._run_calls()
        while self._fetched:  # the worker is shutting down
            self._give_up()

    def free(self, starting: int = 0) -> int:
        """See `Slots.free`. The message at the gate starts next, so it counts as running."""
        return max(0, slots_of(self._pool) - len(state.reserved_requests) + starting) + len(self._held)
