"""A `Lock` over a Sentinel's client, where the Sentinels themselves are of no help."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.sentinel import Sentinel

from celery_redislock import Lock, LockLost, LockUnavailable
from celery_redislock.asyncio import Lock as AsyncLock
from celery_redislock.hold.held_lock import PAST_DEADLINE
from tests.lab.asking import answer_of
from tests.lab.proxy import Proxy
from tests.lab.renewals import begin_renewal, held_by
from tests.lab.servers import Valkey, free_port, wait_until
from tests.lab.topologies import WATCHED, sentinel, sentinel_over

NAME = "stock"


@pytest.fixture
def port(tmp_path):
    with sentinel(tmp_path, WATCHED) as port:
        yield port


@pytest.fixture
def proxy(port):
    """In front of the Sentinel."""
    with Proxy(f"redis://127.0.0.1:{port}").serve() as proxy:
        yield proxy


def primary_behind(*ports, **options):
    sentinels = Sentinel([("127.0.0.1", port) for port in ports], **options)
    return sentinels.master_for(WATCHED, socket_timeout=5.0, socket_connect_timeout=5.0)


def address_of(client):
    return client.connection_pool.get_master_address()


def cut_connections(address):
    with redis.Redis(*address) as direct:
        direct.client_kill_filter(_type="normal", skipme=True)


def test_silent_sentinels_do_not_keep_a_holder_from_being_told(proxy, caplog):
    """They are asked before a connection is made, and have time-outs of their own. Here these come after the test."""
    caplog.set_level(logging.WARNING, "celery_redislock")
    client = primary_behind(proxy.port, socket_timeout=90)
    lock = Lock(client, NAME, timeout=1.5, renew=True)
    assert lock.acquire()
    primary = address_of(client)
    proxy.blackhole()
    cut_connections(primary)
    wait_until(lambda: PAST_DEADLINE in caplog.text, "it is told")


def test_a_silent_sentinel_costs_one_time_out_and_no_more(proxy, port):
    """redis-py 8 asks it eleven times before it asks the next one: seven seconds, of somebody's lease."""
    proxy.blackhole()
    started = time.monotonic()
    with Lock(primary_behind(proxy.port, port, socket_timeout=0.3), NAME, timeout=10):
        assert time.monotonic() - started >= 0.3
        assert proxy.swallowed <= 2


REFUSES = pytest.mark.parametrize("rules", [["-sentinel"], ["resetpass", ">changed"]], ids=["rights", "password"])


@REFUSES
def test_a_sentinel_that_refuses_to_answer_is_passed_over(port, tmp_path, rules):
    """Its users were changed, and those of the next one were not."""
    with sentinel_over(tmp_path / "second", address_of(primary_behind(port))[1], WATCHED) as second:
        with redis.Redis(port=port) as first:
            first.execute_command("ACL", "SETUSER", "default", *rules)
        assert answer_of(Lock(primary_behind(port, second), NAME, timeout=10).acquire) is True


@REFUSES
def test_a_sentinel_that_refuses_to_answer_is_passed_over_by_coroutines_too(port, tmp_path, rules):
    async def main(second):
        async with AsyncLock(primary_behind(port, second), NAME, timeout=10) as lock:
            assert await lock.owned()

    with sentinel_over(tmp_path / "second", address_of(primary_behind(port))[1], WATCHED) as second:
        with redis.Redis(port=port) as first:
            first.execute_command("ACL", "SETUSER", "default", *rules)
        asyncio.run(main(second))


def test_coroutines_ask_sentinels_without_the_threads_of_their_loop(port):
    """A silent Sentinel would keep these from others, such as the loop's own look-up of names."""

    async def main():
        asyncio.get_running_loop().set_default_executor(taken := ThreadPoolExecutor())
        taken.shutdown()
        async with AsyncLock(primary_behind(port), NAME, timeout=10) as lock:
            assert await lock.owned()

    asyncio.run(main())


def test_a_sentinel_is_asked_again_after_several_threads_at_once_have_passed_it_over(proxy, port):
    """redis-py lets the next one that answers change places with it, once for each of these threads."""
    with Proxy(f"redis://127.0.0.1:{port}").serve() as second:
        client = primary_behind(proxy.port, second.port, socket_timeout=20)
        locks = [Lock(client, f"{NAME}:{number}", timeout=10) for number in range(3)]
        proxy.refuse()
        answer = second.hold(to=b"SENTINEL", nth=None)
        with ThreadPoolExecutor() as threads:
            acquired = [threads.submit(lock.acquire) for lock in locks]
            wait_until(lambda: answer.struck == len(locks), "all of them ask the second one")
            answer.let_go()
            assert [one.result() for one in acquired] == [True] * len(locks)
        proxy.mend()
        second.refuse()
        cut_connections(address_of(primary_behind(port)))
        assert [answer_of(lock.locked) for lock in locks] == [True] * len(locks)


def test_where_all_sentinels_refuse_to_answer_the_error_has_their_words(port):
    with redis.Redis(port=port) as only:
        only.execute_command("ACL", "SETUSER", "default", "-sentinel")
    with pytest.raises(LockUnavailable, match="NoPermissionError: User default has no permissions"):
        Lock(primary_behind(port), NAME, timeout=10).acquire()


def test_renewal_goes_on_after_the_sentinels_knew_no_primary(port, caplog):
    """Also where the keeper had no connection yet: redis-py before 8.1 took the failed one for one in use."""
    caplog.set_level(logging.WARNING, "celery_redislock")
    client = primary_behind(port)
    lock = Lock(client, NAME, timeout=30, renew=True)
    assert lock.acquire()
    deadline = held_by(lock).deadline
    host, primary_port = address_of(client)
    with redis.Redis(port=port) as watcher:
        watcher.sentinel_remove(WATCHED)
        begin_renewal(lock)
        wait_until(lambda: "is unavailable: " in caplog.text, "a renewal has failed twice")
        watcher.sentinel_monitor(WATCHED, host, primary_port, 1)
    wait_until(lambda: held_by(lock).deadline > deadline, "it is renewed")
    lock.release()


def test_sentinels_whose_connections_a_gateway_has_forgotten_are_no_outage(proxy, port):
    client = primary_behind(proxy.port)
    with Lock(client, NAME, timeout=10):
        pass
    proxy.forget_all()
    cut_connections(address_of(primary_behind(port)))
    with Lock(client, NAME, timeout=10):
        pass


def test_where_no_sentinel_answers_its_password_is_in_no_error(log):
    secret = "s3cret"  # noqa: S105
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        sentinel = Sentinel([taken.getsockname()], sentinel_kwargs={"password": secret, "username": "shop"})
        lock = Lock(sentinel.master_for("primary", password=secret), "stock:7", timeout=30)
        with pytest.raises(LockUnavailable, match="No master found") as caught:
            lock.acquire()
    assert secret not in "".join(traceback.format_exception(caught.value)) + log.text


def test_a_release_that_a_former_primary_refuses_tells_that_the_new_one_has_not_got_the_key(port, tmp_path):
    """Behind Sentinels, redis-py makes another error of the refusal: the former primary has carried out nothing."""
    (tmp_path / "new").mkdir()
    with Valkey(tmp_path / "new", free_port()).serve() as new, redis.Redis(port=port) as asked:
        lock = Lock(primary_behind(port), NAME, timeout=60)
        lock.acquire()
        with redis.Redis(*address_of(primary_behind(port))) as former:
            asked.execute_command("SENTINEL", "REMOVE", WATCHED)
            asked.execute_command("SENTINEL", "MONITOR", WATCHED, "127.0.0.1", new.port, 1)
            former.replicaof("127.0.0.1", new.port)
            wait_until(lambda: address_of(primary_behind(port)) == ("127.0.0.1", new.port), "the new one is named")
            with pytest.raises(LockLost):
                lock.release()
