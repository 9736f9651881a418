"""The store on a real server behind a faulty network: what a lost, late or missing reply may change, and what not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock import Lock, LockUnavailable
from celery_redislock.connection.clients import derive
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Conflict, Finished, Granted, Renewed
from celery_redislock.protocol.scripts import ACQUIRE, INSPECT, RELEASE, RENEW
from tests.integration.conftest import KEY, ONE, look_all_at_once
from tests.lab.asking import answer_of
from tests.lab.interruption import raised_at
from tests.lab.servers import wait_until

IMPATIENT = 1.0
MINE = "mine"
impatient = pytest.mark.parametrize("timeout", [IMPATIENT])


@pytest.fixture
def timeout():
    """Long: a test that does something while the client waits ends that by `cut`."""
    return 5.0


@pytest.fixture
def store(lock_proxy, client, timeout):
    """Behind the proxy; `client` reaches the server itself."""
    for script in (ACQUIRE, RELEASE, RENEW, INSPECT):
        client.script_load(script.text)  # so that each command is one EVALSHA
    behind = connect(lock_proxy.url, {"socket_timeout": timeout, "socket_connect_timeout": timeout})
    store = LockStore.of(behind)
    yield store
    behind.close()


@pytest.fixture
def other(holder, client):
    """An execution elsewhere, whose network is fine."""
    other = holder("other")
    other.store = LockStore.of(client)
    return other


@pytest.fixture
def lose(lock_proxy):
    """Loses the reply to a script: ``lose(ACQUIRE, nth=2, hang=True)``."""
    return lambda script, **how: lock_proxy.drop_reply(to=b"EVALSHA", where=script.sha.encode(), **how)


@pytest.fixture
def thread():
    """Runs a command beside the test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


class TestAcquire:
    @impatient
    @pytest.mark.parametrize("hang", [False, True])
    def test_a_lost_reply_is_asked_for_again_and_finds_its_own_token(self, holder, other, client, lose, hang):
        mine, fault = holder("id"), lose(ACQUIRE, hang=hang)
        granted = mine.acquire(lease=10)
        assert isinstance(granted, Granted)
        left = client.pttl(KEY) / 1000  # first: time goes by until the second
        ends_at = time.monotonic() + left
        assert fault.struck == 1
        assert client.get(KEY).decode() == mine.token
        assert granted.sent_at + 10 <= ends_at + 0.002  # its holder never trusts it for longer than the server keeps it
        assert client.pttl(KEY) <= 10000
        conflict = other.acquire()
        assert isinstance(conflict, Conflict)
        assert conflict.holder == mine.token

    def test_the_lost_reply_of_a_refusal_stays_a_refusal(self, holder, other, client, lose):
        other.acquire()
        fault = lose(ACQUIRE)
        assert isinstance(holder("id").acquire(), Conflict)
        assert fault.struck == 1
        assert client.get(KEY).decode() == other.token

    def test_a_grant_that_expired_while_its_reply_was_lost_does_not_take_the_key_from_its_next_holder(
        self, holder, other, client, lose, thread, lock_proxy
    ):
        fault = lose(ACQUIRE, hang=True)
        outcome = thread(holder("id").acquire)
        fault.wait()
        client.delete(KEY)  # as an expiry does
        other.acquire()
        lock_proxy.cut()
        assert isinstance(outcome.result(), Conflict)
        assert client.get(KEY).decode() == other.token

    def test_a_copy_whose_grant_was_lost_and_that_is_finished_then_leaves_the_key_free(
        self, holder, client, lose, thread, lock_proxy
    ):
        """Its first delivery, which had lost the key, ends between the two tries, and leaves a note for it."""
        first, copy = holder("id"), holder("id")
        fault = lose(ACQUIRE, hang=True)
        outcome = thread(copy.acquire, may_be_copy=True)
        fault.wait()
        first.store = LockStore.of(client)
        first.release()
        lock_proxy.cut()
        assert isinstance(outcome.result(), Finished)
        assert client.get(KEY) is None

    def test_after_two_lost_replies_the_undo_frees_the_key_at_once(self, holder, client, lose):
        faults = lose(ACQUIRE), lose(ACQUIRE, nth=2)
        with pytest.raises(LockUnavailable):
            holder("id").acquire(lease=60)
        assert [fault.struck for fault in faults] == [1, 1]
        assert client.get(KEY) is None

    def test_its_undo_leaves_alone_what_the_same_owner_was_granted_meanwhile(
        self, holder, client, lose, thread, lock_proxy
    ):
        mine, again = holder("id"), holder("id")
        faults = lose(ACQUIRE), lose(ACQUIRE, nth=2, hang=True)
        outcome = thread(mine.acquire)
        faults[1].wait()
        time.sleep(0.002)  # tokens tell milliseconds
        again.token = tokens.mint(mine.token.nonce, mine.attempt, tokens.origin("w@host", "shop.bill"))
        again.store = LockStore.of(client)
        assert isinstance(again.acquire(), Granted)
        lock_proxy.cut()
        with pytest.raises(LockUnavailable):
            outcome.result()
        assert client.get(KEY) == again.token.encode()

    @impatient
    def test_in_a_black_hole_it_is_lock_unavailable_and_nothing_is_left(self, holder, store, other, client, lock_proxy):
        store.inspect(ONE)  # one connection was there before
        lock_proxy.blackhole()
        with pytest.raises(LockUnavailable, match="Timeout"):
            holder("id").acquire()
        wait_until(lambda: lock_proxy.swallowed >= 2, "both tries are lost")
        lock_proxy.mend()
        assert client.get(KEY) is None
        assert isinstance(other.acquire(), Granted)
        assert store.inspect(ONE).task_id == "other"  # through the mended proxy
        assert isinstance(holder("id").acquire(), Conflict)

    def test_where_the_undo_is_lost_too_the_key_ends_with_one_lease(
        self, holder, other, client, lose, lock_proxy, thread
    ):
        mine = holder("id")
        fault = lose(ACQUIRE, hang=True)
        outcome = thread(mine.acquire, lease=30)
        fault.wait()
        lock_proxy.refuse()
        with pytest.raises(LockUnavailable):
            outcome.result()
        lock_proxy.mend()
        assert client.get(KEY).decode() == mine.token
        assert 0 < client.pttl(KEY) <= 30_000
        client.pexpire(KEY, 1)
        wait_until(lambda: isinstance(other.acquire(), Granted), "the key is free")

    def test_where_the_undo_of_a_lock_is_lost_too_it_is_sent_again_until_redis_has_answered(
        self, store, client, lose, lock_proxy, thread
    ):
        """`store` has loaded the scripts, so the reply that is lost is the grant."""
        with redis.Redis.from_url(lock_proxy.url, socket_timeout=5) as behind:
            lock = Lock(behind, KEY, timeout=600)
            assert not lock.locked()
            fault = lose(ACQUIRE, hang=True)
            outcome = thread(lock.acquire)
            fault.wait()
            lock_proxy.refuse()
            with pytest.raises(LockUnavailable):
                outcome.result()
            assert client.exists(KEY)
            lock_proxy.mend()
            wait_until(lambda: not client.exists(KEY), "the key is free")

    def test_an_undo_is_kept_if_only_the_second_try_was_refused(self, store, client, lose, lock_proxy, thread):
        """As by a primary that is demoted: the first try may have been granted."""
        with redis.Redis.from_url(lock_proxy.url, socket_timeout=5) as behind:
            lock = Lock(behind, KEY, timeout=600)
            assert not lock.locked()
            fault = lose(ACQUIRE, hang=True)
            outcome = thread(lock.acquire)
            fault.wait()
            client.config_set("min-replicas-to-write", 1)
            try:
                lock_proxy.cut()
                with pytest.raises(LockUnavailable, match="NOREPLICAS"):
                    outcome.result()
                assert client.exists(KEY)
            finally:
                client.config_set("min-replicas-to-write", 0)
            wait_until(lambda: not client.exists(KEY), "the key is free")

    def test_no_undo_is_kept_for_an_acquire_that_redis_has_refused(self, client):
        client.rpush(KEY, "a list")
        before = set(threading.enumerate())
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            Lock(client, KEY).acquire()
        assert set(threading.enumerate()) <= before, "no keeper has anything to send"

    def test_no_undo_is_kept_for_a_server_that_has_never_answered(self, lock_proxy):
        lock_proxy.refuse()
        before = set(threading.enumerate())
        with redis.Redis.from_url(lock_proxy.url) as behind, pytest.raises(LockUnavailable, match="refused"):
            Lock(behind, KEY).acquire()
        assert set(threading.enumerate()) <= before, "no keeper has anything to send"

    @impatient
    def test_what_a_paused_server_does_late_ends_with_one_lease(self, private_locks, holder, store, other, client):
        """Its socket still holds the command when it goes on, and no undo could follow."""
        mine = holder("id")
        store.inspect(ONE)  # a connection is at hand, so that the command is sent
        private_locks.pause()
        with pytest.raises(LockUnavailable):
            mine.acquire(lease=30)
        private_locks.resume()
        wait_until(lambda: client.get(KEY) == mine.token.encode(), "it is done late")
        assert 0 < client.pttl(KEY) <= 30_000
        client.pexpire(KEY, 1)
        wait_until(lambda: isinstance(other.acquire(), Granted), "the key is free")

    def test_cut_connections_at_hand_are_no_outage(self, holder, store, client, lock_proxy):
        look_all_at_once(store, client, 4)  # each kept its connection
        lock_proxy.cut()
        mine = holder("id")
        assert isinstance(mine.acquire(), Granted)
        lock_proxy.cut()
        assert mine.release()

    @impatient
    def test_connections_at_hand_that_a_gateway_has_forgotten_are_no_outage(self, holder, store, client, lock_proxy):
        look_all_at_once(store, client, 4)  # each kept its connection
        lock_proxy.forget_all()
        assert isinstance(answer_of(holder("id").acquire), Granted)


class TestRelease:
    def test_a_lost_reply_is_true(self, holder, client, lose):
        mine = holder("id")
        mine.acquire()
        fault = lose(RELEASE)
        assert mine.release()
        assert fault.struck == 1
        assert client.get(KEY) is None

    def test_a_lost_reply_is_true_and_leaves_alone_who_took_the_key_in_between(
        self, holder, other, client, lose, thread, lock_proxy
    ):
        mine = holder("id")
        mine.acquire()
        fault = lose(RELEASE, hang=True)
        outcome = thread(mine.release)
        fault.wait()
        assert isinstance(other.acquire(), Granted)
        lock_proxy.cut()
        assert outcome.result() is True
        assert client.get(KEY).decode() == other.token

    def test_a_lost_reply_loses_no_note(self, holder, lose):
        mine, copy = holder("id"), holder("id")
        mine.acquire()
        assert isinstance(copy.acquire(), Conflict)
        lose(RELEASE)
        assert mine.release()
        assert isinstance(copy.acquire(may_be_copy=True), Finished)

    def test_two_lost_replies_are_lock_unavailable_although_the_key_is_free(self, holder, client, lose):
        mine = holder("id")
        mine.acquire()
        lose(RELEASE)
        lose(RELEASE, nth=2)
        with pytest.raises(LockUnavailable):
            mine.release()
        assert client.get(KEY) is None


class TestRenew:
    def test_a_lost_reply_leaves_the_absolute_lease(self, holder, store, client, lose):
        mine = holder("id")
        mine.acquire(lease=60)
        client.pexpire(KEY, 30_000)
        lose(RENEW)
        with pytest.raises(redis.ConnectionError):
            store.renew([(KEY, mine.token, 60)])
        assert 30_000 < client.pttl(KEY) <= 60_000
        assert store.renew([(KEY, mine.token, 60)]) == [Renewed()]
        assert client.pttl(KEY) <= 60_000

    def test_the_keeper_renews_again_after_a_lost_reply(self, hold, client, lose, often):
        fault = lose(RENEW)
        lock = hold()
        granted = lock.deadline
        wait_until(lambda: fault.struck and lock.deadline > granted, "it is renewed")
        assert fault.struck == 1
        assert lock.state == "held"
        assert client.pttl(KEY) <= 30_000


class TestNoReplyIsTakenForAnothers:
    @pytest.fixture
    def held(self, holder, client):
        """Keys and the ids of the tasks that hold them."""
        held = {}
        for n in range(5):
            one = holder(f"task-{n}")
            held[f"{KEY}:{n}"] = f"task-{n}"
            client.set(f"{KEY}:{n}", one.token, px=60_000)
        return held

    @impatient
    def test_where_late_replies_come_after_the_time_out(self, store, held, lock_proxy):
        """Four threads look at all keys; the replies about one would come after the time-out."""
        slow = f"{KEY}:0"
        fault = lock_proxy.delay(2 * IMPATIENT, where=slow.encode())
        wrong, answers, unanswered = [], [], []

        def look(first):
            for n in range(first, first + 100):
                key = f"{KEY}:{n % 5 if n % 50 == 0 else n % 4 + 1}"
                try:
                    answer = store.inspect(Demand(key))
                except LockUnavailable:
                    unanswered.append(key)
                else:
                    answers.append(answer)
                    if (answer.key, answer.task_id) != (key, held[key]):
                        wrong.append((key, answer))

        threads = [threading.Thread(target=look, args=(n,)) for n in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert wrong == []
        # A thread that was kept from looking at the clock still takes an answer that has come meanwhile.
        assert slow in unanswered
        assert fault.struck >= 8
        assert len(answers) + len(unanswered) == 400

    def test_where_a_time_limit_interrupts_the_reading(self, store, holder, held, client, lock_proxy):
        """The interrupted acquire is undone, and its late reply is nobody's."""
        with (
            raised_at(lock_proxy.delay(60, where=ACQUIRE.sha.encode(), nth=1), SoftTimeLimitExceeded()),
            pytest.raises(SoftTimeLimitExceeded),
        ):
            holder("id").acquire()
        assert client.get(KEY) is None
        for key, task_id in held.items():
            assert store.inspect(Demand(key)).task_id == task_id
        assert store.inspect(ONE) is None


class TestATokenOfTheCallersOwn:
    """It does not tell whose it is: another may hold the key by an equal one."""

    @pytest.fixture(params=[None, 10], ids=["for ever", "with a timeout"])
    def lock(self, request, lock_proxy, store):
        with redis.Redis.from_url(lock_proxy.url, socket_timeout=5) as behind:
            yield Lock(behind, KEY, timeout=request.param, fence=True)

    @pytest.mark.parametrize("script", [ACQUIRE, RELEASE], ids=["of the acquire", "of the exchange"])
    @pytest.mark.parametrize("token", [MINE, MINE.encode()])
    def test_is_known_again_after_a_lost_reply(self, lock, client, lose, script, token):
        fault = lose(script)
        assert lock.acquire(token=token, blocking=False)
        assert fault.struck == 1
        assert client.get(KEY) == lock.local.token == MINE.encode()
        assert (client.pttl(KEY) / 1000 >= lock.remaining - 0.002) or lock.timeout is None
        assert lock.fence == int(client.get(keys_of(KEY).fence))
        lock.release()
        assert client.get(KEY) is None

    def test_is_known_again_where_an_earlier_exchange_of_its_lock_comes_late(self, lock, client, thread, lock_proxy):
        client.script_load(RELEASE.text)
        exchange = lock_proxy.hold(b"EVALSHA", RELEASE.sha.encode(), before=True)
        outcome = thread(lock.acquire, token=MINE, blocking=False)
        exchange.wait()
        client.set(KEY, MINE, keepttl=True)
        exchange.let_go()
        assert outcome.result() is True
        assert client.get(KEY) == MINE.encode()

    @pytest.mark.parametrize("script", [ACQUIRE, RELEASE], ids=["of the acquire", "of the exchange"])
    def test_leaves_no_key_where_redis_could_not_be_asked(self, lock, client, lose, script):
        faults = lose(script), lose(script, nth=2)
        with pytest.raises(LockUnavailable):
            lock.acquire(token=MINE)
        assert [fault.struck for fault in faults] == [1, 1]
        assert client.get(KEY) is None
        assert lock.acquire(token=MINE, blocking=False)

    @pytest.mark.parametrize("has_it", [True, False], ids=["that the key has", "that the key does not have yet"])
    def test_leaves_no_key_once_redis_answers_again(self, store, client, lose, lock_proxy, thread, has_it):
        """Not even the first undo has reached Redis."""
        with redis.Redis.from_url(lock_proxy.url, socket_timeout=5) as behind:
            lock = Lock(behind, KEY, timeout=600)
            fault = (
                lose(RELEASE, hang=True) if has_it else lock_proxy.hold(b"EVALSHA", RELEASE.sha.encode(), before=True)
            )
            outcome = thread(lock.acquire, token=MINE)
            fault.wait()
            lock_proxy.refuse()
            with pytest.raises(LockUnavailable):
                outcome.result()
            assert (client.get(KEY) == MINE.encode()) == has_it
            lock_proxy.mend()
            wait_until(lambda: not client.exists(KEY), "the key is free")

    def test_leaves_another_alone_that_has_an_equal_one(self, lock, client, lose):
        client.set(KEY, MINE)
        fault = lose(ACQUIRE)
        assert not lock.acquire(token=MINE, blocking=False)
        assert fault.struck == 1
        assert client.get(KEY) == MINE.encode()

    def test_leaves_another_alone_that_took_the_key_with_an_equal_one_while_the_reply_was_lost(
        self, lock, client, lose, thread, lock_proxy
    ):
        fault = lose(ACQUIRE, hang=True)
        outcome = thread(lock.acquire, token=MINE, blocking=False)
        fault.wait()
        client.set(KEY, MINE)  # as after an expiry
        lock_proxy.cut()
        assert outcome.result() is False
        assert client.get(KEY) == MINE.encode()

    def test_that_may_be_anothers_since_its_deadline_is_not_taken_for_granted(
        self, lock_proxy, store, client, lose, thread
    ):
        """Its second reply is lost, and when it asks again, its time is over and another has the key."""
        with redis.Redis.from_url(lock_proxy.url, socket_timeout=5) as behind:
            lock, fault = Lock(behind, KEY, timeout=0.3), lose(RELEASE, hang=True)
            outcome = thread(lock.acquire, token=MINE)
            fault.wait()
            wait_until(lambda: client.set(KEY, MINE, nx=True), "it has ended")
            lock_proxy.cut()
            with pytest.raises(LockUnavailable, match="too late"):
                outcome.result()
        assert client.get(KEY) == MINE.encode()


class TestAConnectionInterruptedWhileItIsMade:
    """Half made, it would be in another database, or not logged in, or take the late reply for its own."""

    def test_is_not_used_after_a_time_limit(self, locks, lock_proxy, holder):
        with redis.Redis.from_url(locks.url(1)) as client, connect(f"{lock_proxy.url[:-1]}1", {}) as behind:
            one = holder("id")
            one.store = LockStore.of(behind)
            with (
                raised_at(lock_proxy.delay(60, to=b"SELECT", nth=1), SoftTimeLimitExceeded()),
                pytest.raises(SoftTimeLimitExceeded),
            ):
                one.acquire()
            assert client.get(KEY) is None
            assert isinstance(one.acquire(), Granted)
            assert client.get(KEY) == one.token.encode()

    @pytest.mark.parametrize("can_read", [False, True])
    @pytest.mark.parametrize("ours", [connect, lambda url, options: derive(redis.Redis.from_url(url, **options))])
    def test_is_not_used_after_a_shutdown(self, locks, holder, can_read, ours):
        """As it was seen: ``'_HiredisParser' object has no attribute '_reader'`` took the place of the shutdown."""
        shutdowns = [SystemExit()]

        def on_connect(connection):
            if shutdowns:
                if can_read:
                    connection._parser.on_connect(connection)
                raise shutdowns.pop()  # the database is still to be selected
            connection.on_connect()

        one = holder("id")
        with (
            redis.Redis.from_url(locks.url(1)) as client,
            ours(locks.url(1), {"redis_connect_func": on_connect}) as interrupted,
        ):
            one.store = LockStore.of(interrupted)
            with pytest.raises(SystemExit):
                one.acquire()
            assert isinstance(one.acquire(), Granted)
            assert client.get(KEY) == one.token.encode()
