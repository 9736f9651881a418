"""`Lock`: what it has on top of redis-py's own, and `task.lock_for(...)`, which is one."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal

import pytest
import redis
from redis.exceptions import LockError

from celery_redislock import Lock, LockConfigError, LockConflict, LockLost, LockUnavailable, locked
from celery_redislock.asyncio import Lock as AsyncLock
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.scripts import ACQUIRE, RELEASE, RENEW
from celery_redislock.testing import busy
from tests.lab.interruption import at_each_point, raised_at
from tests.lab.renewals import begin_renewal, held_by
from tests.lab.servers import wait_until

NAME = "stock"


@pytest.fixture
def lock_for(tasks):
    return lambda key="k": tasks.work.lock_for(key)


@pytest.fixture
def make(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield lambda name=NAME, **options: Lock(client, name, **{"timeout": 10, **options})


def test_it_is_held_inside_the_block_and_free_after_it(lock_for, locks, tasks):
    with lock_for() as lock:
        assert isinstance(lock, Lock)
        assert lock.name == lock.key
        assert lock.state == "held"
        assert 25 < lock.remaining <= 30
        assert locks.client.get(lock.name).decode() == lock.token
        lock.check()
        lock.extend()
    assert (lock.state, lock.token, lock.remaining) == (None, None, 0.0)
    assert tasks.work.lock_info("k") is None


def test_a_second_owner_is_refused_naming_the_first(make):
    with make() as first, pytest.raises(LockConflict, match="is held by a lock outside tasks") as caught:
        make(blocking_timeout=0.05).__enter__()
    assert caught.value.key == first.name
    assert caught.value.holder.hostname
    assert caught.value.holder.since
    assert 0 < caught.value.holder.ttl <= 10


def test_who_cannot_extend_because_redis_is_away_still_holds_it_until_its_deadline(private_locks, make):
    lock = make()
    lock.acquire()
    private_locks.kill()
    left = lock.remaining
    with pytest.raises(LockUnavailable, match=NAME):
        lock.extend()
    assert lock.state in {"held", "at_risk"}
    assert 0 < lock.remaining <= left


def test_a_lock_of_redis_py_that_holds_it_is_named_as_well_as_it_can_be(make, locks):
    with locks.client.lock(NAME, timeout=10), pytest.raises(LockConflict, match="on an unknown host"):
        make(blocking=False).__enter__()


def test_the_error_of_a_conflict_shows_no_token(make, locks):
    locks.client.set(NAME, "a secret of somebody's")
    with pytest.raises(LockConflict) as caught:
        make(blocking=False).__enter__()
    assert "secret" not in str(caught.value) + repr(caught.value.args)


def test_renewal_needs_a_timeout(locks):
    with pytest.raises(LockConfigError, match="lock stock: renew=True needs a timeout"):
        Lock(locks.client, NAME, renew=True)


@pytest.mark.parametrize("timeout", ["10", "", b"10", [10], timedelta(seconds=10)], ids=repr)
@pytest.mark.parametrize("kind", [Lock, AsyncLock])
def test_a_timeout_that_is_no_number_is_refused_with_what_it_must_be(locks, kind, timeout):
    with pytest.raises(LockConfigError) as refused:
        kind(locks.client, NAME, timeout=timeout)
    assert str(refused.value) == (
        f"lock stock: timeout = {timeout!r} is not allowed; allowed: seconds, from 0.001 to 1,000,000,000, or None"
    )


@pytest.mark.parametrize("timeout", [-1, 0.0001, math.inf, math.nan, 1e20, Decimal(1)])
def test_a_timeout_that_no_key_can_live_for_is_refused(locks, timeout):
    with pytest.raises(LockConfigError, match=r"is not allowed; allowed: seconds, from 0\.001 to"):
        Lock(locks.client, NAME, timeout=timeout)


def test_it_is_renewed_while_it_is_held_and_no_longer(make, locks, often):
    lock = make(timeout=30, renew=True)
    lock.acquire()
    locks.client.pexpire(NAME, 15_000)
    assert not make().acquire(blocking_timeout=0.05)
    wait_until(lambda: locks.client.pttl(NAME) > 15_000, "it is renewed")
    assert lock.state == "held"
    lock.release()
    wait_until(lambda: locks.client.keys() == [], "nothing is left")  # the one who waited may leave the line only now


def test_without_renewal_it_is_lost_at_its_own_deadline(make, locks):
    lock = make(timeout=0.3)
    lock.acquire()
    wait_until(lambda: lock.state == "lost", "it is over")
    with pytest.raises(LockLost):
        lock.check()
    wait_until(lambda: not locks.client.exists(NAME), "the key ends, a moment later")
    with pytest.raises(LockLost):
        lock.release()


def test_it_is_at_risk_while_less_than_half_of_its_lease_is_left(make):
    with make(timeout=30) as lock:
        assert lock.state == "held"
        held_by(lock).deadline = time.monotonic() + 14.9
        assert lock.state == "at_risk"


def test_without_a_timeout_it_is_never_lost(make):
    with make(timeout=None) as lock:
        assert (lock.state, lock.remaining) == ("held", float("inf"))


def test_a_lock_that_is_dropped_is_renewed_no_more(make, locks):
    for options in ({}, {"reentrant": True}, {"thread_local": False}):
        make(timeout=0.3, renew=True, **options).acquire()
        gc.collect()
        wait_until(lambda: not locks.client.exists(NAME), "it ends")


@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_a_lock_is_extended_although_the_server_has_closed_an_idle_connection(make, locks, verb):
    with make(timeout=30) as lock:
        locks.client.pexpire(lock.name, 10_000)
        locks.client.client_kill_filter(_type="normal", skipme=True)
        assert getattr(lock, verb)()
        assert locks.client.pttl(lock.name) > 20_000


def test_extending_a_renewed_lock_is_not_taken_back_by_its_renewal(make, locks):
    with make(timeout=30, renew=True) as lock:
        lock.extend(100, replace_ttl=True)
        locks.client.pexpire(NAME, 50_000)
        begin_renewal(lock)
        wait_until(lambda: locks.client.pttl(NAME) > 50_000, "it is renewed")
        assert locks.client.pttl(NAME) > 80_000
        assert lock.remaining > 80


def test_shortening_a_renewed_lock_does_not_lose_it(make, often):
    with make(timeout=60, renew=True) as lock:
        lock.extend(20, replace_ttl=True)
        wait_until(lambda: lock.remaining > 30, "it is renewed in time")
        assert lock.owned()


def test_reacquiring_a_renewed_lock_that_was_extended_does_not_lose_it(make, often):
    with make(timeout=30, renew=True) as lock:
        lock.extend(600, replace_ttl=True)
        keeper = LockServer.behind(lock.redis).keeper
        wait_until(lambda: keeper.wake_at > time.monotonic() + 300, "the keeper sleeps until the next renewal")
        lock.reacquire()
        deadline = held_by(lock).deadline
        wait_until(lambda: held_by(lock).deadline > deadline, "it is renewed")


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, 1e20, sys.maxsize, Decimal(1), "5"])
def test_what_no_key_can_live_for_is_refused_and_changes_nothing_for_any_lock(make, locks, often, seconds):
    with make(timeout=30, renew=True) as lock, make("other", timeout=30, renew=True) as other:
        with pytest.raises(ValueError, match="allowed: seconds, at most 1,000,000,000"):
            lock.extend(seconds, replace_ttl=True)
        assert lock.remaining <= 30
        for one in (lock, other):
            deadline = held_by(one).deadline
            wait_until(lambda one=one, deadline=deadline: held_by(one).deadline > deadline, "it is renewed")
        assert 20_000 < locks.client.pttl(NAME) <= 30_000


def test_a_lock_with_a_timeout_of_0_never_ends_and_cannot_be_extended(make, locks):
    with make(timeout=0) as lock:
        assert locks.client.ttl(NAME) == -1
        with pytest.raises(LockError, match="Cannot extend a lock with no timeout"):
            lock.extend(5)
        assert lock.owned()


def test_a_token_that_is_taken_away_and_put_back_is_the_same_lock(make, often):
    with make(timeout=30, renew=True, fence=True) as lock:
        held, token = held_by(lock), lock.local.token
        lock.local.token = None
        assert (lock.state, lock.token, lock.local.token) == (None, None, None)
        lock.local.token = token
        assert (held_by(lock), lock.fence) == (held, held.fence)
        deadline = held.deadline
        wait_until(lambda: held.deadline > deadline, "it is still renewed")


@pytest.fixture
def make_behind(lock_proxy):
    with redis.Redis.from_url(lock_proxy.url, socket_timeout=15) as client:
        yield lambda name=NAME, **options: Lock(client, name, **options)


@pytest.mark.parametrize("shorten", [lambda lock: lock.extend(20, replace_ttl=True), Lock.reacquire])
def test_a_holder_counts_on_no_more_than_what_a_shortening_has_left_of_it_if_the_answer_is_lost(
    make_behind, locks, lock_proxy, shorten
):
    lock = make_behind(timeout=30)
    with lock:
        lock.extend(60, replace_ttl=True)
        locks.client.script_load(RENEW.text)
        lock_proxy.drop_reply(to=b"EVALSHA", where=RENEW.sha.encode())
        shorten(lock)
        left = locks.client.pttl(NAME)  # first: time goes by until the second
        assert left >= lock.remaining * 1000
        assert lock.state != "lost"


def test_shortening_a_renewed_lock_does_not_lose_it_if_the_answer_is_lost(make_behind, locks, lock_proxy, request):
    with make_behind(timeout=60, renew=True) as lock:
        locks.client.script_load(RENEW.text)
        lock_proxy.drop_reply(to=b"EVALSHA", where=RENEW.sha.encode())
        request.getfixturevalue("often")  # only now: the reply that is lost must not be one to the keeper
        lock.extend(20, replace_ttl=True)
        wait_until(lambda: locks.client.pttl(NAME) > 30_000, "it is renewed in time")
        assert lock.owned()


def test_checking_what_is_not_held_says_so(make):
    with pytest.raises(LockLost, match="this object does not hold it"):
        make().check()


def test_extending_a_stolen_lock_says_so_and_leaves_the_thief_alone(make, locks):
    lock = make()
    lock.acquire()
    locks.client.set(lock.name, "thief")
    with pytest.raises(LockLost, match="deleted, expired or taken"):
        lock.extend()
    assert lock.state == "lost"
    with pytest.raises(LockLost):
        lock.release()
    assert locks.client.get(lock.name) == b"thief"


def test_a_loss_is_raised_also_where_the_release_cannot_tell(locks, lock_proxy):
    """Its first reply was lost, so that the second, "not yours", may mean that the first try released it."""
    with redis.Redis.from_url(lock_proxy.url, socket_timeout=15) as client:
        lock = Lock(client, NAME, timeout=30, renew=True)
        lock.acquire()
        locks.client.delete(NAME)
        begin_renewal(lock)
        wait_until(lambda: lock.state == "lost", "it is told")
        fault = lock_proxy.drop_reply(to=b"EVALSHA", where=RELEASE.sha.encode())
        with pytest.raises(LockLost):
            lock.release()
        assert fault.struck


def test_a_block_that_ends_by_a_refusal_of_its_own_has_not_lost_its_lock_if_the_reply_to_its_release_is_lost(
    locks, lock_proxy
):
    """As in a failover that cuts the lock's connection, and the user's own client meets a replica."""
    with redis.Redis.from_url(lock_proxy.url, socket_timeout=15) as client:
        lock = Lock(client, NAME, timeout=30)
        fault = lock_proxy.drop_reply(to=b"EVALSHA", where=RELEASE.sha.encode())
        with pytest.raises(redis.ReadOnlyError, match="its own"), lock:
            raise redis.ReadOnlyError("its own")
        assert fault.struck
    assert locks.client.keys() == []


def test_a_cycle_costs_one_round_trip_to_acquire_and_one_to_release(private_locks, make, locks):
    lock = make(timeout=60, renew=True, blocking_timeout=10)
    with lock:
        pass
    locks.calls()
    for _ in range(20):
        with lock:
            pass
    calls = locks.calls()
    assert calls.pop("evalsha") == 40
    assert set(calls) <= {"set", "get", "del", "exists"}  # inside the scripts
    assert locks.client.keys() == []


def test_an_outage_is_lock_unavailable_and_a_connection_error(tmp_path):
    lock = Lock(redis.Redis(unix_socket_path=f"{tmp_path}/nobody.sock"), NAME)
    with pytest.raises(LockUnavailable) as caught:
        lock.acquire()
    assert isinstance(caught.value, redis.ConnectionError)
    assert (lock.state, lock.local.token) == (None, None)


class TestInterruptions:
    """A time limit, a signal, a process that ends: at any point nothing may be held that nobody knows."""

    @pytest.mark.parametrize("timeout", [None, 10])
    def test_amid_the_acquire_it_is_given_back(self, lock_proxy, locks, timeout):
        locks.client.script_load(ACQUIRE.text)
        with redis.Redis.from_url(lock_proxy.url) as behind:
            lock = Lock(behind, NAME, timeout=timeout)
            granted = lock_proxy.delay(60, to=b"EVALSHA", where=ACQUIRE.sha.encode(), nth=1)
            with raised_at(granted, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
                lock.acquire()
        assert locks.client.keys() == []
        assert lock.state is None

    @pytest.mark.parametrize("timeout", [None, 60])
    def test_amid_the_release_it_is_sent_again(self, lock_proxy, locks, timeout):
        with redis.Redis.from_url(lock_proxy.url) as behind:
            lock = Lock(behind, NAME, timeout=timeout)
            lock.acquire()
            locks.client.script_load(RELEASE.text)
            swallowed = lock_proxy.hold(to=b"EVALSHA", where=RELEASE.sha.encode(), before=True)
            with raised_at(swallowed, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
                lock.release()
            assert locks.client.exists(NAME)
            wait_until(lambda: not locks.client.exists(NAME), "the keeper has released it")

    @pytest.mark.parametrize("options", [{"timeout": None}, {"timeout": 60, "renew": True, "reentrant": True}])
    def test_at_any_point_of_the_acquire_nothing_stays_held(self, make, locks, options):
        lock = make(**options)
        for point in at_each_point(lock.acquire):
            wait_until(lambda: not locks.client.exists(NAME), f"it is given back at {point}")
            assert lock.state is None
            with lock:  # so that the next acquire finds a connection
                assert locks.client.exists(NAME)
        assert point > 50
        lock.release()

    @pytest.mark.parametrize("options", [{"timeout": None}, {"timeout": 60, "renew": True, "reentrant": True}])
    def test_at_any_point_of_the_release_nothing_stays_held(self, make, locks, options):
        lock = make(**options)
        lock.acquire()
        for point in at_each_point(lock.release):
            wait_until(lambda: not locks.client.exists(NAME), f"it is released at {point}")
            assert lock.state is None
            lock.acquire()

    def test_at_any_point_of_an_inner_acquire_the_outer_block_ends_as_ever(self, make, locks):
        lock, inner = (make(timeout=60, renew=True, reentrant=True) for _ in range(2))
        lock.acquire()
        for point in at_each_point(inner.acquire):
            assert (lock.state, locks.client.exists(NAME)) == ("held", 1), f"it is still held at {point}"
            lock.release()
            assert not locks.client.exists(NAME), f"it is released after {point}"
            lock.acquire()
        inner.release()
        lock.release()

    def test_an_interruption_of_the_first_command_is_undone_later_where_the_server_does_not_answer(
        self, lock_proxy, locks
    ):
        locks.client.script_load(ACQUIRE.text)
        with redis.Redis.from_url(lock_proxy.url) as behind:
            lock = Lock(behind, NAME, timeout=None)
            granted = lock_proxy.delay(60, to=b"EVALSHA", where=ACQUIRE.sha.encode(), nth=1)
            for nth in (1, 2):
                lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode(), nth=nth)
            with raised_at(granted, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
                lock.acquire()
            wait_until(lambda: not locks.client.exists(NAME), "the keeper has released it")

    def test_at_any_point_of_an_inner_release_the_outer_block_still_holds_it(self, make, locks):
        lock = make(timeout=60, renew=True, reentrant=True)

        def enter_twice():
            lock.acquire()
            lock.acquire()

        enter_twice()
        for point in at_each_point(lock.release):
            assert (lock.state, locks.client.exists(NAME)) == ("held", 1), f"it is still held at {point}"
            lock.release()
            assert not locks.client.exists(NAME), f"it is released after {point}"
            enter_twice()

    def test_a_token_of_the_callers_choice_is_not_released_again(self, make_behind, lock_proxy, locks):
        """Another caller may have chosen it too, and hold the key by then."""
        chosen, minted = make_behind(timeout=60), make_behind("another", timeout=60)
        chosen.acquire(token="mine")  # noqa: S106
        minted.acquire()
        lock_proxy.refuse()
        for lock in (chosen, minted):
            with pytest.raises(LockUnavailable):
                lock.release()
        lock_proxy.mend()
        wait_until(lambda: not locks.client.exists("another"), "the keeper has released the other one")
        assert locks.client.get(NAME) == b"mine"

    def test_an_outage_amid_the_release_delays_it(self, make_behind, lock_proxy, locks):
        lock = make_behind(timeout=None)
        lock.acquire()
        lock_proxy.refuse()
        with pytest.raises(LockUnavailable):
            lock.release()
        assert locks.client.exists(NAME)
        lock_proxy.mend()
        wait_until(lambda: not locks.client.exists(NAME), "the keeper has released it")

    def test_after_the_grant_it_is_given_back(self, make, locks, monkeypatch):
        def refuse(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)  # of its keeper, which begins with the first lock
        with pytest.raises(RuntimeError):
            make(renew=True).acquire()
        assert locks.client.keys() == []

    def test_a_forked_child_does_not_hold_what_its_parent_holds(self, make, locks):
        lock = make(renew=True, reentrant=True)
        lock.acquire()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                lock.release()
            except redis.exceptions.LockError:
                os.write(write, b"refused ")
            again = make(reentrant=True).acquire(blocking=False)
            other = make("other", renew=True)
            os.write(write, f"{lock.state} {again} {other.acquire()}".encode())
            other.release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"refused None False True"
        os.close(read)
        os.close(write)
        assert lock.owned()
        lock.release()
        assert locks.client.keys() == []


class TestAfterALoss:
    """A block whose lock is lost ends with `LockLost`, and leaves alone what others have taken since."""

    @pytest.fixture
    def lose(self, locks, often):
        def lose(lock):
            locks.client.delete(NAME)
            wait_until(lambda: lock.state == "lost", "it is told")

        return lose

    def test_a_release_is_of_what_its_own_thread_has_acquired(self, make, locks):
        lock = make(timeout=0.2, thread_local=False)
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            first.submit(lock.acquire).result()
            wait_until(lambda: not locks.client.exists(NAME), "it has expired")
            lock.timeout = 60
            second.submit(lock.acquire).result()
            with pytest.raises(LockLost):
                first.submit(lock.release).result()
            assert locks.client.exists(NAME)
            second.submit(lock.release).result()
        assert not locks.client.exists(NAME)

    def test_a_release_of_nothing_leaves_what_another_thread_acquires_meanwhile(self, make, locks, monkeypatch):
        lock = make(timeout=60, thread_local=False)
        leave = LockError.__init__

        def acquire_elsewhere(error, *args):
            leave(error, *args)
            with ThreadPoolExecutor(1) as other:
                assert other.submit(lock.acquire).result()

        with monkeypatch.context() as patch:
            patch.setattr(LockError, "__init__", acquire_elsewhere)
            with pytest.raises(LockError):
                lock.release()
        assert lock.state == "held"
        assert locks.client.exists(NAME)
        lock.release()

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_in_another_thread_the_same_object_keeps_its_own_lock(self, make, locks, lose, reentrant):
        lock = make(timeout=60, renew=True, reentrant=reentrant, thread_local=False)
        first_is_lost, second_is_in, first_has_left = threading.Event(), threading.Event(), threading.Event()

        def first():
            with lock:
                lose(lock)
                first_is_lost.set()
                assert second_is_in.wait(10)

        def second():
            assert first_is_lost.wait(10)
            with lock:
                second_is_in.set()
                assert first_has_left.wait(10)
                assert locks.client.exists(NAME)
                assert lock.state == "held"

        with ThreadPoolExecutor() as pool:
            seconds_block = pool.submit(second)
            with pytest.raises(LockLost):
                pool.submit(first).result(20)
            first_has_left.set()
            seconds_block.result(20)
        assert not locks.client.exists(NAME)

    def test_a_block_inside_it_takes_the_key_anew(self, make, locks, lose):
        lock = make(timeout=60, renew=True, reentrant=True)

        def nested():
            with lock:
                lose(lock)
                with lock:
                    assert locks.client.exists(NAME)
                assert not locks.client.exists(NAME)

        with pytest.raises(LockError) as caught:
            nested()
        assert isinstance(caught.value, LockLost)

    def test_one_of_several_is_told_too(self, app, locks, often):
        both = locked(["a", "b"], app=app)

        def nested():
            with both as outer:
                locks.client.delete("redislock:{a}", "redislock:{b}")
                wait_until(lambda: outer.state == "lost", "it is told")
                with both:
                    pass

        with pytest.raises(LockLost):
            nested()


class TestLockFor:
    def test_it_waits_for_lock_block_for(self, config, locks):
        from tests.lab.app import make_app

        config.settings["redislock_block_for"] = 0.1
        work = make_app(config).tasks["lab.work"]
        with busy(work.lock_for("k")), pytest.raises(LockConflict):
            work.lock_for("k").__enter__()

    def test_another_thread_may_release_it(self, lock_for, tasks):
        lock = lock_for()
        lock.acquire()
        with ThreadPoolExecutor() as pool:
            pool.submit(lock.release).result()
        assert tasks.work.lock_info("k") is None
