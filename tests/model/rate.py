"""A rate on paper: permits that are spent from their grants, in ticks of time, in every interleaving.

A message that finds no free permit stays in the queue. In which order the line lets messages go is no matter here.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from enum import Enum
from typing import NamedTuple

from promises import Promise

from .memory import quick
from .search import Exploration, search
from .world import Faults


class Mistake(Enum):
    """What an implementation may get wrong. A test shows that each one breaks a promise."""

    SPENT_IS_FINISHED = "a message whose attempt has spent a permit is dropped, as if that permit cooled down"
    COOLS_FROM_THE_END = "a permit is held while the body runs, and spent only from its end"
    COPIES_ARE_FREE = "a copy of a message runs for the permit that was spent for its first delivery"
    UNDO_BY_ATTEMPT = "the undo of an unanswered grant frees whatever permit the attempt has spent"


class Scenario(NamedTuple):
    """Where an exploration begins, and what may go wrong."""

    name: str
    permits: int
    spent: int
    """For how many ticks a permit is spent."""
    messages: int
    faults: Faults

    @property
    def window(self) -> int:
        """In how many ticks no more than two runs may begin."""
        return self.spent * 2 // self.permits


TWO_PERMITS = Scenario("a rate of two, by two permits", 2, 2, 3, Faults(2, deaths=1, lost_replies=1, timeouts=1))
ONE_PERMIT = Scenario("a rate of two, by one permit", 1, 1, 3, Faults(2, deaths=2, lost_replies=1, timeouts=1))
SCENARIOS = (TWO_PERMITS, ONE_PERMIT)
MOST = 2


@quick
class Permit(NamedTuple):
    """Who was granted a permit, and in how many ticks it is free."""

    nonce: str
    attempt: str
    left: int
    is_held: bool = False
    """Whether it is free only when its owner releases it. No permit of a rate is."""


@quick
class Message(NamedTuple):
    """A message in the queue or with a run."""

    attempt: str
    redelivered: bool = False


class Phase(Enum):
    """Where a run is."""

    ASKED = "with its grant unanswered"
    RUNNING = "in its body"

    __hash__ = object.__hash__


@quick
class Run(NamedTuple):
    """A message with a worker."""

    nonce: str
    message: Message
    phase: Phase


@quick
class World(NamedTuple):
    """One state."""

    permits: tuple[Permit | None, ...]
    queue: tuple[Message, ...]
    faults: Faults
    runs: tuple[Run, ...] = ()
    begun: tuple[int, ...] = ()
    """How many ticks ago runs have begun, as far as that matters."""
    done: frozenset[str] = frozenset()
    """The attempts whose body has finished."""

    @property
    def is_over(self) -> bool:
        return not (self.queue or self.runs)

    def put(self, number: int, permit: Permit | None) -> World:
        permits = list(self.permits)
        permits[number] = permit
        return self._replace(permits=tuple(permits))

    def without(self, run: Run) -> World:
        return self._replace(runs=tuple(one for one in self.runs if one != run))

    def having(self, run: Run) -> World:
        return self._replace(runs=tuple(sorted((*self.runs, run), key=lambda one: one.nonce)))

    def enqueue(self, message: Message) -> World:
        return self._replace(queue=tuple(sorted((*self.queue, message))))

    def dequeue(self, message: Message) -> World:
        queue = list(self.queue)
        queue.remove(message)
        return self._replace(queue=tuple(queue))

    def fresh(self) -> str:
        used = {one.nonce for one in self.runs} | {one.nonce for one in self.permits if one}
        return next(nonce for nonce in map("n{}".format, range(100)) if nonce not in used)


class Step(NamedTuple):
    """What leads from one state to the next."""

    label: str
    world: World
    broken: Promise | None = None


def granted(world: World, nonce: str, attempt: str, spent: int, mistakes: Set[Mistake]) -> tuple[int, World] | None:
    """The number of the permit that an acquire is granted, and the state after it; None if all are spent."""
    for number, permit in enumerate(world.permits):
        if permit and permit.nonce == nonce:
            return number, world.put(number, permit._replace(left=spent))
        if permit and permit.attempt == attempt and Mistake.COPIES_ARE_FREE in mistakes:
            return number, world
    for number, permit in enumerate(world.permits):
        if permit is None:
            is_held = Mistake.COOLS_FROM_THE_END in mistakes
            return number, world.put(number, Permit(nonce, attempt, spent, is_held))
    return None


class Steps:
    """All steps from a state."""

    def __init__(self, scenario: Scenario, mistakes: Set[Mistake]) -> None:
        self.scenario, self.mistakes = scenario, mistakes

    def of(self, world: World) -> Iterator[Step]:
        """The steps from `world`."""
        for message in dict.fromkeys(world.queue):
            yield from self._ask(world.dequeue(message), Run(world.fresh(), message, Phase.ASKED))
        for run in world.runs:
            yield from self._run(world.without(run), run)
        if any(world.permits) or world.begun:
            yield Step("a tick passes", self._later(world))

    def _ask(self, world: World, run: Run) -> Iterator[Step]:
        attempt, spent = run.message.attempt, self.scenario.spent
        has_spent = any(one and one.attempt == attempt and one.nonce != run.nonce for one in world.permits)
        if has_spent and Mistake.SPENT_IS_FINISHED in self.mistakes:
            is_lost = attempt not in world.done and all(one.message.attempt != attempt for one in world.runs)
            yield Step(f"{attempt} is dropped", world, Promise.NOT_DROPPED if is_lost else None)
            return
        grant = granted(world, run.nonce, attempt, spent, self.mistakes)
        if grant is None:
            return
        number, after = grant
        begun = (0, *after.begun)
        is_over = sum(age < self.scenario.window for age in begun) > MOST
        running = after.having(run._replace(phase=Phase.RUNNING))._replace(begun=begun)
        yield Step(f"{run.nonce} runs {attempt} with permit {number}", running, Promise.RATE if is_over else None)
        if world.faults.may("lost_replies"):
            unanswered = after._replace(faults=after.faults.spend("lost_replies"))
            yield Step(f"{run.nonce} asks, the reply is lost", unanswered.having(run))

    def _run(self, world: World, run: Run) -> Iterator[Step]:
        attempt = run.message.attempt
        if run.phase is Phase.ASKED:
            yield Step(f"{run.nonce} undoes its grant, and asks anew", self._undo(world, run).enqueue(run.message))
        else:
            finished = self._release(world, run)._replace(done=world.done | {attempt})
            yield Step(f"{run.nonce} finishes", finished)
        again = run.message._replace(redelivered=True)
        if world.faults.may("deaths"):
            dead = self._free(world, run)._replace(faults=world.faults.spend("deaths"))
            yield Step(f"{run.nonce} dies {run.phase.value}", dead.enqueue(again))
        if world.faults.may("timeouts") and not run.message.redelivered:
            twice = world.having(run)._replace(faults=world.faults.spend("timeouts"))
            yield Step(f"{attempt} is delivered again", twice.enqueue(again))

    def _undo(self, world: World, run: Run) -> World:
        by_attempt = Mistake.UNDO_BY_ATTEMPT in self.mistakes
        for number, permit in enumerate(world.permits):
            if permit and (permit.attempt == run.message.attempt if by_attempt else permit.nonce == run.nonce):
                world = world.put(number, None)
        return world

    def _release(self, world: World, run: Run) -> World:
        for number, permit in enumerate(world.permits):
            if permit and permit.nonce == run.nonce and permit.is_held:
                world = world.put(number, permit._replace(is_held=False, left=self.scenario.spent))
        return world

    def _free(self, world: World, run: Run) -> World:
        """The main process releases what a dead child has held: nothing that is spent."""
        for number, permit in enumerate(world.permits):
            if permit and permit.nonce == run.nonce and permit.is_held:
                world = world.put(number, None)
        return world

    def _later(self, world: World) -> World:
        permits = tuple(
            one if one is None or one.is_held else one._replace(left=one.left - 1) if one.left > 1 else None
            for one in world.permits
        )
        begun = tuple(age + 1 for age in world.begun if age + 1 < self.scenario.window)
        return world._replace(permits=permits, begun=begun)


def explore(scenario: Scenario, mistakes: Set[Mistake] = frozenset()) -> Exploration:
    """Find all that can happen in `scenario`, breadth first, until a promise is broken."""
    queue = tuple(Message("abc"[number]) for number in range(scenario.messages))
    return search(World((None,) * scenario.permits, queue, scenario.faults), Steps(scenario, mistakes).of)
