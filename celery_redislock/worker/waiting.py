"""Waiting: the messages that wait in line in this worker, unacked, in the room of its main process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.worker.request import Request

from celery_redislock.app import server_of
from celery_redislock.server.room import Room
from celery_redislock.task.endings import WaitsInLine
from celery_redislock.task.plan import LockPlan

from . import rate_limit, same_id
from .gate import GatedSlots, SoloSlots
from .revoked import RevokedMessages, has_ended
from .slots import SemaphoreSlots, Slots, scale_up
from .starter import Starter
from .waiting_message import Prepare, WaitingMessage, must_leave_at
from .windows import Windows, open_windows

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
        #: Messages that are on their way to the pool, and whether they were called.
        self._calls: deque[tuple[WaitingMessage, bool]] = deque()
        #: Those that Celery has reserved, or will once their task's `rate_limit` has a token for them.
        self._called: dict[Request, WaitingMessage] = {}
        #: For how many lines of each room a slot is all that is missing.
        self._wanted: dict[Room, int] = {}
        #: Delivery tags of messages that waited here when the connection to the broker was lost.
        self._to_restore: list[str] = []
        #: Where there is no event loop, Celery's timer is a thread, which threads of a pool must not start twice.
        self._timing = threading.Lock()
        self._revoked = RevokedMessages(self._unordered, self._end, self._timing)
        vars(parent.app)[_WAITING_ROOM] = self
        self._starter = Starter(self._run_calls)
        self._slots = self._slots_of(parent)
        parent.on_task_request = self._admit
        parent.on_connection_error_after_connected = partial(_survive, parent.on_connection_error_after_connected)

    def start(self, parent: Any) -> None:
        """Begin to keep messages."""
        open_windows(parent)
        self._consumer = parent
        self._starter.start(parent)
        self._restore(parent)

    def stop(self, parent: Any) -> None:
        """Forget all messages and leave all lines: the broker delivers again what is not acked."""
        self._consumer = None
        self._starter.stop()
        self._revoked.stop()
        self._slots.clear()
        self._wanted.clear()
        for one in (*self._called.values(), *(one for one, is_called in self._calls if is_called)):
            one.pass_on()  # nobody will ask for its key
        self._to_restore += [request.message.delivery_tag for request in self._called]
        self._called.clear()
        for room in tuple(self._rooms):
            room.hosts.discard(self)
            waited = [one for one in room.leave_all() if isinstance(one, WaitingMessage)]
            self._to_restore += [one.request.message.delivery_tag for one in waited]
        self._to_restore += [one.request.message.delivery_tag for one, _ in self._calls]
        self._calls.clear()

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Called by Celery whenever the event loop starts, where there is one."""
        self._starter.register(hub)

    def _slots_of(self, consumer: Any) -> Slots:
        controller, hooks = consumer.controller, (self._ask_rooms, self._starter.look_again)
        if isinstance(consumer.pool, solo.TaskPool):
            return SoloSlots(consumer, *hooks, self._run_calls)
        if consumer.hub is not None and consumer.on_task_request == controller._process_task_sem:
            return SemaphoreSlots(consumer, *hooks)
        return GatedSlots(consumer, *hooks, lambda: any(map(len, tuple(self._rooms))))

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
        self._keep_unacked(consumer, request)
        room = server_of(plan.app).room
        self._rooms.add(room)
        room.hosts.add(self)
        room.enter(WaitingMessage(request, ending, plan, prepare, self.can_begin, self.begin))
        self._revoked.look_later(consumer)
        if consumer.hub is not None:  # it may sleep for a second while a thread of the pool calls this
            self._starter.wake_up()

    @staticmethod
    def _keep_unacked(consumer: Any, request: Request) -> None:
        """Have the worker go on fetching while the message of `request` stays unacked."""
        consumer.qos.increment_eventually()
        if isinstance(consumer.qos, Windows):
            consumer.qos.keep(request.message)

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

    # What the rooms ask and tell, each in its own thread.

    def begins_round(self) -> None:
        """Have `can_begin` answer by what is free from now on."""
        if self._consumer is not None:
            self._slots.begins_round()

    def can_begin(self, waiting: WaitingMessage) -> bool:
        """Whether the message of `waiting` would run at once if it were called, or as soon as it has its token."""
        return self._consumer is not None and self._lacks(self._consumer, waiting.group) is None

    def ends_round(self, room: Room, aside: Mapping[str, int]) -> None:
        """Have slots held for the messages of the lines `aside`, counted by their tasks, that lack nothing else."""
        consumer = self._consumer
        if consumer is None:
            return
        self._wanted[room] = sum(count for name, count in aside.items() if self._lacks(consumer, name) == "slot")
        if self._slots.ends_round(sum(self._wanted.values())):
            self._starter.wake_up()

    def lacks(self, waiting: WaitingMessage) -> str | None:
        """What the worker lacks to run the message of `waiting` soon: a ``token`` or a ``slot``; None for neither.

        It is for people who ask why the message waits.
        """
        return None if self._consumer is None else self._lacks(self._consumer, waiting.group)

    def _lacks(self, consumer: Any, name: str) -> str | None:
        in_bucket = rate_limit.called(consumer, name)
        on_their_way = [one for one, is_called in self._calls.copy() if is_called]
        before = in_bucket + sum(one.group == name for one in on_their_way)
        if not rate_limit.has_token(consumer, name, before):
            return "token"
        return None if self._slots.free > in_bucket + len(on_their_way) else "slot"

    def begin(self, waiting: WaitingMessage, called: bool) -> None:
        """Have the pool run the message of `waiting`."""
        if self._consumer is not None:
            self._calls.append((waiting, called))
            self._starter.wake_up()
        elif called:
            waiting.pass_on()

    # What runs in the thread that gives messages to the pool.

    def _ask_rooms(self) -> None:
        for room in tuple(self._rooms):
            room.wake()

    def _run_calls(self) -> None:
        while self._calls and self._consumer is not None:
            self._run(self._consumer, *self._calls.popleft())
        wanted = sum(self._wanted.values())
        if self._consumer is not None:
            self._slots.settle(wanted)
            if wanted:
                scale_up(self._consumer, wanted)

    def _run(self, consumer: Any, waiting: WaitingMessage, called: bool) -> None:
        request = waiting.request
        if self._is_lost(consumer, request):
            if called:
                waiting.pass_on()
            return
        if has_ended(request):
            self._let_go(consumer, request)
            if called:
                waiting.pass_on()
            return
        if called:
            in_bucket = rate_limit.called(consumer, waiting.group)
            if not rate_limit.has_token(consumer, waiting.group, in_bucket):
                waiting.wait_on()
                return
            self._called[request] = waiting
        self._let_go(consumer, request)
        waiting.prepare(waiting.call if called else None)
        rate_limit.begin(consumer, request)

    @staticmethod
    def _let_go(consumer: Any, request: Request) -> None:
        """Count the message of `request` as one that waits no longer."""
        consumer.qos.decrement_eventually()
        if isinstance(consumer.qos, Windows):
            consumer.qos.let_go(request.message)

    def _end(self, waiting: WaitingMessage) -> None:
        """End the message of `waiting`, which was revoked, if it still waits."""
        consumer = self._consumer
        if consumer is not None and waiting.withdraw():
            self._run(consumer, waiting, called=False)

    def _admit(self, request: Request) -> None:
        """Called by Celery with each message that it has reserved: in place of Celery's `on_task_request`."""
        waiting = self._called.pop(request, None)
        if waiting is None:
            self._slots.admit(request)
        elif not self._slots.take(request, waiting.look_for_next):
            self._keep_on(waiting)

    def _keep_on(self, waiting: WaitingMessage) -> None:
        """Have a message wait on that was called: another one has taken its slot meanwhile."""
        same_id.task_ready(waiting.request)
        self._keep_unacked(self._consumer, waiting.request)
        self.give_token_back(waiting.request)
        waiting.wait_on()

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
