"""Waiting for a `Lock`: woken by the release, one at a time, and never for ever because somebody died."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from celery_redislock import Lock, LockConfigError, LockedTask, locked
from celery_redislock.server.names import keys_of
from celery_redislock.testing import busy
from tests.lab.app import make_app
from tests.lab.interruption import raised_at
from tests.lab.servers import need, wait_until
from tests.lab.workers import ROOT

NAME = "stock"
WAITERS, WAKE = keys_of("stock").waiters, keys_of("stock").wake


@pytest.fixture
def client(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield client


@pytest.fixture
def make(client):
    return lambda **options: Lock(client, NAME, **{"timeout": 10, "blocking_timeout": 20, **options})


@pytest.fixture
def waiting(make, client):
    """Starts waiters: ``waiting(3)``; each waits when it returns."""
    with ThreadPoolExecutor(60) as pool:

        def start(count=1, work=lambda lock: None):
            def wait():
                with make() as lock:
                    work(lock)
                    return time.monotonic()

            started = [pool.submit(wait) for _ in range(count)]
            wait_until(lambda: blocked(client) == count, "they block on the server")
            return started

        yield start


def blocked(client):
    return client.info("clients")["blocked_clients"]


def test_a_waiter_blocks_on_the_server_instead_of_asking_again(make, client, locks, waiting):
    with make():
        (waiter,) = waiting()
        locks.calls()
        time.sleep(0.5)
        assert locks.calls() == {}
    assert waiter.result(5)


def test_a_release_wakes_it(make, waiting):
    holder = make()
    holder.acquire()
    (waiter,) = waiting()
    released = time.monotonic()
    holder.release()
    assert waiter.result(5) - released < 0.5  # a turn is a whole second


def test_one_release_wakes_one_waiter(make, client, locks, waiting):
    has_it, go_on = threading.Event(), threading.Event()
    holder = make()
    holder.acquire()
    waiters = waiting(5, work=lambda lock: has_it.set() or go_on.wait(10))
    locks.calls()
    holder.release()
    assert has_it.wait(5)
    calls = locks.calls()
    go_on.set()
    assert calls["evalsha"] == 2  # one release, one acquire
    assert all(waiter.result(10) for waiter in waiters)


def test_all_waiters_have_their_turn_one_after_another(make, waiting, client):
    inside, most = [0], [0]

    def work(lock):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1

    holder = make()
    holder.acquire()
    waiters = waiting(20, work)
    holder.release()
    assert all(waiter.result(20) for waiter in waiters)
    assert most == [1]
    assert client.keys() == []  # no waiter remembered, no wake-up left


def test_nobody_waits_so_nothing_is_left_behind(make, client):
    with make():
        pass
    assert client.keys() == []


def test_who_gives_up_is_remembered_no_more(make, client):
    with make():
        assert not make().acquire(blocking_timeout=0.05)
        assert client.keys() == [NAME.encode()]


def test_a_wake_up_for_nobody_expires(make, client):
    """All who waited died: what the release leaves for them ends by itself."""
    with make():
        client.sadd(WAITERS, "dead")
        client.pexpire(WAITERS, 3000)
    assert client.llen(WAKE) == 1
    assert 0 < client.pttl(WAKE) <= 1000


def test_a_wake_up_for_a_dead_waiter_wakes_the_next_one_once(make, client, locks):
    with make():
        client.sadd(WAITERS, "dead")
    with make():
        locks.calls()
        assert not make().acquire(blocking_timeout=0.2)
        assert locks.calls()["evalsha"] <= 3  # a look, a second one for the old wake-up, the last


def test_releases_leave_no_more_than_one_wake_up(make, client):
    for _ in range(3):
        with make():
            client.sadd(WAITERS, "dead")
    assert client.llen(WAKE) == 1


def test_a_waiter_that_died_with_the_wake_up_delays_the_others_by_no_more_than_a_turn(make, client, waiting):
    holder = make()
    holder.acquire()
    (waiter,) = waiting()
    client.delete(NAME)  # as a release whose wake-up went to the dead one
    assert waiter.result(3)


def test_a_holder_that_died_delays_no_longer_than_its_lease(make, waiting):
    make(timeout=0.4).acquire()
    (waiter,) = waiting()
    assert waiter.result(1.5)


def test_a_holder_whose_process_is_killed_delays_no_longer_than_its_lease(make, client):
    pid = os.fork()
    if pid == 0:
        make(timeout=0.6, renew=True).acquire()
        signal.pause()
    wait_until(lambda: client.exists(NAME), "the child holds it")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert make().acquire(blocking_timeout=3)


def test_a_lock_of_redis_py_is_polled(make, client):
    """Its release wakes nobody."""
    other = client.lock(NAME, timeout=10)
    other.acquire()
    with ThreadPoolExecutor() as pool:
        waiter = pool.submit(make(sleep=0.01).acquire)
        wait_until(lambda: client.exists(WAITERS), "it waits")
        assert blocked(client) == 0
        other.release()
        assert waiter.result(5)


def test_a_waiter_polls_where_it_may_not_block(make, client):
    """A user without the command, or more waiters than connections."""
    client.execute_command("ACL", "SETUSER", "default", "-blpop")
    try:
        holder = make()
        holder.acquire()
        with ThreadPoolExecutor() as pool:
            waiter = pool.submit(make(sleep=0.01).acquire)
            wait_until(lambda: client.exists(WAITERS), "it waits")
            holder.release()
            assert waiter.result(5)
    finally:
        client.execute_command("ACL", "SETUSER", "default", "+blpop")


def test_a_waiters_interruption_leaves_its_connection_fit_for_the_next(make, client, lock_proxy):
    holder = make()
    holder.acquire()
    with redis.Redis.from_url(lock_proxy.url) as behind, ThreadPoolExecutor() as pool:
        waits = lock_proxy.drop_command(to=b"BLPOP")
        with raised_at(waits, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            Lock(behind, NAME, timeout=10).acquire()
        waiter = pool.submit(Lock(behind, NAME, timeout=10).acquire)
        wait_until(lambda: blocked(client) == 1, "it waits")
        holder.release()
        assert waiter.result(5)


def test_a_server_that_ends_while_one_waits_is_an_outage(tmp_path):
    from celery_redislock import LockUnavailable
    from tests.lab.servers import Valkey

    with Valkey(tmp_path).serve() as server, ThreadPoolExecutor() as pool:
        client = redis.Redis(unix_socket_path=str(server.socket))
        Lock(client, NAME, timeout=10).acquire()
        waiter = pool.submit(Lock(client, NAME, timeout=10).acquire)
        wait_until(lambda: blocked(server.client) == 1, "it waits")
        server.kill()
        with pytest.raises(LockUnavailable):
            waiter.result(10)


def test_a_task_that_ends_wakes_a_lock_that_waits(tasks, locks):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(tasks.work.apply, ("k", "item", 0.5))
        lock = tasks.work.lock_for("k")
        wait_until(lock.locked, "the task holds it")
        locks.calls()
        assert lock.acquire()
        running.result()
        assert locks.calls()["evalsha"] <= 4  # the look, the release, the grant; and the look of a turn at most
        lock.release()


class TestInARunningEventLoop:
    """To wait would stop all of it; a coroutine that is to release the key would never come to that."""

    def test_an_acquire_that_would_wait_is_refused_with_what_to_do_instead(self, make, client):
        async def take(lock):
            with pytest.raises(LockConfigError) as caught:
                lock.acquire()
            return str(caught.value)

        with busy(make()):
            began = time.monotonic()
            said = asyncio.run(take(make()))
            assert time.monotonic() - began < 5
            assert client.exists(WAITERS) == 0
        assert "the lock stock is held by a lock outside tasks on" in said
        assert "asyncio.to_thread()" in said
        assert "wait=0 or blocking=False" in said
        assert client.keys() == []

    def test_a_block_and_an_eager_run_are_refused_too(self, config):
        app = make_app(config)

        @app.task(base=LockedTask, shared=False, lock_key="stock", lock_on_conflict="wait")
        def task(): ...

        async def enter():
            with locked("stock", app=app):
                pass

        async def apply():
            task.apply().get()

        with busy(task.lock_for()):
            for coroutine in (enter(), apply()):
                with pytest.raises(LockConfigError, match="event loop"):
                    asyncio.run(coroutine)

    def test_one_that_need_not_wait_or_shall_not_is_as_ever(self, make, client):
        async def take(**options):
            return make().acquire(**options)

        with busy(make()):
            assert asyncio.run(take(blocking=False)) is False
            assert asyncio.run(take(blocking_timeout=0)) is False
        assert asyncio.run(take()) is True

    def test_a_thread_that_the_loop_waits_for_may_wait(self, make):
        async def take():
            return await asyncio.to_thread(make().acquire)

        with ThreadPoolExecutor(1) as pool:
            lock = make(thread_local=False)
            assert lock.acquire()
            taken = pool.submit(asyncio.run, take())
            wait_until(lambda: blocked(lock.redis) == 1, "it waits")
            lock.release()
            assert taken.result() is True

    def test_under_gevent_the_loop_of_another_greenlet_stops_nobody(self, locks):
        need("gevent")
        command = [sys.executable, "-c", GREENLETS, str(locks.socket)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == ("taken\nrefused\ngiven back\n", "")


#: One greenlet's coroutine holds on, in its loop, while another waits for a lock; then the coroutine asks for it.
GREENLETS = """
from gevent import monkey
monkey.patch_all()
import asyncio, sys, time
import gevent, redis
from celery_redislock import Lock, LockConfigError

client = redis.Redis(unix_socket_path=sys.argv[1])
make = lambda: Lock(client, "stock", timeout=10, reentrant=True)
holder = make()
holder.acquire()
loop_runs, taken = gevent.event.Event(), gevent.event.Event()

async def coroutine():
    loop_runs.set()
    taken.wait()  # blocks this greenlet amid its coroutine
    try:
        make().acquire()
    except LockConfigError:
        print("refused")

def wait_for_it():
    loop_runs.wait()
    lock = make()
    lock.acquire()
    print("taken")
    taken.set()
    in_loop.join()
    lock.release()
    print("given back")

in_loop = gevent.spawn(asyncio.run, coroutine())
waiter = gevent.spawn(wait_for_it)
loop_runs.wait()
while not client.exists("{stock}:waiters"):
    time.sleep(0.01)
holder.release()
gevent.joinall([in_loop, waiter], raise_error=True)
"""
