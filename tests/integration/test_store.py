"""The protocol on a real server: who is granted, who is refused, and what a lost reply changes."""

from __future__ import annotations

import os

import pytest
import redis

from celery_redislock import LockUnavailable
from celery_redislock.server.answers import Conflict, Finished, Granted
from celery_redislock.server.connect import connect
from celery_redislock.server.scripts import ACQUIRE, RELEASE
from celery_redislock.server.store import LockStore
from celery_redislock.server.tokens import SEEN, known_by, mint_nonce
from tests.integration.conftest import KEY
from tests.lab.servers import Valkey

MINE = known_by(mint_nonce())


def test_a_free_key_is_granted_for_the_lease(holder, client):
    mine = holder("id")
    assert isinstance(mine.acquire(lease=10), Granted)
    assert client.get(KEY).decode() == mine.token
    assert 9900 < client.pttl(KEY) <= 10000


def test_a_held_key_is_refused_naming_its_holder(holder):
    first, second = holder("first"), holder("second")
    first.acquire(lease=10)
    conflict = second.acquire()
    assert isinstance(conflict, Conflict)
    assert conflict.holder.attempt == first.attempt
    assert (conflict.holder.hostname, conflict.holder.task) == ("w@host", "shop.bill")
    assert 9 < conflict.ttl <= 10


def test_a_lock_of_redis_pys_own_is_respected_and_shown_as_nobodys_task(holder, client):
    with client.lock(KEY, timeout=10):
        conflict = holder("id").acquire()
    assert conflict.holder.attempt is None
    assert conflict.holder.info(KEY, conflict.ttl).who == "a lock outside tasks on an unknown host"


def test_acquire_sent_twice_is_granted_twice(holder):
    """The first reply may have been lost: the script finds its own token."""
    mine = holder("id")
    assert isinstance(mine.acquire(), Granted)
    assert isinstance(mine.acquire(), Granted)


def test_only_the_owner_releases(holder, client):
    first, second = holder("first"), holder("second")
    first.acquire()
    assert not second.release()
    assert client.get(KEY).decode() == first.token
    assert first.release()
    assert client.get(KEY) is None


def test_release_after_expiry_leaves_the_new_holder_alone(holder, client):
    first, second = holder("first"), holder("second")
    first.acquire()
    client.delete(KEY)  # as an expiry does
    second.acquire()
    assert not first.release()
    assert client.get(KEY).decode() == second.token


def test_the_nonce_alone_releases_so_that_the_main_process_can(holder, store):
    mine = holder("id")
    mine.acquire()
    assert not store.release(KEY, known_by(mine.token.nonce[:-1] + "-"))
    assert store.release(KEY, known_by(mine.token.nonce))


def test_renew_gives_the_whole_lease_again_only_to_owners(holder, store, client):
    mine, other = holder("mine"), holder("other")
    mine.acquire(lease=10)
    client.pexpire(KEY, 100)
    assert store.renew([(KEY, mine.token, 10), (KEY, other.token, 99), ("nowhere", mine.token, 10)]) == [
        True,
        False,
        False,
    ]
    assert 9900 < client.pttl(KEY) <= 10000


def test_inspect_tells_the_holder_or_none(holder, store):
    assert store.inspect(KEY) is None
    holder("id").acquire()
    assert store.inspect(KEY).task_id == "id"


class TestNotes:
    """A release leaves a note for copies of its message, but only where there may be one."""

    def test_no_copy_no_note(self, holder, client):
        mine = holder("id")
        mine.acquire()
        mine.release()
        assert client.keys() == []

    def test_a_copy_that_was_seen_finds_the_note(self, holder):
        first, copy = holder("id"), holder("id")
        first.acquire()
        assert isinstance(copy.acquire(), Conflict)
        first.release()
        assert isinstance(copy.acquire(may_be_copy=True), Finished)

    def test_a_mark_survives_renewal_and_a_resent_acquire(self, holder, store):
        first, copy = holder("id"), holder("id")
        first.acquire()
        copy.acquire()
        assert store.renew([(KEY, first.token, 10)]) == [True]
        assert isinstance(first.acquire(), Granted)
        first.release()
        assert isinstance(copy.acquire(may_be_copy=True), Finished)

    def test_a_copy_that_may_wait_unseen_finds_the_note(self, holder):
        first, copy = holder("id"), holder("id")
        first.acquire()
        first.release(copy_may_wait=True)
        assert isinstance(copy.acquire(may_be_copy=True), Finished)

    def test_an_attempt_that_is_not_over_leaves_none(self, holder):
        first, copy = holder("id"), holder("id")
        first.acquire()
        copy.acquire()
        first.release(over=False, copy_may_wait=True)
        assert isinstance(copy.acquire(may_be_copy=True), Granted)

    def test_a_copy_that_is_to_come_finds_the_note(self, holder, store, client):
        first, copy = holder("id"), holder("id")
        first.acquire()
        for _ in range(2):  # sent twice, it counts once
            assert store.expect_copy(KEY, first.token)
        assert client.get(KEY).decode() == f"{SEEN}{first.token[1:]}"
        assert 9000 < client.pttl(KEY) <= 10000
        assert first.release()
        assert isinstance(copy.acquire(may_be_copy=True), Finished)

    def test_only_the_holder_expects_a_copy(self, holder, store, client):
        first, other = holder("id"), holder("other")
        assert not store.expect_copy(KEY, first.token)
        assert client.keys() == []
        first.acquire()
        assert not store.expect_copy(KEY, other.token)
        assert client.get(KEY).decode() == first.token

    def test_another_attempt_of_the_same_id_is_no_copy(self, holder, client):
        first, retried = holder("id"), holder("id", retries=1)
        first.acquire()
        retried.acquire()
        first.release()
        assert client.keys() == []

    def test_two_locks_outside_tasks_are_no_copies_of_each_other(self, holder, client):
        first, second = holder(), holder()
        first.acquire()
        second.acquire()
        first.release()
        assert client.keys() == []

    def test_who_lost_the_lock_leaves_the_note_all_the_same(self, holder, client):
        first, copy = holder("id"), holder("id")
        first.acquire()
        client.delete(KEY)
        first.release()
        assert isinstance(copy.acquire(may_be_copy=True), Finished)


class TestOutage:
    def test_a_restarted_server_without_the_scripts_is_no_outage(self, holder, client):
        client.script_flush()
        mine = holder("id")
        assert isinstance(mine.acquire(), Granted)
        client.script_flush()
        assert mine.release()

    def test_a_restarted_server_is_no_outage_for_any_connection_that_was_at_hand(self, holder, tmp_path):
        server = Valkey(tmp_path)
        with server.serve():
            store = LockStore(connect(server.url(), {}))
            store._spare += [store._take_client() for _ in range(4)]
            for spare in store._spare:
                spare.ping()
        with server.serve():
            mine = holder("id")
            mine.store = store
            assert isinstance(mine.acquire(), Granted)
            assert mine.release()

    def test_nobody_there_is_lock_unavailable(self, tmp_path):
        store = LockStore(connect(f"unix://{tmp_path}/nobody.sock", {}))
        with pytest.raises(LockUnavailable, match="ConnectionError"):
            store.acquire(KEY, MINE, 10)
        with pytest.raises(LockUnavailable):
            store.release(KEY, MINE)
        with pytest.raises(LockUnavailable):
            store.inspect(KEY)

    def test_a_refusal_is_lock_unavailable(self, holder, client):
        client.rpush(KEY, "no lock")
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            holder("id").acquire()

    @pytest.mark.parametrize("script", [ACQUIRE, RELEASE])
    def test_a_lost_reply_changes_nothing(self, holder, store, client, script):
        """The connection ends after the server has run the script: it is sent again."""
        mine = holder("id")
        if script is RELEASE:
            mine.acquire()
        lossy = _LosesOneReply(client, script.sha)
        mine.store = LockStore(lossy)
        outcome = mine.acquire() if script is ACQUIRE else mine.release()
        assert lossy.lost
        assert outcome is True or isinstance(outcome, Granted)

    def test_an_interrupted_acquire_is_undone(self, holder, client):
        """A soft time limit strikes after the server has granted the key."""
        mine = holder("id")
        mine.store = LockStore(_LosesOneReply(client, ACQUIRE.sha, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            mine.acquire()
        assert client.get(KEY) is None


class _LosesOneReply:
    """A client of a real server that runs one script and then fails as if its reply had been lost."""

    def __init__(self, client, sha, error=None):
        self.real, self.sha, self.lost = client, sha, False
        self.connection_pool, self.connection = client.connection_pool, None
        self.error = error or redis.ConnectionError("Connection closed by server.")
        client.script_load(next(s.text for s in (ACQUIRE, RELEASE) if s.sha == sha))

    def client(self):
        return self

    def close(self): ...

    def execute_command(self, *args):
        reply = self.real.execute_command(*args)
        if args[1] == self.sha and not self.lost:
            self.lost = True
            raise self.error
        return reply


def test_a_forked_child_has_connections_of_its_own(store):
    """What its parent keeps at hand has two readers then, and each would take the other's replies."""

    def connection_id():
        return str(store._on_line(lambda client: client.client_id()))

    mine = connection_id()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, connection_id().encode())
        os._exit(0)
    os.wait()
    theirs = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    assert theirs.isdigit()
    assert theirs != mine
    assert connection_id() == mine
