"""How many messages a pool runs at a time, and the looks at what stands at its gate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery.concurrency import prefork, solo, thread

from celery_redislock.worker.slots import slots_of
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


def test_the_solo_pool_has_one_slot() -> None:
    pool = solo.TaskPool(limit=8)
    pool.start()
    assert slots_of(pool) == 1


def test_however_often_a_look_is_asked_for_only_one_is_to_come() -> None:
    """Each look asks for the next one. If each wake-up began a series of its own, their number would only grow."""
    looks: set[int] = set()

    def call_later(seconds: float, _: object) -> SimpleNamespace:
        looks.add(number := len(looks) + 1)
        return SimpleNamespace(cancel=lambda: looks.discard(number))

    starter = Starter(lambda: starter.look_again(0.1))
    starter.start(SimpleNamespace(hub=SimpleNamespace(call_later=call_later)))
    for _ in range(3):
        starter.look_again(0.1)
    assert len(looks) == 1


def test_after_a_reconnect_no_slot_is_held_for_a_run_that_has_ended_before() -> None:
    """No room is asked about it any more, so the slot would be held again and again, for nobody."""
    pool = thread.TaskPool(limit=1)
    pool.start()
    held: list[bool] = []
    consumer = SimpleNamespace(pool=pool, on_task_request=lambda _: None)
    slots = GatedSlots(consumer, lambda: held.append(True), lambda _: None, lambda: True)
    request: Any = SimpleRequest()
    assert slots.take(request, lambda: True)
    slots.settle(0)
    assert held == [True], "one waits in its line"
    slots.clear()
    slots.settle(0)
    assert held == [True]
    pool.stop()


class SimpleRequest:
    """A request that Celery has not reserved any more: its run has ended."""
