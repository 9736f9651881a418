"""A holder never counts on more time than its key has, in whatever order the server meets what was sent to it.

The keeper and each caller of `extend` have connections of their own, so a command may overtake one that was sent before
it; and one whose sender has given up waiting may still arrive.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio

from celery_redislock import Lock, LockUnavailable
from celery_redislock.asyncio import Lock as AsyncLock
from celery_redislock.protocol.scripts import RELEASE, RENEW
from tests.lab.renewals import begin_renewal, held_by
from tests.lab.servers import wait_until

NAME = "stock"
RENEWAL = {"to": b"EVALSHA", "where": RENEW.sha.encode()}


@pytest.fixture
def make(locks, lock_proxy):
    for script in (RELEASE, RENEW):
        locks.client.script_load(script.text)
    clients = []

    def make(timeout, *, renew, answer_within=10.0):
        clients.append(redis.Redis.from_url(lock_proxy.url, socket_timeout=answer_within))
        return Lock(clients[-1], NAME, timeout=timeout, renew=renew, thread_local=False)

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def overtrust(locks):
    """By how many seconds the holder counts on more than the key has."""

    def overtrust(lock):
        deadline, left = held_by(lock).deadline, locks.client.pttl(NAME) / 1000
        return deadline - (time.monotonic() + left)

    return overtrust


def wait_until_the_keeper_has_read(lock, lock_proxy):
    """Until it has dealt with its last answer: it sends its next renewal. No renewal reaches the server any more."""
    fault = lock_proxy.hold(**RENEWAL, nth=None, before=True)

    def is_sent():
        begin_renewal(lock)
        return fault.struck

    wait_until(is_sent, "the keeper renews again", 10)


def test_a_renewal_whose_answer_comes_after_a_shortening_does_not_undo_it(make, lock_proxy, overtrust):
    with make(60, renew=True) as lock:
        answer = lock_proxy.hold(**RENEWAL)
        begin_renewal(lock)
        answer.wait()
        lock.extend(20, replace_ttl=True)
        answer.let_go()
        wait_until_the_keeper_has_read(lock, lock_proxy)
        assert overtrust(lock) <= 0
        assert lock.state != "lost"


def test_a_renewal_that_a_shortening_has_overtaken_counts_for_no_more_than_it(make, lock_proxy, overtrust):
    with make(60, renew=True) as lock:
        renewal = lock_proxy.hold(**RENEWAL, before=True)
        begin_renewal(lock)
        renewal.wait()
        lock.extend(20, replace_ttl=True)
        assert overtrust(lock) <= 0
        renewal.let_go()
        wait_until_the_keeper_has_read(lock, lock_proxy)
        assert overtrust(lock) <= 0


def test_a_shortening_that_arrives_after_a_later_renewal_costs_its_holder_no_trust(make, lock_proxy, locks, overtrust):
    """Its sender has given up waiting for the answer, and has sent it again; the first sending is still on its way."""
    with make(60, renew=True, answer_within=0.3) as lock:
        shortening = lock_proxy.hold(**RENEWAL, before=True)
        lock.extend(20, replace_ttl=True)
        granted = locks.client.pttl(NAME)
        begin_renewal(lock)
        wait_until(lambda: locks.client.pttl(NAME) > granted, "it is renewed")
        wait_until_the_keeper_has_read(lock, lock_proxy)
        shortening.let_go()
        wait_until(lambda: locks.client.pttl(NAME) <= 20_000, "the shortening arrives")
        assert overtrust(lock) <= 0
        assert lock.state != "lost"


def test_an_extension_that_a_renewal_under_way_may_undo_counts_once_it_is_made_again(
    make, lock_proxy, locks, overtrust
):
    with make(20, renew=True) as lock:
        renewal = lock_proxy.hold(**RENEWAL, before=True)
        begin_renewal(lock)
        renewal.wait()
        lock.extend(60, replace_ttl=True)
        answer = lock_proxy.hold(**RENEWAL)
        renewal.let_go()
        answer.wait()
        assert locks.client.pttl(NAME) <= 20_000
        assert overtrust(lock) <= 0
        answer.let_go()
        wait_until(lambda: begin_renewal(lock) or lock.remaining > 50, "the keeper has made it again")
        assert overtrust(lock) <= 0


def test_an_extension_counts_for_no_more_than_that_of_another_thread_which_is_under_way(
    make, lock_proxy, locks, overtrust
):
    with ThreadPoolExecutor() as threads, make(20, renew=False) as lock:
        short = lock_proxy.hold(**RENEWAL, before=True)
        other = threads.submit(lock.extend, 5, replace_ttl=True)
        short.wait()
        lock.extend(60, replace_ttl=True)
        assert locks.client.pttl(NAME) > 50_000
        answer = lock_proxy.hold(**RENEWAL)
        short.let_go()
        answer.wait()
        assert locks.client.pttl(NAME) <= 5_000
        assert overtrust(lock) <= 0
        answer.let_go()
        assert other.result(10)
        lock.extend(60, replace_ttl=True)
        assert lock.remaining > 50


def test_a_lock_that_is_released_while_it_is_extended_is_renewed_no_more(make, lock_proxy, locks):
    """Also where Redis has not heard of the release: then the key ends with its timeout."""
    lock = make(1.0, renew=True, answer_within=0.5)
    lock.acquire()
    answer = lock_proxy.hold(**RENEWAL)
    with ThreadPoolExecutor() as threads:
        extends = threads.submit(lock.extend, 1.0, replace_ttl=True)
        answer.wait()
        release = lock_proxy.hold(b"EVALSHA", RELEASE.sha.encode(), nth=None, before=True)
        releases = threads.submit(lock.release)
        release.wait()
        answer.let_go()
        extends.exception(10)  # where the answer came too late, it is LockUnavailable
        with pytest.raises(LockUnavailable):
            releases.result(10)
    wait_until(lambda: not locks.client.exists(NAME), "the key ends", 5)


def test_a_shortening_of_a_coroutine_that_arrives_after_it_was_sent_again_costs_its_holder_no_trust(
    make, lock_proxy, locks, overtrust
):
    """Its answer did not come, so it was sent once more; what was sent first is still on its way."""

    async def main():
        client = redis.asyncio.from_url(lock_proxy.url, socket_timeout=0.3)
        lock = AsyncLock(client, NAME, timeout=60, thread_local=False)
        await lock.acquire()
        shortening = lock_proxy.hold(**RENEWAL, before=True)
        await lock.extend(20, replace_ttl=True)
        await lock.extend(60, replace_ttl=True)
        assert locks.client.pttl(NAME) > 50_000
        shortening.let_go()
        await asyncio.to_thread(wait_until, lambda: locks.client.pttl(NAME) <= 20_000, "the shortening arrives")
        assert overtrust(lock) <= 0

    asyncio.run(main())
