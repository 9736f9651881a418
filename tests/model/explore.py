"""The explorer: every interleaving of a scenario, breadth first: it finds the shortest way to a broken promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from celery_redislock.protocol.tokens import Attempt

from .commands import Command
from .executions import IN_BODY, Execution
from .messages import Ending, Message
from .publishing import Publisher
from .rooms import Rooms
from .rules import Excuse, Mistake, Promise
from .server import Key, Server
from .steps import Steps
from .world import Faults, Step, World


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


@dataclass
class Exploration:
    """What was found: every state, and the first broken promise with the way to it.

    Attributes:
        scenario: Where the exploration began.
        excuses: The excuses that were accepted.
        came_from: Each state that was found, with the state before it and the step that led from there to here.
        known_as: For each canonical form of a state, the first state found that has it.
        before: For each state, those from which one step leads to it.
        asked: Every command that Redis was asked, with the state that Redis was in.
        broken: The first promise that was broken; None where all were kept.
        trace: The steps that led to the broken promise.
    """

    scenario: Scenario
    excuses: Set[Excuse]
    came_from: dict[World, tuple[World, str] | None] = field(default_factory=dict)
    known_as: dict[World, World] = field(default_factory=dict)
    before: dict[World, list[World]] = field(default_factory=dict)
    asked: set[tuple[Server, Command]] = field(default_factory=set)
    broken: Promise | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.scenario.name}: {len(self.came_from)} states, nothing broken"
        return "\n  ".join([f"{self.scenario.name}: broken: {self.broken.value}", *self.trace])

    def break_promise(self, promise: Promise, world: World, last: str) -> None:
        """Note that `promise` is broken in `world`, by the step `last`; empty where the state itself breaks it."""
        labels = [last] if last else []
        step = self.came_from[world]
        while step is not None:
            world, label = step
            labels.append(label)
            step = self.came_from[world]
        self.broken, self.trace = promise, labels[::-1]


def explore(
    scenario: Scenario, mistakes: Set[Mistake] = frozenset(), excuses: Set[Excuse] = frozenset(Excuse)
) -> Exploration:
    """Find all that can happen in `scenario`, until a promise is broken.

    Args:
        scenario: Where to begin.
        mistakes: The mistakes that the implementation makes.
        excuses: The excuses that are accepted.
    """
    found = Exploration(scenario, excuses)
    rooms = Rooms(scenario.slots, scenario.limits, scenario.has_others, mistakes)
    steps = Steps(
        scenario.plays,
        rooms,
        scenario.limit,
        mistakes,
        excuses,
        bool(scenario.publishers) and scenario.faults.spares_jobs,
    )
    start = World.of(scenario.messages, scenario.faults, scenario.publishers, max(scenario.limits))
    found.came_from[start] = None
    found.known_as[start.canonical] = start
    waiting = deque([start])
    while waiting:
        world = waiting.popleft()
        for step in steps.of(world):
            if step.asked:
                found.asked.add(step.asked)
            broken = step.broken or _broken_in(step.world, scenario.limits, found.excuses)
            if broken:
                found.break_promise(broken, world, step.label)
                return found
            _enter(found, waiting, world, step)
    stuck = _first_that_never_ends(found)
    if stuck:
        found.break_promise(Promise.ENDS, stuck, "")
    return found


def _enter(found: Exploration, waiting: deque[World], world: World, step: Step) -> None:
    known = step.world
    if known not in found.came_from:  # most steps lead to a state that is known just so
        known = found.known_as.setdefault(known.canonical, known)
        if known not in found.came_from:
            found.came_from[known] = (world, step.label)
            waiting.append(known)
    if not step.is_too_late:
        found.before.setdefault(known, []).append(world)


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
        return Promise.NOT_STUCK
    if not world.is_over:
        return None
    if history.answered - history.finished - history.settled - history.failed - given_up:
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


def _first_that_never_ends(found: Exploration) -> World | None:
    """A state from which no state that is over can be reached; None where there is none."""
    ends = {world for world in found.came_from if world.is_over}
    waiting = list(ends)
    while waiting:
        for world in found.before.get(waiting.pop(), ()):
            if world not in ends:
                ends.add(world)
                waiting.append(world)
    return next((world for world in found.came_from if world not in ends), None)
