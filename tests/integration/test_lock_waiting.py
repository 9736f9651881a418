"""Waiting for a `Lock`: called by the release, in order, and never for ever because somebody died."""

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

from celery_redislock import Lock, LockConfigError, LockedTask, LockUnavailable, locked
from celery_redislock.line.lines import CALLED_FOR
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import channel_of, keys_of
from celery_redislock.protocol.tokens import Token
from celery_redislock.testing import busy
from tests.lab.app import make_app
from tests.lab.interruption import raised_at
from tests.lab.servers import Valkey, need, wait_until
from tests.lab.workers import ROOT

NAME = "stock"
LINE = keys_of("stock").line


@pytest.fixture
def client(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield client


@pytest.fixture
def make(client):
    return lambda **options: Lock(client, NAME, **{"timeout": 10, "blocking_timeout": 20, **options})


@pytest.fixture
def waiting(make, client):
    """Starts waiters: ``waiting(3)``; each waits when it returns, in the order in which they started."""
    with ThreadPoolExecutor(60) as pool:

        def start(count=1, work=lambda lock: None):
            def wait():
                with make() as lock:
                    work(lock)
                    return time.monotonic()

            started = []
            for _ in range(count):
                before = waiters(client)
                started.append(pool.submit(wait))
                wait_until(lambda before=before: waiters(client) > before, "it waits")
            wait_until(lambda: hears(client), "they are told")
            return started

        yield start


def waiters(client):
    return len(LockServer.behind(client).room)


def hears(client):
    """Whether those who wait in this process hear what is offered to them."""
    return client.pubsub_numsub(channel_of(LockServer.behind(client).room.token.nonce))[0][1]


def test_a_release_calls_who_waits(make, waiting):
    holder = make(timeout=60)
    holder.acquire()
    (waiter,) = waiting()
    holder.release()
    assert waiter.result(15)  # a look would come after the lease


def is_quiet(locks):
    """Whether nobody sends anything for a while. After its subscription a room looks once more."""
    locks.calls()
    time.sleep(0.5)
    return "evalsha" not in locks.calls()


def test_who_waits_sends_nothing_until_then(private_locks, make, locks, waiting, client):
    with make():
        waiters = waiting(3)
        wait_until(lambda: client.zcard(LINE) == 1, "the room stands in line, once for all of them")
        wait_until(lambda: is_quiet(locks), "nothing is sent", 8)
    assert all(waiter.result(15) for waiter in waiters)


def test_one_release_calls_one_waiter(private_locks, make, locks, waiting):
    has_it, go_on = threading.Event(), threading.Event()
    holder = make(timeout=60)
    holder.acquire()
    waiters = waiting(5, work=lambda lock: has_it.set() or go_on.wait(30))
    wait_until(lambda: is_quiet(locks), "the look after the subscription is over")
    holder.release()
    assert has_it.wait(15)
    calls = locks.calls()
    go_on.set()
    assert 3 <= calls["evalsha"] <= 5  # the release, the room's stand, the acquire; on a slow machine the next looks
    assert all(waiter.result(10) for waiter in waiters)


def test_first_come_first_served_one_after_another(make, waiting, client):
    inside, most, turns = [0], [0], []

    def work(number):
        def run(lock):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            turns.append(number)
            time.sleep(0.002)
            inside[0] -= 1

        return run

    holder = make()
    holder.acquire()
    waiters = [waiter for number in range(20) for waiter in waiting(1, work(number))]
    holder.release()
    assert all(waiter.result(20) for waiter in waiters)
    assert most == [1]
    assert turns == list(range(20))
    assert client.keys() == []  # no line left, and no offer


@pytest.fixture
def elsewhere(client):
    """Starts other processes, in each of which one waits for the lock; what it writes and reads are its pipes."""
    started = []

    def start(code=WAIT):
        command = [sys.executable, "-c", code, client.connection_pool.connection_kwargs["path"]]
        rooms = client.zcard(LINE)
        one = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(one)
        wait_until(lambda: client.zcard(LINE) == rooms + 1, "it stands in line")
        room = Token.of(client.zrange(LINE, -1, -1)[0])
        wait_until(lambda: client.pubsub_numsub(channel_of(room.nonce))[0][1], "it hears")
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


WAIT = """
import sys
import redis
from celery_redislock import Lock

with Lock(redis.Redis(unix_socket_path=sys.argv[1]), "stock", timeout=10, blocking_timeout=20):
    print("mine", flush=True)
    sys.stdin.readline()
"""


def test_first_come_first_served_between_processes_too(make, client, waiting, elsewhere):
    """By what the server offers: a process that a busy machine keeps from answering for a second loses its turn."""
    holder, turns = make(timeout=60), []
    holder.acquire()
    with client.pubsub() as heard:
        heard.psubscribe(channel_of("*"))
        assert heard.get_message(timeout=15)["type"] == "psubscribe"
        (first,) = waiting(work=lambda lock: turns.append("first"))
        wait_until(lambda: client.zcard(LINE) == 1, "this process stands in line, before the others")
        second = elsewhere()
        (third,) = waiting(work=lambda lock: turns.append("third"))
        fourth = elsewhere()
        here, *others = [channel_of(Token.of(room).nonce) for room in client.zrange(LINE, 0, -1)]
        for one in (second, fourth):
            one.stdin.write("\n")  # it gives the lock back at once
            one.stdin.flush()
        holder.release()
        assert [one.communicate()[0] for one in (second, fourth)] == ["mine\n", "mine\n"]
        assert first.result(15)
        assert third.result(15)
        offers = [message["channel"].decode() for message in offers_in(heard)]
    assert turns == ["first", "third"]
    assert list(dict.fromkeys(offers)) == [here, *others]
    wait_until(lambda: client.keys() == [], "no line is left, and no offer")


def offers_in(heard):
    """The offers that a subscription has heard so far."""
    while message := heard.get_message(timeout=0.1):
        if message["data"].startswith(b"offer "):
            yield message


def test_a_waiter_whose_process_is_killed_costs_one_lapsed_offer(make, client, waiting, elsewhere):
    holder = make()
    holder.acquire()
    killed = elsewhere()
    (waiter,) = waiting()
    wait_until(lambda: client.zcard(LINE) == 2, "both stand in line")
    killed.kill()
    killed.wait()
    room = Token.of(client.zrange(LINE, 0, 0)[0])
    wait_until(lambda: not client.pubsub_numsub(channel_of(room.nonce))[0][1], "the server knows")
    released = time.monotonic()
    holder.release()
    assert waiter.result(15) - released > 0.8


def test_who_happens_by_does_not_come_before_who_waits(make, client, waiting):
    client.zadd(LINE, {tokens.of_room(tokens.mint_nonce(), "host"): 1})
    assert not make().acquire(blocking=False)
    assert client.pttl(NAME) <= 1000


def test_who_gives_up_leaves_the_line(make, client):
    with make():
        assert not make().acquire(blocking_timeout=0.05)
        wait_until(lambda: client.keys() == [NAME.encode()], "the line is left")


def test_a_key_that_was_deleted_by_hand_is_found_free_when_its_lease_would_have_ended(make, client, waiting):
    make(timeout=1).acquire()
    (waiter,) = waiting()
    client.delete(NAME)
    assert waiter.result(15)


def test_a_holder_that_died_delays_no_longer_than_its_lease(make, waiting):
    make(timeout=0.4).acquire()
    (waiter,) = waiting()
    wait_until(waiter.done, "it has the lock", 15)
    assert waiter.result()


def test_a_holder_whose_process_is_killed_delays_no_longer_than_its_lease(make, client):
    pid = os.fork()
    if pid == 0:
        make(timeout=0.6, renew=True).acquire()
        signal.pause()
    wait_until(lambda: client.exists(NAME), "the child holds it")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert make().acquire(blocking_timeout=15)


def test_an_interrupted_waiter_leaves_the_line_and_the_next_has_its_turn(make, client, lock_proxy, waiting):
    holder = make()
    holder.acquire()
    with redis.Redis.from_url(lock_proxy.url) as behind:
        stands = lock_proxy.drop_reply(to=b"EVALSHA", where=NAME.encode(), nth=2)
        with raised_at(stands, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            Lock(behind, NAME, timeout=10).acquire()
        wait_until(lambda: not client.exists(LINE), "the line is left")
        (waiter,) = waiting()
        holder.release()
        assert waiter.result(15)
        assert Lock(behind, NAME, timeout=10).acquire(blocking_timeout=5)


def test_who_is_interrupted_while_entering_the_line_is_not_called(make, client, monkeypatch):
    """The room would keep the key for a caller that is gone."""
    holder = make()
    holder.acquire()
    room = LockServer.behind(client).room
    enter = room.enter

    def enter_and_be_struck(waiter):
        enter(waiter)
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "enter", enter_and_be_struck)
    with pytest.raises(KeyboardInterrupt):
        make().acquire()
    assert len(room) == 0
    wait_until(lambda: not client.exists(LINE), "the line is left")
    holder.release()
    assert make().acquire(blocking=False)


def test_one_who_is_called_and_interrupted_passes_the_key_on(make, client, lock_proxy, waiting):
    holder = make(thread_local=False)
    holder.acquire()
    with redis.Redis.from_url(lock_proxy.url) as behind, ThreadPoolExecutor() as pool:
        asks = lock_proxy.drop_command(to=b"EVALSHA", where=f"!{room_of(behind)} ".encode())

        def release_later():
            wait_until(lambda: client.exists(LINE), "it waits")
            (later,) = waiting()
            wait_until(lambda: client.zcard(LINE) == 2, "another waits behind it")
            holder.release()
            return later, time.monotonic()

        releasing = pool.submit(release_later)
        with raised_at(asks, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            Lock(behind, NAME, timeout=10).acquire()
        later, released = releasing.result()
        assert later.result(15) - released < CALLED_FOR - 0.5  # sooner than the key is kept for who was called


def room_of(client):
    return LockServer.behind(client).room.token.nonce


def test_a_server_that_ends_while_one_waits_is_an_outage(tmp_path):
    with Valkey(tmp_path).serve() as server, ThreadPoolExecutor() as pool:
        client = redis.Redis(unix_socket_path=str(server.socket))
        Lock(client, NAME, timeout=10).acquire()
        waiter = pool.submit(Lock(client, NAME, timeout=10).acquire)
        wait_until(lambda: server.client.exists(LINE) and hears(client), "it waits")
        server.kill()
        with pytest.raises(LockUnavailable):
            waiter.result(10)


def test_a_forked_child_waits_in_a_room_of_its_own(make, client, waiting):
    holder = make()
    holder.acquire()
    (waiter,) = waiting()
    pid = os.fork()
    if pid == 0:
        taken = make().acquire(blocking_timeout=20)
        os._exit(0 if taken else 1)
    wait_until(lambda: client.zcard(LINE) == 2, "the child stands in line too")
    holder.release()
    assert waiter.result(15)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_task_that_ends_wakes_a_lock_that_waits(private_locks, app, locks):
    ends = threading.Event()

    @app.task(base=LockedTask, shared=False)
    def work():
        ends.wait(60)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(work.apply)
        lock = work.lock_for()
        wait_until(lock.locked, "the task holds it")
        locks.calls()
        waiting = pool.submit(lock.acquire)
        wait_until(lambda: locks.client.exists(keys_of(lock.name).line), "it waits")
        ends.set()
        assert waiting.result(15)
        running.result()
        assert locks.calls()["evalsha"] <= 8  # the look, some stands, the release, the grant
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
            assert client.exists(LINE) == 0
        assert "the lock stock is held by a lock outside tasks on" in said
        assert "asyncio.to_thread()" in said
        assert "block_for=0 or blocking=False" in said
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
            wait_until(lambda: lock.redis.exists(LINE), "it waits")
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
while not client.exists("{stock}:line"):
    time.sleep(0.01)
holder.release()
gevent.joinall([in_loop, waiter], raise_error=True)
"""


def test_who_waits_in_a_line_that_was_evicted_gets_the_key_when_the_lease_ends(make, waiting, client):
    """The release tells nobody then."""
    lock = make(timeout=2)
    lock.acquire()
    (waiter,) = waiting()
    assert client.delete(LINE)
    released_at = time.monotonic()
    lock.release()
    assert waiter.result(timeout=20) > released_at
