"""The fencing number grows from holder to holder of a key, whatever happens to the counter."""

from __future__ import annotations

import time

import pytest
import redis

from celery_redislock import Lock, LockConfigError, LockedTask
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.replies import Granted
from celery_redislock.protocol.scripts import ACQUIRE
from celery_redislock.testing import busy
from tests.integration.conftest import KEY, ONE
from tests.lab.app import make_app
from tests.lab.asking import acquire
from tests.lab.renewals import renew

NAME, COUNTER = "stock", keys_of("stock").fence
DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def client(locks):
    return locks.client


@pytest.fixture
def make(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield lambda **options: Lock(client, NAME, **{"timeout": 10, "fence": True, **options})


def fences(make, count=1):
    taken = []
    for _ in range(count):
        with make() as lock:
            taken.append(lock.fence)
    return taken


def test_it_grows_from_holder_to_holder(make):
    taken = fences(make, 20)
    assert taken == sorted(set(taken))


def test_it_is_the_servers_time_in_microseconds(make, client):
    before, (fence,), after = client.time(), fences(make), client.time()
    micros = [seconds * 10**6 + rest for seconds, rest in (before, after)]
    assert micros[0] <= fence <= micros[1]


def test_it_grows_although_the_clock_went_back(make, client):
    ahead = (int(time.time()) + 3600) * 10**6
    client.set(COUNTER, ahead)
    assert fences(make, 2) == [ahead + 1, ahead + 2]


@pytest.mark.parametrize("value", ["nonsense", "nan", "inf", "-inf", "1e300", "1e18", str(2**53), str(10**20), "-1"])
def test_it_grows_by_the_clock_although_the_counter_is_damaged(make, client, value):
    client.set(COUNTER, value)
    now = int(time.time()) * 10**6
    taken = fences(make, 3)
    assert taken == sorted(set(taken))
    assert now <= taken[0] < now + 3600 * 10**6
    assert int(client.get(COUNTER)) == taken[-1]


def test_it_grows_although_the_counter_was_lost(make, client):
    (first,) = fences(make)
    client.delete(COUNTER)
    (second,) = fences(make)
    assert second > first


def test_it_grows_where_an_acquire_is_sent_again_and_the_counter_was_lost(holder, client):
    mine = holder("id")
    first = acquire(mine.store, ONE, mine.token, 10, fence=True).fence
    client.delete(keys_of(KEY).fence)
    again = acquire(mine.store, ONE, mine.token, 10, fence=True).fence
    assert again > first
    assert again == int(client.get(keys_of(KEY).fence))


def test_where_the_last_one_is_lost_and_the_clock_is_behind_it_may_be_smaller(make, client):
    """As after a failover to a replica that has not got it; docs/fencing.md says what follows."""
    client.set(COUNTER, (int(time.time()) + 3600) * 10**6)  # the primary's clock
    (first,) = fences(make)
    client.delete(COUNTER)
    (second,) = fences(make)
    assert second < first


def test_the_last_one_is_kept_for_a_day(make, client):
    (fence,) = fences(make)
    assert int(client.get(COUNTER)) == fence
    assert DAY_MS - 5000 < client.pttl(COUNTER) <= DAY_MS


def test_neither_renewal_nor_extending_moves_it(make, client):
    with make(timeout=30, renew=True) as lock:
        fence = lock.fence
        renew(lock)
        lock.reacquire()
        lock.extend(5)
        assert lock.fence == fence == int(client.get(COUNTER))


def test_entering_again_does_not_move_it(make, client):
    with make(reentrant=True) as outer, make(reentrant=True) as inner:
        assert inner.fence == outer.fence == int(client.get(COUNTER))


def test_a_lost_reply_does_not_move_it(holder, client, lock_proxy):
    """The acquire is sent again, finds its own token, and returns the number that was lost with the reply."""
    mine = holder("id")
    client.script_load(ACQUIRE.text)
    fault = lock_proxy.drop_reply(to=b"EVALSHA", where=ACQUIRE.sha.encode())
    with connect(lock_proxy.url, {}) as behind:
        granted = acquire(LockStore.of(behind), ONE, mine.token, 10, fence=True)
    assert fault.struck == 1
    assert isinstance(granted, Granted)
    assert granted.fence == int(client.get(keys_of(KEY).fence))
    assert acquire(mine.store, ONE, mine.token, 10, fence=True).fence == granted.fence


def test_a_refused_one_does_not_move_it(make, client):
    with make() as lock:
        assert not make().acquire(blocking_timeout=0.05)
        assert int(client.get(COUNTER)) == lock.fence


def test_who_does_not_ask_has_none_and_leaves_none(make, client):
    with make(fence=False) as lock:
        assert lock.fence is None
        assert client.keys() == [NAME.encode()]


def test_an_inner_block_cannot_ask_for_what_the_outer_one_has_not(make):
    """The number of an earlier holder would be handed out again."""
    with (
        make(reentrant=True, fence=False),
        pytest.raises(LockConfigError, match="without a fence"),
    ):
        make(reentrant=True).__enter__()


def test_a_resource_that_checks_it_refuses_a_holder_that_was_overtaken(make, client):
    highest = 0

    def write(fence):
        nonlocal highest
        if fence < highest:
            return False
        highest = fence
        return True

    stale = make()
    stale.acquire()
    client.delete(NAME)  # its lease ended while its process was paused
    with make() as current:
        assert write(current.fence)
        assert not write(stale.fence)


class TestTask:
    @pytest.fixture
    def app(self, config):
        return make_app(config)

    def test_a_task_has_it_by_its_option_or_app_wide(self, app, config):
        @app.task(bind=True, base=LockedTask, shared=False, lock_fence=True)
        def task(self):
            with self.lock_for() as lock:
                return self.lock.fence, lock.fence

        first, second = task.apply().get(), task.apply().get()
        assert first[0] == first[1] < second[0]
        config.settings["redislock_fence"] = True
        with make_app(config).tasks["lab.work"].lock_for("k") as lock:
            assert lock.fence

    def test_a_waiter_has_it_too(self, app):
        @app.task(bind=True, base=LockedTask, shared=False, lock_fence=True, lock_block_for=0.05)
        def task(self):
            return self.lock.fence

        with busy(task.lock_for()) as lock:
            assert lock.fence
        assert task.apply().get() > 0
