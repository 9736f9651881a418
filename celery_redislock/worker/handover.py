"""Handover: returns to the broker the messages that can no longer wait here; they wait again when redelivered.

They are published again when the worker shuts down (see `Shutdown`) or the broker's visibility timeout approaches (see
`Handover.leave`). If the connection is lost, the broker delivers them again by itself.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.signals import worker_shutting_down
from celery.worker import state
from celery.worker.request import Request
from kombu.common import ignore_errors

from .requeue import BATCH, hand_over, publish, settle
from .slots import drained, let_go
from .waiting_message import WaitingMessage
from .worker_port import is_closing, restore, wrap_soft_shutdown

logger = logging.getLogger(__name__)

#: A worker that is shutting down gives up on its broker after this many seconds without progress.
LONGEST = 5.0

_ENDS = {bootsteps.CLOSE, bootsteps.TERMINATE}  # type: ignore[attr-defined]


class Shutdown:
    """The shutdown of one worker.

    A thread hands over the waiting messages, so that an unresponsive broker cannot keep the worker from exiting. The
    thread starts when Celery stops the consumer, or earlier if something else keeps the main thread busy: a body in the
    pool ``solo``, a soft shutdown, or, in green pools, waiting for the broker.

    Args:
        consumer: Celery's consumer.
        hand_over: Stops consuming, and hands over the waiting messages.
        wake_up: Wakes up the event loop, which would otherwise end its round only at the next event.

    Attributes:
        still_receives: Whether Celery still reads from the broker during the handover, and puts back what it receives.
    """

    def __init__(self, consumer: Any, hand_over: Callable[[], None], wake_up: Callable[[], None]) -> None:
        self._consumer, self._hand_over, self._wake_up = consumer, hand_over, wake_up
        self._thread: threading.Thread | None = None
        #: How many messages have been handed over.
        self._steps = 0
        self.still_receives = False
        worker_shutting_down.connect(self._heard)
        wrap_soft_shutdown(consumer.controller, self._wait_for_soft_shutdown)

    @property
    def is_under_way(self) -> bool:
        """Whether the worker is shutting down. A consumer that stops may just be about to reconnect."""
        return self._thread is not None or self._consumer.blueprint.state in _ENDS

    def finish(self) -> None:
        """Hand over the waiting messages, unless that has started already, and wait until it is done."""
        self._start()
        if self._thread is not None:
            self._wait_for(self._thread)

    def run(self, hand_over: Callable[[], None]) -> None:
        """Run `hand_over` in another thread, and wait for it to end.

        This is for messages that begin to wait during the shutdown.
        """
        thread = _thread(hand_over)
        thread.start()
        self._wait_for(thread)

    def step(self) -> None:
        """Record that a message was handed over."""
        self._steps += 1

    def _wait_for(self, thread: threading.Thread) -> None:
        steps = -1
        while thread.is_alive() and steps != self._steps:
            steps = self._steps
            thread.join(LONGEST)
        if thread.is_alive():
            logger.warning("the broker does not answer; it will redeliver the messages that wait in this worker")

    def _heard(self, sender: Any = None, **_: Any) -> None:
        """Handle `worker_shutting_down`, which Celery sends in an OS signal handler that interrupts the main thread."""
        if sender != self._consumer.hostname:
            return
        if isinstance(self._consumer.pool, solo.TaskPool) and state.active_requests:
            self._start()
        elif self._consumer.hub is not None:
            self._wake_up()
        elif self._is_green_on_redis:
            self.still_receives = True
            self._consumer.timer.call_after(0.0, self._start)  # gevent's handler must not wait for a thread to start

    @property
    def _is_green_on_redis(self) -> bool:
        """Whether this is a green pool with Redis as its broker.

        Celery then checks only every two seconds whether it must stop, and another greenlet may use the broker.
        """
        driver = getattr(getattr(self._consumer.connection, "transport", None), "driver_type", None)
        return bool(self._consumer.pool.is_green) and driver == "redis"

    def _wait_for_soft_shutdown(self, wait: Callable[[], None]) -> None:
        """Start the handover before the worker's own `wait`. Also called in an OS signal handler."""
        conf = self._consumer.app.conf
        if conf.worker_soft_shutdown_timeout > 0 and (
            state.active_requests or conf.worker_enable_soft_shutdown_on_idle
        ):
            self._start()
        wait()
        if self._thread is not None:
            self._wait_for(self._thread)

    def _start(self) -> None:
        if self._thread is None and self._consumer.task_consumer is not None:
            self._thread = _thread(self._hand_over)  # set before it starts, because the thread checks `is_under_way`
            self._thread.start()


def _thread(target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name="redislock-shutdown", daemon=True)


class Handover:
    """Lets go of the messages that wait in one worker. They keep waiting after another delivery, here or elsewhere.

    Args:
        consumer: Celery's consumer.
        stop: Stops waiting, and lets go of all messages.
        wake_up: Wakes up the worker's event loop.
        run: Gives the pool a message that could not be published again.
    """

    def __init__(
        self,
        consumer: Any,
        stop: Callable[[], None],
        wake_up: Callable[[], None],
        run: Callable[[WaitingMessage], None],
    ) -> None:
        self.shutdown = Shutdown(consumer, stop, wake_up)
        self._wake_up, self._run = wake_up, run
        #: The consumer while it receives messages, otherwise None.
        self._consumer: Any = None
        #: Messages that leave a running worker, and the thread that publishes them again.
        self._leaving: deque[WaitingMessage] = deque()
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        #: The requests of those that were published again, for the worker's event loop to ack.
        self._to_ack: deque[Request] = deque()
        #: The messages that waited here when the connection to the broker was lost.
        self._to_restore: deque[Any] = deque()

    def start(self, consumer: Any) -> None:
        """Start: `consumer` receives messages from now on."""
        self._consumer = consumer
        self._restore(consumer)

    def stop(self) -> None:
        """Stop: no more messages are received."""
        self._consumer = None

    def let_go(self, requests: Sequence[Request], channel: Any = None) -> None:
        """In a shutdown, publish the messages of `requests` again, in this order; otherwise, restore them.

        `channel` is the channel that the worker consumed on, if the worker has just stopped consuming.
        """
        if not self.shutdown.is_under_way:
            self._to_ack.clear()  # the broker delivers the originals again, and they are dropped as copies
            self.restore(requests)
            return
        for request in drained(self._to_ack):
            settle(request, self.shutdown.step)
        if channel is not None:  # in the thread of the shutdown
            hand_over(requests, channel, self.shutdown.step)
        elif requests:
            self.shutdown.run(partial(hand_over, requests, None, self.shutdown.step))

    def restore(self, requests: Sequence[Request]) -> None:
        """Make the broker redeliver the messages of `requests`, whose connection is lost, once there is another one."""
        self._to_restore += [request.message for request in requests]
        if (consumer := self._consumer) and consumer.connection and not is_closing(channel_of(consumer)):
            ignore_errors(consumer.connection, self._restore, consumer)  # lost again: `start` is called once more

    def _restore(self, consumer: Any) -> None:
        """Make a Redis broker immediately redeliver the messages that waited here when the connection was lost.

        Kombu does so only if it can still reach the broker; otherwise the broker waits for the visibility timeout.
        Other brokers redeliver by themselves.
        """
        for message in drained(self._to_restore):
            try:
                restore(channel_of(consumer), message)
            except Exception:  # the connection is lost again
                self._to_restore.append(message)
                raise

    def leave(self, waiting: WaitingMessage) -> None:
        """Publish the message of `waiting` again soon: it keeps waiting after another delivery. Thread-safe."""
        with self._guard:
            self._leaving.append(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish, name="redislock-handover", daemon=True)
                self._thread.start()

    def take_back(self) -> list[WaitingMessage]:
        """Wait until the current batch of leaving messages is published, and return those that are left."""
        with self._guard:
            left, thread = [*drained(self._leaving)], self._thread
        if thread is not None:
            thread.join(LONGEST)
        return left

    def _publish(self) -> None:
        try:
            while batch := self._next_batch():
                published = set(map(id, publish([one.request for one in batch]) or ()))
                for one in batch:
                    if id(one.request) in published:
                        self._to_ack.append(one.request)
                    else:  # its run sends it back
                        one.request.may_leave = False  # otherwise it would try to leave over and over
                        self._run(one)
                if (consumer := self._consumer) is not None:
                    consumer.call_soon(self._ack)
                    if consumer.hub is not None:
                        self._wake_up()
        except BaseException:  # the next message that leaves must start a new thread
            with self._guard:
                self._thread = None
            raise

    def _next_batch(self) -> list[WaitingMessage]:
        with self._guard:
            batch = [self._leaving.popleft() for _ in range(min(BATCH, len(self._leaving)))]
            if not batch:
                self._thread = None
        return sorted(batch, key=lambda one: one.rank)

    def _ack(self) -> None:
        """Ack the messages that were published again. Called in the worker's event loop."""
        while (consumer := self._consumer) is not None and (request := next(drained(self._to_ack), None)):
            if request.message.channel is not channel_of(consumer):
                continue  # its connection is lost: the broker delivers it again, and it is dropped as a copy
            let_go(consumer, request)
            request.acknowledge()


def channel_of(consumer: Any) -> Any:
    """The channel that `consumer` currently receives tasks on; None if it receives none."""
    return getattr(consumer.task_consumer, "channel", None)
