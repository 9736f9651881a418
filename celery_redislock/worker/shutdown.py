"""Shutdown: whether the worker shuts down, as soon as that is known."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.signals import worker_shutting_down
from celery.worker import state

from .worker_port import wrap_soft_shutdown

logger = logging.getLogger(__name__)

#: So many seconds without a step forward, and a worker that shuts down waits for its broker no longer.
LONGEST = 5.0


class Shutdown:
    """The shutdown of one worker.

    A thread hands over what waits, so that a broker that does not answer cannot keep the worker from ending. It begins
    when Celery stops the consumer; sooner, where the main thread is busy for longer: with a body in the pool ``solo``,
    with the time of a soft shutdown, or, in green pools, with its wait for the broker.

    Args:
        consumer: Celery's consumer.
        hand_over: Stops to consume, and hands over what waits.
        wake_up: Wakes up the event loop, which would else end its round only at the next event.

    Attributes:
        steps: How many messages have been handed over.
        still_receives: Whether Celery goes on reading from the broker meanwhile, and puts back what it receives.
    """

    def __init__(self, consumer: Any, hand_over: Callable[[], None], wake_up: Callable[[], None]) -> None:
        self._consumer, self._hand_over, self._wake_up = consumer, hand_over, wake_up
        self._thread: threading.Thread | None = None
        self.steps = 0
        self.still_receives = False
        worker_shutting_down.connect(self._heard)
        wrap_soft_shutdown(consumer.controller, self._wait_for_soft_shutdown)

    @property
    def has_begun(self) -> bool:
        """Whether the worker shuts down. Its consumer also stops where it is to connect again."""
        return self._thread is not None or self._consumer.blueprint.state in _ENDS

    def finish(self) -> None:
        """Hand over what waits, unless that has begun before, and wait for it."""
        self._begin()
        if self._thread is not None:
            self._wait_for(self._thread)

    def run(self, hand_over: Callable[[], None]) -> None:
        """Run `hand_over`, for what has to wait only now, and wait for it."""
        thread = _thread(hand_over)
        thread.start()
        self._wait_for(thread)

    def _wait_for(self, thread: threading.Thread) -> None:
        steps = -1
        while thread.is_alive() and steps != self.steps:
            steps = self.steps
            thread.join(LONGEST)
        if thread.is_alive():
            logger.warning("what waits in this worker is delivered again later: the broker does not answer")

    def _heard(self, sender: Any = None, **_: Any) -> None:
        """Called in the handler of a signal, which interrupts the main thread."""
        if sender != self._consumer.hostname:
            return
        if isinstance(self._consumer.pool, solo.TaskPool) and state.active_requests:
            self._begin()
        elif self._consumer.hub is not None:
            self._wake_up()
        elif self._is_green_on_redis:
            self.still_receives = True
            self._consumer.timer.call_after(0.0, self._begin)  # gevent's handler must not wait for a thread to start

    @property
    def _is_green_on_redis(self) -> bool:
        """Whether Celery looks only every two seconds if it must stop, and another greenlet may talk to the broker."""
        consumer = self._consumer
        driver = getattr(getattr(consumer.connection, "transport", None), "driver_type", None)
        return bool(consumer.pool.is_green) and driver == "redis"

    def _wait_for_soft_shutdown(self, wait: Callable[[], None]) -> None:
        """Called as well in such a handler, in place of the worker's own wait."""
        conf = self._consumer.app.conf
        if conf.worker_soft_shutdown_timeout > 0 and (
            state.active_requests or conf.worker_enable_soft_shutdown_on_idle
        ):
            self._begin()
        wait()
        if self._thread is not None:
            self._wait_for(self._thread)

    def _begin(self) -> None:
        if self._thread is None and self._consumer.task_consumer is not None:
            self._thread = _thread(self._hand_over)  # before it starts, for it asks whether the shutdown has begun
            self._thread.start()


def _thread(target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name="redislock-shutdown", daemon=True)


_ENDS = {bootsteps.CLOSE, bootsteps.TERMINATE}  # type: ignore[attr-defined]
