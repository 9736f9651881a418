"""Several locks for one run, on paper."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from promises import Promise

from .several_explore import explore
from .several_world import (
    CROSSWISE,
    ENDLESS,
    LOST,
    NESTED,
    ONE_FAILS,
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
    Mistake.KEEPS_WITHOUT_SLOT: (NESTED, Promise.ENDS),
    Mistake.THIRD_KEEPS: (TWO_HOLD, Promise.FREED),
    Mistake.THIRD_OVERTAKES: (TWO_HOLD, Promise.ENDS),
    Mistake.SECOND_PERMIT: (TWO_HOLD, Promise.RESERVED),
    Mistake.UNDO_ONCE: (LOST, Promise.FREED),
    Mistake.UNDO_BY_OWNER: (LOST, Promise.AT_MOST_N),
    Mistake.SAME_TOKEN: (LOST, Promise.AT_MOST_N),
    Mistake.KEEPS_FIRST_TOKEN: (LOST, Promise.AT_MOST_N),
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """The garbage collector would look at all states again and again."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_promises_hold_in_every_interleaving_of(scenario):
    found = explore(scenario)
    assert found.broken is None, str(found)
    worlds = [*found.states]
    assert {key.state for world in worlds for key in world.keys if key} == set(State)
    places = {one.place for world in worlds for one in world.messages}
    assert places >= {Place.WAITS, Place.ASKS, Place.RUNS, Place.DONE}
    assert any(one.keeps for world in worlds for one in world.messages)
    assert any(world.shut for world in worlds) == (scenario is TWO_FAIL)
    assert any(world.faults.together == 0 for world in worlds)


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_the_model_finds_the_mistake_that(mistake):
    scenario, promise = FOUND_IN[mistake]
    found = explore(scenario, {mistake})
    assert found.broken is promise, str(found)
    assert found.trace
