"""The keeper renews what is held, knows its deadline, and survives."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from celery_redislock import LockLost
from celery_redislock.app import server_of
from celery_redislock.server import tokens
from celery_redislock.server.answers import Granted
from celery_redislock.server.keeper import LINGER
from celery_redislock.server.scripts import ACQUIRE, RELEASE, RENEW
from tests.integration.conftest import KEY
from tests.lab.app import make_app
from tests.lab.servers import wait_until


def test_a_held_lock_outlives_its_lease(hold, client):
    lock = hold(lease=0.6)
    time.sleep(1.5)
    assert lock.state == "held"
    assert client.get(KEY).decode() == lock.token


def test_a_removed_lock_ends_with_its_lease(hold, keeper, client):
    lock = hold(lease=0.6)
    keeper.remove(lock)
    wait_until(lambda: client.get(KEY) is None, "the key ends", 2)
    assert lock.state == "lost"
    with pytest.raises(LockLost, match="its lease has ended"):
        lock.check()


@pytest.mark.parametrize("thief", [None, "another's token"])
def test_a_deleted_or_stolen_key_is_noticed_at_the_next_renewal_and_left_alone(hold, client, log, thief):
    told = []
    lock = hold(lease=0.9, on_lost=lambda lock, reason: told.append(reason))
    client.set(KEY, thief, px=5000) if thief else client.delete(KEY)
    wait_until(lambda: told, "the holder is told", 2)
    assert lock.state == "lost"
    assert client.get(KEY) == (thief.encode() if thief else None)
    assert f"the lock {KEY} is lost: its key was deleted, expired or taken" in log.text


def test_a_silent_server_loses_the_lock_at_its_deadline(hold_on, behind, lock_proxy, log):
    told = []
    lock = hold_on(behind, KEY, lease=1.0, on_lost=lambda lock, reason: told.append((time.monotonic(), reason)))
    lock_proxy.blackhole()
    deadline = lock.deadline
    wait_until(lambda: told, "the holder is told", 3)
    ((at, reason),) = told
    assert reason == "it was not renewed until its deadline"
    assert at >= deadline
    assert log.text.count("the lock server cannot be asked") == 1


def test_a_server_that_comes_back_before_the_deadline_loses_nothing(hold_on, behind, lock_proxy, client):
    lock = hold_on(behind, KEY)
    lock_proxy.blackhole()
    wait_until(lambda: lock.state == "at_risk", "a renewal is late", 2)
    lock_proxy.mend()
    wait_until(lambda: lock.state == "held", "it is renewed", 2)
    assert client.get(KEY).decode() == lock.token


def test_a_release_is_made_up_for_where_a_renewal_had_failed_and_nothing_is_held_any_more(
    hold_on, behind, lock_proxy, client, log
):
    lock = hold_on(behind, KEY, lease=30)
    lock_proxy.blackhole()
    lock.renew_at = 0
    behind.keeper.add(lock)  # it looks what is due
    wait_until(lambda: "the lock server cannot be asked" in log.text, "renewals have failed", 5)
    behind.keeper.remove(lock)
    behind.keeper.later(lambda store: store.release(KEY, lock.token))
    lock_proxy.mend()
    wait_until(lambda: client.get(KEY) is None, "it is released", 5)


def test_a_lock_past_its_deadline_stays_lost_although_a_late_renewal_succeeds(hold):
    lock = hold(lease=30)
    lock.deadline = time.monotonic() - 1
    lock.renew_at = 0
    assert lock.state == "lost"
    hold("another", lease=0.3)  # wakes the keeper
    wait_until(lambda: lock.was_lost, "it is noted", 2)
    assert lock.state == "lost"


def test_max_hold_ends_renewal_and_says_so(hold, client, log):
    lock = hold(lease=0.6, max_hold=0.5)
    wait_until(lambda: lock.state == "lost", "it is lost", 3)
    assert f"still runs after lock_max_hold (0.5 s): its lock {KEY} is not renewed any more" in log.text
    wait_until(
        lambda: f"the lock {KEY} is lost: it was held for longer than lock_max_hold" in log.text, "it says so", 2
    )
    wait_until(lambda: client.get(KEY) is None, "the key ends", 2)


def test_the_keeper_survives_every_exception(hold, store, log):
    lock = hold(lease=3)
    working = store.renew
    store.renew = lambda locks: 1 / 0
    lock.renew_at = 0
    hold("another", lease=0.9)
    wait_until(lambda: "the keeper failed" in log.text, "it failed", 3)
    store.renew = working
    wait_until(lambda: lock.renew_at > time.monotonic(), "it renews again", 3)
    assert lock.state == "held"


def test_a_slow_receiver_does_not_keep_other_locks_from_being_renewed(hold, client, log):
    def slow(lock, reason):
        time.sleep(1.5)

    other = hold("other", lease=0.9)
    lost = hold(lease=0.9, on_lost=slow)
    client.delete(KEY)
    wait_until(lambda: lost.state == "lost", "it is lost", 3)
    time.sleep(1.5)
    assert other.state == "held"


def test_a_keeper_whose_thread_could_not_be_started_starts_it_with_the_next_lock(hold, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            hold("first", lease=0.6)
    lock = hold("second", lease=0.6)
    time.sleep(1.2)
    assert lock.state == "held"


def test_many_locks_are_renewed_together(hold, locks):
    for number in range(1000):
        hold(f"{KEY}{number}", lease=3.0)
    locks.calls()
    time.sleep(1.1)  # one interval
    assert 1 <= locks.calls()["evalsha"] <= 10


def test_removing_while_renewing_does_not_tell_of_a_loss(hold, keeper, store, log):
    """A task that ends in the middle of a renewal released its key itself."""
    held = [hold(f"{KEY}{number}", lease=0.3) for number in range(50)]
    end = time.monotonic() + 2
    while time.monotonic() < end:
        lock = held.pop(0)
        keeper.remove(lock)
        store.release(lock.key, lock.token)
        held.append(hold(lock.key, lease=0.3))
        time.sleep(0.005)
    assert "lost" not in log.text


def test_locks_of_many_threads_are_all_renewed(hold):
    held = []
    threads = [
        threading.Thread(target=lambda n=n: held.extend(hold(f"{KEY}{n}-{m}", lease=0.6) for m in range(20)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1.5)
    assert {lock.state for lock in held} == {"held"}


@pytest.fixture
def server(config):
    """Makes what one app has of its lock server: ``server(url, **client_options)``."""
    made = []

    def make(url=None, **options):
        options = {"redislock_client_options": {"socket_timeout": 0.5, "socket_connect_timeout": 0.5, **options}}
        app = make_app(replace(config, locks=url or config.locks, settings={**config.settings, **options}))
        made.append(server_of(app))
        return made[-1]

    yield make
    for server in made:
        server.keeper.stop()


@pytest.fixture
def behind(server, lock_proxy):
    """The lock server behind the proxy; who waits for its reply in vain has soon waited enough."""
    return server(lock_proxy.url, socket_timeout=0.1)


@pytest.fixture
def hold_on(hold):
    """Takes a key on a server and gives it to the server's keeper."""
    return lambda server, key, lease=1.5, **options: hold(
        key, lease, store=server.store, keeper=server.keeper, **options
    )


def keepers():
    """The threads of this process that renew."""
    return {thread for thread in threading.enumerate() if thread.name == "redislock-keeper"}


def test_until_a_lock_is_held_there_is_neither_a_thread_nor_a_connection(server, hold_on, locks):
    def connections():
        return {client["id"] for client in locks.client.client_list()}

    before, clients = keepers(), connections()
    mine = server()
    assert (keepers(), connections() - clients) == (before, set())
    lock = hold_on(mine, KEY)
    assert len(keepers() - before) == 1
    renewed(lock)
    assert len(connections() - clients) == 2  # the store's, and the keeper's own


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts how often Linux has woken the thread")
def test_an_idle_keeper_sleeps_until_a_lock_comes(server, hold_on, locks):
    mine, before = server(), keepers()
    lock = hold_on(mine, KEY, lease=0.6)
    (thread,) = keepers() - before
    mine.store.inspect(KEY)  # loads the script
    renewed(lock)
    mine.keeper.remove(lock)
    wait_until(lambda: is_asleep(thread), "it sleeps", 5)
    locks.calls()
    woken = switches(thread)
    for number in range(20):
        mine.store.inspect(f"{KEY}{number}")  # others ask the server, which is no business of its
    time.sleep(0.7)
    assert switches(thread) == woken
    assert locks.calls() == {"evalsha": 20, "mget": 20}
    renewed(hold_on(mine, f"{KEY}again", lease=0.6))
    assert switches(thread) > woken


def switches(thread):
    """How often it has gone to sleep."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[1])


def is_asleep(thread):
    """Also when it would look once more, which it does a second after it had something to do."""
    before = switches(thread)
    time.sleep(LINGER + 0.1)
    return switches(thread) == before


def renewed(lock, times=1):
    """Wait until the lock was renewed so often from now."""
    for _ in range(times):
        end = time.monotonic() + lock.remaining + 0.05
        wait_until(lambda end=end: time.monotonic() + lock.remaining > end or lock.state == "lost", "it is renewed", 10)
        assert lock.state != "lost"


def test_many_releases_to_make_up_for_do_not_delay_a_renewal(lock_proxy, locks, server, hold_on):
    """As of ten thousand revoked messages, by a worker whose pool shares its process."""
    mine = server()
    lock = hold_on(mine, KEY, lease=3.0)
    granted = lock.deadline
    releases = lock_proxy.delay(0.005, to=b"EVALSHA", where=RELEASE.sha.encode())
    for number in range(1000):
        mine.keeper.later(lambda store, number=number: store.release(f"{KEY}:{number}", lock.token))
    wait_until(lambda: releases.met >= 1000, "all are released")
    assert lock.deadline > granted + 3
    assert lock.state == "held"


def test_waiters_for_the_stores_connections_do_not_delay_a_renewal(lock_proxy, server, hold_on, client):
    """Sixty threads share five connections, each of which waits for a reply."""
    for script in (ACQUIRE, RENEW):
        client.script_load(script.text)
    mine = server(socket_timeout=20.0, max_connections=5)
    lock = hold_on(mine, KEY)
    fault = lock_proxy.delay(60, to=b"EVALSHA", where=ACQUIRE.sha.encode())
    answers = []

    def acquire(number):
        token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
        answers.append(mine.store.acquire(f"{KEY}{number}", token, 10.0))

    waiters = [threading.Thread(target=acquire, args=(number,), daemon=True) for number in range(60)]
    for waiter in waiters:
        waiter.start()
    wait_until(lambda: fault.struck >= 5, "every connection waits")
    renewed(lock, times=4)
    assert lock.state == "held"
    assert (answers, fault.struck) == ([], 5), "they wait still"
    lock_proxy.mend()
    lock_proxy.cut()
    for waiter in waiters:
        waiter.join(10)
    assert [type(answer) for answer in answers] == [Granted] * 60


def test_a_dead_server_does_not_delay_the_renewals_of_another(lock_proxy, locks, server, hold_on):
    """Two apps in one process, each with its own server; one of the servers falls silent."""
    dying = hold_on(server(lock_proxy.url), "dying")
    living = hold_on(server(locks.url()), "living")
    renewed(dying)
    lock_proxy.blackhole()
    seen = set()

    def is_lost():
        seen.add(living.state)
        return dying.state == "lost"

    deadline = living.deadline
    wait_until(is_lost, "the one is lost", 5)
    assert living.deadline > deadline
    renewed(living, times=2)
    assert seen == {"held"}


def test_after_a_fork_the_child_renews_its_own_locks_and_not_its_parents(config, locks):
    config.settings["redislock_lease"] = 1.5
    app = make_app(config)
    parents = app.tasks["lab.work"].lock_for("parent")
    parents.acquire()
    told, seen = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fresh = not keepers()
            lock = app.tasks["lab.work"].lock_for("child")
            lock.acquire()
            renewed(lock, times=4)  # beyond its first lease
            os.write(told[1], f"{fresh} {lock.state}".encode())
            os.read(seen[0], 1)
        finally:
            os._exit(0)
    renewed(parents)
    assert os.read(told[0], 100) == b"True held"
    assert parents.state == "held"
    server_of(app).keeper.stop()
    wait_until(lambda: not locks.client.exists(parents.name), "nobody renews the parent's any more", 5)
    assert locks.client.exists(app.tasks["lab.work"].lock_for("child").name), "the child renews its own"
    os.write(seen[1], b".")
    os.waitpid(pid, 0)
    for end in (*told, *seen):
        os.close(end)
