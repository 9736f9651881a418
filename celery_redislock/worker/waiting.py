"""Waiting: the messages that wait in line in this worker, unacked, in the room of its main process."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

from celery import bootsteps
from celery.concurrency import solo
from celery.worker import state
from celery.worker.request import Request
from kombu.common import ignore_errors

from celery_redislock.app import server_of
from celery_redislock.server.room import Room
from celery_redislock.task.endings import WaitsInLine
from celery_redislock.task.plan import LockPlan

from . import rate_limit
from .children import CHILDREN
from .handover import Handover, channel_of
from .waiting_message import Prepare, WaitingMessage, must_leave_at, was_given_back_often
from .windows import Windows, open_windows, slots_of

_WAITING_ROOM = "_redislock_waiting_room"


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
        stop, run = partial(self._stop, parent), partial(self.begin, called=False)
        self._handover = Handover(parent, stop, self._wake_up, run)
        #: Where there is no event loop, Celery's timer is a thread, which threads of a pool must not start twice.
        self._timing = threading.Lock()
        vars(parent.app)[_WAITING_ROOM] = self

    def start(self, parent: Any) -> None:
        """Begin to keep messages."""
        open_windows(parent)
        self._consumer = parent
        self._handover.start(parent)

    def stop(self, parent: Any) -> None:
        """Leave all lines. If the worker shuts down, hand over all that waits; else the broker delivers it again."""
        if self._handover.shutdown.has_begun:
            self._handover.shutdown.finish()
        else:
            self._stop(parent)

    def _stop(self, parent: Any) -> None:
        self._consumer = None
        self._handover.stop()
        if self._handover.shutdown.has_begun:
            ignore_errors(parent, parent.task_consumer.cancel)  # it must not receive what is published again
        self._let_go_of_all(channel_of(parent))

    def _let_go_of_all(self, channel: Any = None) -> None:
        """Have all that waits here, if anything does, wait somewhere else."""
        gone = self._take_calls()
        for room in tuple(self._rooms):
            gone += [one for one in room.leave_all() if isinstance(one, WaitingMessage)]
        gone += self._take_calls() + self._handover.take_back()  # now the room's thread adds no more
        self._handover.let_go([one.request for one in sorted(gone, key=lambda one: one.place)], channel)

    def _take_calls(self) -> list[WaitingMessage]:
        """Take out what is on its way to the pool. The keys for which it was called are passed on."""
        taken = []
        while self._calls:
            waiting, is_called = self._calls.popleft()
            taken.append(waiting)
            if is_called:  # this message will not run here; release its key to the next one now
                waiting.pass_on()
        return taken

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Called by Celery whenever the event loop starts, where there is one."""
        hub.add_reader(self._wake, self._run_calls)

    @property
    def waiting(self) -> list[WaitingMessage]:
        """The messages that wait here, in the order of their places."""
        waiters = (waiter for room in tuple(self._rooms) for waiter in room.waiting())
        return sorted((one for one in waiters if isinstance(one, WaitingMessage)), key=lambda one: one.place)

    def may_keep(self, request: Request, plan: LockPlan) -> bool:
        """Whether the message of `request` can wait here if its key is not free."""
        consumer = self._consumer
        count = sum(map(len, tuple(self._rooms)))
        if consumer is None or count >= plan.waiting_limit:
            return False
        most = getattr(consumer.qos, "max_prefetch", None)  # Celery's `worker_eta_task_limit`
        if consumer.qos is None or (most and consumer.qos.value >= most):
            return False
        must_leave = was_given_back_often(request) or time.monotonic() >= must_leave_at(request, plan)
        return not must_leave or request.may_leave  # type: ignore[attr-defined] # it is a `LockedRequest`

    def keep(self, request: Request, ending: WaitsInLine, plan: LockPlan, prepare: Prepare) -> None:
        """Keep the message of `request` until its turn."""
        state.task_ready(request)
        consumer = self._consumer
        if consumer is None:
            self._handover.let_go([request])
            return
        if self._is_lost(consumer, request):
            return
        consumer.qos.increment_eventually()
        if isinstance(consumer.qos, Windows):
            consumer.qos.keep(request.message)
        if consumer.hub is not None:
            self._wake_up()  # in a pool of threads this is not the event loop's: it would read on only in a second
        room = server_of(plan.app).room
        self._rooms.add(room)
        waiting = WaitingMessage(request, ending, plan, prepare, self.can_begin, self._end_wait)
        if waiting.must_leave:
            self._handover.leave(waiting)
        else:
            room.enter(waiting)
        if self._consumer is None:  # it has stopped meanwhile
            self._let_go_of_all()

    def _end_wait(self, waiting: WaitingMessage, called: bool) -> None:
        """Have the message of `waiting` run, or leave this worker. Called in the room's thread."""
        if not called and waiting.must_leave:
            self._handover.leave(waiting)
        else:
            self.begin(waiting, called)

    def _is_lost(self, consumer: Any, request: Request) -> bool:
        """Whether the connection is lost over which the message of `request` came.

        It cannot be acked any more, and kombu may even end the worker when that is tried. The broker delivers it again.
        """
        channel = channel_of(consumer)
        if channel is None or request.message.channel is channel:
            return False
        self._handover.restore([request])
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
            self._handover.let_go([waiting.request])
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
            return
        if called and not self._can_still_begin(consumer, waiting):
            waiting.wait_on()
            return
        consumer.qos.decrement_eventually()
        if isinstance(consumer.qos, Windows):
            consumer.qos.let_go(waiting.request.message)
        waiting.prepare(waiting.call if called else None)
        rate_limit.begin(consumer, waiting.request)

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


def waiting_room_of(app: Any) -> WaitingRoom | None:
    """The waiting room of the worker of `app` in this process; None where there is none."""
    room = vars(app).get(_WAITING_ROOM)
    return room if isinstance(room, WaitingRoom) else None
