"""Commands that a server has not taken are sent again, and none of them holds up another one."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest

from celery_redislock.connection.connect import connect
from celery_redislock.hold.keeper import LastWord
from celery_redislock.hold.put_off import PAUSE
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.scripts import Note
from tests.integration.conftest import KEY
from tests.integration.test_refusals import read_only, with_rights, without_rights, writable
from tests.lab.servers import wait_until

SECRET = KEY[:9]
OTHER, THIRD = f"{KEY}:other", f"{KEY}:third"


@pytest.fixture
def make_server():
    """Makes what this process has of a lock server: ``make_server(url)``."""
    made = []

    def make(url, **options):
        client = connect(url, {"socket_timeout": 5.0, "socket_connect_timeout": 5.0, **options})
        made.append(LockServer.behind(client))
        made.append(client)
        return made[-2]

    yield make
    for one in made:
        (one.stop if isinstance(one, LockServer) else one.close)()


@pytest.fixture
def server(locks, make_server):
    return make_server(locks.url())


@pytest.fixture
def behind(lock_proxy, make_server):
    """The same server behind the proxy. On a busy machine an answer may come late, and the command is sent again."""
    return make_server(lock_proxy.url, socket_timeout=0.5)


@pytest.fixture
def put_off(client):
    """Gives a key to a token, and has the keeper of a server release it: ``put_off(server, key)``."""

    def put(server, key, until=math.inf, *, token=None):
        token = token or tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
        if not client.exists(key):
            client.set(key, token.value)
        server.keeper.later(key, until, lambda store: store.release(Demand(key), token))
        return token

    return put


def test_one_that_is_refused_because_of_its_key_holds_up_no_other(server, put_off, client, monkeypatch):
    monkeypatch.setattr("celery_redislock.hold.put_off.LONG_PAUSE", 0.2)
    client.rpush(KEY, "something else")
    token = put_off(server, KEY)
    put_off(server, OTHER)
    wait_until(lambda: not client.exists(OTHER), "the other one is released")
    assert client.type(KEY) == b"list"
    client.delete(KEY)
    client.set(KEY, token.value)
    wait_until(lambda: not client.exists(KEY), "it is released once its key is its own again")


def test_one_that_is_refused_for_another_reason_of_its_own_holds_up_the_others_for_a_moment(
    private_locks, make_server, put_off, client
):
    """Nobody can tell that the reason is its own: here it is a user who may touch the other key alone."""
    rules = ["on", f">{SECRET}", "+@all", "&*", f"~{OTHER}*", f"~{{{OTHER}}}*"]
    private_locks.client.execute_command("ACL", "SETUSER", "restricted", *rules)
    denied = make_server(private_locks.url(), username="restricted", password=SECRET)
    put_off(denied, KEY)
    put_off(denied, OTHER)
    wait_until(lambda: not client.exists(OTHER), "the other one is released")
    assert client.exists(KEY)
    private_locks.client.execute_command("ACL", "SETUSER", "restricted", "allkeys")
    wait_until(lambda: not client.exists(KEY), "so is the first one, as soon as the user may")


@pytest.mark.parametrize(("trouble", "cure"), [(read_only, writable), (without_rights, with_rights)])
def test_a_server_that_refuses_all_is_sent_one_a_second_and_takes_all_as_soon_as_it_can(
    private_locks, server, put_off, client, trouble, cure
):
    admin, keys = private_locks.connect(), [f"{KEY}:{number}" for number in range(20)]
    tokens_of = [put_off(server, key) for key in keys]
    wait_until(lambda: not client.exists(*keys), "those that it takes are released at once")
    for key, token in zip(keys, tokens_of, strict=True):
        client.set(key, token.value)
    trouble(admin)
    private_locks.calls()
    began = time.monotonic()
    for key, token in zip(keys, tokens_of, strict=True):
        put_off(server, key, token=token)
    refused = Counter()
    at_once = 2 if trouble is read_only else 1  # a replica is sent it once more, as long as no outage is known

    def count():
        stats = admin.info("commandstats").get("cmdstat_evalsha", {})
        refused["tries"] = stats.get("calls", 0) + stats.get("rejected_calls", 0)
        return refused["tries"] > at_once

    wait_until(count, "it is tried again")
    assert time.monotonic() - began > PAUSE - 0.1
    cure(admin)
    wait_until(lambda: not client.exists(*keys), "all are released")
    admin.close()


def test_one_that_is_of_no_use_any_more_is_dropped_and_one_without_end_is_sent(behind, lock_proxy, put_off, client):
    lock_proxy.blackhole()
    put_off(behind, KEY, time.monotonic() + 0.5)
    put_off(behind, OTHER)
    # Both attempts of the first command have failed, so it is past its time and no attempt of it is under way.
    wait_until(lambda: behind.store.outage_of(KEY).unreachable, "it was tried")
    lock_proxy.mend()
    wait_until(lambda: not client.exists(OTHER), "the one without end is released", 15)
    put_off(behind, THIRD)
    wait_until(lambda: not client.exists(THIRD), "and what comes later")
    assert client.exists(KEY)


def test_where_there_are_too_many_those_of_no_use_soonest_are_dropped_and_one_line_says_so(
    behind, lock_proxy, put_off, client, log, monkeypatch
):
    monkeypatch.setattr("celery_redislock.hold.put_off.MOST", 3)
    monkeypatch.setattr("celery_redislock.hold.put_off.AT_ONCE", 1)
    keys = [f"{KEY}:{number}" for number in range(6)]
    lock_proxy.refuse()
    put_off(behind, keys[0])
    wait_until(lambda: "the lock server is unavailable:" in log.text, "it was tried")  # in a second it is tried again
    for key in keys[1:]:
        put_off(behind, key)
    assert len(lines(log)) == 1
    lock_proxy.mend()
    wait_until(lambda: not client.exists(*keys[3:]), "the others are released")
    assert client.exists(*keys[:3]) == 3
    (line,) = lines(log)
    assert line.startswith("more than 3 commands wait for the lock server: 1 dropped; ")


def lines(log):
    return [record.getMessage() for record in log.records if " dropped; " in record.getMessage()]


@pytest.mark.parametrize("leaves_note", [True, False])
def test_the_release_of_a_run_is_sent_after_its_lease_only_where_it_leaves_a_note(
    hold, behind, lock_proxy, put_off, client, leaves_note
):
    lock = hold(lease=0.5, store=behind.store, keeper=behind.keeper)
    behind.keeper.remove(lock)
    lock_proxy.refuse()
    note = Note(keys_of(KEY).note("id/0/0"), 60.0) if leaves_note else None
    word = LastWord(lock, lock.hold.ended(note=note), was_sent_before=False, keeper=behind.keeper)
    word.send_again("it is lost")
    wait_until(lambda: not client.exists(KEY), "the lease is over")
    time.sleep(0.1)
    client.set(KEY, lock.token.value)  # as if it were not: to see who releases it
    lock_proxy.mend()
    put_off(behind, OTHER)
    wait_until(lambda: not client.exists(OTHER), "what comes later is released")
    if leaves_note:  # it was tried before, so it may come later than what was never tried
        wait_until(lambda: not client.exists(KEY), "the run's key is released")
    assert client.exists(KEY) != leaves_note
    assert client.exists(keys_of(KEY).note("id/0/0")) == leaves_note
