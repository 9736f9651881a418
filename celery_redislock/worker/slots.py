"""Slots: the slots of a worker's pool, which go to waiting messages before fetched ones.

A waiting message is called to its key only while there is a free slot for it. A worker with a backlog never has a free
slot, because Celery gives each one to the next message that it has fetched. So when a waiting message lacks only a
slot, the next slot is *held*: kept from fetched messages for the moment it takes the message's room to ask for the key.
If the room does not use the slot, a fetched message gets it. When the run of a called message ends, its slot is held
too, for the next message in the same line.

`Windows` keeps a worker fetching from quorum queues while messages from them wait in it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from celery.utils.quorum_queues import detect_quorum_queues
from celery.worker import state
from celery.worker.request import Request
from kombu.common import QoS

from .worker_port import forget_tag, most_prefetched, run_in_acquired_slot, tags_of, wait_in_front, waiting_behind

#: A slot is held for at most this many seconds: the lock server may be slow, and other messages are ready to run.
HELD_FOR = 0.25


def slots_of(pool: Any) -> int:
    """How many messages `pool` runs at a time; 0 before it starts and after it stops.

    In a cold shutdown, the pool stops first, while messages still wait in its worker.
    """
    if not pool.active:
        return 0
    slots: int = pool.num_processes if pool.uses_semaphore else pool.limit
    return slots


class Slots(ABC):
    """The slots of one worker's pool.

    The rooms' threads call `free`, `starts_round` and `ends_round`. Everything else is called in the thread that gives
    messages to the pool: the event loop, if the worker has one.

    Args:
        consumer: Celery's consumer.
        on_held: Called when a slot is held, so that a waiting message can be called to its key.
        look_again: Schedules a call of `settle` after this many seconds; with 0, at once, which is thread-safe.
    """

    def __init__(self, consumer: Any, on_held: Callable[[], None], look_again: Callable[[float], None]) -> None:
        self._consumer = consumer
        self._pool = consumer.pool
        self._run: Callable[[Request], object] = consumer.on_task_request
        self._on_held = on_held
        self._look_again = look_again
        #: When each held slot became free, by `time.monotonic()`.
        self._held: deque[float] = deque()
        self._wanted = 0
        self._dead = 0
        #: The runs of called messages, each with a function that makes its room check the line (see `take`).
        self._followed: dict[Request, Callable[[], bool]] = {}
        #: How many of these runs have ended while their lines had waiters: in total, by the start of the latest round
        #: (`_seen`), and by the start of the latest finished round (`_decided`).
        self._ended = self._seen = self._decided = 0
        self._ending = threading.Lock()

    @property
    def free(self) -> int:
        """How many waiting messages could start to run now."""
        return self._free(0)

    def starts_round(self, living: Callable[[Any], int]) -> None:
        """Count the dead children: their slots are lost until Celery replaces them, up to five seconds later.

        `living` returns how many children of the pool are alive.
        """
        slots = slots_of(self._pool)
        self._dead = max(0, slots - living(self._pool)) if slots and self._pool.uses_semaphore else 0
        self._seen = self._ended

    def ends_round(self, wanted: int) -> bool:
        """End a room's round: `wanted` messages lack only a slot. Return whether `settle` has work to do."""
        self._decided = self._seen
        return wanted != self._wanted or bool(self._held)

    def settle(self, wanted: int) -> None:
        """Hold slots for `wanted` waiting messages; give up those not needed any more, or held for too long."""
        self._wanted = wanted
        self._note_ended()
        while len(self._held) > self._claims or (self._held and time.monotonic() - self._held[0] > HELD_FOR):
            self._held.popleft()
            self._give_up()
        self._hold_more()

    def take(self, request: Request, look: Callable[[], bool]) -> bool:
        """Run `request`, whose message was called and which Celery has reserved; return False if it gets no slot.

        `look` makes the room check the message's line, and returns whether that line has a waiter.
        """
        if self._free(1) <= 0:
            return False
        self._followed[request] = look
        if self._held:
            self._held.popleft()
            self._run_in_held(request)
        else:
            self._start(request)
        return True

    def clear(self) -> None:
        """Forget all slots and runs, as Celery does when the connection to the broker is lost."""
        self._held.clear()
        self._followed.clear()
        self._wanted = 0
        self._seen = self._decided = self._ended  # no room will check the lines of the runs that have ended

    @abstractmethod
    def admit(self, request: Request) -> None:
        """Run a fetched message in the pool as soon as it has a slot for the message."""

    @abstractmethod
    def _free(self, starting: int) -> int:
        """The value of `free` if `starting` of the requests that Celery has reserved have no slot yet."""

    @abstractmethod
    def _hold_more(self) -> None:
        """Hold as many slots as are claimed."""

    @abstractmethod
    def _give_up(self) -> None:
        """Give a held slot to a fetched message."""

    @property
    def _claims(self) -> int:
        """How many slots may be held now."""
        return self._wanted + self._ended - self._decided

    def _start(self, request: Request) -> None:
        self._run(request)

    def _run_in_held(self, request: Request) -> None:
        self._start(request)

    def _note_ended(self) -> None:
        for request in [one for one in self._followed.copy() if one not in state.reserved_requests]:
            self._note_end(request)

    def _note_end(self, request: Request) -> None:
        look = self._followed.pop(request, None)
        if look is not None:
            with self._ending:
                self._ended += look()


class SemaphoreSlots(Slots):
    """The slots of ``prefork``, where Celery's semaphore keeps fetched messages until a slot is free.

    To hold a slot, a dummy waits in front of these messages.
    """

    def __init__(self, consumer: Any, on_held: Callable[[], None], look_again: Callable[[float], None]) -> None:
        super().__init__(consumer, on_held, look_again)
        self._semaphore = consumer.controller.semaphore
        self._dummies = 0

    def admit(self, request: Request) -> None:
        """Start `request`, which the semaphore keeps until a slot is free."""
        self._start(request)
        if self._followed:
            self._hold_more()

    def clear(self) -> None:
        """Forget the dummies too: Celery has emptied the semaphore."""
        super().clear()
        self._dummies = 0

    def _hold_more(self) -> None:
        # The next slot to become free may be that of a called run: hold it too, unless another slot is free already.
        coming = len(self._followed) if self._semaphore.value <= 0 else 0
        missing = min(self._claims + coming, slots_of(self._pool)) - len(self._held) - self._dummies
        for _ in range(missing):
            self._dummies += 1
            if self._semaphore.value > 0:
                self._semaphore.acquire(self._hold)
            else:
                wait_in_front(self._semaphore, self._hold)

    def _hold(self) -> None:
        """Called by the semaphore when it has a slot for a dummy."""
        self._dummies -= 1
        self._held.append(time.monotonic())
        self._consumer.hub.call_soon(self._is_held)  # once Celery has recorded the end of the previous run

    def _is_held(self) -> None:
        self.settle(self._wanted)
        if self._held:
            self._on_held()
            self._look_again(HELD_FOR * 1.1)

    def _give_up(self) -> None:
        self._semaphore.release()

    def _free(self, starting: int) -> int:
        # The semaphore counts a slot twice if a child has died or the pool has grown, so count the pool's runs as well.
        queued = waiting_behind(self._semaphore) - self._dummies
        in_pool = len(state.reserved_requests) - queued - starting
        value: int = self._semaphore.value
        return min(len(self._held) + value, slots_of(self._pool) - self._dead - in_pool)

    def _run_in_held(self, request: Request) -> None:
        run_in_acquired_slot(self._consumer, request)


def scale_up(consumer: Any, wanted: int) -> None:
    """Make Celery's autoscaler, if any, add slots for waiting messages: on its own it counts only reserved ones."""
    scaler = getattr(consumer.controller, "autoscaler", None)
    if scaler is None:
        return
    missing = min(wanted, scaler.max_concurrency - scaler.processes)
    if missing > 0:
        with scaler.mutex:
            scaler.scale_up(missing)
        consumer.pool.maintain_pool()


class Windows(QoS):
    """Replaces Celery's QoS in a worker that consumes from RabbitMQ's quorum queues.

    On these queues, a prefetch count applies to each consumer separately, and only to consumers that start after it was
    set. Waiting messages would fill the consumer's window, and nothing else would be delivered. So the worker
    starts a new consumer, which has its own window. The old consumer's messages stay unacked but no longer count.

    Args:
        consumer: Celery's consumer, with Celery's own QoS.
    """

    def __init__(self, consumer: Any) -> None:
        super().__init__(consumer.qos.callback, consumer.qos.value, most_prefetched(consumer))
        self._consumer = consumer
        #: The prefetch count of the next consumer of a queue.
        self._count: int = consumer.initial_prefetch_count
        #: The prefetch count of each consumer, and the delivery tags of its waiting messages, by consumer tag.
        self._counts: dict[str, int] = {}
        self._waiting: dict[str, set[Any]] = {}

    def keep(self, message: Any) -> None:
        """Count `message` as waiting."""
        info = message.delivery_info
        self._waiting.setdefault(info["consumer_tag"], set()).add(info["delivery_tag"])
        self.prev = None  # makes the event loop call `update`

    def let_go(self, message: Any) -> None:
        """Count `message`, which has waited, as running."""
        info = message.delivery_info
        self._waiting.get(info["consumer_tag"], set()).discard(info["delivery_tag"])

    def update(self) -> int:
        """Start a new consumer if too many messages of the current one wait.

        The event loop calls this if `prev` is not `value`.

        Besides the waiting messages, the window needs room for one message per slot. But if it has room for at least
        one and all slots are taken, it is kept: a new window would fetch messages that another worker could run.
        """
        self.prev = self.value
        consumer = self._consumer
        tags = tags_of(consumer.task_consumer)
        self._counts = {tag: self._counts.get(tag, self._count) for tag in tags.values()}
        for tag in self._waiting.keys() - self._counts.keys():
            del self._waiting[tag]
        slots = slots_of(consumer.pool)
        for queue, tag in tags.items():
            waiting = len(self._waiting.get(tag, ()))
            left = self._counts[tag] - waiting
            if not waiting or left >= slots:
                continue
            if left <= 0 or len(state.reserved_requests) < slots:
                self._consume_anew(queue)
            else:
                self.prev = None  # check again
        return self.value

    def _consume_anew(self, queue: str) -> None:
        consumer, tasks = self._consumer, self._consumer.task_consumer
        self._count = consumer.initial_prefetch_count
        self.callback(prefetch_count=self._count)
        # While that call waited for its answer, it may have handled a message that made the worker leave the queue.
        tag = forget_tag(tasks, queue)
        if tag is None:
            return
        tasks.consume()
        tasks.channel.basic_cancel(tag)
        if consumer.hub is not None:  # over TLS, messages may have been read along with the answers
            transport, connection = consumer.connection.transport, consumer.connection.connection
            consumer.hub.call_soon(transport.on_readable, connection, consumer.hub)


def keep_unacked(consumer: Any, request: Request) -> None:
    """Let the worker keep fetching while the message of `request` stays unacked."""
    consumer.qos.increment_eventually()
    if isinstance(consumer.qos, Windows):
        consumer.qos.keep(request.message)


def let_go(consumer: Any, request: Request) -> None:
    """Count the message of `request` as no longer waiting."""
    consumer.qos.decrement_eventually()
    if isinstance(consumer.qos, Windows):
        consumer.qos.let_go(request.message)


def open_windows(consumer: Any) -> None:
    """Give `consumer` a `Windows` if its prefetch count cannot grow.

    Celery makes the same check when it starts to consume.
    """
    app, connection = consumer.app, consumer.connection
    if connection.qos_semantics_matches_spec or not app.conf.worker_detect_quorum_queues:
        return
    # With a prefetch count of 0, a consumer has no window.
    if consumer.initial_prefetch_count and detect_quorum_queues(app, connection.transport.driver_type)[0]:
        consumer.qos = Windows(consumer)
