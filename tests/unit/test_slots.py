"""How many messages a pool runs at a time, and which of them gets a slot that becomes free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
from celery.concurrency import prefork, solo, thread
from celery.signals import task_postrun
from celery.worker import state
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from celery_redislock.worker.slots import SemaphoreSlots, drained, slots_of
from celery_redislock.worker.starter import GatedSlots, Starter


def test_a_pool_has_its_slots_between_its_start_and_its_end() -> None:
    pool = thread.TaskPool(limit=3)
    assert slots_of(pool) == 0
    pool.start()
    assert slots_of(pool) == 3
    pool.stop()
    assert slots_of(pool) == 0


def test_a_pool_that_has_lost_its_processes_to_a_cold_shutdown_has_no_slot() -> None:
    assert slots_of(prefork.TaskPool(2)) == 0


def test_a_pool_that_a_signal_has_stopped_since_it_was_looked_at_has_no_slots() -> None:
    """Chaos has seen it: in a cold shutdown, a message came at that moment."""
    pool = prefork.TaskPool(2)
    with patch.object(prefork.TaskPool, "active", True):
        assert slots_of(pool) == 0


def test_the_solo_pool_has_one_slot() -> None:
    pool = solo.TaskPool(limit=8)
    pool.start()
    assert slots_of(pool) == 1


def test_however_often_it_is_woken_only_one_call_is_to_come() -> None:
    """Each call asks for the next one. If each wake-up began a series of its own, their number would only grow."""
    looks: set[int] = set()

    def call_after(seconds: float, _: object) -> SimpleNamespace:
        looks.add(number := len(looks) + 1)
        return SimpleNamespace(cancel=lambda: looks.discard(number))

    added: list[Any] = []
    starter = Starter(lambda: 0.1)
    starter.register(SimpleNamespace(add_reader=lambda _, callback: added.append(callback)))
    starter.start(SimpleNamespace(hub=True, timer=SimpleNamespace(call_after=call_after)))
    for _ in range(3):
        starter.wake_up()
        added[0]()
    assert len(looks) == 1


def test_after_a_reconnect_no_slot_is_held_for_a_run_that_has_ended_before() -> None:
    """No room is asked about it any more, so the slot would be held again and again, for nobody."""
    pool = thread.TaskPool(limit=1)
    pool.start()
    held: list[bool] = []
    consumer = SimpleNamespace(pool=pool, on_task_request=lambda _: None)
    slots = GatedSlots(consumer, lambda: held.append(True), lambda: None, lambda: True)
    request: Any = SimpleRequest()
    assert slots.take(request, lambda: True)
    slots.settle(0, 0)
    assert held == [True], "one waits in its line"
    slots.clear()
    slots.settle(0, 0)
    assert held == [True]
    pool.stop()


def test_a_child_of_prefork_does_nothing_for_the_slots_when_its_run_ends() -> None:
    """Without an event loop, a child has a copy of what its main process has at the gate, and of its locks."""
    woken: list[bool] = []
    consumer = SimpleNamespace(pool=prefork.TaskPool(1), on_task_request=lambda _: None)
    slots = GatedSlots(consumer, lambda: None, lambda: woken.append(True), lambda: True)
    at_the_gate: Any = SimpleRequest()
    slots.admit(at_the_gate)
    assert woken == [True]
    task_postrun.send(None, task_id="in a child")
    assert woken == [True]


class SimpleRequest:
    """A request that Celery has not reserved any more: its run has ended."""


class Prefork:
    """A worker with two slots, on kombu's own semaphore."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.asked = 0
        self.waits = False
        self.semaphore = LaxBoundedSemaphore(2)
        start: Any = self.started.append
        controller = SimpleNamespace(semaphore=self.semaphore, _process_task=start)
        pool = SimpleNamespace(active=True, uses_semaphore=True, num_processes=2)
        hub = SimpleNamespace(call_soon=lambda call: call())
        consumer = SimpleNamespace(controller=controller, pool=pool, hub=hub, on_task_request=start)
        self.slots = SemaphoreSlots(consumer, self.asks, lambda: None, lambda: self.waits)

    def asks(self) -> None:
        """It is called when a room is to be asked."""
        self.asked += 1

    def admit(self, *names: Any) -> None:
        """Messages with these names are fetched."""
        for name in names:
            self.slots.admit(name)


def test_fetched_messages_get_the_slots_as_they_come_while_nothing_waits() -> None:
    worker = Prefork()
    worker.admit("a", "b", "c", "d")
    assert worker.started == ["a", "b"]
    worker.semaphore.release()
    assert worker.started == ["a", "b", "c"]
    assert (worker.asked, worker.semaphore.value) == (0, 0)


def test_the_next_slot_is_held_for_a_waiting_message_and_goes_to_a_fetched_one_if_no_room_uses_it() -> None:
    worker = Prefork()
    worker.admit("a", "b", "c", "d")
    worker.waits = True
    worker.slots.settle(1, 0)
    worker.semaphore.release()
    worker.slots.settle(1, 0)
    assert (worker.started, worker.asked) == (["a", "b"], 1)
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "c"]


def test_a_fetched_message_gets_the_slot_after_the_one_that_a_waiting_message_took() -> None:
    worker = Prefork()
    worker.admit("a", "b", "c")
    worker.waits = True
    worker.slots.settle(1, 0)
    worker.semaphore.release()
    waiting: Any = "waiting"
    assert worker.slots.take(waiting, lambda: False)
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "waiting"]
    worker.semaphore.release()
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "waiting", "c"]


def test_a_slot_that_no_message_needs_any_more_goes_back_to_the_semaphore() -> None:
    worker = Prefork()
    worker.admit("a", "b")
    worker.slots.settle(2, 0)
    worker.semaphore.release()
    worker.semaphore.release()
    worker.slots.settle(0, 0)
    assert worker.semaphore.value == 2


@pytest.fixture
def reserved() -> Iterator[Callable[..., list[Any]]]:
    """Makes messages that Celery has reserved, from their names."""
    with patch.object(state, "reserved_requests", WeakSet[Message]()) as requests:

        def reserve(*names: str) -> list[Any]:
            messages = [*map(Message, names)]
            requests.update(messages)
            return messages

        yield reserve


class Message(str):
    """A message that can be weakly referenced."""


def test_a_slot_that_is_released_twice_is_given_to_one_message(reserved: Callable[..., list[Any]]) -> None:
    """Billiard does so with a child's slot after its last run: once the run has ended, and when it is replaced."""
    worker, (first, *others) = Prefork(), reserved("a", "b", "c", "d", "e")
    worker.waits = True
    worker.admit(first, *others)
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b"]
    worker.semaphore.release()
    state.reserved_requests.discard(first)
    worker.slots.settle(0, 1)
    assert worker.started == ["a", "b"], "its child is dead"
    worker.semaphore.release()
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "c"], "there is another child"


def test_slots_that_were_released_twice_while_nothing_asked_for_them_are_given_to_no_message(
    reserved: Callable[..., list[Any]],
) -> None:
    worker, (first, second, third) = Prefork(), reserved("a", "b", "c")
    worker.waits = True
    worker.admit(first, second)
    worker.slots.settle(0, 0)
    worker.semaphore.release()
    worker.semaphore.release()
    worker.admit(third)
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b"]
    worker.semaphore.release()
    state.reserved_requests.discard(first)
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "c"]


def test_while_nothing_waits_at_most_one_message_too_many_is_started(
    reserved: Callable[..., list[Any]],
) -> None:
    """Celery alone would let ever more in, and what begins to wait later would let them all pass."""
    worker = Prefork()
    worker.admit(*(messages := reserved("a", "b", "c", "d", "e")))
    for _ in range(3):
        worker.semaphore.release()
        worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "c"]
    worker.semaphore.release()
    state.reserved_requests.discard(messages[0])
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "c"]
    worker.semaphore.release()
    state.reserved_requests.discard(messages[1])
    worker.slots.settle(0, 0)
    assert worker.started == ["a", "b", "c", "d"]


def test_a_slot_that_is_released_twice_does_not_let_a_fetched_message_take_that_of_a_waiting_one(
    reserved: Callable[..., list[Any]],
) -> None:
    worker, (first, second) = Prefork(), reserved("a", "b")
    worker.admit(first, second)
    worker.waits = True
    (third,) = reserved("c")
    worker.admit(third)
    worker.semaphore.release()
    worker.semaphore.release()
    state.reserved_requests.discard(first)
    worker.slots.settle(1, 0)
    assert (worker.started, worker.slots.free()) == (["a", "b"], 1)
    (waiting,) = reserved("waiting")
    assert worker.slots.take(waiting, lambda: False)
    assert worker.started == ["a", "b", "waiting"]


def test_a_room_is_told_of_a_message_with_a_slot_that_has_not_begun_but_not_of_those_at_the_gate(
    reserved: Callable[..., list[Any]],
) -> None:
    worker, messages = Prefork(), reserved("a", "b", "c")
    for message in messages:
        message.time_start = None
    worker.waits = True
    worker.admit(*messages)
    worker.slots.settle(0, 0)
    messages[0].time_start = 1.0
    assert worker.slots.is_one_on_its_way()
    messages[1].time_start = 1.0
    assert not worker.slots.is_one_on_its_way()


def test_a_room_is_not_told_of_a_message_that_has_to_wait_in_the_pool(reserved: Callable[..., list[Any]]) -> None:
    """The runs before it may last for hours."""
    worker, messages = Prefork(), reserved("a", "b", "c")
    for message in messages:
        message.time_start = None
    worker.admit(*messages)
    worker.semaphore.release()
    assert worker.started == ["a", "b", "c"]
    assert not worker.slots.is_one_on_its_way()


def test_threads_that_take_the_same_items_out_get_each_of_them_once() -> None:
    items = deque(range(20_000))
    with ThreadPoolExecutor(4) as pool:
        taken = [*pool.map(lambda _: [*drained(items)], range(4))]
    assert sorted(chain.from_iterable(taken)) == [*range(20_000)]
