"""Starter: gives waiting messages to the pool, in the same thread that gives it fetched ones.

`GatedSlots` and `SoloSlots` are the slots of workers whose fetched messages do not pass Celery's semaphore.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.concurrency import solo
from celery.signals import task_postrun
from celery.worker import state
from celery.worker.request import Request

from .slots import HELD_FOR, Slots, slots_of

logger = logging.getLogger(__name__)

#: Seconds between two checks of the gate while fetched messages are queued at it: a run may end without a signal.
LOOK_EVERY = 0.1


class Starter:
    """Calls `run` in the event loop. A worker without an event loop uses a thread; ``solo`` uses the main thread.

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
        #: In a worker without an event loop, the seconds after which the thread wakes up by itself; None for never.
        self._again: float | None = None
        #: In a worker with one, the timer's entry for the scheduled call of `run`.
        self._entry: Any = None

    def start(self, consumer: Any) -> None:
        """Start calling `run`."""
        self._consumer = consumer

    def stop(self) -> None:
        """Stop calling `run`."""
        self._consumer = None

    def register(self, hub: Any) -> None:
        """Add the pipe to the event loop, which is starting."""
        hub.add_reader(self._reader, self._woken_up)

    def wake_up(self) -> None:
        """Schedule a call of `run` at once. Thread-safe."""
        consumer = self._consumer
        if consumer is None:
            return
        if consumer.hub is not None:
            with suppress(BlockingIOError):  # the pipe is full: the event loop will wake up anyway
                os.write(self._writer, b"!")
        elif isinstance(consumer.pool, solo.TaskPool):
            consumer.call_soon(self._run)
        else:
            self._wake_thread()

    def look_again(self, seconds: float) -> None:
        """Schedule a call of `run` after this many seconds, instead of any call scheduled earlier.

        With 0, which means at once, this is thread-safe; otherwise, call it only in the thread that calls `run`.
        """
        consumer = self._consumer
        if not seconds or consumer is None:
            self.wake_up()
        elif consumer.hub is not None:
            if self._entry is not None:  # otherwise each call would start a new series of calls
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


class GatedSlots(Slots):
    """The slots of ``threads``, ``gevent`` and ``eventlet``, and of ``prefork`` in a worker without an event loop.

    While messages wait in the worker, fetched messages queue at a gate until a slot is free. Otherwise they pass.

    Args:
        consumer, on_held, look_again: See `Slots`.
        is_waited: Returns whether a message waits in the worker.
    """

    def __init__(
        self,
        consumer: Any,
        on_held: Callable[[], None],
        look_again: Callable[[float], None],
        is_waited: Callable[[], bool],
    ) -> None:
        super().__init__(consumer, on_held, look_again)
        self._is_waited = is_waited
        self._fetched: deque[Request] = deque()
        #: The requests that were given to the pool and have not ended.
        self._running: set[Request] = set()
        task_postrun.connect(self._run_ends)

    def admit(self, request: Request) -> None:
        """Pass `request` on to the pool, or queue it at the gate."""
        if self._fetched or (self._is_waited() and (self._claims or self._idle() <= 0)):
            self._fetched.append(request)
            self._look_again(0)
        else:
            self._start(request)

    def clear(self) -> None:
        """Empty the gate too: the broker delivers its messages again."""
        super().clear()
        self._fetched.clear()

    def _hold_more(self) -> None:
        for request in tuple(self._running):
            if request not in state.reserved_requests:
                self._running.discard(request)
        while self._let_one_in():
            pass
        if self._fetched:
            self._look_again(LOOK_EVERY)

    def _let_one_in(self) -> bool:
        """Let in a waiting message if one needs a slot, otherwise a fetched one; return whether one was let in."""
        if self._fetched and not self._is_waited():
            self._start(self._fetched.popleft())
        elif self._idle() <= 0:
            return False
        elif len(self._held) < self._claims:
            self._held.append(time.monotonic())
            self._on_held()
        elif self._fetched:
            self._start(self._fetched.popleft())
        else:
            return False
        return True

    def _give_up(self) -> None:
        if self._fetched:
            self._start(self._fetched.popleft())

    def _start(self, request: Request) -> None:
        self._running.add(request)
        super()._start(request)

    def _run_ends(self, task_id: str = "", **_: Any) -> None:
        """Handle the end of a run, in the pools that run tasks in this process."""
        request = state.requests.get(task_id)
        if request is not None:
            self._note_end(request)
            self._running.discard(request)
        if self._fetched or self._claims:
            self._look_again(0)

    def _idle(self) -> int:
        return slots_of(self._pool) - self._dead - len(self._running) - len(self._held)

    def _free(self, starting: int) -> int:
        return max(0, self._idle()) + len(self._held)


class SoloSlots(Slots):
    """The one slot of ``solo``, which runs tasks in the thread that fetches messages.

    Before each fetched message, a room may call waiting ones.

    Args:
        consumer, on_held, look_again: See `Slots`.
        run_calls: Runs the called messages.
    """

    def __init__(
        self,
        consumer: Any,
        on_held: Callable[[], None],
        look_again: Callable[[float], None],
        run_calls: Callable[[], None],
    ) -> None:
        super().__init__(consumer, on_held, look_again)
        self._run_calls = run_calls
        self._has_seen = False
        self._has_decided = threading.Event()

    def starts_round(self, living: Callable[[Any], int]) -> None:
        """Record whether this round sees the held slot; only a round that sees it decides whether to use it."""
        super().starts_round(living)
        self._has_seen = bool(self._held)

    def ends_round(self, wanted: int) -> bool:
        """End a room's round. If the round has decided about the held slot, `admit` need not wait any longer."""
        super().ends_round(wanted)
        self._wanted = wanted
        if self._has_seen:
            self._has_decided.set()
        return False

    def settle(self, wanted: int) -> None:
        """Record `wanted`, but do not give up the held slot: `admit` would think that it was used."""
        self._wanted = wanted
        self._note_ended()

    def admit(self, request: Request) -> None:
        """Run the waiting messages that are called, then `request`."""
        self._note_ended()
        while self._claims and self._runs_one():
            self._note_ended()
        self._start(request)

    def _runs_one(self) -> bool:
        """Let the room call a waiting message, and run that message; return whether there was one."""
        self._has_decided.clear()
        self._held.append(time.monotonic())
        self._on_held()
        self._has_decided.wait(HELD_FOR)
        self._run_calls()
        is_unused = bool(self._held)
        self._held.clear()
        return not is_unused

    def _hold_more(self) -> None:
        """Do nothing: the slot is held only when a message was fetched."""

    def _give_up(self) -> None:
        """Do nothing: the fetched message runs next."""

    def _free(self, starting: int) -> int:
        return max(0, slots_of(self._pool) - len(state.reserved_requests) + starting) + len(self._held)
