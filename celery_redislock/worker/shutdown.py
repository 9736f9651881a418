"""Shutdown: whether the worker shuts down, as soon as that is known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.signals import worker_shutting_down
from celery.worker import state

#: Seconds that the end of a worker waits at most for a handover that has begun before.
LONGEST = 5.0


class Shutdown:
    """The shutdown of one worker.

    Celery stops the consumer when the event loop ends its round. Where the main thread is busy for longer, with a body
    in the pool ``solo`` or with the time of a soft shutdown, a thread hands over meanwhile what waits.

    Args:
        consumer: Celery's consumer.
        hand_over: Stops to consume, and hands over what waits.
        wake_up: Wakes up the event loop, which would else end its round only at the next event.
    """

    def __init__(self, consumer: Any, hand_over: Callable[[], None], wake_up: Callable[[], None]) -> None:
        self._consumer, self._hand_over, self._wake_up = consumer, hand_over, wake_up
        self._thread: threading.Thread | None = None
        worker_shutting_down.connect(self._heard)
        worker = consumer.controller
        self._wait, worker.wait_for_soft_shutdown = worker.wait_for_soft_shutdown, self._wait_for_soft_shutdown

    @property
    def has_begun(self) -> bool:
        """Whether the worker shuts down. Its consumer also stops where it is to connect again."""
        return self._thread is not None or self._consumer.blueprint.state in _ENDS

    def join(self) -> None:
        """Wait for what has begun before the consumer stops."""
        if self._thread is not None:
            self._thread.join(LONGEST)

    def _heard(self, sender: Any = None, **_: Any) -> None:
        """Called in the handler of a signal, which interrupts the main thread."""
        if sender != self._consumer.hostname:
            return
        if isinstance(self._consumer.pool, solo.TaskPool) and state.active_requests:
            self._begin()
        elif self._consumer.hub is not None:
            self._wake_up()

    def _wait_for_soft_shutdown(self) -> None:
        """Called as well in such a handler, in place of the worker's own method."""
        conf = self._consumer.app.conf
        if conf.worker_soft_shutdown_timeout > 0 and (
            state.active_requests or conf.worker_enable_soft_shutdown_on_idle
        ):
            self._begin()
        self._wait()
        self.join()

    def _begin(self) -> None:
        if self._thread is None and self._consumer.task_consumer is not None:
            self._thread = threading.Thread(target=self._hand_over, name="redislock-shutdown", daemon=True)
            self._thread.start()


_ENDS = {bootsteps.CLOSE, bootsteps.TERMINATE}  # type: ignore[attr-defined]
