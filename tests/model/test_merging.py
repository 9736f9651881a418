"""Merged calls on paper: every interleaving of two or three calls, with the faults that may happen to them.

Where a test fails, its message tells the way to the broken promise, step by step.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_redislock.connection.connect import connect
from promises import Excuse, Promise
from tests.lab.servers import Valkey

from .merging import Command, Mistake, Server, Time
from .merging_explore import (
    COLLECTED,
    COPIES,
    EXCUSES,
    EXPIRED,
    RETRIED,
    RETRIED_TWICE,
    REVOKED,
    SCENARIOS,
    SWALLOWED,
    THREE_CALLS,
    TWO_CALLS,
    explore,
)
from .merging_real import Keys, follow, plain, small_acquires, small_merges
from .merging_world import Phase, Stage

pytestmark = pytest.mark.timeout(300)

FOUND_IN = {
    Mistake.UNSENT_IS_MERGED_INTO: (TWO_CALLS, Promise.LATEST),
    Mistake.NO_SECOND_QUESTION: (REVOKED, Promise.LATEST),
    Mistake.SECOND_QUESTION_IS_THE_FIRST: (TWO_CALLS, Promise.ENDS),
    Mistake.NO_THIRD_QUESTION: (REVOKED, Promise.LATEST),
    Mistake.ANY_NEWEST_IS_AN_ANSWER: (COLLECTED, Promise.LATEST),
    Mistake.RETRY_IS_MERGED: (RETRIED, Promise.LATEST),
    Mistake.RETRY_HAS_A_NEW_NUMBER: (RETRIED, Promise.NOT_STALE),
    Mistake.RETRY_HAS_NO_NUMBER: (RETRIED, Promise.NOT_STALE),
    Mistake.LAPSED_PLACE_LOSES_ITS_CALLS: (REVOKED, Promise.LATEST),
    Mistake.FULL_TICKET_LOSES_ITS_CALLS: (COLLECTED, Promise.LATEST),
    Mistake.UNDO_DROPS_THE_CALLS_OF_ANOTHER: (REVOKED, Promise.LATEST),
    Mistake.GRANT_LEAVES_THE_PLACE: (COLLECTED, Promise.LATEST),
    Mistake.GRANT_KEEPS_NO_ARGUMENTS: (COPIES, Promise.LATEST),
    Mistake.DEAD_CHILD_LOSES_ITS_ARGUMENTS: (COPIES, Promise.LATEST),
    Mistake.NO_NEWEST: (THREE_CALLS, Promise.NOT_STALE),
    Mistake.NEWEST_OF_MERGED_ONLY: (TWO_CALLS, Promise.NOT_STALE),
    Mistake.FREE_KEY_IS_ENOUGH: (THREE_CALLS, Promise.NOT_STALE),
    Mistake.OWN_NUMBER_IS_COMPARED: (COPIES, Promise.LATEST),
    Mistake.DEAD_CHILD_LOSES_THE_CALLS: (COPIES, Promise.LATEST),
    Mistake.ENDED_JOB_LOSES_ITS_CALLS: (SWALLOWED, Promise.LATEST),
    Mistake.REFUSED_KEEPS_ITS_PLACE: (EXPIRED, Promise.LATEST),
}
NEEDED_IN = {Excuse.PUBLISHED_TWICE: (RETRIED_TWICE, Promise.LATEST)}


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS])
def test_the_promise_holds_in_every_interleaving_of(name, explorations):
    assert explorations[name].broken is None, str(explorations[name])
    assert len(explorations[name].states) > 1000
    assert any(world.is_over for world in explorations[name].states)


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_the_model_finds_the_mistake_that(mistake):
    scenario, promise = FOUND_IN[mistake]
    found = explore(scenario, {mistake})
    assert found.broken is promise, str(found)
    assert found.trace


@pytest.mark.parametrize("excuse", EXCUSES, ids=lambda excuse: excuse.value)
def test_the_promise_needs_the_exception_that(excuse):
    """An excuse that no scenario needs would hide mistakes."""
    scenario, promise = NEEDED_IN[excuse]
    found = explore(scenario, excuses=frozenset(EXCUSES) - {excuse})
    assert found.broken is promise, str(found)


def test_what_fate_can_do_has_really_happened(explorations):
    """If some fault had never happened, it would prove little that the promises hold."""
    worlds = [world for found in explorations.values() for world in found.states]
    assert [sight for sight, is_seen in SIGHTS.items() if not any(map(is_seen, worlds))] == []


#: What is to be seen in some state.
SIGHTS = {
    "calls of one ticket, merged": lambda world: world.server.pending and len(world.server.pending.bodies) > 1,
    "a ticket that is not due": lambda world: world.server.pending and world.server.pending.time is Time.EARLY,
    "a place that has lapsed": lambda world: world.server.pending and not world.server.lock.queued,
    "an attempt that was given later arguments": lambda world: any(
        run.number > run.message.number for run in world.runs
    ),
    "an answer to a merged call": lambda world: bool(world.server.merged),
    "a call that asks again": lambda world: any(one.merge.number and not one.run for one in world.publishers),
    "a publisher that takes over": lambda world: any(one.merge.unsent for one in world.publishers),
    "a publisher that has died or failed": lambda world: bool(world.history.failed),
    "an unanswered acquire": lambda world: any(run.phase is Phase.ASKED for run in world.runs),
    "a retry that is being sent": lambda world: any(one.run and one.stage is Stage.TOOK for one in world.publishers),
    "a retry without a place": lambda world: any(one.attempt.retries and not one.claim for one in world.queue),
    "a run that is refused": lambda world: any(run.phase is Phase.REFUSED for run in world.runs),
    "a copy in the queue": lambda world: any(one.redelivered for one in world.queue),
    "a note": lambda world: bool(world.server.lock.notes),
    "a marked key": lambda world: any(key.marked for key in world.server.lock.keys),
}


# The Lua scripts do what the model says, for every command in every state that an exploration has met.


@pytest.fixture(scope="module")
def pairs(explorations) -> list[tuple[Server, Command]]:
    asked = {pair for found in explorations.values() for pair in found.asked}
    return sorted({plain(server, command) for server, command in asked}, key=repr)


@pytest.fixture
def keys(locks: Valkey) -> Iterator[Keys]:
    client = connect(locks.url(), {})
    yield Keys(client)
    client.close()


def test_every_command_answers_and_leaves_what_the_model_says(pairs, keys):
    for server, command in pairs:
        follow(keys, server, command)


def test_every_merge_does_so_on_every_place(keys):
    for server, command in small_merges():
        follow(keys, server, command)


def test_every_merge_gives_a_greater_number_though_the_clock_was_set_back(keys):
    for server, command in small_merges()[::7]:
        follow(keys, server, command, is_clock_behind=True)


def test_every_acquire_does_so_whatever_its_attempt_was_given(keys):
    for server, command in small_acquires():
        follow(keys, server, command)
