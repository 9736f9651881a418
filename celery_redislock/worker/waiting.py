"""Waiting: the messages that wait in line in this worker, unacked, in the room of its main process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.worker import state
from celery.worker.request import Request

from celery_redislock.app import server_of
from celery_redislock.server.room import Room
from celery_redislock.task.endings import WaitsInLine
from celery_redislock.task.plan import LockPlan

from . import rate_limit, same_id
from .children import CHILDREN
from .revoked import RevokedMessages, has_ended
from .waiting_message import Prepare, WaitingMessage, must_leave_at
from .windows import Windows, open_windows, slots_of

logger = logging.getLogger(__name__)

_WAITING_ROOM = "_redislock_waiting_room"
#: A message that a quorum queue has given back so often waits no more, but is published anew. RabbitMQ 4 drops it after
#: twenty times. It counts each time that a worker ends or loses its connection while the message waits there.
GIVEN_BACK_OFTEN = 10


class WaitingRoom(bootsteps.StartStopStep):
    """A step of the worker's consumer: keeps the messages that wait in line, and has the pool run them at their turn.

    The broker still owns the messages that wait, so the worker may go on fetching others: its prefetch count grows by
    one for each of them, as it does for a message with an eta. For quorum queues see `Windows`.
    """

    requires = ("celery.worker.consumer:Tasks",)  # the step that has a channel to the broker

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._consumer: Any = None
        self._rooms: set[Room] = set()
        #: Messages that are on their way to the pool, for the worker's event loop; and the pipe that wakes it up.
        self._calls: deque[tuple[WaitingMessage, bool]] = deque()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        #: How many runs had begun in this worker when its last slot was taken, or given to a message that had waited.
        self._begun_at: int | None = None
        #: Delivery tags of messages that waited here when the connection to the broker was lost.
        self._to_restore: list[str] = []
        #: Where there is no event loop, Celery's timer is a thread, which threads of a pool must not start twice.
        self._timing = threading.Lock()
        self._revoked = RevokedMessages(self._unordered, self._end, self._timing)
        vars(parent.app)[_WAITING_ROOM] = self
        parent.on_connection_error_after_connected = partial(_survive, parent.on_connection_error_after_connected)

    def start(self, parent: Any) -> None:
        """Begin to keep messages."""
        open_windows(parent)
        self._consumer = parent
        self._restore(parent)

    def stop(self, parent: Any) -> None:
        """Forget all messages and leave all lines: the broker delivers again what is not acked."""
        self._consumer = None
        self._revoked.stop()
        for one, is_called in self._calls:
            if is_called:  # nobody comes to its key: the next in line shall have it at once
                one.pass_on()
        for room in tuple(self._rooms):
            waited = [one for one in room.leave_all() if isinstance(one, WaitingMessage)]
            self._to_restore += [one.request.message.delivery_tag for one in waited]
        self._to_restore += [one.request.message.delivery_tag for one, _ in self._calls]
        self._calls.clear()

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Called by Celery whenever the event loop starts, where there is one."""
        hub.add_reader(self._wake, self._run_calls)

    def _restore(self, parent: Any) -> None:
        """Have a Redis broker deliver again at once what waited here when its connection was lost.

        Kombu does so only where the broker can still be reached; else the broker would wait for the visibility timeout.
        Other brokers do so by themselves.
        """
        restore = getattr(getattr(_channel_of(parent), "qos", None), "restore_by_tag", None)
        tags, self._to_restore = self._to_restore, []
        if restore is not None:
            for tag in tags:
                restore(tag)

    @property
    def waiting(self) -> list[WaitingMessage]:
        """The messages that wait here, in the order of their places."""
        return sorted(self._unordered(), key=lambda one: one.place)

    def _unordered(self) -> list[WaitingMessage]:
        waiters = (waiter for room in tuple(self._rooms) for waiter in room.waiting())
        return [one for one in waiters if isinstance(one, WaitingMessage)]

    def may_keep(self, request: Request, plan: LockPlan) -> bool:
        """Whether the message of `request` can wait here if its key is not free."""
        consumer = self._consumer
        count = sum(map(len, tuple(self._rooms)))
        if consumer is None or count >= plan.waiting_limit or _was_given_back_often(request):
            return False
        most = getattr(consumer.qos, "max_prefetch", None)  # Celery's `worker_eta_task_limit`
        if consumer.qos is None or (most and consumer.qos.value >= most):
            return False
        return time.monotonic() < must_leave_at(request, plan)

    def keep(self, request: Request, ending: WaitsInLine, plan: LockPlan, prepare: Prepare) -> None:
        """Keep the message of `request` until its turn."""
        same_id.task_ready(request)
        consumer = self._consumer
        if consumer is None or self._is_lost(consumer, request):
            return
        consumer.qos.increment_eventually()
        if isinstance(consumer.qos, Windows):
            consumer.qos.keep(request.message)
        room = server_of(plan.app).room
        self._rooms.add(room)
        room.enter(WaitingMessage(request, ending, plan, prepare, self.can_begin, self.begin))
        self._revoked.look_later(consumer)
        if consumer.hub is not None:
            self._wake_up()  # in a pool of threads this is not the event loop's: it would read on only in a second

    def _is_lost(self, consumer: Any, request: Request) -> bool:
        """Whether the connection is lost over which the message of `request` came.

        It cannot be acked any more, and kombu may even end the worker when that is tried. The broker delivers it again.
        """
        channel = _channel_of(consumer)
        if channel is None or request.message.channel is channel:
            return False
        self._to_restore.append(request.message.delivery_tag)
        self._restore(consumer)
        return True

    def can_begin(self, waiting: WaitingMessage) -> bool:
        """Whether the message of `waiting` would run soon if it were called. Called in the room's thread."""
        consumer, name = self._consumer, waiting.request.task.name
        if consumer is None:
            return False
        in_bucket = rate_limit.called(consumer, name)
        on_its_way = sum(one.request.task.name == name for one, _ in self._calls.copy())
        return self._has_slot(consumer, in_bucket) and rate_limit.has_token(consumer, name, in_bucket + on_its_way)

    def lacks(self, waiting: WaitingMessage) -> str | None:
        """What the worker lacks to run the message of `waiting` soon: a ``token`` or a ``slot``; None for neither.

        It is for people who ask why the message waits; `can_begin` decides whether it does.
        """
        consumer, name = self._consumer, waiting.request.task.name
        if consumer is None:
            return None
        in_bucket = rate_limit.called(consumer, name)
        if not rate_limit.has_token(consumer, name, in_bucket):
            return "token"
        return None if self._is_free(_living_slots(consumer.pool), in_bucket) else "slot"

    def _has_slot(self, consumer: Any, in_bucket: int) -> bool:
        """Whether the pool can run one more message soon, besides those that are called and stand in their bucket.

        It can where a slot is free. A worker that has fetched more messages than it has slots never has a free one:
        there a message that waits joins the fetched ones whenever another run has begun since the last one joined.
        """
        slots = _living_slots(consumer.pool)
        if not slots:
            return False
        if self._is_free(slots, in_bucket):
            self._begun_at = None
            return True
        begun: int = state.all_total_count[0]
        if self._begun_at is None:
            self._begun_at = begun
        return begun > self._begun_at

    def _is_free(self, slots: int, in_bucket: int) -> bool:
        """Whether one of so many slots is free."""
        return len(state.reserved_requests) + len(self._calls) + in_bucket < slots

    def _can_still_begin(self, consumer: Any, waiting: WaitingMessage) -> bool:
        """Whether nobody has taken the slot, or the token, for which `waiting` was called."""
        name = waiting.request.task.name
        slots, in_bucket = _living_slots(consumer.pool), rate_limit.called(consumer, name)
        joins_the_fetched = self._begun_at is not None  # and takes no free slot
        has_slot = slots > 0 and (joins_the_fetched or self._is_free(slots, in_bucket))
        return has_slot and rate_limit.has_token(consumer, name, in_bucket)

    def begin(self, waiting: WaitingMessage, called: bool) -> None:
        """Have the pool run the message of `waiting`. Called in the room's thread."""
        consumer = self._consumer
        if consumer is None:
            if called:
                waiting.pass_on()
            return
        if self._begun_at is not None:
            self._begun_at = state.all_total_count[0]
        if consumer.hub is None and not isinstance(consumer.pool, solo.TaskPool):
            self._run(consumer, waiting, called)
            return
        self._calls.append((waiting, called))
        if consumer.hub is None:  # the pool would run the body in this thread, and nobody else would have a turn
            consumer.call_soon(self._run_calls)
        else:
            self._wake_up()

    def _wake_up(self) -> None:
        """Wake the event loop up."""
        with suppress(BlockingIOError):  # the pipe is full: the event loop will wake up in any case
            os.write(self._waker, b"!")

    def _run_calls(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass
        while self._calls and self._consumer is not None:
            self._run(self._consumer, *self._calls.popleft())

    def _run(self, consumer: Any, waiting: WaitingMessage, called: bool) -> None:
        if self._is_lost(consumer, waiting.request):
            if called:
                waiting.pass_on()
            return
        if has_ended(waiting.request):
            self._let_go(consumer, waiting)
            if called:
                waiting.pass_on()
            return
        if called and not self._can_still_begin(consumer, waiting):
            waiting.wait_on()
            return
        self._let_go(consumer, waiting)
        waiting.prepare(waiting.call if called else None)
        rate_limit.begin(consumer, waiting.request)

    def _let_go(self, consumer: Any, waiting: WaitingMessage) -> None:
        """Count the message of `waiting` as one that waits no longer."""
        consumer.qos.decrement_eventually()
        if isinstance(consumer.qos, Windows):
            consumer.qos.let_go(waiting.request.message)

    def _end(self, waiting: WaitingMessage) -> None:
        """End the message of `waiting`, which was revoked, if it still waits."""
        consumer = self._consumer
        if consumer is not None and waiting.withdraw():
            self._run(consumer, waiting, called=False)

    def give_token_back(self, request: Request) -> None:
        """Give the token of `rate_limit` back that `request` has taken: its body has not run."""
        consumer, name = self._consumer, request.task.name
        if consumer is None or not rate_limit.limits(consumer, name):
            return
        if consumer.hub is None:  # a greenlet of the pool must not wait for a slot of the pool
            with self._timing:
                consumer.timer.call_after(0.0, rate_limit.give_back, (consumer, name))
        else:
            consumer.hub.call_soon(rate_limit.give_back, consumer, name)


def _living_slots(pool: Any) -> int:
    """How many messages `pool` can run at a time now. A slot without a child that lives is none."""
    slots = slots_of(pool)
    return CHILDREN.living(pool) if slots and pool.uses_semaphore else slots


def _was_given_back_often(request: Request) -> bool:
    """Whether the message of `request` came from a quorum queue that may soon drop it."""
    count = (request.message.headers or {}).get("x-delivery-count")
    return isinstance(count, int) and count >= GIVEN_BACK_OFTEN


def _channel_of(consumer: Any) -> Any:
    """The channel over which `consumer` receives tasks now; None where it does not."""
    return getattr(consumer.task_consumer, "channel", None)


def _survive(handle: Callable[[BaseException], None], error: BaseException) -> None:
    """Let Celery's consumer handle a lost connection, and connect again even where kombu fails to close the old one.

    Kombu 5.7 closes it twice, and the second time raises AttributeError if a message is not acked and Redis, as the
    broker, cannot be reached: the worker would end.
    """
    try:
        handle(error)
    except AttributeError:
        logger.warning("kombu could not close the lost connection to the broker; the worker connects again")


def waiting_room_of(app: Any) -> WaitingRoom | None:
    """The waiting room of the worker of `app` in this process; None where there is none."""
    room = vars(app).get(_WAITING_ROOM)
    return room if isinstance(room, WaitingRoom) else None
