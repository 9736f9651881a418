"""More callers at once than connections: who waits for one waits for others like it, and not for the lock server."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import redis

from celery_redislock import Lock, LockUnavailable


@pytest.fixture
def client(lock_proxy):
    """Makes a user's client with a pool of two connections, which a caller is to get within two time-outs."""

    def make(time_out):
        return redis.Redis.from_url(
            lock_proxy.url, max_connections=2, socket_timeout=time_out, socket_connect_timeout=time_out
        )

    return make


def test_a_server_that_answers_is_available_to_however_many_callers(client, lock_proxy):
    crowded = client(0.2)
    lock_proxy.delay(0.05, to=b"EVALSHA")

    def use(number):
        with Lock(crowded, f"{number}", timeout=60):
            pass

    with ThreadPoolExecutor(50) as callers:
        ends = [callers.submit(use, number) for number in range(50)]
    assert [end.exception() for end in ends] == 50 * [None]


def test_callers_in_a_loop_keep_no_connection_from_who_waits_for_one(client):
    crowded, end = client(0.1), time.monotonic() + 2.0

    def loop(number):
        while time.monotonic() < end:
            with Lock(crowded, f"{number}", timeout=60):
                pass

    with ThreadPoolExecutor(16) as callers:
        ends = [callers.submit(loop, number) for number in range(16)]
    assert [end.exception() for end in ends] == 16 * [None]


def test_a_connection_that_is_returned_goes_to_who_waits_for_one(client, lock_proxy):
    crowded = client(5.0)
    with Lock(crowded, "warm", timeout=60):
        pass
    first, second = (lock_proxy.hold(to=b"EVALSHA", where=b"{%s}" % name) for name in (b"first", b"second"))
    with ThreadPoolExecutor(3) as callers:
        ends = [callers.submit(Lock(crowded, name, timeout=60).acquire) for name in ("first", "second")]
        first.wait()
        second.wait()
        waits = callers.submit(Lock(crowded, "third", timeout=60).acquire)
        time.sleep(0.2)  # nobody tells that it waits for a connection; where it does not yet, this test shows nothing
        first.let_go()
        is_served, _ = wait([waits], timeout=3)
        is_second_done = ends[1].done()
        second.let_go()
    assert is_served
    assert not is_second_done
    assert [one.result() for one in (*ends, waits)] == [True, True, True]


def test_no_caller_waits_for_longer_than_before_where_the_server_does_not_answer(client, lock_proxy):
    crowded = client(0.3)
    with Lock(crowded, "warm", timeout=60):
        pass
    lock_proxy.blackhole()

    def use(number):
        began = time.monotonic()
        with pytest.raises(LockUnavailable):
            Lock(crowded, f"{number}", timeout=60).acquire()
        return time.monotonic() - began

    with ThreadPoolExecutor(20) as callers:
        assert max(callers.map(use, range(20))) < 10.0
