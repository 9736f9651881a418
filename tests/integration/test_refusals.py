"""A server that answers, but refuses: LockUnavailable with its own words, and nothing stays locked afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from celery_redislock import Lock, LockUnavailable
from celery_redislock.connection import outage
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Granted
from tests.integration.conftest import KEY, look_all_at_once
from tests.lab.asking import acquire, answer_of
from tests.lab.servers import Valkey, wait_until


def read_only(server: redis.Redis) -> None:
    server.replicaof("127.0.0.1", 1)  # of a primary that is not there


def writable(server: redis.Redis) -> None:
    server.replicaof("NO", "ONE")


def out_of_memory(server: redis.Redis) -> None:
    server.config_set("maxmemory", 1)


def with_memory(server: redis.Redis) -> None:
    server.config_set("maxmemory", 0)


def locked_out(server: redis.Redis) -> None:
    server.acl_setuser("default", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"], reset=True)


def let_in(server: redis.Redis) -> None:
    server.acl_setuser("default", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all"])


def without_rights(server: redis.Redis) -> None:
    server.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")


def with_rights(server: redis.Redis) -> None:
    server.execute_command("ACL", "SETUSER", "default", "+@all")


TROUBLES = pytest.mark.parametrize(
    ("trouble", "cure", "words"),
    [
        (read_only, writable, "read only"),
        (out_of_memory, with_memory, "maxmemory"),
        (locked_out, let_in, "[Aa]uthentication"),
        (without_rights, with_rights, "permission"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)


@pytest.fixture
def server(private_locks):
    """The test's own connection, opened before the trouble begins."""
    client = private_locks.connect()
    client.ping()
    yield client
    client.close()


@TROUBLES
def test_an_acquire_that_is_refused_is_unavailable_and_works_after_the_cure(server, holder, log, trouble, cure, words):
    trouble(server)
    server.client_kill_filter(_type="normal", skipme=True)  # else who is logged in already would notice nothing
    for _ in range(3):
        with pytest.raises(LockUnavailable, match=words) as caught:
            holder("id").acquire()
    assert log.text.count("the lock server is unavailable:") == 1
    assert caught.value.key == KEY
    assert "secret" not in str(caught.value)
    cure(server)
    assert server.get(KEY) is None
    assert isinstance(holder("id").acquire(), Granted)


@pytest.fixture
def moved(private_locks, lock_proxy, tmp_path) -> Iterator[tuple[LockStore, redis.Redis]]:
    """A store that is still connected to a former primary, and the new one: their one name has another address now."""
    client = connect(lock_proxy.url, {"socket_timeout": 15.0, "socket_connect_timeout": 15.0})
    store, folder = LockStore.of(client), tmp_path / "new"
    folder.mkdir()
    with Valkey(folder).serve() as new:
        look_all_at_once(store, private_locks.client, 3)
        read_only(private_locks.client)
        lock_proxy.lead_to(new.url())
        yield store, new.client
    client.close()


def test_a_caller_still_connected_to_a_former_primary_gets_the_key_from_the_new_one(moved):
    store, new = moved
    token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
    assert isinstance(answer_of(lambda: acquire(store, Demand(KEY), token, 60)), Granted)
    assert new.get(KEY) == token.value


@pytest.mark.parametrize("is_held", [True, False])
def test_a_caller_still_connected_to_a_former_primary_gives_the_key_back_to_the_new_one(moved, private_locks, is_held):
    """It may have lost the key: it is told so, because the former primary has not carried out anything."""
    store, new = moved
    token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
    private_locks.client.replicaof("NO", "ONE")
    private_locks.client.set(KEY, token.value)
    read_only(private_locks.client)
    if is_held:
        new.set(KEY, token.value)
    assert store.release(Demand(KEY), token) is is_held
    assert not new.exists(KEY)


def test_a_caller_still_connected_to_a_former_primary_waits_in_the_line_of_the_new_one(moved):
    store, new = moved
    store.enter(Demand(KEY), tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None)), 1)
    assert new.zcard(keys_of(KEY).line) == 1


def test_a_server_is_available_again_once_a_run_has_all_of_its_keys(server, store, holder, log):
    """It asks for them in one round trip."""
    out_of_memory(server)
    with pytest.raises(LockUnavailable):
        holder("id").acquire()
    with_memory(server)
    token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
    both = [HeldLock(store, Hold(Demand(key), token), 60) for key in ("{k}a", "{k}b")]
    store.acquire_all(both, 60, None, None)
    assert "the lock server is available again" in log.text


def test_a_server_that_refuses_only_releases_is_said_once_to_be_unavailable_and_again_a_minute_later(
    server, holder, log, monkeypatch
):
    """The next acquire is granted each time, and ends the outage."""
    server.execute_command("ACL", "SETUSER", "default", "-del")

    def run_without_release():
        server.flushall()
        mine = holder("id")
        assert isinstance(mine.acquire(), Granted)
        with pytest.raises(LockUnavailable, match="ACL failure in script"):
            mine.release()
        return mine

    def said():
        return [log.text.count(f"the lock server is {state}") for state in ("unavailable", "available again")]

    for _ in range(5):
        run_without_release()
    assert said() == [1, 1]
    monkeypatch.setattr(outage, "SAY_EVERY", 0.0)
    mine = run_without_release()
    assert said() == [2, 1]
    with_rights(server)
    assert mine.release() is True
    assert said() == [2, 2]


def test_a_refusal_that_began_right_after_another_and_goes_on_is_said_in_the_end(server, holder, log, monkeypatch):
    def is_refused():
        with pytest.raises(LockUnavailable):
            holder("id").acquire()

    without_rights(server)
    is_refused()
    with_rights(server)
    holder("id").acquire()
    without_rights(server)
    is_refused()
    assert log.text.count("the lock server is unavailable:") == 1
    monkeypatch.setattr(outage, "SAY_EVERY", 0.0)
    is_refused()
    is_refused()
    assert log.text.count("the lock server is unavailable:") == 2
    with_rights(server)
    server.flushall()
    holder("id").acquire()
    assert log.text.count("the lock server is available again") == 2


@TROUBLES
def test_a_release_that_is_refused_is_unavailable_and_the_key_ends_with_its_lease_or_by_the_next_release(
    server, holder, trouble, cure, words
):
    mine = holder("id")
    mine.acquire(lease=60)
    trouble(server)
    server.client_kill_filter(_type="normal", skipme=True)  # else who is logged in already would notice nothing
    if trouble is out_of_memory:  # a DEL needs none
        assert mine.release(copy_may_wait=False) is True
    else:
        with pytest.raises(LockUnavailable, match=words):
            mine.release()
        cure(server)
        assert 0 < server.ttl(KEY) <= 60
        assert mine.release() is True
    assert server.get(KEY) is None
    cure(server)


def test_a_server_without_memory_takes_the_key_back_and_the_note_in_its_place(server, holder):
    """What has begun to write may go on: the key is deleted first."""
    mine = holder("id")
    mine.acquire(lease=60)
    out_of_memory(server)
    assert mine.release(copy_may_wait=True) is True
    assert server.keys() == [mine.note.encode()]
    with_memory(server)


def test_a_lock_is_renewed_on_a_server_without_memory(server, hold, often):
    lock = hold()
    out_of_memory(server)
    deadline = lock.deadline
    wait_until(lambda: lock.deadline > deadline, "it is renewed")
    with_memory(server)


def test_a_server_that_still_loads_its_data_is_unavailable_until_it_is_done(server, holder, client):
    mine = holder("id")
    mine.acquire(lease=60)
    for name, value in [("key-load-delay", 300), ("loading-process-events-interval-bytes", 1024)]:
        server.execute_command("CONFIG", "SET", name, value)
    server.execute_command("DEBUG", "POPULATE", 10000)
    reload = threading.Thread(target=server.execute_command, args=("DEBUG", "RELOAD"))
    reload.start()

    def refused() -> bool:
        try:
            holder("other").acquire()
        except LockUnavailable as error:
            return "load" in str(error)
        return False

    wait_until(refused, "it is refused while the server loads")
    reload.join()
    assert mine.release() is True  # the key was loaded with the rest


@pytest.mark.parametrize("key", ["stock", "free"])
def test_a_server_that_still_says_who_has_a_key_is_not_available_again(private_locks, caplog, key):
    """It is out of memory: who asks for a held key gets an answer, and cannot stand in line."""
    client = private_locks.connect()
    assert Lock(client, "stock", timeout=60).acquire()
    client.zadd("{stock}:line", {f"?{'A' * 22} * 1 other *": 1})  # so that the acquire need not write
    client.config_set("maxmemory", 1)
    for _ in range(3):
        with pytest.raises(LockUnavailable):
            Lock(client, key, timeout=60).acquire(blocking_timeout=1)
        assert not Lock(client, "stock", timeout=60).acquire(blocking=False)
    assert [one.getMessage().split(":")[0] for one in caplog.records] == ["the lock server is unavailable"]
