"""Replacing on paper, with the faults that may happen to runs; and its scripts, held against the paper."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.replies import Conflict, Granted, Renewed, Stopped
from celery_redislock.protocol.scripts import Call, Claim, Numbered, Passed, Tag
from promises import Promise
from tests.lab.asking import Caller as Owner
from tests.lab.servers import Valkey

from .replacing import DEATHS, RETRIES, SCENARIOS, Holder, Mistake, Phase, Stage, asked_to_stop, explore

FOUND_IN = {
    Mistake.MARK_BEFORE_OUT: (DEATHS, Promise.LATEST),
    Mistake.MARK_HITS_THE_NEXT: (DEATHS, Promise.REPLACED),
    Mistake.REPLACED_JOB_RETRIES: (RETRIES, Promise.REPLACED),
    Mistake.COPY_RUNS_AGAIN: (DEATHS, Promise.REPLACED),
    Mistake.NEWCOMER_BEFORE_THE_END: (DEATHS, Promise.AT_MOST_N),
    Mistake.ASKS_AGAIN: (DEATHS, Promise.REPLACED),
    Mistake.STOPS_ITSELF: (RETRIES, Promise.REPLACED),
}
KEY = "redislock:{k}"
NAMES = keys_of(KEY)
REPLACEABLE = Numbered(0, stops_but=frozenset())

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_promises_hold_in_every_interleaving_of(scenario):
    found = explore(scenario)
    assert found.broken is None, str(found)
    assert len(found.states) > 10_000
    worlds = [*found.states]
    assert any(world.is_over and world.stopped for world in worlds)
    assert {stage for world in worlds for stage in world.stages} == set(Stage)
    phases = {run.phase for world in worlds for run in world.runs}
    assert phases == (set(Phase) if scenario.retries else {Phase.RUNNING, Phase.STOPPING})


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_the_model_finds_the_mistake_that(mistake):
    scenario, promise = FOUND_IN[mistake]
    found = explore(scenario, {mistake})
    assert found.broken is promise, str(found)
    assert found.trace


@pytest.fixture
def store(locks: Valkey) -> Iterator[LockStore]:
    client = connect(locks.url(), {})
    yield LockStore.of(client)
    client.close()


def token(nonce, job, state=tokens.RUNS, host="w@host", task="shop.index", retries=0):
    return tokens.mint(nonce.ljust(22, "-"), tokens.Attempt(job, retries, 0), tokens.origin(host, task), state)


def in_seconds(seconds):
    """A moment, as calls are numbered."""
    return time.time_ns() // 1000 + seconds * 10**6


TICKET = token("t", "newer", tokens.SENDING)
HELD = token("h", "older")
WHO_ASKS = {
    "the publisher": lambda: commands.replace(KEY, TICKET, 60.0, ["cause"]),
    "a merged call": lambda: commands.merge(
        *(
            KEY,
            token("m", "merged", tokens.SENDING),
            30.0,
            60.0,
            Passed(),
            Call(b"c", None, stops_but=frozenset({"cause"})),
        )
    ),
    "the refused run": lambda: commands.acquire(
        Demand(KEY),
        token("r", "newer"),
        30.0,
        numbered=Numbered(time.time_ns() // 1000 + 10**6, stops_but=frozenset({"cause"})),
    ),
}


def reserve(store, locks, *, is_out=True):
    """Reserve the place in the queue for the ticket, as its publisher does."""
    reply = store.ask(commands.merge(KEY, TICKET, 30.0, 60.0, Passed(), Call(b"a", None)))[0]
    assert reply[0] == Tag.QUEUED
    if is_out:
        assert store.send(commands.renew([(NAMES.queued, TICKET, 60.0)]))


@pytest.mark.parametrize("who", WHO_ASKS)
def test_the_scripts_ask_whom_the_model_asks(store, locks, who):
    """A run of another job; but not who runs the job itself, in whatever attempt."""
    for job in ("older", "newer"):
        for asked_by in ("", "first"):
            locks.client.flushall()
            reserve(store, locks, is_out=who != "the publisher")
            held = token("h", job, retries=1)
            locks.client.set(KEY, held + (f" <{asked_by}" if asked_by else ""), px=30_000)
            number = {"older": 1, "newer": 2, "first": 3, "": 0}
            expected = asked_to_stop(Holder("h", number[job], 1, number[asked_by]), number["newer"])
            for _ in range(2):  # as if the first reply was lost
                store.ask(WHO_ASKS[who]())
            found = tokens.Token.of(locks.client.get(KEY))
            assert number[found.asked_by or ""] == expected.asked_by
            assert 0 < locks.client.pttl(KEY) <= 30_000
            is_new = bool(expected.asked_by) and not asked_by
            assert locks.client.exists(f"{KEY}:replaced:{job}") == is_new


@pytest.mark.parametrize("who", WHO_ASKS)
@pytest.mark.parametrize(
    "held",
    [
        token("h", "other", task="shop.other"),
        token("h", "cause"),
        token("h", "older", tokens.COOLING),
        token("h", "older", tokens.RESERVED),
        token("h", "older", host="host-of-an-eager-run"),
        tokens.mint("h" * 22, None, tokens.origin("w@host", None)),
        tokens.Token.of("a string of another library <newer"),
    ],
    ids=["another task's", "a cause", "cooling", "reserved", "eager", "a block", "foreign"],
)
def test_the_scripts_ask_nobody_else(store, locks, who, held):
    reserve(store, locks, is_out=who != "the publisher")
    locks.client.set(KEY, held, px=30_000)
    store.ask(WHO_ASKS[who]())
    assert locks.client.get(KEY) == held.value
    assert locks.client.keys("*:replaced:*") == []


def test_a_publisher_that_comes_late_asks_nobody(store, locks):
    """Its ticket has begun, and so has a newer call's run."""
    reserve(store, locks)
    locks.client.delete(NAMES.queued)
    newest = token("n", "newest")
    locks.client.set(KEY, newest, px=30_000)
    assert not store.send(commands.replace(KEY, TICKET, 60.0, []))
    assert locks.client.get(KEY) == newest.value
    assert locks.client.keys("*:replaced:*") == []


def test_a_publisher_that_asks_again_asks_no_other_run(store, locks):
    """The reply was lost. Meanwhile the run that it asked has ended, and one that stood in line before has begun."""
    reserve(store, locks, is_out=False)
    locks.client.set(KEY, HELD, px=30_000)
    assert store.send(commands.replace(KEY, TICKET, 60.0, []))
    before = token("b", "before the ticket")
    locks.client.set(KEY, before, px=30_000)
    assert store.send(commands.replace(KEY, TICKET, 60.0, []))
    assert locks.client.get(KEY) == before.value
    assert locks.client.keys("*:replaced:*") == [f"{KEY}:replaced:older".encode()]


def test_a_publisher_says_that_its_message_is_sent_and_keeps_its_place(store, locks):
    reserve(store, locks, is_out=False)
    assert store.send(commands.replace(KEY, TICKET, 60.0, []))
    assert tokens.Token.of(locks.client.get(NAMES.queued)).state == "queued"
    assert locks.client.pttl(NAMES.queued) > 50_000


class TestWhoIsAsked:
    @pytest.fixture
    def asked(self, store, locks):
        """A run that has the key, and is asked to stop."""
        owner = Owner(Demand(KEY), HELD)
        store.acquire(owner, 30.0, numbered=REPLACEABLE)
        reserve(store, locks, is_out=False)
        store.ask(WHO_ASKS["the publisher"]())
        return owner

    def test_learns_of_it_at_each_renewal(self, asked, store):
        locks = [("nowhere", HELD, 1.0), (KEY, HELD, 60.0)]
        assert store.renew(locks) == [None, Renewed("newer")]
        assert store.renew(locks[1:]) == [Renewed("newer")]

    def test_is_still_asked_if_its_grant_is_repeated(self, asked, store):
        """The reply to the grant was lost, and the call came in between."""
        assert isinstance(store.acquire(Owner(Demand(KEY), HELD), 30.0, numbered=REPLACEABLE), Granted)
        assert store.renew([(KEY, HELD, 60.0)]) == [Renewed("newer")]

    def test_can_undo_what_it_was_granted(self, asked, store, locks):
        assert store.send(asked.hold.undo())
        assert locks.client.get(KEY) is None

    @pytest.mark.parametrize("retries", [0, 1], ids=["redelivered", "its retry"])
    def test_does_not_begin_again(self, asked, store, retries):
        again = token("again", "older", retries=retries)
        assert store.release(Demand(KEY), HELD)
        for _ in range(2):
            owner = Owner(Demand(KEY), again)
            assert store.acquire(owner, 30.0, numbered=REPLACEABLE) == Stopped("newer")

    def test_has_its_retry_wait_until_it_has_ended(self, asked, store):
        retry = Owner(Demand(KEY), token("again", "older", retries=1))
        assert isinstance(store.acquire(retry, 30.0, numbered=REPLACEABLE), Conflict)
        assert store.send(commands.release(Demand(KEY), HELD.owner))
        assert store.acquire(retry, 30.0, numbered=REPLACEABLE) == Stopped("newer")

    def test_does_not_begin_again_though_it_has_kept_the_key_for_its_retry(self, asked, store, locks):
        """A worker with other options of the task keeps it, in the middle of a deploy."""
        kept = token("kept", "older", tokens.RESERVED, retries=1)
        assert store.send(commands.hand_over(Demand(KEY), HELD, kept, 30.0))
        assert locks.client.get(KEY) == kept.value
        retry = Owner(Demand(KEY), token("again", "older", retries=1), claim=Claim(kept.nonce, 30.0))
        assert store.acquire(retry, 30.0, numbered=REPLACEABLE) == Stopped("newer")
        assert locks.client.get(KEY) is None

    def test_begins_again_for_a_call_that_is_newer_than_who_asked(self, asked, store, locks):
        """Its lock was lost, but it has retried itself, and newer calls were merged into the retry."""
        assert store.release(Demand(KEY), HELD)
        number = int(locks.client.hget(NAMES.pending, "number"))
        retry = Owner(Demand(KEY), token("again", "older", retries=1))
        assert isinstance(store.acquire(retry, 30.0, numbered=REPLACEABLE._replace(number=number + 1)), Granted)

    def test_begins_again_if_its_task_is_published_anew_under_the_same_id(self, asked, store, locks):
        assert store.release(Demand(KEY), HELD)
        attempt = tokens.Attempt("older", 0, 0, "abcdefgh")
        anew = Owner(Demand(KEY), tokens.mint("anew".ljust(22, "-"), attempt, tokens.origin("w@host", "shop.index")))
        assert isinstance(store.acquire(anew, 30.0, numbered=REPLACEABLE), Granted)
        assert locks.client.keys("*:replaced:*") == []


def test_a_run_that_is_refused_does_not_ask_who_has_begun_after_its_call(store, locks):
    """An older call's retry or redelivery meets a newer run with arguments of its own."""
    reserve(store, locks)
    held = token("h", "older")
    locks.client.set(KEY, held, px=30_000)
    older = Numbered(in_seconds(-1), stops_but=frozenset({"cause"}))
    store.ask(commands.acquire(Demand(KEY), token("r", "newer"), 30.0, numbered=older))
    assert locks.client.get(KEY) == held.value
