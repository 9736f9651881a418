"""How the command line looks at all locks of a server: page by page, on one server and in a Cluster."""

from __future__ import annotations

import pytest
import redis

from celery_redislock.cli.locks import PAGE, Locks
from celery_redislock.cli.workers import Waits
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.tokens import Attempt

from .conftest import KEY, ONE


def test_all_of_many_locks_are_found_once_among_as_many_notes_and_no_command_asks_for_all_keys(app, locks):
    keys = {f"redislock:{{lab.work:{number}}}" for number in range(3 * PAGE)}
    with locks.client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.set(key, a_token().value, px=60_000)
            pipeline.set(keys_of(key).note("an-id/0/0"), "", px=60_000)
        pipeline.execute()
    locks.client.config_resetstat()
    found = [row.part.key for row in Locks(app).all()]
    assert len(found) == len(keys)
    assert set(found) == keys
    calls = {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in locks.client.info("commandstats").items()}
    assert {"scan", "get", "pttl", "zrange"} <= calls.keys()
    assert "keys" not in calls
    assert calls["scan"] < 6 * len(keys) / PAGE
    assert calls["get"] == len(keys)  # not for the notes


def test_a_key_that_is_no_string_any_more_or_not_there_is_left_out_and_a_strange_name_is_shown(app, locks):
    locks.client.set(b"redislock:{\xff}", a_token().value)
    locks.client.rpush("redislock:{a list}", "x")
    (row,) = Locks(app).all()
    assert row.part.key == "redislock:{\udcff}"


def test_a_lock_that_is_released_while_it_is_looked_at_is_left_out(app, locks, monkeypatch):
    ask = redis.Redis.scan

    def scan(*args, **options):
        """Between the name of a lock and what is asked of it, the lock is released."""
        names = ask(*args, **options)
        locks.client.delete("redislock:{a}")
        return names

    for name in "ab":
        locks.client.set(f"redislock:{{{name}}}", a_token().value)
    monkeypatch.setattr(redis.Redis, "scan", scan)
    assert [row.part.key for row in Locks(app).all()] == ["redislock:{b}"]


def test_the_first_who_waits_tells_since_when(app, store: LockStore, holder, locks):
    first = holder("a")
    first.acquire()
    now = locks.client.time()[0]
    room = tokens.of_room(tokens.mint_nonce(), "host")
    store.stand(ONE, room, (now - 100) * 1_000_000, None)
    (row,) = Locks(app).all()
    assert (row.part.key, row.waiting) == (KEY, 1)
    assert row.waits["shop.bill"].oldest == pytest.approx(100, abs=5)


def test_messages_are_counted_for_their_own_task_and_a_process_that_told_of_none_for_the_holders(
    app, store: LockStore, holder
):
    holder("a").acquire()
    told, silent = (tokens.of_room(tokens.mint_nonce(), "host") for _ in range(2))
    for room in (told, silent):
        store.enter(ONE, room, 1_000_000)
    known = Locks(app)
    known.counts.rooms = {told.nonce}
    known.counts.locks[KEY] = {"shop.refund": Waits(500, 2e6)}
    (row,) = known.all()
    assert row.waits == {"shop.refund": (500, 2e6), "shop.bill": (1, 1e6)}
    assert row.outside == {silent.nonce}


def test_a_server_that_refuses_is_an_error_and_no_empty_list(app, locks):
    locks.client.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], commands=["+scan", "+get", "+ping"])
    locks.client.set(KEY, a_token().value)
    app.conf.redislock_client_options = {"username": "reader", "password": "any"}
    with pytest.raises(redis.ResponseError, match="pttl"):
        list(Locks(app).all())
    locks.client.acl_deluser("reader")


def a_token():
    return tokens.mint(tokens.mint_nonce(), Attempt("an-id", 0, 0), tokens.origin("w@host", "lab.work"))
