"""A lock server that is known to be away: who asks for a key is told at once, and somebody looks now and then."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_redislock import LockUnavailable
from celery_redislock.app import server_of
from celery_redislock.server import outage
from celery_redislock.server.answers import Granted
from celery_redislock.server.tokens import Token
from tests.integration.conftest import KEY
from tests.lab.servers import wait_until

TIMEOUT = 0.5  # of the client, for a connection and for a reply
AT_ONCE = 0.1


@pytest.fixture
def store(app, lock_proxy):
    """Behind the proxy, as a publisher or a run uses it."""
    store = server_of(app).store
    store.inspect(KEY)  # the script is known
    return store


@pytest.fixture
def no_looks(monkeypatch):
    """Nobody looks again in this test."""
    monkeypatch.setattr(outage, "SHORTEST_PAUSE", 60.0)


@pytest.fixture
def look_now(store):
    """It is time to look, for the next who asks."""
    return lambda: wait_until(lambda: time.monotonic() > store.outage.look_at, "it is time to look", 6)


@pytest.fixture
def ask(store, holder):
    """Asks for a key once; returns the answer, or the error, and the seconds that it took."""

    def ask_once(number=0):
        began = time.monotonic()
        try:
            answer = holder(f"task-{number}").acquire()
        except LockUnavailable as error:
            answer = error
        return answer, time.monotonic() - began

    return ask_once


@pytest.fixture
def silent(lock_proxy, ask):
    """The server is silent, and this process knows it."""
    lock_proxy.blackhole()
    error, seconds = ask()
    assert isinstance(error, LockUnavailable)
    assert seconds > 2 * TIMEOUT  # asked twice, as ever
    return error


@pytest.mark.usefixtures("no_looks", "silent")
@pytest.mark.parametrize("name", ["job", "queued"])
def test_a_publish_does_not_wait_for_a_silent_server_each_time(tasks, name, lock_proxy):
    swallowed = lock_proxy.swallowed
    began = time.monotonic()
    assert {getattr(tasks, name).delay(number).duplicate for number in range(20)} == {False}
    assert time.monotonic() - began < 2.0
    assert lock_proxy.swallowed == swallowed


@pytest.mark.usefixtures("no_looks")
def test_who_is_told_at_once_is_told_why_and_the_log_says_it_once(log, lock_proxy, ask):
    lock_proxy.blackhole()
    (first, _), (error, seconds) = ask(), ask()
    assert seconds < AT_ONCE
    assert (type(error), error.key, error.reason) == (LockUnavailable, KEY, first.reason)
    assert log.text.count("the lock server cannot be asked") == 1


@pytest.mark.usefixtures("silent")
def test_who_has_looked_in_vain_spares_it_the_others_for_a_while(ask, look_now):
    look_now()
    assert TIMEOUT <= ask()[1] < 2 * TIMEOUT
    with ThreadPoolExecutor(8) as threads:
        asked = list(threads.map(ask, range(400)))
    assert all(isinstance(error, LockUnavailable) for error, _ in asked)
    assert max(seconds for _, seconds in asked) < AT_ONCE  # the one before took its time: not again so soon


@pytest.mark.usefixtures("silent")
def test_of_eight_that_ask_when_it_is_time_to_look_one_does(ask, look_now):
    look_now()
    together = threading.Barrier(8)

    def ask_together(number):
        together.wait()
        return ask(number)[1]

    with ThreadPoolExecutor(8) as threads:
        seconds = sorted(threads.map(ask_together, range(8)))
    assert TIMEOUT <= seconds[-1] < 2 * TIMEOUT
    assert seconds[-2] < TIMEOUT


@pytest.mark.usefixtures("silent")
def test_when_the_server_is_back_the_next_look_gets_the_key(ask, lock_proxy, log):
    lock_proxy.mend()
    wait_until(lambda: isinstance(ask()[0], Granted), "somebody has looked", 5)
    assert log.text.count("the lock server answers again, after") == 1


@pytest.mark.usefixtures("no_looks", "silent")
def test_any_answer_shows_that_the_server_is_back(ask, lock_proxy, store):
    lock_proxy.mend()
    assert isinstance(ask()[0], LockUnavailable)
    assert store.renew([(KEY, Token.of("nobody"), 1.0)]) == [False]
    assert isinstance(ask()[0], Granted)


@pytest.mark.usefixtures("no_looks")
def test_a_lock_that_is_held_is_renewed_and_released_all_the_while(hold, ask, lock_proxy, keeper, store, locks):
    lock = hold(lease=5.0, store=store)
    lock_proxy.refuse()
    assert isinstance(ask()[0], LockUnavailable)
    with pytest.raises(LockUnavailable):
        store.release(KEY, lock.token)
    lock_proxy.mend()
    assert store.release(KEY, lock.token) is True  # nobody has looked
    assert locks.client.get(KEY) is None


@pytest.mark.usefixtures("no_looks", "silent")
def test_a_forked_child_asks_for_itself(tasks, lock_proxy, ask):
    lock_proxy.mend()
    assert isinstance(ask()[0], LockUnavailable)
    child = multiprocessing.get_context("fork").Process(target=lambda: tasks.job.lock_for("k").acquire())
    child.start()
    child.join(20)
    assert child.exitcode == 0


@pytest.mark.usefixtures("no_looks", "silent")
def test_a_lock_outside_tasks_is_told_at_once_too(tasks):
    lock = tasks.job.lock_for("k")
    began = time.monotonic()
    with pytest.raises(LockUnavailable):
        lock.acquire()
    assert time.monotonic() - began < AT_ONCE
