"""How many messages a pool runs at a time."""

from __future__ import annotations

from celery.concurrency import prefork, solo, thread

from celery_redislock.worker.windows import slots_of


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
