"""A rate on paper, with the faults that may happen to its runs; and its scripts, held against the paper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.scripts import Tag
from promises import Promise
from tests.lab.servers import Valkey

from .rate import ONE_PERMIT, SCENARIOS, TWO_PERMITS, Faults, Mistake, Permit, Phase, World, explore, granted

FOUND_IN = {
    Mistake.SPENT_IS_FINISHED: (TWO_PERMITS, Promise.NOT_DROPPED),
    Mistake.COOLS_FROM_THE_END: (TWO_PERMITS, Promise.RATE),
    Mistake.COPIES_ARE_FREE: (ONE_PERMIT, Promise.RATE),
    Mistake.UNDO_BY_ATTEMPT: (TWO_PERMITS, Promise.RATE),
}
KEY, SPENT = "{rated}", 60.0

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("without_collector")]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_promise_holds_in_every_interleaving_of(scenario):
    found = explore(scenario)
    assert found.broken is None, str(found)
    assert len(found.states) > 1000
    assert any(world.is_over for world in found.states)
    runs = [run for world in found.states for run in world.runs]
    assert {run.phase for run in runs} == set(Phase)
    assert any(run.message.redelivered for run in runs)


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


def token(nonce: str, attempt: str) -> tokens.Token:
    state = tokens.SPENT
    return tokens.mint(nonce.ljust(22, "-"), tokens.Attempt(attempt, 0, 0), tokens.origin("w@host", "shop.mail"), state)


def test_the_scripts_grant_and_undo_what_the_model_says_whatever_the_permits_are(store, locks):
    """With two permits: each is free, or was spent by this run, by a copy of its message or by another run."""
    kinds = [None, Permit("n1", "a", 1), Permit("n2", "a", 1), Permit("n3", "b", 1)]
    demand, names = Demand(KEY, 2, SPENT), [keys_of(KEY).permit(number) for number in (1, 2)]
    for permits in itertools.product(kinds, repeat=2):
        if permits[0] == permits[1] and permits[0]:
            continue
        locks.client.flushall()
        for name, permit in zip(names, permits, strict=True):
            if permit:
                locks.client.set(name, token(permit.nonce, permit.attempt), px=30_000)
        grant = granted(World(permits, (), Faults()), "n1", "a", 1, frozenset())
        mine = token("n1", "a")
        for _ in range(2):  # as if the first reply was lost
            reply = store.ask(commands.acquire(demand, mine, 5.0))[0]
            assert (reply[0], reply[1] if len(reply) == 2 else None) == (
                (Tag.GRANTED, grant[0] + 1) if grant else (Tag.CONFLICT, None)
            )
        expected = grant[1].permits if grant else permits
        owners = [value and value[:23].decode() for value in locks.client.mget(names)]
        assert owners == [one and token(one.nonce, one.attempt)[:23] for one in expected]
        if grant:
            assert 50_000 < locks.client.pttl(names[grant[0]]) <= 60_000
            assert store.ask(commands.release(demand, mine.value))[0][0] == Tag.RELEASED
            assert locks.client.get(names[grant[0]]) is None
        assert store.ask(commands.release(demand, tokens.known_by("n3".ljust(22, "-")).owner))[0][0] == Tag.LOST
