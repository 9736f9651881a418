"""The keeper renews what is held, knows its deadline, and survives."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from celery_redislock import LockLost
from celery_redislock.app import server_of
from celery_redislock.connection.pool import Wake
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.replies import Granted
from celery_redislock.protocol.scripts import ACQUIRE, RELEASE, RENEW
from tests.integration.conftest import KEY, ONE
from tests.lab.app import make_app
from tests.lab.asking import acquire
from tests.lab.renewals import held_by
from tests.lab.servers import wait_until


def test_a_held_lock_outlives_its_lease(hold, client, often):
    lock = hold()
    client.pexpire(KEY, 15_000)
    renewed(lock, times=3)
    assert client.pttl(KEY) > 15_000
    assert client.get(KEY).decode() == lock.token


def test_a_removed_lock_ends_with_its_lease(hold, keeper, client):
    lock = hold()
    keeper.remove(lock)
    client.pexpire(KEY, 20_000)
    lock.renew_at = 0
    renew(keeper, hold("another"))
    assert client.pttl(KEY) <= 20_000
    lock.deadline = time.monotonic()
    assert lock.state == "lost"
    with pytest.raises(LockLost, match="its lease has ended"):
        lock.check()


@pytest.mark.parametrize("thief", [None, "another's token"])
def test_a_deleted_or_stolen_key_is_noticed_at_the_next_renewal_and_left_alone(hold, keeper, client, log, thief):
    told = []
    lock = hold(on_lost=lambda lock, reason: told.append(reason))
    client.set(KEY, thief, px=60_000) if thief else client.delete(KEY)
    make_due(keeper, lock)
    wait_until(lambda: told, "the holder is told")
    assert lock.state == "lost"
    assert client.get(KEY) == (thief.encode() if thief else None)
    assert f"the lock {KEY} is lost: its key was deleted, expired or taken" in log.text


def test_something_else_under_one_key_is_noticed_at_its_next_renewal_and_costs_the_other_locks_none(
    hold, client, log, often
):
    lost, other = hold(), hold("other")
    client.delete(KEY)
    client.rpush(KEY, "something else")
    renewed(other, times=2)
    wait_until(lambda: f"the lock {KEY} is lost: its key was deleted, expired or taken" in log.text, "it is told")
    assert lost.state == "lost"
    assert client.lrange(KEY, 0, -1) == [b"something else"]


def test_a_silent_server_loses_the_lock_at_its_deadline(hold, behind, lock_proxy, log):
    told = []
    lock = hold(keeper=behind.keeper, on_lost=lambda lock, reason: told.append((time.monotonic(), reason)))
    lock_proxy.blackhole()
    make_due(behind.keeper, lock)
    wait_until(lambda: "the lock server is unavailable:" in log.text, "renewals have failed")
    deadline = lock.deadline = time.monotonic() + 0.5
    wait_until(lambda: told, "the holder is told")
    ((at, reason),) = told
    assert reason == "not renewed by its deadline"
    assert at >= deadline
    assert log.text.count("the lock server is unavailable:") == 1


def test_a_lock_that_its_holder_extends_is_not_lost_while_the_keeper_waits_for_an_answer(hold, server, lock_proxy):
    """The holder has another connection, and is answered."""
    silent = server(lock_proxy.url, socket_timeout=5.0)
    lock = hold(keeper=silent.keeper)
    lock_proxy.blackhole()
    deadline = lock.deadline = time.monotonic() + 3
    make_due(silent.keeper, lock)
    wait_until(lambda: "redislock-watch" in {one.name for one in threading.enumerate()}, "its deadline is watched")
    lock.extend()
    wait_until(lambda: time.monotonic() > deadline + 0.5, "the first deadline has passed")
    assert lock.state == "held"


def test_a_holder_trusts_its_lock_for_less_time_than_its_key_lives_however_slow_the_answers_are(
    server, hold_on, lock_proxy, client
):
    def margin():
        left = client.pttl(KEY) / 1000  # first: a pause between the two makes the margin look greater
        return time.monotonic() + left - lock.deadline

    hold_on(server(), "another")  # so that the server knows the scripts
    client.script_load(RENEW.text)
    slow = server(lock_proxy.url)
    lock_proxy.delay(0.5, to=b"EVALSHA")
    lock = hold_on(slow, KEY)
    assert margin() > 0.25
    renew(slow.keeper, lock)
    assert margin() > 0.25


def test_a_server_that_comes_back_before_the_deadline_loses_nothing(hold, behind, lock_proxy, client):
    lock = hold(keeper=behind.keeper)
    lock_proxy.blackhole()
    make_due(behind.keeper, lock)
    wait_until(lambda: lock_proxy.swallowed, "a renewal is lost")
    lock.deadline = time.monotonic() + lock.lease / 2 - 0.1
    assert lock.state == "at_risk"
    lock_proxy.mend()
    wait_until(lambda: lock.state == "held", "it is renewed")
    assert client.get(KEY).decode() == lock.token


def test_a_release_is_made_up_for_where_a_renewal_had_failed_and_nothing_is_held_any_more(
    hold, behind, lock_proxy, client, log
):
    lock = hold(keeper=behind.keeper)
    lock_proxy.blackhole()
    make_due(behind.keeper, lock)
    wait_until(lambda: "the lock server is unavailable:" in log.text, "renewals have failed")
    behind.keeper.remove(lock)
    behind.keeper.later(KEY, math.inf, lambda store: store.release(ONE, lock.token))
    lock_proxy.mend()
    wait_until(lambda: client.get(KEY) is None, "it is released")


def test_a_lock_past_its_deadline_stays_lost_although_a_late_renewal_succeeds(hold, keeper):
    lock = hold()
    lock.deadline = time.monotonic() - 1
    assert lock.state == "lost"
    make_due(keeper, lock)
    wait_until(lambda: lock.was_lost, "it is noted")
    assert lock.state == "lost"


def test_max_hold_ends_renewal_and_says_so(hold, keeper, client, log, often):
    lock = hold(max_hold=0.5)
    over = f"is still running after lock_max_hold (0.5 s): its lock {KEY} is no longer renewed"
    wait_until(lambda: over in log.text, "it says so")
    client.pexpire(KEY, 20_000)
    renewed(hold("another"), times=2)
    assert client.pttl(KEY) <= 20_000
    lock.deadline = time.monotonic()
    keeper.add(lock)  # it looks whose deadline has passed
    wait_until(lambda: f"the lock {KEY} is lost: held for longer than lock_max_hold" in log.text, "it is lost")
    assert lock.state == "lost"


def test_the_keeper_survives_every_exception(hold, keeper, store, log):
    lock = hold()
    working = store.renew
    store.renew = lambda locks: 1 / 0
    make_due(keeper, lock)
    wait_until(lambda: "the keeper failed" in log.text, "it failed")
    store.renew = working
    renewed(lock)


def test_a_slow_receiver_does_not_keep_other_locks_from_being_renewed(hold, client, often):
    receives, ends = threading.Event(), threading.Event()

    def slow(lock, reason):
        receives.set()
        ends.wait(60)

    other = hold("other")
    lost = hold(on_lost=slow)
    client.delete(KEY)
    assert receives.wait(30)
    renewed(other, times=2)
    ends.set()
    assert lost.state == "lost"


def test_a_keeper_whose_thread_could_not_be_started_starts_it_with_the_next_lock(hold, monkeypatch, often):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            hold("first")
    renewed(hold("second"))


def test_many_locks_are_renewed_together(hold, keeper, private_locks):
    held = [hold(f"{KEY}{number}") for number in range(1000)]
    deadlines = [lock.deadline for lock in held]
    private_locks.calls()
    for lock in held:
        lock.renew_at = 0
    keeper.look_at(held[0])
    wait_until(lambda: all(lock.deadline > old for lock, old in zip(held, deadlines, strict=True)), "all are renewed")
    assert 1 <= private_locks.calls()["evalsha"] <= 10  # it may have looked before all were due


def test_removing_while_renewing_does_not_tell_of_a_loss(hold, keeper, store, log, monkeypatch):
    """A task that ends in the middle of a renewal released its key itself."""
    for module in ("held_lock", "keeper"):
        monkeypatch.setattr(f"celery_redislock.hold.{module}.INTERVAL", 0.0001)  # the keeper renews all the time
    held = [hold(f"{KEY}{number}") for number in range(50)]
    for _ in range(400):
        lock = held.pop(0)
        keeper.remove(lock)
        store.release(lock.demand, lock.token)
        held.append(hold(lock.key))
        time.sleep(0.005)
    assert "lost" not in log.text


def test_locks_of_many_threads_are_all_renewed(hold, often):
    held = []
    threads = [
        threading.Thread(target=lambda n=n: held.extend(hold(f"{KEY}{n}-{m}") for m in range(20))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 160
    deadlines = [lock.deadline for lock in held]
    wait_until(lambda: all(lock.deadline > old for lock, old in zip(held, deadlines, strict=True)), "all are renewed")


@pytest.fixture
def server(config):
    """Makes what one app has of its lock server: ``server(url, **client_options)``."""
    made = []

    def make(url=None, **options):
        options = {"redislock_client_options": {"socket_timeout": 15.0, "socket_connect_timeout": 4.0, **options}}
        app = make_app(replace(config, locks=url or config.locks, settings={**config.settings, **options}))
        made.append(app)  # the server ends with it
        return server_of(app)

    yield make
    for app in made:
        server_of(app).keeper.stop()


@pytest.fixture
def behind(server, lock_proxy):
    """The lock server behind the proxy: its keeper waits in vain for no more than 0.1 s, and then tries again.

    On a busy machine an answer may come later than that, so the lock is taken from the server itself.
    """
    return server(lock_proxy.url, socket_timeout=0.1)


@pytest.fixture
def hold_on(hold):
    """Takes a key on a server and gives it to the server's keeper."""
    return lambda server, key, lease=30.0, **options: hold(
        key, lease, store=server.store, keeper=server.keeper, **options
    )


def keepers():
    """The threads of this process that renew. Those of an earlier test may be about to end."""
    return {thread for thread in threading.enumerate() if thread.name == "redislock-keeper"}


def make_due(keeper, lock):
    """Let the keeper renew `lock` now."""
    lock.renew_at = 0
    keeper.add(lock)  # it looks what is due


def renew(keeper, lock):
    """Wait until the keeper has renewed `lock`."""
    before = lock.deadline
    make_due(keeper, lock)
    wait_until(lambda: lock.deadline > before, "it is renewed")


def renewed(lock, times=1):
    """Wait until the lock was renewed so often from now."""
    for _ in range(times):
        before = lock.deadline
        wait_until(lambda before=before: lock.deadline > before or lock.was_lost, "it is renewed")
        assert lock.state == "held"


def test_until_a_lock_is_held_there_is_neither_a_thread_nor_a_connection(server, hold_on, private_locks, often):
    def connections():
        return {client["id"] for client in private_locks.client.client_list()}

    before, clients = keepers(), connections()
    mine = server()
    assert keepers() <= before
    assert connections() == clients
    lock = hold_on(mine, KEY)
    assert len(keepers() - before) == 1
    renewed(lock)
    assert len(connections() - clients) == 2  # the store's, and the keeper's own


def test_an_idle_keeper_sleeps_until_a_lock_comes(server, hold_on, private_locks, often):
    mine, before = server(), keepers()
    lock = hold_on(mine, KEY)
    (thread,) = keepers() - before
    mine.store.inspect(ONE)  # loads the script
    renewed(lock)
    mine.keeper.remove(lock)
    wait_until(lambda: is_asleep(mine.keeper, thread), "it sleeps until it is woken")
    private_locks.calls()
    woken = switches(thread)
    for number in range(20):
        mine.store.inspect(Demand(f"{KEY}{number}"))  # others ask the server, which is no business of its
    time.sleep(0.7)
    # 14 times if it looked for late answers, 20 times if the others woke it. To fall asleep may take it a few times.
    assert switches(thread) < woken + 10
    assert private_locks.calls() == {"evalsha": 20, "mget": 20, "time": 20, "zcard": 20}
    renewed(hold_on(mine, f"{KEY}again"))


def switches(thread):
    """How often it has gone to sleep."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[1])


def is_asleep(keeper, thread):
    """Whether it waits, and not only until it looks once more, as it does a second after it had something to do."""
    return keeper.wake_at == math.inf and sys._current_frames()[thread.ident].f_code is Wake.wait.__code__


def test_many_releases_to_make_up_for_do_not_delay_a_renewal(lock_proxy, server, hold_on, often):
    """As of ten thousand revoked messages, by a worker whose pool shares its process."""
    mine = server()
    lock = hold_on(mine, KEY)
    granted = lock.deadline
    releases = lock_proxy.delay(0.005, to=b"EVALSHA", where=RELEASE.sha.encode())
    for number in range(1000):  # which take five seconds
        key = f"{KEY}:{number}"
        mine.keeper.later(key, math.inf, lambda store, key=key: store.release(Demand(key), lock.token))
    wait_until(lambda: releases.met >= 1000, "all are released")
    assert lock.deadline > granted + 3
    assert lock.state == "held"


def test_waiters_for_the_stores_connections_do_not_delay_a_renewal(lock_proxy, server, hold_on, client, often):
    """Sixty threads share five connections, each of which waits for a reply."""
    for script in (ACQUIRE, RENEW):
        client.script_load(script.text)
    mine = server(socket_timeout=20.0, max_connections=5)
    lock = hold_on(mine, KEY)
    fault = lock_proxy.delay(60, to=b"EVALSHA", where=ACQUIRE.sha.encode())
    answers = []

    def take(number):
        token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
        answers.append(acquire(mine.store, Demand(f"{KEY}{number}"), token, 10.0))

    waiters = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(60)]
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


def test_a_dead_server_does_not_delay_the_renewals_of_another(lock_proxy, locks, server, hold_on, often):
    """Two apps in one process, each with its own server; one of the servers falls silent."""
    dying = hold_on(server(lock_proxy.url), "dying")
    living = hold_on(server(locks.url()), "living")
    renewed(dying)
    lock_proxy.blackhole()
    wait_until(lambda: lock_proxy.swallowed, "a keeper waits for an answer that never comes")
    deadline = dying.deadline
    renewed(living, times=4)
    assert dying.deadline == deadline


def test_after_a_fork_the_child_renews_its_own_locks_and_not_its_parents(config, locks, often):
    app, before = make_app(config), keepers()
    parents = app.tasks["lab.work"].lock_for("parent")
    parents.acquire()
    (keeper,) = keepers() - before
    told, seen = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fresh = not keepers()
            lock = app.tasks["lab.work"].lock_for("child")
            lock.acquire()
            renewed(held_by(lock), times=4)
            os.write(told[1], f"{fresh} {lock.state}".encode())
            os.read(seen[0], 1)
        finally:
            os._exit(0)
    renewed(held_by(parents))
    assert os.read(told[0], 100) == b"True held"
    assert parents.state == "held"
    server_of(app).keeper.stop()
    keeper.join(30)
    locks.client.pexpire(parents.name, 1000)  # more than three times as long as the child lets pass without a renewal
    wait_until(lambda: not locks.client.exists(parents.name), "nobody renews the parent's any more")
    assert locks.client.exists(app.tasks["lab.work"].lock_for("child").name), "the child renews its own"
    os.write(seen[1], b".")
    os.waitpid(pid, 0)
    for end in (*told, *seen):
        os.close(end)


def test_a_lock_whose_release_is_about_to_be_sent_counts_as_ended(hold):
    """The server may have deleted the key before the process records that it has sent the release."""
    lock = hold()
    lock.check()
    lock.hold = lock.hold.ended()
    assert (lock.state, lock.remaining) == ("lost", 0.0)
    with pytest.raises(LockLost, match="its run has ended"):
        lock.check()
