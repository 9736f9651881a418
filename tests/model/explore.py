"""The explorer: every interleaving of a scenario, breadth first: it finds the shortest way to a broken promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from celery_redislock.protocol.tokens import Attempt
from promises import Excuse, Promise

from .commands import Command
from .executions import IN_BODY, Execution
from .memory import forget
from .messages import Ending, Message
from .publishing import Publisher
from .rooms import Rooms
from .rules import EXCUSES, Mistake
from .search import first_that_never_ends
from .server import Key, Server
from .steps import Steps
from .world import Faults, World


class Scenario(NamedTuple):
    """Where an exploration begins, what its bodies may do, and what may go wrong."""

    name: str
    messages: tuple[Message, ...]
    """What is in the queue at the beginning."""
    plays: Mapping[Attempt, tuple[Ending, ...]]
    """How the body of each attempt may end."""
    faults: Faults
    """How many faults may happen."""
    publishers: tuple[Publisher, ...] = ()
    """Who publishes more messages."""
    slots: tuple[int, ...] = ()
    """How many executions each worker can run at a time; empty: each message comes to a worker of its own."""
    limit: int | None = None
    """How many messages may wait in a worker; None: any number."""
    limits: tuple[int, ...] = (1,)
    """How many may hold the lock at once, as each worker knows it; more than one number during a rolling deploy."""
    has_others: bool = False
    """Whether each worker has fetched tasks with other keys, which take its slots."""


class State:
    """A state that was found, and the way to it.

    Attributes:
        world: The state.
        parent: What it was found from; None for the beginning.
        label: What happened in between, in words.
    """

    __slots__ = ("label", "parent", "world")

    def __init__(self, world: World, parent: State | None, label: str) -> None:
        self.world, self.parent, self.label = world, parent, label


#: For each state, those from which one step leads to it.
Before = dict[State, list[State]]


@dataclass
class Exploration:
    """What was found: every state, and the first broken promise with the way to it.

    Attributes:
        scenario: Where the exploration began.
        excuses: The excuses that were accepted.
        states: Every state that was found, the nearest first. Of states that differ only in names, the first one.
        asked: Every command that Redis was asked, with the state that Redis was in.
        broken: The first promise that was broken; None where all were kept.
        trace: The steps that led to the broken promise.
    """

    scenario: Scenario
    excuses: Set[Excuse]
    states: list[State] = field(default_factory=list)
    asked: set[tuple[Server, Command]] = field(default_factory=set)
    broken: Promise | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.scenario.name}: {len(self.states)} states, nothing broken"
        return "\n  ".join([f"{self.scenario.name}: broken: {self.broken.value}", *self.trace])

    @property
    def worlds(self) -> Iterator[World]:
        """The states that were found."""
        return (one.world for one in self.states)

    def break_promise(self, promise: Promise, at: State | None, *last: str) -> None:
        """Note that `promise` is broken in the state `at`, or by the step `last` from there."""
        labels = list(last)
        while at is not None and at.parent is not None:
            labels.append(at.label)
            at = at.parent
        self.broken, self.trace = promise, labels[::-1]


def explore(
    scenario: Scenario, mistakes: Set[Mistake] = frozenset(), excuses: Set[Excuse] = frozenset(EXCUSES)
) -> Exploration:
    """Find all that can happen in `scenario`, until a promise is broken.

    Args:
        scenario: Where to begin.
        mistakes: The mistakes that the implementation makes.
        excuses: The excuses that are accepted.
    """
    forget()
    mistakes = frozenset(mistakes)
    exploration = Exploration(scenario, excuses)
    rooms = Rooms(scenario.slots, scenario.limits, scenario.has_others, mistakes)
    steps = Steps(
        scenario.plays,
        rooms,
        scenario.limit,
        mistakes,
        excuses,
        bool(scenario.publishers) and scenario.faults.spares_jobs,
        publishes_are_slow=scenario.faults.slow_publishes > 0,
    )
    start = World.of(scenario.messages, scenario.faults, scenario.publishers, max(scenario.limits))
    states = exploration.states
    states.append(State(start, None, ""))
    before: Before = {}
    known = {start: states[0], start.canonical: states[0]}
    for at in states:  # what is found meanwhile is appended
        for step in steps.of(at.world):
            if step.asked:
                exploration.asked.add(step.asked)
            if step.broken:
                exploration.break_promise(step.broken, at, step.label)
                return exploration
            to = known.get(step.world)  # most steps lead to a state that is known just so
            if to is None:
                to = known.setdefault(step.world.canonical, new := State(step.world, at, step.label))
                known[step.world] = to
                if to is new:
                    broken = _broken_in(step.world, scenario.limits, excuses)
                    if broken:
                        exploration.break_promise(broken, new)
                        return exploration
                    states.append(new)
            if not step.is_too_late:
                before.setdefault(to, []).append(at)
    stuck = first_that_never_ends(states, {one for one in states if one.world.is_over}, before)
    if stuck:
        exploration.break_promise(Promise.ENDS, stuck)
    return exploration


def _broken_in(world: World, limits: Sequence[int], excuses: Set[Excuse]) -> Promise | None:
    """The promise that a state breaks, whatever step led to it; None where it breaks none."""
    running = [one for one in world.executions if one.phase in IN_BODY and not one.lost]
    if len(running) > 1 and _are_too_many(running, limits):
        return Promise.AT_MOST_N
    if len(world.server.permits) > 1 and (_has_twins(running) or _has_twins(world.server.runs)):
        return Promise.NO_TWINS
    history = world.history
    given_up = {attempt for attempt, excuse in history.excused if excuse is Excuse.ACKED_EARLY and excuse in excuses}
    if any(key.attempt not in given_up for key in world.stuck):
        return Promise.RESERVED
    if not world.is_over:
        return None
    if history.answered - history.finished - history.settled - given_up:
        return Promise.ANSWERED
    dropped = history.published - history.finished - history.settled - given_up
    return Promise.NOT_DROPPED if dropped else None


def _has_twins(those: Sequence[Execution | Key]) -> bool:
    return len({one.attempt for one in those}) < len(those)


def _are_too_many(running: list[Execution], limits: Sequence[int]) -> bool:
    """Whether more run than the greatest limit allows, or more with a lower limit than that one allows.

    A message with a claim has its permit from the run before, whose limit may have been greater.
    """
    claimless = [one.limit for one in running if not one.message.claim]
    lower = (sum(own <= limit for own in claimless) > limit for limit in limits)
    return len(running) > max(limits) or any(lower)
