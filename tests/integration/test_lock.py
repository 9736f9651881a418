"""`task.lock_for(...)`: the lock of a task's key, for code outside the task."""

from __future__ import annotations

import threading
import time

import pytest

from celery_redislock import LockConflict, LockLost


@pytest.fixture
def lock_for(tasks):
    return lambda key="k": tasks.work.lock_for(key)


def test_it_is_held_inside_the_block_and_free_after_it(lock_for, locks, tasks):
    with lock_for() as lock:
        assert lock.state == "held"
        assert 25 < lock.remaining <= 30
        assert locks.client.get(lock.name).decode() == lock.token
        lock.check()
        lock.extend()
    assert lock.state is None
    assert lock.token is None
    assert tasks.work.lock_info("k") is None


def test_a_second_owner_is_refused_naming_the_first(lock_for):
    with lock_for():
        second = lock_for()
        second.blocking_timeout = 0.1
        assert not second.acquire(blocking=False)
        with pytest.raises(LockConflict, match="is held by a lock outside tasks") as caught, second:
            pass
    assert caught.value.key == second.name
    assert caught.value.holder.hostname


def test_a_waiter_gets_the_key_when_it_is_released(lock_for):
    first, second = lock_for(), lock_for()
    first.acquire()
    threading.Timer(0.2, first.release).start()
    started = time.monotonic()
    assert second.acquire()
    assert 0.1 < time.monotonic() - started < 5
    second.release()


def test_releasing_what_is_not_held_says_so(lock_for, locks):
    lock = lock_for()
    with pytest.raises(LockLost, match="not held by this object"):
        lock.release()
    lock.acquire()
    locks.client.delete(lock.name)
    with pytest.raises(LockLost, match="not ours at the release"):
        lock.release()


def test_extending_a_stolen_lock_says_so_and_leaves_the_thief_alone(lock_for, locks):
    lock = lock_for()
    lock.acquire()
    locks.client.set(lock.name, "thief")
    with pytest.raises(LockLost, match="deleted, expired or taken"):
        lock.extend()
    assert lock.state == "lost"
    with pytest.raises(LockLost):
        lock.release()
    assert locks.client.get(lock.name) == b"thief"


def test_an_error_in_the_block_releases(lock_for, tasks):
    with pytest.raises(ZeroDivisionError), lock_for():
        1 / 0  # noqa: B018
    assert tasks.work.lock_info("k") is None
