"""Several locks for one run, on paper."""

from __future__ import annotations

import pytest

from promises import Promise

from .several_explore import explore
from .several_world import (
    BACKLOG,
    CROSSWISE,
    ENDLESS,
    IN_ORDER,
    LOST,
    NESTED,
    ONE_FAILS,
    OUT_OF_ORDER,
    SCENARIOS,
    THREE_KEYS,
    TWO_FAIL,
    TWO_HOLD,
    Mistake,
    Place,
    State,
)

FOUND_IN = {
    Mistake.HOLDS_WHILE_IT_WAITS: (TWO_FAIL, Promise.FREED),
    Mistake.CHILD_LEAVES_A_PART: (TWO_FAIL, Promise.FREED),
    Mistake.TRUSTS_ITS_CALL: (ONE_FAILS, Promise.AT_MOST_N),
    Mistake.CROSSWISE_FOR_EVER: (CROSSWISE, Promise.ENDS),
    Mistake.FIRST_STAYS: (CROSSWISE, Promise.ENDS),
    Mistake.HOLDS_UNORDERED: (CROSSWISE, Promise.ENDS),
    Mistake.KEEPS_AFTER_A_GAP: (THREE_KEYS, Promise.ENDS),
    Mistake.SLOT_FOR_ANYONE: (ENDLESS, Promise.ENDS),
    Mistake.SHUT_ROOM_KEEPS: (TWO_FAIL, Promise.RESERVED),
    Mistake.LETS_GO_OF_A_PART: (BACKLOG, Promise.ENDS),
    Mistake.KEEPS_WITHOUT_SLOT: (NESTED, Promise.ENDS),
    Mistake.THIRD_KEEPS: (TWO_HOLD, Promise.FREED),
    Mistake.SECOND_PERMIT: (TWO_HOLD, Promise.RESERVED),
    Mistake.UNDONE_ONCE: (LOST, Promise.FREED),
    Mistake.UNDONE_BY_OWNER: (LOST, Promise.AT_MOST_N),
    Mistake.ASKS_AS_BEFORE: (LOST, Promise.AT_MOST_N),
    Mistake.FIRST_GRANT_STAYS: (LOST, Promise.AT_MOST_N),
}

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("without_collector")]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_promises_hold_in_every_interleaving_of(scenario):
    found = explore(scenario)
    assert found.broken is None, str(found)
    worlds = [*found.states]
    assert {one.state for world in worlds for permits in world.keys for one in permits if one} == set(State)
    places = {one.place for world in worlds for one in world.messages}
    assert places >= {Place.WAITS, Place.ASKS, Place.RUNS, Place.DONE}
    assert any(one.keeps for world in worlds for one in world.messages)
    assert any(world.shut for world in worlds) == (scenario is TWO_FAIL)
    assert any(world.undos for world in worlds) == (scenario is LOST)
    assert any(len(permits) > 1 and all(permits) for world in worlds for permits in world.keys) == (
        scenario is TWO_HOLD
    )
    assert any(world.faults.together == 0 for world in worlds)


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_the_model_finds_the_mistake_that(mistake):
    scenario, promise = FOUND_IN[mistake]
    found = explore(scenario, {mistake})
    assert found.broken is promise, str(found)
    assert found.trace


def test_a_body_that_takes_a_key_out_of_order_can_deadlock_with_what_a_room_keeps():
    """A known limit, which docs/several-locks.md names: only a body that takes its keys in the common order is safe."""
    assert explore(IN_ORDER).broken is None
    assert explore(OUT_OF_ORDER).broken is Promise.ENDS
