"""Of several keys, one is lost while the caller still waits for another: nothing begins."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_redislock import Also, LockedTask, LockLost, locked
from celery_redislock.lock import several
from celery_redislock.protocol.names import keys_of
from celery_redislock.testing import busy
from tests.lab.servers import wait_until

A, B = "redislock:{a}", "redislock:{b}"


@pytest.fixture
def loses_a(locks, caplog):
    """Delete the key A of a caller that waits for B, once the caller has A, until the caller has noticed."""

    def lose():
        wait_until(lambda: locks.client.exists(A, keys_of(B).line) == 2, "it has A and waits for B")
        locks.client.delete(A)
        wait_until(lambda: f"{A} is lost" in caplog.text, "it has noticed")

    return lose


def enter(app, bodies):
    with locked(["a", "b"], app=app, block_for=20, lease=5):
        bodies.append("begun")


async def enter_in_a_loop(app, bodies):
    async with locked(["a", "b"], app=app, block_for=20, lease=5):
        bodies.append("begun")


@pytest.mark.parametrize("enters", [enter, lambda *args: asyncio.run(enter_in_a_loop(*args))], ids=["thread", "loop"])
def test_a_block_does_not_begin_and_gives_the_others_back(app, locks, loses_a, monkeypatch, enters):
    monkeypatch.setattr(several, "KEEPS_AFTER", -1.0)
    bodies = []
    with ThreadPoolExecutor() as threads:
        with busy(locked("b", app=app)):
            block = threads.submit(enters, app, bodies)
            loses_a()
        with pytest.raises(LockLost) as lost:
            block.result(20)
    assert lost.value.key == A
    assert bodies == []
    assert not locks.client.exists(A, B)


def test_an_eager_run_does_not_begin_and_gives_the_others_back(app, locks, loses_a):
    bodies = []

    @app.task(base=LockedTask, shared=False, lock_key="a", lock_also=[Also("b")], lock_on_conflict="wait", lock_lease=5)
    def both():
        bodies.append("begun")

    with ThreadPoolExecutor() as threads:
        with busy(locked("b", app=app)):
            run = threads.submit(both.apply)
            loses_a()
        with pytest.raises(LockLost):
            run.result(20).get()
    assert bodies == []
    assert not locks.client.exists(A, B)


def test_an_eager_run_that_waits_asks_only_its_own_key_for_a_fence(app, locks):
    @app.task(
        base=LockedTask, shared=False, lock_key="a", lock_also=[Also("b")], lock_fence=True, lock_on_conflict="wait"
    )
    def both():
        return both.lock.fence

    with ThreadPoolExecutor() as threads:
        with busy(locked("b", app=app)):
            run = threads.submit(both.apply)
            wait_until(lambda: locks.client.exists(keys_of(B).line), "it waits for B")
        fence = run.result(20).get()
    assert int(locks.client.get(keys_of(A).fence)) == fence
    assert not locks.client.exists(keys_of(B).fence)
