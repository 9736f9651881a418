"""Waiting: keeps the messages that wait in line in this worker, unacked, in the rooms of its main process."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from celery import bootsteps
from celery.concurrency import solo
from celery.worker import state
from celery.worker.request import Request
from kombu.common import ignore_errors

from celery_redislock.app import server_of
from celery_redislock.line.room import Room
from celery_redislock.policy import Place

from . import worker_port
from .children import CHILDREN, run_of
from .handover import Handover, channel_of
from .slots import SemaphoreSlots, Slots, drained, keep_unacked, let_go, open_windows, scale_up
from .starter import GatedSlots, SoloSlots, Starter
from .waiting_message import Drop, WaitingMessage, has_ended, must_leave, revoked_among

#: The rooms of the workers of an app in this process, by their names: tests may embed several.
_WAITING_ROOMS = "_redislock_waiting_rooms"
#: While messages wait, the seconds between two checks for those that were revoked, for which Celery has no hook, and
#: between two replacements of dead children: Celery may notice a death five seconds late, and lacks a slot until then.
#: Dead children are also replaced while a called message is on its way to one.
LOOK_EVERY = 0.5
#: How long messages that come to wait for a key are ended after an operator has dropped what waited for it, in seconds.
DROPPED_FOR = 3600.0
#: One check ends at most this many messages, because each costs a call to the result backend. Another check follows at
#: once.
MOST_AT_ONCE = 100


class WaitingRoom(bootsteps.StartStopStep):
    """A consumer step: keeps the messages that wait in line, and gives each to the pool when its turn comes.

    The broker still owns the waiting messages. So that the worker keeps fetching others, its prefetch count grows by
    one for each waiting message, as it does for a message with an eta. For quorum queues, see `Windows`.

    Attributes:
        pid: The worker's main process.
        overflow: How many messages of each task were sent back because they could not wait in this worker.
    """

    requires = ("celery.worker.consumer:Tasks",)  # the step that has a channel to the broker

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.pid = os.getpid()
        self.overflow = Counter[str]()
        self._consumer: Any = None
        self._parent = parent
        #: The queues that the worker consumes from, or did on this connection, by their consumer tags.
        self._queues: dict[str, str] = {}
        self._rooms: set[Room] = set()
        #: Messages on their way to the pool.
        self._calls: deque[WaitingMessage] = deque()
        #: Those with a slot that Celery has reserved, or will reserve once their task has a rate token for them.
        self._called: dict[Request, WaitingMessage] = {}
        #: For each room, the number of its lines whose first waiter lacks only a slot.
        self._wanted: dict[Room, int] = {}
        #: Whether a room has counted these lines since `_run_calls` last used the numbers.
        self._has_news = False
        self._starter = Starter(self._run_calls)
        self._slots = self._slots_of(parent)
        parent.on_task_request = self._admit
        self._handover = Handover(parent, self._stop, self._starter.wake_up, self.give_to_pool)
        worker_port.before_close(parent, self._restore_scheduled)
        #: The tasks whose rate tokens are to be given back.
        self._unused_tokens: deque[str] = deque()
        #: What an operator has dropped, by key.
        self._drops: dict[str, Drop] = {}
        #: When to check for revoked messages, by `time.monotonic()`.
        self._look_at = 0.0
        vars(parent.app).setdefault(_WAITING_ROOMS, WeakValueDictionary())[parent.hostname] = self

    def start(self, parent: Any) -> None:
        """Start keeping messages."""
        open_windows(parent, self._starter.wake_up)
        self._consumer, self._queues = parent, {}
        self._starter.start(parent)
        self._handover.start(parent)

    def stop(self, parent: Any) -> None:
        """Leave all lines. In a shutdown, hand over all waiting messages; otherwise the broker delivers them again."""
        if self._handover.shutdown.is_under_way:
            self._handover.shutdown.finish()
        else:
            self._stop()

    def _stop(self) -> None:
        self._consumer = None
        self._starter.stop()
        self._handover.stop()
        self._slots.clear()
        if self._handover.shutdown.is_under_way:
            ignore_errors(self._parent, self._parent.task_consumer.cancel)  # else it may receive what it republishes
        self._let_go_of_all(None if self._handover.shutdown.still_receives else channel_of(self._parent))

    def restore(self, request: Request) -> None:
        """Have the broker redeliver a message whose connection was lost, unless it has done so."""
        self._handover.restore([request])

    def _restore_scheduled(self) -> None:
        """If the connection is lost, have the messages with an eta redelivered. Celery 5.7 is about to forget them."""
        lost = () if self._parent.connection else worker_port.listed(getattr(state, "scheduled_requests", WeakSet()))
        # Another worker in this process may have some too, from RabbitMQ, whose channels have no such attribute.
        self._handover.restore([one for one in lost if run_of(one) and hasattr(one.message.channel, "qos")])

    def _let_go_of_all(self, channel: Any = None) -> None:
        """Take out all messages that wait here, if any, and let them wait somewhere else."""
        gone = self._take_calls()
        for room in self.rooms:
            room.hosts.discard(self)
            gone += room.leave_all(self._in(room))
        gone += self._take_calls() + self._handover.take_back()  # from here on, the rooms' threads add no more
        self._wanted.clear()
        self._handover.let_go([one.request for one in sorted(gone, key=lambda one: one.rank)], channel)

    def _take_calls(self) -> list[WaitingMessage]:
        """Take out the messages on their way to the pool, and pass on the keys that they were called to."""
        calls = [one for request in tuple(self._called) if (one := self._called.pop(request, None))]
        calls += drained(self._calls)
        for waiting in calls:  # they will not run here: pass their keys on now
            waiting.pass_on()
        return calls

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Register with the event loop. Celery calls this each time the loop starts."""
        self._starter.register(hub)

    def _slots_of(self, consumer: Any) -> Slots:
        hooks = (self._ask_rooms, self._starter.wake_up, self._is_waited)
        if isinstance(consumer.pool, solo.TaskPool):
            return SoloSlots(consumer, *hooks, run_calls=self._run_calls)
        if consumer.hub is not None and worker_port.is_behind_semaphore(consumer):
            return SemaphoreSlots(consumer, *hooks)
        return GatedSlots(consumer, *hooks)

    @property
    def waiting(self) -> list[WaitingMessage]:
        """The messages that wait here, in the order of their ranks."""
        return sorted(self._unordered(), key=lambda one: one.rank)

    @property
    def rooms(self) -> tuple[Room, ...]:
        """The rooms that hold these messages."""
        return tuple(self._rooms)

    def _unordered(self) -> list[WaitingMessage]:
        return [one for room in self.rooms for one in self._in(room)]

    def _in(self, room: Room) -> list[WaitingMessage]:
        """The messages in `room`, without those of other workers in this process."""
        return [one for one in room.waiting() if isinstance(one, WaitingMessage) and one.worker is self]

    def may_keep(self, request: Any) -> bool:
        """Whether the message of `request` can wait here if its key is not free."""
        consumer, plan = self._consumer, request.task.lock_plan
        if consumer is None or (sum(map(len, self.rooms)) >= plan.waiting_limit and plan.options.fair is None):
            return False
        most = worker_port.most_prefetched(consumer)
        is_full = consumer.qos is None or (most and consumer.qos.value >= most)
        return not is_full and (request.may_leave or not must_leave(request))

    def queue_of(self, message: Any) -> str | None:
        """The queue that `message` came from; None if it is not known."""
        tasks, tag = self._parent.task_consumer, message.delivery_info.get("consumer_tag")
        if tag is None:
            return worker_port.queue_that_fits(message, tasks.queues if tasks else ())
        # Remembered: a shutdown cancels the consumers before it has handled their last messages.
        if tasks is not None:
            self._queues |= {tag: queue for queue, tag in worker_port.tags_of(tasks).items()}
        return self._queues.get(tag)

    def keep(self, request: Any, place: Place, *, leaves: bool = False) -> None:
        """Keep the message of `request` until its turn.

        If it `leaves`, until it is published again; if that fails, it is given to the pool again.
        """
        worker_port.task_ready(request)
        consumer = self._consumer
        if consumer is None:
            self._handover.let_go([request])
            return
        if self._is_lost(consumer, request):
            return
        keep_unacked(consumer, request)
        room = server_of(request.task.lock_plan.app).message_room
        self._rooms.add(room)
        room.hosts.add(self)
        waiting = WaitingMessage(request, place, self)
        if leaves or waiting.must_leave:
            self._handover.leave(waiting)
        else:
            room.enter(waiting)
            if sum(map(len, self.rooms)) > request.task.lock_plan.waiting_limit:
                room.displace_last(waiting.line)
        self._starter.wake_up()  # an event loop may sleep for a second while a pool thread calls this
        if self._consumer is None:  # this step was stopped in the meantime
            self._let_go_of_all()

    def _is_lost(self, consumer: Any, request: Request) -> bool:
        """Whether the connection that the message of `request` came over is lost. If so, the broker redelivers it.

        The message cannot be acked any more: in kombu, even trying may crash the worker.
        """
        is_lost = channel_of(consumer) not in (None, request.message.channel)
        if is_lost:
            self.restore(request)
        return is_lost

    # The rooms call these methods, each in its own thread.

    def starts_round(self) -> None:
        """Refresh the number of free slots that `is_ready` uses."""
        if (consumer := self._consumer) is not None:
            self._slots.starts_round(CHILDREN.dead(consumer.pool))

    def keeps_offer(self, waiting: WaitingMessage) -> bool:
        """Whether the message of `waiting` lacks at most a slot, and one that has a slot is on its way to a child."""
        return self.lacks(waiting) in {"slot", None} and self._slots.is_one_on_its_way()

    def is_ready(self, waiting: WaitingMessage) -> bool:
        """Whether the message of `waiting`, if called now, would run at once or as soon as it gets its rate token."""
        return (consumer := self._consumer) is not None and self._lacks(consumer, waiting.group) is None

    def is_coming(self, request: Request) -> bool:
        """Whether `request`, which was called, is on its way to a child or in the bucket of its task."""
        is_called = any(one.request is request for one in self._calls.copy()) or request in self._called
        return is_called or (request in state.reserved_requests and request.time_start is None)

    def ends_round(self, room: Room, aside: Mapping[str, int]) -> None:
        """Request a slot for each line whose first message lacks only a slot. `aside` counts the candidates by task."""
        consumer = self._consumer
        if consumer is None:
            return
        self._wanted[room] = sum(count for name, count in aside.items() if self._lacks(consumer, name) == "slot")
        self._has_news = True
        if self._slots.ends_round(sum(self._wanted.values())):
            self._starter.wake_up()

    def lacks(self, waiting: WaitingMessage) -> str | None:
        """What keeps the message of `waiting` from running soon, for ``celery locks why``.

        Returns:
            ``server`` if the lock server does not answer, ``rate`` if its task's rate limit is reached, ``slot`` if the
            pool is full; None if it lacks only its key.
        """
        if waiting.is_out:
            return "server"
        return None if (consumer := self._consumer) is None else self._lacks(consumer, waiting.group)

    def _lacks(self, consumer: Any, name: str) -> str | None:
        # A message that moves on meanwhile may be missed: `Slots.take` counts again.
        in_bucket = worker_port.called(consumer, name)
        on_their_way = self._calls.copy()
        before = in_bucket + sum(one.group == name for one in on_their_way)
        if not worker_port.has_rate_token(consumer, name, before):
            return "rate"
        return None if self._slots.free() > in_bucket + len(on_their_way) else "slot"

    def end_wait(self, waiting: WaitingMessage) -> None:
        """Give the message of `waiting` to the pool, or make it leave this worker."""
        if not waiting.called and waiting.must_leave:
            self._handover.leave(waiting)
        else:
            self.give_to_pool(waiting)

    def send_away(self, waiting: WaitingMessage) -> None:
        """Make the message of `waiting` leave this worker, which has no room for it."""
        self.overflow[waiting.group] += 1
        self._handover.leave(waiting)

    def give_to_pool(self, waiting: WaitingMessage) -> None:
        """Pass the message of `waiting` to the pool, or let go of it if this step has stopped."""
        if self._consumer is not None:
            self._calls.append(waiting)
            self._starter.wake_up()
        else:
            waiting.pass_on()
            self._handover.let_go([waiting.request])

    # These methods run in the thread that gives messages to the pool.

    def _ask_rooms(self) -> None:
        for room in self.rooms:
            room.wake()

    def _run_calls(self) -> float:
        """Run the called messages, end the revoked ones, and share out the slots; return when to do so again."""
        while (consumer := self._consumer) is not None and (call := next(drained(self._calls), None)):
            self._run(consumer, call)
        if consumer is None:
            return math.inf
        while self._unused_tokens:
            worker_port.give_rate_token_back(consumer, self._unused_tokens.popleft())
        self._end_revoked(consumer)
        wanted, has_news, self._has_news = sum(self._wanted.values()), self._has_news, False
        pause = self._slots.settle(wanted, CHILDREN.dead(consumer.pool))
        if wanted and has_news:  # otherwise it would scale up again for a message just called
            scale_up(consumer, wanted)
        return min(pause, max(0.0, self._look_at - time.monotonic())) if self._is_waited() else pause

    def drop(self, key: str, spared: Collection[str]) -> int:
        """End the messages that wait for `key`, except those with the ids `spared`; return how many there are.

        For `DROPPED_FOR` seconds, older messages that come to wait for it are ended too. A message whose turn has come
        runs.
        """
        now, waiting = time.monotonic(), [one for one in self._unordered() if one.key == key]
        before = max([time.time_ns() // 1000, *(one.published for one in waiting)])
        self._drops = {known: drop for known, drop in self._drops.items() if now < drop.until}
        self._drops[key] = Drop(before, now + DROPPED_FOR, spared)
        self._look_at = now
        self._starter.wake_up()
        return sum(map(self._is_dropped, waiting))

    def _is_dropped(self, one: WaitingMessage) -> bool:
        return one.request.is_dropped or ((drop := self._drops.get(one.key)) is not None and drop.ends(one))

    def _end_revoked(self, consumer: Any) -> None:
        """Every now and then, end the messages that were revoked or dropped, and have dead children replaced."""
        if time.monotonic() < self._look_at:
            return
        if consumer.hub is not None:  # without an event loop, billiard has a thread for this
            with suppress(IndexError):  # a signal for a cold shutdown has stopped the pool meanwhile
                consumer.pool.maintain_pool()
        revoked = revoked_among(self._unordered)
        for one in self._unordered() if self._drops else ():
            if self._is_dropped(one):
                one.request.is_dropped = True
                revoked.append(one)
        self._look_at = time.monotonic() + (LOOK_EVERY if len(revoked) <= MOST_AT_ONCE else 0.0)
        for one in revoked[:MOST_AT_ONCE]:
            if one.withdraw():
                self._run(consumer, one)

    def _is_waited(self) -> bool:
        return any(map(len, self.rooms))

    def _run(self, consumer: Any, waiting: WaitingMessage) -> None:
        request, name = waiting.request, waiting.group
        if self._is_lost(consumer, request):
            waiting.pass_on()
            return
        if has_ended(request):
            let_go(consumer, request)
            waiting.pass_on()
            return
        if waiting.has_slot:
            if not worker_port.has_rate_token(consumer, name, worker_port.called(consumer, name)):
                waiting.wait_on()
                return
            self._called[request] = waiting
        let_go(consumer, request)
        request.prepare_run(waiting.call)
        worker_port.run_limited(consumer, request)

    def _admit(self, request: Request) -> None:
        """Handle a message that Celery has reserved, in place of Celery's own `on_task_request`."""
        waiting = self._called.pop(request, None)
        if waiting is None:
            self._slots.admit(request)
        elif not self._slots.take(request, waiting.look_for_next):
            self._keep_on(waiting)

    def _keep_on(self, waiting: WaitingMessage) -> None:
        """Put a message back in line, because another message has taken its slot."""
        worker_port.task_ready(waiting.request)
        if (consumer := self._consumer) is not None:
            keep_unacked(consumer, waiting.request)
        self.give_rate_token_back(waiting.request)
        waiting.wait_on()
        if self._consumer is None:  # this step was stopped in the meantime
            self._let_go_of_all()

    def give_rate_token_back(self, request: Request) -> None:
        """Give back the rate token that `request` has taken, because its body has not run."""
        consumer, name = self._consumer, request.task.name
        if consumer is not None and worker_port.bucket_of(consumer, name) is not None:
            self._unused_tokens.append(name)
            self._starter.wake_up()


def waiting_rooms_of(app: Any) -> list[WaitingRoom]:
    """The waiting rooms of the workers of `app` in this process, which are more than one only in tests."""
    return [room for room in vars(app).get(_WAITING_ROOMS, {}).values() if room.pid == os.getpid()]


def waiting_room_of(app: Any, hostname: str | None) -> WaitingRoom | None:
    """The waiting room of the worker named `hostname`, else of the newest; None if `app` has none in this process."""
    rooms = vars(app).get(_WAITING_ROOMS, {})
    room = rooms.get(hostname) or next(reversed([*rooms.values()]), None)
    return room if room is not None and room.pid == os.getpid() else None
