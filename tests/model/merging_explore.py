"""Every interleaving of the small world of merged calls, and where that begins."""

from __future__ import annotations

from collections.abc import Set

from celery_redislock.protocol.tokens import Attempt
from promises import Excuse, Promise

from .memory import forget
from .merging import Command, Merge, Mistake, Server
from .merging_world import Publisher, Scenario, Steps, World
from .search import first_that_never_ends
from .world import Faults

#: The excuses that this model needs. A test shows that it needs each of them.
EXCUSES = (Excuse.PUBLISHED_TWICE,)

THREE_CALLS = Scenario(
    "three calls of one task",
    3,
    Faults(1, deaths=1, lost_replies=1, failed_publishes=1, slow_publishes=1, lapses=1),
)
TWO_CALLS = Scenario(
    "two calls of one task, and two faults",
    2,
    Faults(2, deaths=1, lost_replies=1, failed_publishes=1, slow_publishes=1, lapses=1),
)
COPIES = Scenario(
    "two calls, and copies of their messages",
    2,
    Faults(2, deaths=2, lost_replies=1, pauses=1, timeouts=1, lapses=1),
)
RETRIED = Scenario(
    "three calls, and a run that retries itself",
    3,
    Faults(1, pauses=1, lapses=1),
    retries=frozenset({"a"}),
)
RETRIED_TWICE = Scenario(
    "two calls, and a run that retries itself, perhaps twice",
    2,
    Faults(2, deaths=1, lapses=1),
    retries=frozenset({"a"}),
)
REVOKED = Scenario(
    "three calls, and revoked jobs",
    3,
    Faults(2, revokes=2, lapses=1, lost_replies=1),
)
EXPIRED = Scenario(
    "two calls that are due later and may expire",
    2,
    Faults(2, deaths=1, lapses=1, lost_replies=1),
    is_debounced=True,
    expires=True,
)
COLLECTED = Scenario(
    "three calls that are all wanted, and two fill a ticket",
    3,
    Faults(2, deaths=1, lapses=1, revokes=1),
    joins=True,
)
COLLECTED_AT_ONCE = Scenario(
    "three calls that are all wanted, and faults of their publishers",
    3,
    Faults(1, lost_replies=1, failed_publishes=1, slow_publishes=1, lapses=1),
    joins=True,
)
COLLECTED_AND_RETRIED = Scenario(
    "two calls that are both wanted, and a run that retries itself",
    2,
    Faults(1, deaths=1, lapses=1, pauses=1),
    retries=frozenset({"a"}),
    joins=True,
)
SWALLOWED = Scenario(
    "three calls that are all wanted, and a run that succeeds after its retry",
    3,
    Faults(),
    retries=frozenset({"a"}),
    joins=True,
    full=3,
    swallows=True,
)
SCENARIOS = (
    *(THREE_CALLS, TWO_CALLS, COPIES, RETRIED, RETRIED_TWICE, REVOKED, EXPIRED),
    *(COLLECTED, COLLECTED_AT_ONCE, COLLECTED_AND_RETRIED, SWALLOWED),
)


class Exploration:
    """What was found: every state, and the first broken promise with the way to it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.states: dict[World, tuple[World, str] | None] = {}
        """Each state, with the one that it was found from, and what happened in between."""
        self.asked: set[tuple[Server, Command]] = set()
        self.broken: Promise | None = None
        self.trace: list[str] = []

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.scenario.name}: {len(self.states)} states, nothing broken"
        return "\n  ".join([f"{self.scenario.name}: broken: {self.broken.value}", *self.trace])

    def break_promise(self, promise: Promise, at: World, *last: str) -> Exploration:
        """Note that `promise` is broken in the state `at`, or by the step `last` from there."""
        labels, way = list(last), self.states[at]
        while way is not None:
            labels.append(way[1])
            way = self.states[way[0]]
        self.broken, self.trace = promise, labels[::-1]
        return self


def explore(
    scenario: Scenario, mistakes: Set[Mistake] = frozenset(), excuses: Set[Excuse] = frozenset(EXCUSES)
) -> Exploration:
    """Find all that can happen in `scenario`, breadth first, until a promise is broken."""
    forget()
    found = Exploration(scenario)
    steps = Steps(scenario, mistakes, excuses)
    publishers = [Merge(f"h{i}", Attempt("abc"[i - 1], 0, 0)) for i in range(1, scenario.calls + 1)]
    ask = [one._replace(joins=scenario.joins, is_early=scenario.is_debounced, full=scenario.full) for one in publishers]
    start = World(Server(), tuple(Publisher(one) for one in ask), scenario.faults)
    found.states[start] = None
    states, before = [start], dict[World, list[World]]()
    for at in states:  # what is found meanwhile is appended
        for label, world, asked, broken in steps.of(at):
            if asked:
                found.asked.add(asked)
            if broken:
                return found.break_promise(broken, at, label)
            if world not in found.states:
                found.states[world] = (at, label)
                if promise := _broken_in(world):
                    return found.break_promise(promise, world)
                states.append(world)
            before.setdefault(world, []).append(at)
    stuck = first_that_never_ends(states, {one for one in states if one.is_over}, before)
    return found.break_promise(Promise.ENDS, stuck) if stuck else found


def _broken_in(world: World) -> Promise | None:
    """The promise that a state breaks, whatever step led to it; None where it breaks none."""
    if not world.is_over:
        return None
    queued = world.server.lock.queued
    if queued and queued.nonce not in world.history.failed:
        return Promise.RESERVED
    return Promise.LATEST if world.history.owed else None
