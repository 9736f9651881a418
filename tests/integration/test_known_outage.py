"""A lock server that is known to be away: who asks for a key is told at once, and somebody looks now and then."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from redis.exceptions import RedisError

from celery_redislock import LockUnavailable
from celery_redislock.app import server_of
from celery_redislock.connection import outage
from celery_redislock.connection.connections import Connections
from celery_redislock.protocol.replies import Conflict, Granted
from celery_redislock.protocol.tokens import Token
from tests.integration.conftest import KEY, ONE
from tests.lab.servers import wait_until

TIMEOUT = 0.5  # of the client, for a connection and for a reply


@pytest.fixture
def store(app, lock_proxy):
    """Behind the proxy, as a publisher or a run uses it."""
    store = server_of(app).store
    store.inspect(ONE)  # the script is known
    return store


@pytest.fixture
def no_looks(monkeypatch):
    """Nobody looks again in this test."""
    monkeypatch.setattr(outage, "SHORTEST_PAUSE", 60.0)


@pytest.fixture
def look_now(store, monkeypatch):
    """It is time to look, for the next who asks; and after that nobody looks again in this test."""

    def wait():
        wait_until(lambda: time.monotonic() > store.outage_of(KEY).look_at, "it is time to look")
        monkeypatch.setattr(outage, "SHORTEST_PAUSE", 60.0)

    return wait


@pytest.fixture
def ask(store, holder):
    """Asks for a key once; returns the answer, or the error."""

    def ask_once(number=0):
        try:
            return holder(f"task-{number}").acquire()
        except LockUnavailable as error:
            return error

    return ask_once


@pytest.fixture
def sent(monkeypatch):
    """What was sent, and not what has arrived: that may be something older. What keepers take back is left out."""
    sent = []
    ask = Connections.ask

    def note(connections, command, **options):
        if threading.current_thread().name != "redislock-keeper":
            sent.append(command)
        return ask(connections, command, **options)

    monkeypatch.setattr(Connections, "ask", note)
    return sent


@pytest.fixture
def nothing_is_sent(sent):
    """The silent server is sent nothing in the block."""

    @contextmanager
    def checked():
        before = len(sent)
        yield
        assert len(sent) == before

    return checked


@pytest.fixture
def silent(lock_proxy, ask):
    """The server is silent, and this process knows it."""
    lock_proxy.blackhole()
    began = time.monotonic()
    error = ask()
    assert isinstance(error, LockUnavailable)
    assert time.monotonic() - began > 2 * TIMEOUT  # asked twice, as ever
    return error


@pytest.mark.usefixtures("no_looks", "silent")
@pytest.mark.parametrize("name", ["job", "queued"])
def test_a_publish_does_not_wait_for_a_silent_server_each_time(tasks, name, nothing_is_sent):
    with nothing_is_sent():
        assert {getattr(tasks, name).delay(number).duplicate for number in range(20)} == {False}


@pytest.mark.usefixtures("no_looks")
def test_who_is_told_at_once_is_told_why_and_the_log_says_it_once(log, lock_proxy, ask, nothing_is_sent):
    lock_proxy.blackhole()
    first = ask()
    with nothing_is_sent():
        error = ask()
    assert (type(error), error.key, error.reason) == (LockUnavailable, KEY, first.reason)
    assert log.text.count("the lock server is unavailable:") == 1


@pytest.mark.usefixtures("silent")
def test_who_has_looked_in_vain_spares_it_the_others_for_a_while(ask, look_now, nothing_is_sent, sent):
    look_now()
    before = len(sent)
    ask()
    assert len(sent) == before + 1
    with nothing_is_sent(), ThreadPoolExecutor(8) as threads:  # the look took its time: not again so soon
        asked = list(threads.map(ask, range(400)))
    assert all(isinstance(error, LockUnavailable) for error in asked)


@pytest.mark.usefixtures("silent")
def test_of_eight_that_ask_when_it_is_time_to_look_one_does(ask, look_now, sent):
    look_now()
    together = threading.Barrier(8)
    before = len(sent)

    def ask_together(number):
        together.wait()
        return ask(number)

    with ThreadPoolExecutor(8) as threads:
        asked = list(threads.map(ask_together, range(8)))
    assert all(isinstance(error, LockUnavailable) for error in asked)
    assert len(sent) == before + 1


@pytest.mark.usefixtures("silent")
def test_when_the_server_is_back_the_next_look_gets_the_key(ask, lock_proxy, log):
    lock_proxy.mend()
    wait_until(lambda: isinstance(ask(), Granted), "somebody has looked")
    assert log.text.count("the lock server is available again after") == 1


@pytest.mark.usefixtures("silent")
def test_that_a_key_is_held_shows_too_that_the_server_is_back(ask, lock_proxy, locks, log):
    lock_proxy.mend()
    locks.client.set(KEY, "of another")
    wait_until(lambda: isinstance(ask(), Conflict), "the next look gets an answer")
    assert log.text.count("the lock server is available again after") == 1


@pytest.mark.usefixtures("no_looks", "silent")
def test_any_answer_shows_that_the_server_is_back(ask, lock_proxy, store):
    lock_proxy.mend()
    assert isinstance(ask(), LockUnavailable)

    def answers():
        try:
            return store.renew([(KEY, Token.of("nobody"), 1.0)]) == [None]
        except RedisError:  # it is sent once, with a short time-out
            return False

    wait_until(answers, "it answers")
    assert isinstance(ask(), Granted)


@pytest.mark.usefixtures("no_looks")
def test_a_lock_that_is_held_is_renewed_and_released_all_the_while(hold, ask, lock_proxy, keeper, store, locks):
    lock = hold(store=store)
    lock_proxy.refuse()
    assert isinstance(ask(), LockUnavailable)
    with pytest.raises(LockUnavailable):
        store.release(ONE, lock.token)
    lock_proxy.mend()
    assert store.release(ONE, lock.token) is True  # nobody has looked
    assert locks.client.get(KEY) is None


@pytest.mark.usefixtures("no_looks", "silent")
def test_a_forked_child_asks_for_itself(tasks, lock_proxy, ask):
    lock_proxy.mend()
    assert isinstance(ask(), LockUnavailable)
    child = multiprocessing.get_context("fork").Process(target=lambda: tasks.job.lock_for("k").acquire())
    child.start()
    child.join(20)
    assert child.exitcode == 0


@pytest.mark.usefixtures("no_looks", "silent")
def test_a_lock_outside_tasks_is_told_at_once_too(tasks, nothing_is_sent):
    lock = tasks.job.lock_for("k")
    with nothing_is_sent(), pytest.raises(LockUnavailable):
        lock.acquire()
