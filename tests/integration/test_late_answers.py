"""Answers that are read late: what becomes of a release whose answer nobody waits for."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_redislock import signals
from celery_redislock.app import server_of
from celery_redislock.connection.connect import connect
from celery_redislock.connection.connections import Connection
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import commands
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Conflict, Granted
from celery_redislock.protocol.scripts import RELEASE, Tag
from tests.integration.conftest import KEY, ONE
from tests.lab.app import make_app
from tests.lab.asking import acquire
from tests.lab.interruption import raised_at
from tests.lab.servers import wait_until

OTHER = "redislock:{shop.bill:8}"
TWO = Demand(OTHER)


@pytest.fixture(autouse=True)
def known(store, holder):
    """The server knows the script: the first release of a process waits for its answer."""
    Sent(store, holder("nobody"))


class Sent:
    """A release that was sent late, and what came of it."""

    def __init__(self, store, holder, key=KEY):
        self.answers = []
        self.doubts = 0
        store.send_late(commands.release(Demand(key), holder.token.owner), self.answers.append, self.doubt)

    def doubt(self):
        self.doubts += 1


def test_a_release_reaches_the_server_before_its_answer_is_read(store, client, holder):
    mine = holder("a")
    mine.acquire()
    sent = Sent(store, mine)
    wait_until(lambda: not client.exists(KEY), "the key is free")
    assert sent.answers == []


def test_its_answer_is_read_with_the_next_command_of_its_connection_in_one_round_trip(store, holder, locks):
    mine, next_one = holder("a"), holder("b")
    mine.acquire()
    sent = Sent(store, mine)
    assert isinstance(next_one.acquire(), Granted)
    assert sent.answers == [1]
    assert sent.doubts == 0


def test_a_release_that_follows_another_reads_the_answer_of_that(store, holder):
    first, second = holder("a"), holder("b")
    first.acquire()
    acquire(store, TWO, second.token, 10.0)
    sent = Sent(store, first), Sent(store, second, OTHER)
    assert [one.answers for one in sent] == [[1], []]
    assert store.look(ONE) is None
    assert [one.answers for one in sent] == [[1], [1]]


def test_the_answer_to_who_did_not_hold_the_key_any_more_tells_so(store, client, holder):
    mine = holder("a")
    mine.acquire()
    client.delete(KEY)
    sent = Sent(store, mine)
    store.look(ONE)
    assert sent.answers == [0]


def test_an_answer_that_is_late_and_the_next_one_are_each_told_to_who_has_asked(store, holder):
    """If they were swapped, a run would not know a key that it was granted, and another would hold one that it lost."""
    sent = Sent(store, holder("a"))  # which does not hold the key
    assert store.ask(commands.acquire(ONE, holder("b").token, 10.0))[0] == [Tag.GRANTED]
    assert sent.answers == [0]


def test_who_fails_over_an_answer_harms_neither_the_next_command_nor_its_connection(store, holder, log):
    """As a receiver of a signal may, which is told of a lost lock by the answer to its release."""

    def fails(_):
        raise ValueError

    mine = holder("a")
    mine.acquire()
    store.send_late(commands.release(ONE, mine.token.owner), fails, lambda: None)
    assert isinstance(mine.acquire(), Granted)
    assert "could not handle the lock server's reply" in log.text


def test_an_answer_that_nobody_reads_is_read_by_who_looks_for_it_later(store, holder):
    mine = holder("a")
    mine.acquire()
    sent = Sent(store, mine)
    assert store.read_late(60.0, 60.0)  # it is too young
    assert sent.answers == []
    wait_until(lambda: not store.read_late(0.0, 60.0), "it is read")
    assert sent.answers == [1]
    assert isinstance(mine.acquire(), Granted)


@pytest.fixture
def behind(lock_proxy, holder):
    """A store behind the proxy."""
    client = connect(lock_proxy.url, {"socket_timeout": 3.0, "socket_connect_timeout": 3.0})
    store = LockStore.of(client)
    Sent(store, holder("nobody"))
    yield store
    client.close()


def test_a_release_that_is_lost_is_in_doubt_and_the_next_command_is_sent_once_more(behind, client, holder, lock_proxy):
    mine = holder("a")
    mine.acquire()
    client.script_load(RELEASE.text)
    lost = lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode())
    sent = Sent(behind, mine)
    lost.wait()
    assert isinstance(acquire(behind, TWO, holder("b").token, 10.0), Granted)
    assert (sent.answers, sent.doubts) == ([], 1)
    assert client.exists(KEY)


@pytest.mark.parametrize("hang", [False, True])
def test_a_release_whose_answer_is_lost_is_in_doubt(behind, client, holder, lock_proxy, hang):
    mine = holder("a")
    mine.acquire()
    client.script_load(RELEASE.text)
    lost = lock_proxy.drop_reply(to=b"EVALSHA", where=RELEASE.sha.encode(), hang=hang)
    sent = Sent(behind, mine)
    lost.wait()
    assert behind.look(TWO) is None
    assert (sent.answers, sent.doubts) == ([], 1)


def test_a_release_on_a_connection_that_is_lost_is_sent_once_more_and_the_one_before_it_is_in_doubt(
    behind, client, holder, lock_proxy
):
    first, second = holder("a"), holder("b")
    first.acquire()
    acquire(behind, TWO, second.token, 10.0)
    client.script_load(RELEASE.text)
    lost = lock_proxy.drop_reply(to=b"EVALSHA", where=RELEASE.sha.encode())
    sent = Sent(behind, first)
    lost.wait()
    again = Sent(behind, second, OTHER)
    assert (sent.answers, sent.doubts) == ([], 1)
    assert (again.answers, again.doubts) == ([1], 0)
    assert not client.exists(OTHER)


def test_who_looks_for_an_answer_on_a_connection_that_is_lost_tells_of_the_doubt(behind, client, holder, lock_proxy):
    mine = holder("a")
    mine.acquire()
    client.script_load(RELEASE.text)
    lost = lock_proxy.drop_reply(to=b"EVALSHA", where=RELEASE.sha.encode())
    sent = Sent(behind, mine)
    lost.wait()
    wait_until(lambda: not behind.read_late(0.0, 60.0), "its end is seen")
    assert (sent.answers, sent.doubts) == ([], 1)


def test_a_time_limit_that_strikes_while_the_answer_is_read_leaves_both_commands_in_doubt(
    behind, client, holder, lock_proxy
):
    mine = holder("a")
    mine.acquire()
    client.script_load(RELEASE.text)
    lost = lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode())
    sent = Sent(behind, mine)
    lost.wait()
    asks = lock_proxy.drop_command(to=b"EVALSHA", where=OTHER.encode())
    with pytest.raises(SoftTimeLimitExceeded), raised_at(asks, SoftTimeLimitExceeded()):
        acquire(behind, TWO, holder("b").token, 10.0)
    assert (sent.answers, sent.doubts) == ([], 1)


def test_a_server_that_never_answers_keeps_nobody_waiting_who_looks_for_answers(behind, client, holder, lock_proxy):
    mine = holder("a")
    mine.acquire()
    client.script_load(RELEASE.text)
    lost = lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode())
    sent = Sent(behind, mine)
    lost.wait()
    assert behind.read_late(0.0, 60.0)  # returns at once, and hopes on
    assert not behind.read_late(0.0, 0.0)
    assert (sent.answers, sent.doubts) == ([], 1)


def test_a_release_that_the_server_does_not_know_or_refuses_is_in_doubt_and_the_connection_lives_on(
    private_locks, store, client, holder
):
    mine, other = holder("a"), holder("b")
    mine.acquire()
    client.script_flush()
    sent = Sent(store, mine)
    connected = client.client_list()
    assert isinstance(acquire(store, TWO, other.token, 10.0), Granted)
    assert (sent.answers, sent.doubts) == ([], 1)
    assert len(client.client_list()) == len(connected)


def test_a_command_that_cannot_be_sent_is_an_error_of_the_sender(tmp_path, holder):
    away = LockStore.of(connect(f"unix://{tmp_path}/none", {}))
    with pytest.raises(RedisConnectionError):
        Sent(away, holder("a"))


def test_a_check_of_the_connections_health_does_not_take_the_answer(locks, holder):
    checked = connect(locks.url(), {"health_check_interval": 0.000001})
    store = LockStore.of(checked)
    mine = holder("a")
    Sent(store, mine)
    for _ in range(3):
        assert isinstance(acquire(store, ONE, mine.token, 10.0), Granted)
        sent = Sent(store, mine)
        assert store.look(TWO) is None
        assert sent.answers == [1]
    checked.close()


def test_a_child_that_is_forked_reads_no_answer_of_its_parents(store, holder):
    mine, childs = holder("a"), holder("b")
    mine.acquire()
    sent = Sent(store, mine)
    pid = os.fork()
    if not pid:
        os._exit(0 if isinstance(acquire(store, TWO, childs.token, 10.0), Granted) and not sent.answers else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert isinstance(acquire(store, TWO, childs.token, 10.0), Granted)
    assert sent.answers == [1]


def test_many_threads_each_have_the_key_alone_and_every_answer_is_read(store, holder):
    inside, sent, exclusive = [], [], []

    def run(number):
        mine = holder(f"t{number}")
        for _ in range(20):
            while isinstance(mine.acquire(), Conflict):
                pass
            inside.append(number)
            exclusive.append(inside == [number])
            inside.remove(number)
            sent.append(Sent(store, mine))

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(run, range(20)))
    assert all(exclusive)
    wait_until(lambda: not store.read_late(0.0, 60.0), "all are read")
    assert [one.answers for one in sent] == [[1]] * 400


def test_no_connection_with_an_unread_answer_goes_back_to_the_pool(locks, holder, monkeypatch):
    small = connect(locks.url(), {"max_connections": 2})  # of which one is kept as a spare
    store = LockStore.of(small)
    Sent(store, holder("nobody"))
    holders = [holder("a"), holder("b")]
    both_have_one, first_has_sent, send_late = threading.Barrier(2), threading.Event(), Connection.send_late

    def one_after_the_other(connection, late):
        if both_have_one.wait(30) == 1:
            first_has_sent.wait(30)
        send_late(connection, late)

    def run(mine, key):
        acquire(store, Demand(key), mine.token, 10.0)
        sent = Sent(store, mine, key)
        first_has_sent.set()
        return sent

    monkeypatch.setattr(Connection, "send_late", one_after_the_other)
    with ThreadPoolExecutor(2) as threads:
        sent = [*threads.map(run, holders, (KEY, OTHER))]
    for key in (KEY, OTHER):
        assert store.look(Demand(key)) is None
    wait_until(lambda: not store.read_late(0.0, 60.0), "all are read")
    assert [one.answers for one in sent] == [[1], [1]]
    small.close()


# The release of a run.


@pytest.fixture
def work(config):
    return make_app(config).tasks["lab.work"]


def key_of(task):
    return task.lock_for("k").key


def test_a_process_that_ends_right_after_a_run_leaves_no_lock(work, locks):
    for _ in range(20):
        pid = os.fork()
        if not pid:
            work.apply(("k", "item"))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wait_until(lambda: locks.client.keys() == [], "the key is free")


def test_an_idle_process_reads_the_answer_and_sends_a_lost_release_again(work, locks, lock_proxy):
    work.apply(("k", "warm-up"))
    lost = lock_proxy.drop_command(to=b"EVALSHA", where=RELEASE.sha.encode())
    work.apply(("k", "item"))
    lost.wait()
    assert locks.client.exists(key_of(work))
    wait_until(lambda: not locks.client.exists(key_of(work)), "the keeper has released it", 10)


@pytest.fixture
def while_it_runs():
    """Does something as soon as the next run has its lock."""
    receivers = []

    def connect(act):
        def once(lock, **_):
            signals.lock_acquired.disconnect(once)
            act(lock)

        receivers.append(once)
        signals.lock_acquired.connect(once)

    yield connect
    for one in receivers:
        signals.lock_acquired.disconnect(one)


def test_a_release_that_the_server_does_not_know_any_more_is_sent_again_by_the_keeper(work, locks, while_it_runs):
    work.apply(("k", "warm-up"))
    while_it_runs(lambda _: locks.client.script_flush())
    work.apply(("k", "item"))
    wait_until(lambda: not locks.client.exists(key_of(work)), "the keeper has released it", 10)


def test_a_release_that_is_sent_again_leaves_a_note_for_a_copy_that_may_have_come_meanwhile(
    config, locks, deliver, while_it_runs
):
    """The broker may have been away too, and with it the ack of a run that has ended."""
    config.settings["task_ignore_result"] = True
    app = make_app(config)
    deliver(app, "lab.work", "k", "warm-up", id="warm-up")
    while_it_runs(lambda _: locks.client.script_flush())
    deliver(app, "lab.work", "k", "item")
    key = key_of(app.tasks["lab.work"])
    wait_until(lambda: not locks.client.exists(key), "the keeper has released it", 10)
    assert locks.client.keys() == [keys_of(key).note("id/0/0").encode()]


@pytest.mark.parametrize(
    ("refuse", "allow"),
    [
        ("ACL SETUSER default -evalsha", "ACL SETUSER default +evalsha"),  # NOPERM
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),  # READONLY, as after a failover
    ],
)
def test_a_release_that_is_refused_is_sent_again_by_the_keeper_until_it_is_not(
    work, locks, while_it_runs, log, refuse, allow
):
    work.apply(("k", "warm-up"))
    while_it_runs(lambda _: locks.client.execute_command(*refuse.split()))
    try:
        work.apply(("k", "item"))
        wait_until(lambda: "has ended, but Redis has not confirmed" in log.text, "it is said", 10)
        assert locks.client.exists(key_of(work))
    finally:
        locks.client.execute_command(*allow.split())
    wait_until(lambda: not locks.client.exists(key_of(work)), "the keeper has released it", 10)


def test_a_run_that_had_lost_its_lock_is_told_so_soon_after_its_end(work, locks, while_it_runs):
    told = []

    def lost(lock, reason, **_):
        told.append(reason)

    signals.lock_lost.connect(lost)
    work.apply(("k", "warm-up"))
    while_it_runs(lambda lock: locks.client.delete(lock.key))
    work.apply(("k", "item"))
    wait_until(lambda: told, "it is told", 10)
    assert told == ["its key was gone or taken at the release"]


def test_the_answer_to_the_release_of_a_long_run_is_read_soon_although_the_keeper_sleeps(work, while_it_runs):
    work.apply(("k", "warm-up"))
    keeper = server_of(work.app).keeper
    while_it_runs(lambda _: wait_until(lambda: keeper.wake_at > time.monotonic() + 2, "the keeper sleeps"))
    work.apply(("k", "item"))
    wait_until(lambda: not server_of(work.app).store.read_late(60.0, 60.0), "the answer is read")


def test_a_publish_that_is_the_last_thing_a_process_does_keeps_the_key_for_its_message(config, locks):
    job = make_app(config).tasks["lab.job"]
    for item in ("warm-up", "item"):
        job.apply_async(("k", item), queue="nobody")
        wait_until(lambda: locks.client.ttl(job.lock_for("k").key) > 3000, "the key is kept for lock_queue_ttl")
        wait_until(lambda: not server_of(job.app).store.read_late(60.0, 60.0), "the answer is read")
        locks.client.delete(job.lock_for("k").key)


def test_a_server_without_memory_still_takes_the_release_of_a_run_whose_key_cools_down(config, locks, while_it_runs):
    work = make_app(config).tasks["lab.cools_skip"]
    work.apply(("k", "warm-up"))
    wait_until(lambda: not locks.client.exists(key_of(work)), "it has cooled down", 10)
    while_it_runs(lambda _: locks.client.config_set("maxmemory", 1))
    try:
        work.apply(("k", "item"))
        wait_until(lambda: work.lock_info("k").state == "cooling", "it cools down", 10)
    finally:
        locks.client.config_set("maxmemory", 0)
