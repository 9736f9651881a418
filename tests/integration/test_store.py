"""The store on a real server, in what the model's pairs of a state and a command do not tell.

Who is granted, refused, renewed and released, and which notes that leaves, is held by
`tests/model/test_model.py`.
"""

from __future__ import annotations

import os

import pytest

from celery_redislock import LockUnavailable
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.replies import Conflict, Finished, Granted, Outstanding, Renewed, Reserved, info_of
from celery_redislock.protocol.scripts import Claim, Passed
from celery_redislock.protocol.tokens import RESERVED, RUNS, SEEN, Attempt, Token, known_by, mint_nonce
from tests.integration.conftest import KEY, ONE, look_all_at_once
from tests.lab.asking import acquire, reserve
from tests.lab.servers import Valkey

MINE = known_by(mint_nonce())


def test_a_free_key_is_granted_for_the_lease(holder, client):
    mine = holder("id")
    assert isinstance(mine.acquire(lease=10), Granted)
    assert client.get(KEY).decode() == mine.token
    assert 5000 < client.pttl(KEY) <= 10000


def test_a_held_key_is_refused_naming_its_holder(holder):
    first, second = holder("first"), holder("second")
    first.acquire(lease=10)
    conflict = second.acquire()
    assert isinstance(conflict, Conflict)
    assert conflict.holder.attempt == first.attempt
    assert (conflict.holder.hostname, conflict.holder.task) == ("w@host", "shop.bill")
    assert 5 < conflict.ttl <= 10


def test_a_lock_of_redis_pys_own_is_respected_and_shown_as_nobodys_task(holder, client):
    with client.lock(KEY, timeout=10):
        conflict = holder("id").acquire()
    assert conflict.holder.attempt is None
    assert info_of(conflict.holder, KEY, conflict.ttl).who == "a lock outside tasks on an unknown host"


def test_the_nonce_alone_releases_so_that_the_main_process_can(holder, store):
    mine = holder("id")
    mine.acquire()
    assert not store.release(ONE, known_by(mine.token.nonce[:-1] + "-"))
    assert store.release(ONE, known_by(mine.token.nonce))


def test_a_claim_opens_a_key_that_is_reserved_and_no_other(holder, store, client):
    """Whatever a message says: it may know the nonce of a run, as who has read the key does."""
    mine, other = holder("mine"), holder("other")
    claim = Claim(mine.token.nonce, 60)
    mine.acquire()
    assert isinstance(acquire(store, ONE, other.token, 10, claim=claim), Conflict)
    assert not store.give_up(ONE, claim.nonce, is_to_come=False)
    assert client.get(KEY) == mine.token.value
    client.set(KEY, f"{RESERVED}{mine.token[1:]}")
    assert isinstance(acquire(store, ONE, other.token, 10, claim=claim), Granted)


def test_a_key_that_is_reserved_for_one_message_is_given_to_no_other(holder, store, client):
    """Neither to one that has a claim of its own, nor to one that has none; and no other gives it up."""
    owner, other = holder("owner"), holder("other")
    reserved = f"{RESERVED}{owner.token[1:]}".encode()
    client.set(KEY, reserved, px=60_000)
    its_own = Claim(other.token.nonce, 60)
    assert isinstance(acquire(store, ONE, other.token, 10, claim=its_own), Conflict)
    assert isinstance(other.acquire(), Conflict)
    assert not store.give_up(ONE, its_own.nonce, is_to_come=False)
    assert client.get(KEY) == reserved


def test_a_message_that_runs_leaves_its_own_place_in_the_queue_to_the_next(holder, store, client):
    mine, claim, place = holder("mine"), Claim(mint_nonce(), 60), keys_of(KEY).queued
    anothers = f"{RESERVED}{mint_nonce()} *".encode()
    for queued, left in ((f"{RESERVED}{claim.nonce} *", None), (anothers, anothers)):
        client.set(place, queued)
        assert isinstance(acquire(store, ONE, mine.token, 10, claim=claim), Granted)
        assert client.get(place) == left
        mine.release()


def test_a_message_that_will_not_run_gives_up_its_place_in_the_queue_alone(holder, store, client):
    running, claim = holder("running"), mint_nonce()
    running.acquire()
    client.set(keys_of(KEY).queued, f"{RESERVED}{claim} *")
    assert not store.give_up(ONE, mint_nonce(), is_to_come=False)
    assert client.exists(keys_of(KEY).queued)
    assert not store.give_up(ONE, claim, is_to_come=False)
    assert client.keys() == [KEY.encode()]


def test_an_acquire_that_is_sent_again_keeps_the_mark_for_the_copy(holder, store, client):
    mine = holder("id")
    mine.acquire()
    assert isinstance(holder("id").acquire(), Conflict)  # it is the copy
    assert isinstance(mine.acquire(), Granted)
    assert client.get(KEY).decode() == f"{SEEN}{mine.token[1:]}"


def test_what_another_library_has_stored_is_marked_by_nobody(holder, client):
    """Although its second word is an attempt of ours."""
    value = b"theirs id/0/0 1700000000000 host task"
    client.set(KEY, value)
    assert isinstance(holder("id").acquire(), Conflict)
    assert client.get(KEY) == value


def test_renew_gives_the_whole_lease_again_only_to_owners(holder, store, client):
    mine, other = holder("mine"), holder("other")
    mine.acquire(lease=60)
    client.pexpire(KEY, 30_000)
    assert store.renew([(KEY, mine.token, 60), (KEY, other.token, 99), ("nowhere", mine.token, 60)]) == [
        Renewed(),
        None,
        None,
    ]
    assert store.renew([(KEY, other.token, 99)]) == [None]  # the script has a shorter way for one key alone
    assert 50_000 < client.pttl(KEY) <= 60_000


def test_inspect_tells_the_holder_or_none(holder, store):
    assert store.inspect(ONE) is None
    holder("id").acquire()
    assert store.inspect(ONE).task_id == "id"


class TestNotes:
    """A release leaves a note for copies of its message, but only where there may be one."""

    def test_a_copy_that_has_met_its_key_finds_the_note(self, holder, client):
        first, copy = holder("id"), holder("id")
        first.acquire()
        for _ in range(2):  # sent twice, it counts once
            assert isinstance(copy.acquire(), Conflict)
        assert client.get(KEY).decode() == f"{SEEN}{first.token[1:]}"
        assert 5000 < client.pttl(KEY) <= 10000
        assert first.release()
        assert isinstance(copy.acquire(may_be_copy=True), Finished)

    def test_two_locks_outside_tasks_are_no_copies_of_each_other(self, holder, client):
        first, second = holder(), holder()
        first.acquire()
        second.acquire()
        first.release()
        assert client.keys() == []


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
            store = LockStore.of(connect(server.url(), {}))
            look_all_at_once(store, server.client, 4)  # each kept its connection
        with server.serve():
            mine = holder("id")
            mine.store = store
            assert isinstance(mine.acquire(), Granted)
            assert mine.release()

    def test_nobody_there_is_lock_unavailable(self, tmp_path):
        store = LockStore.of(connect(f"unix://{tmp_path}/nobody.sock", {}))
        with pytest.raises(LockUnavailable, match="ConnectionError"):
            acquire(store, ONE, MINE, 10)
        with pytest.raises(LockUnavailable):
            store.release(ONE, MINE)
        with pytest.raises(LockUnavailable):
            store.inspect(ONE)

    def test_a_refusal_is_lock_unavailable(self, holder, client):
        client.rpush(KEY, "no lock")
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            holder("id").acquire()


def test_a_forked_child_has_connections_of_its_own(store, locks):
    """What its parent keeps at hand has two readers then, and each would take the other's replies."""

    def connections():
        return {connection["id"] for connection in locks.client.client_list()}

    store.inspect(ONE)
    mine = connections()
    asked, seen = os.pipe(), os.pipe()
    if os.fork() == 0:
        store.inspect(ONE)
        os.write(asked[1], b"it has asked")
        os.read(seen[0], 1)
        os._exit(0)
    os.read(asked[0], 100)
    new = connections() - mine
    assert len(new) == 1
    store.inspect(ONE)
    assert connections() - mine == new
    os.write(seen[1], b".")
    os.wait()
    for end in (*asked, *seen):
        os.close(end)


PLACE = keys_of(KEY).queued


def job(task_id: str, state: str = RESERVED, task: str = "shop.bill", host: str = "w@host") -> Token:
    return tokens.mint(mint_nonce(), Attempt(task_id, 0, 0), tokens.origin(host, task), state)


class TestReserve:
    """What the model's places do not tell: of whose job a token is, times, and names of any kind."""

    def test_a_job_in_the_queue_is_outstanding_also_where_the_key_is_free(self, store, client):
        queued = job("queued")
        client.set(PLACE, queued, px=60_000)
        answer = reserve(store, KEY, job("next"), 10, Passed())
        assert isinstance(answer, Outstanding)
        assert [(info.task_id, info.state) for info in answer.info(KEY)] == [("queued", "queued")]
        assert 50 < (answer.info(KEY)[0].ttl or 0) <= 60

    def test_an_ended_job_that_still_runs_keeps_its_key(self, store, client):
        running, next_one = job("ended", RUNS), job("next")
        client.set(KEY, running, px=60_000)
        assert reserve(store, KEY, next_one, 10, Passed(ended=frozenset({"ended"}))) == Reserved(PLACE)
        assert (client.get(KEY), client.get(PLACE)) == (running.value, next_one.value)
        assert 5000 < client.pttl(PLACE) <= 10_000

    def test_an_ended_job_is_known_by_its_id_also_once_its_run_has_another_token(self, store, client):
        """It was queued when its publisher was told of it, and runs by the second call."""
        queued = job("ended")
        client.set(KEY, queued, px=60_000)
        (told, _), *_ = reserve(store, KEY, job("next"), 10, Passed()).taken
        assert told == queued
        client.set(KEY, job("ended", RUNS), px=60_000)
        assert reserve(store, KEY, job("next"), 10, Passed(ended=frozenset({"ended"}))) == Reserved(PLACE)

    @pytest.mark.parametrize("task_id", ["a b", "naïve/1", "~", "x" * 199, "%41"])
    def test_an_id_of_any_kind_names_its_own_job_alone(self, store, client, task_id):
        client.set(KEY, job(task_id), px=60_000)
        others = frozenset({"a", "b", "1", "x", "A"})
        assert isinstance(reserve(store, KEY, job("next"), 10, Passed(ended=others)), Outstanding)
        assert reserve(store, KEY, job("next"), 10, Passed(ended=frozenset({task_id}))) == Reserved(KEY)

    @pytest.mark.parametrize(
        "other",
        [
            job("other", RUNS, task="shop.bill2"),
            job("other", task="shop.other"),
            job("eager", RUNS, host="web"),
            tokens.mint(mint_nonce(), None, tokens.origin("w@host", None)),
            Token.of("of another library"),
            tokens.of_room(mint_nonce(), "w@host"),
        ],
        ids=["another task", "queued for another task", "by apply()", "a lock", "of another library", "an offer"],
    )
    def test_where_no_job_has_the_key_the_place_is_reserved_once(self, store, client, other):
        client.set(KEY, other, px=60_000)
        assert reserve(store, KEY, job("first"), 10, Passed()) == Reserved(PLACE)
        assert isinstance(reserve(store, KEY, job("second"), 10, Passed()), Outstanding)
        assert client.get(KEY) == other.value

    def test_what_is_sent_twice_reserves_once(self, store, client):
        mine = job("mine")
        assert reserve(store, KEY, mine, 10, Passed()) == reserve(store, KEY, mine, 10, Passed()) == Reserved(KEY)
        client.set(KEY, job("other", task="shop.other"), px=60_000)
        assert reserve(store, KEY, mine, 10, Passed()) == reserve(store, KEY, mine, 10, Passed()) == Reserved(PLACE)

    def test_a_key_of_another_type_is_no_job_and_nothing_is_sent_for_it(self, store, client):
        client.rpush(KEY, "no lock")
        with pytest.raises(LockUnavailable):
            reserve(store, KEY, job("first"), 10, Passed())
        assert not client.exists(PLACE)
