"""Slots: the slots of a worker's pool, which go to waiting messages before fetched ones.

A waiting message is called to its key only while there is a free slot for it. A worker with a backlog never has a free
slot, because Celery gives each one to the next message that it has fetched. So fetched messages stop at a gate. When a
waiting message lacks only a slot, the next one is *held*: kept from them for the moment it takes the message's room to
ask for the key. If the room does not use the slot, a fetched message gets it. When the run of a called message ends,
its slot is held too, for the next message in the same line.

`Windows` keeps a worker fetching where its prefetch count cannot grow while messages wait in it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from celery.signals import task_received
from celery.utils.quorum_queues import detect_quorum_queues
from celery.worker import state
from celery.worker.request import Request
from kombu.common import QoS

from .worker_port import forget_tag, listed, most_prefetched, restore_prefetch_count, run_in_acquired_slot, tags_of

T = TypeVar("T")

#: A slot is held for at most this many seconds: the lock server may be slow, and other messages are ready to run.
HELD_FOR = 0.25


def slots_of(pool: Any) -> int:
    """How many messages `pool` runs at a time; 0 before it starts and after it stops.

    In a cold shutdown, the pool stops first, while messages still wait in its worker.
    """
    try:
        return int(pool.num_processes if pool.uses_semaphore else pool.limit) if pool.active else 0
    except AttributeError:  # a signal for a cold shutdown stops the pool, even between these two
        return 0


class Slots(ABC):
    """The slots of one worker's pool, and the gate at which fetched messages wait for one.

    The rooms' threads call `free`, `starts_round` and `ends_round`. Everything else is called in the thread that gives
    messages to the pool: the event loop, if the worker has one.

    Args:
        consumer: Celery's consumer.
        on_held: Called when a slot is held, so that a waiting message can be called to its key.
        wake_up: Has `settle` called soon. Thread-safe.
        is_waited: Returns whether a message waits in the worker.
    """

    def __init__(
        self, consumer: Any, on_held: Callable[[], None], wake_up: Callable[[], None], is_waited: Callable[[], bool]
    ) -> None:
        self._consumer = consumer
        self._pool = consumer.pool
        self._run: Callable[[Request], object] = consumer.on_task_request
        self._on_held, self._wake_up, self._is_waited = on_held, wake_up, is_waited
        #: The fetched messages at the gate.
        self._fetched: deque[Request] = deque()
        #: When each held slot became free, by `time.monotonic()`.
        self._held: deque[float] = deque()
        self._has_news = False
        self._wanted = 0
        self._dead = 0
        #: The runs of called messages, each with a function that makes its room check the line (see `take`).
        self._followed: dict[Request, Callable[[], bool]] = {}
        #: One for each of these runs that has ended while its line had waiters, until a round of a room that began
        #: after that is over; and how many there were when the latest round began.
        self._ended: deque[Request] = deque()
        self._seen = 0

    def starts_round(self, dead: int) -> None:
        """Begin a room's round.

        `dead` is how many children are dead and have no message; each lacks its slot until the pool replaces it.
        """
        self._dead = dead
        self._seen = len(self._ended)

    def is_one_on_its_way(self) -> bool:
        """Whether a message that has a slot has not begun to run, and soon will.

        It is on its way to a child, which may be busy or just starting. If there are more messages than slots, one of
        them may stay on its way for long, and the answer is False.
        """
        in_pool = {*listed(state.reserved_requests)} - {*self._fetched.copy()}
        return len(in_pool) <= slots_of(self._pool) and any(one.time_start is None for one in in_pool)

    def ends_round(self, wanted: int) -> bool:
        """End a room's round: `wanted` messages lack only a slot. Return whether `settle` has work to do."""
        seen, self._seen = self._seen, 0
        with suppress(IndexError):  # another room's round ends at the same time
            for _ in range(seen):
                self._ended.popleft()
        return wanted != self._wanted or bool(self._held)

    def settle(self, wanted: int, dead: int) -> float:
        """Hold slots for `wanted` waiting messages, and let fetched ones have the others.

        Return after how many seconds to call this again. For `dead`, see `starts_round`.
        """
        self._wanted, self._dead = wanted, dead
        for request in [one for one in self._followed.copy() if one not in state.reserved_requests]:
            self._note_end(request)
        self._fill()
        while len(self._held) > self._claims:
            self._held.pop()
            self._give_up()
        while self._held and time.monotonic() - self._held[0] > HELD_FOR:
            self._held.popleft()
            self._give_up()
        has_news, self._has_news = self._has_news, False
        if self._held and has_news:
            self._on_held()
        # A child may die before it accepts a called message: until it has, dead children are looked for.
        return HELD_FOR * 1.1 if self._held or any(one.time_start is None for one in [*self._followed]) else math.inf

    def take(self, request: Request, look: Callable[[], bool]) -> bool:
        """Run `request`, whose message was called and which Celery has reserved; return False if it gets no slot.

        `look` makes the room check the message's line, and returns whether that line has a waiter.
        """
        if self.free(1) <= 0:
            return False
        self._followed[request] = look
        if self._held:
            self._held.popleft()
            self._start_in_held(request)
        else:
            self._start(request)
        self._fill()
        return True

    def clear(self) -> None:
        """Forget all slots and runs, as Celery does when the connection to the broker is lost.

        The broker delivers the fetched messages again.
        """
        for one in (self._fetched, self._held, self._followed, self._ended):  # no room checks the lines of ended runs
            one.clear()
        self._wanted = 0

    @abstractmethod
    def admit(self, request: Request) -> None:
        """Run a fetched message in the pool as soon as it has a slot for the message."""

    @abstractmethod
    def free(self, starting: int = 0) -> int:
        """How many waiting messages could start to run now. `starting` requests are reserved but have no slot yet."""

    @abstractmethod
    def _fill(self) -> None:
        """Hold the free slots, as many as are claimed and as the fetched messages need."""

    @property
    def _claims(self) -> int:
        """How many slots may be held now."""
        return self._wanted + len(self._ended)

    def _hold(self) -> None:
        self._held.append(time.monotonic())
        self._has_news = True

    def _give_up(self) -> None:
        """Give a slot that is held no more to a fetched message."""
        if self._fetched:
            self._start_in_held(self._fetched.popleft())
        else:
            self._release()

    @abstractmethod
    def _release(self) -> None:
        """Let go of a slot that no message needs."""

    def _start(self, request: Request) -> None:
        self._run(request)

    def _start_in_held(self, request: Request) -> None:
        self._start(request)

    def _note_end(self, request: Request) -> None:
        look = self._followed.pop(request, None)
        if look is not None and look():
            self._ended.append(request)


class SemaphoreSlots(Slots):
    """The slots of ``prefork``, for which Celery has a semaphore.

    The gate asks the semaphore for slots, and decides which message gets one when it is free.

    Args:
        consumer, hooks: See `Slots`.
    """

    def __init__(self, consumer: Any, *hooks: Any) -> None:
        super().__init__(consumer, *hooks)
        self._semaphore = consumer.controller.semaphore
        #: How many slots the semaphore was asked for and has not granted yet.
        self._asked = 0

    def admit(self, request: Request) -> None:
        """Start `request` when the semaphore has a slot for it."""
        self._fetched.append(request)
        self._fill()

    def clear(self) -> None:
        """Forget what the semaphore was asked for too: Celery has emptied it."""
        super().clear()
        self._asked = 0

    def settle(self, wanted: int, dead: int) -> float:
        """See `Slots.settle`."""
        # Billiard releases a child's slot twice: after its last run, and when the child is replaced. One is too much.
        self._wanted, self._dead = wanted, dead
        self._fill()
        while self._held and len(self._held) + self._in_pool > slots_of(self._pool) - dead:
            self._held.pop()
            self._fill()  # the semaphore may have more of them
        return super().settle(wanted, dead)

    def _fill(self) -> None:
        # The next slot to become free may be that of a called run: hold it too, unless another slot is free already.
        coming = len(self._followed) if self._semaphore.value <= 0 else 0
        needed = min(self._claims + coming, slots_of(self._pool)) + len(self._fetched)
        for _ in range(needed - len(self._held) - self._asked):
            self._asked += 1
            self._semaphore.acquire(self._granted)

    def _granted(self) -> None:
        """Called by the semaphore when it has a slot."""
        self._asked -= 1
        if self._followed or self._is_waited() or self.free() < 0:  # it may be one too many: let `settle` decide
            self._hold()
            self._wake_up()  # to settle once Celery has recorded the end of the previous run
        else:
            self._give_up()

    def _release(self) -> None:
        self._consumer.hub.call_soon(self._semaphore.release)  # it may call `_granted` at once

    def free(self, starting: int = 0) -> int:
        """See `Slots.free`."""
        # The semaphore counts a slot twice if a child has died or the pool has grown, so count the pool's runs as well.
        value: int = self._semaphore.value
        return min(len(self._held) + value, slots_of(self._pool) - self._dead - self._in_pool + starting)

    @property
    def _in_pool(self) -> int:
        """How many messages the pool has."""
        return len(state.reserved_requests) - len(self._fetched)

    def _start_in_held(self, request: Request) -> None:
        run_in_acquired_slot(self._consumer, request)


def drained(items: deque[T]) -> Iterator[T]:
    """Take the items out one by one. Other threads may do so at the same time."""
    with suppress(IndexError):
        while True:
            yield items.popleft()


def scale_up(consumer: Any, wanted: int) -> None:
    """Make Celery's autoscaler, if any, add slots for waiting messages: on its own it counts only reserved ones."""
    if (scaler := getattr(consumer.controller, "autoscaler", None)) is None:
        return
    missing = min(wanted, scaler.max_concurrency - scaler.processes)
    if missing > 0:
        with scaler.mutex:
            scaler.scale_up(missing)
        consumer.pool.maintain_pool()


class Windows(QoS):
    """Replaces Celery's QoS in a worker that consumes from RabbitMQ 4 or from quorum queues.

    There, a prefetch count applies to each consumer separately, and only to consumers that start after it was set.
    Waiting messages would fill the consumer's window, and nothing else would be delivered. So the worker
    starts a new consumer, which has its own window. The old consumer's messages stay unacked but no longer count.

    Messages that Celery keeps until their eta fill the window in the same way. Some were sent back with a countdown,
    because the worker is full or the lock server is down. So messages count as waiting until their eta.

    Args:
        consumer: Celery's consumer, with Celery's own QoS.
        wake_up: Wakes the event loop up, to call `update`.
    """

    def __init__(self, consumer: Any, wake_up: Callable[[], None]) -> None:
        super().__init__(consumer.qos.callback, consumer.qos.value, most_prefetched(consumer))
        self._consumer, self._wake_up = consumer, wake_up
        #: The prefetch count of the next consumer of a queue.
        self._count: int = consumer.initial_prefetch_count
        #: The prefetch count of each consumer, and the delivery tags of its waiting messages, by consumer tag.
        self._counts: dict[str, int] = {}
        self._waiting: dict[str, set[Any]] = {}
        #: The etas of the messages that each consumer has received with one, in order, by consumer tag.
        self._etas: dict[str, list[datetime]] = {}
        task_received.connect(self._note_eta, sender=consumer)

    def _note_eta(self, request: Request, **_: Any) -> None:
        if request.eta and self.value != most_prefetched(self._consumer):
            insort(self._etas.setdefault(request.message.delivery_info["consumer_tag"], []), request.eta)
            self._wake_up()  # `update` itself may have received the message

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
        for by_tag in (self._waiting, self._etas):
            for tag in by_tag.keys() - self._counts.keys():
                del by_tag[tag]
        slots = slots_of(consumer.pool)
        for queue, tag in tags.items():
            etas = self._etas.get(tag, [])
            del etas[: bisect(etas, datetime.now(UTC))]
            waiting = len(self._waiting.get(tag, ())) + len(etas)
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
        if (tag := forget_tag(tasks, queue)) is None:
            return
        tasks.consume()
        tasks.channel.basic_cancel(tag)
        if consumer.hub is not None:  # over TLS, messages may have been read along with the answers
            transport, connection = consumer.connection.transport, consumer.connection.connection
            consumer.hub.call_soon(transport.on_readable, connection, consumer.hub)


def keep_unacked(consumer: Any, request: Request) -> None:
    """Let the worker keep fetching while the message of `request` stays unacked."""
    restore_prefetch_count(consumer)
    consumer.qos.increment_eventually()
    if isinstance(consumer.qos, Windows):
        consumer.qos.keep(request.message)


def let_go(consumer: Any, request: Request) -> None:
    """Count the message of `request` as no longer waiting."""
    consumer.qos.decrement_eventually()
    if isinstance(consumer.qos, Windows):
        consumer.qos.let_go(request.message)


def open_windows(consumer: Any, wake_up: Callable[[], None]) -> None:
    """Give `consumer` a `Windows` if its prefetch count cannot grow; for `wake_up`, see there.

    Celery makes the same checks when it starts to consume.
    """
    app, connection = consumer.app, consumer.connection
    # Only AMQP has these properties. With any other broker, and with RabbitMQ before 3.3, the count grows.
    capabilities = getattr(connection.connection, "server_properties", {}).get("capabilities", {})
    if not capabilities.get("per_consumer_qos") or not consumer.initial_prefetch_count:  # with 0, there is no window
        return
    is_quorum = app.conf.worker_detect_quorum_queues and detect_quorum_queues(app, connection.transport.driver_type)[0]
    if is_quorum or connection.qos_semantics_matches_spec:  # kombu says so of RabbitMQ 4: each consumer has its own
        consumer.qos = Windows(consumer, wake_up)
