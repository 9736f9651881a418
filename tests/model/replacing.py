"""Replacing on paper: the newest call stops the run that holds the key, in every interleaving.

Each publisher calls the task once. The numbers of the calls are in the order of their commands. A message whose key is
held stays in the queue. What merging does to arguments has a model of its own, in merging.py.
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

    MARK_BEFORE_OUT = "a publisher asks the holder to stop before its message is sent"
    MARK_HITS_THE_NEXT = "a publisher's late request stops whoever holds the key by then"
    REPLACED_JOB_RETRIES = "the retry of a replaced run runs"
    COPY_RUNS_AGAIN = "a replaced run whose process has died runs again"
    NEWCOMER_BEFORE_THE_END = "the newcomer is granted the key as soon as the holder was asked to stop"
    ASKS_AGAIN = "a request that is sent again stops a run that stood in line before the message"
    STOPS_ITSELF = "a call that is merged into the retry of the run that holds the key stops the whole job"


class Scenario(NamedTuple):
    """Where an exploration begins, and what may go wrong."""

    name: str
    calls: int
    faults: Faults
    retries: bool = False
    """Whether the run of the first call may retry itself, once."""


DEATHS = Scenario("three calls with deaths", 3, Faults(3, deaths=2, failed_publishes=1))
RETRIES = Scenario("three calls with a retry", 3, Faults(2, deaths=1, failed_publishes=1), retries=True)
SCENARIOS = (DEATHS, RETRIES)


@quick
class Holder(NamedTuple):
    """What the key holds."""

    nonce: str
    job: int
    """The number of the job's first call."""
    number: int
    """The number of the call that the run is for."""
    asked_by: int = 0
    """The job that asks it to stop; 0 if none does."""


@quick
class Ticket(NamedTuple):
    """What the place in the queue holds, and the last call that was merged into its message."""

    job: int
    number: int
    retries: int = 0
    is_out: bool = False

    @property
    def claim(self) -> tuple[int, int]:
        """What its message carries."""
        return self.job, self.retries


@quick
class Message(NamedTuple):
    """A message in the queue or with a run."""

    job: int
    number: int
    retries: int = 0


class Stage(Enum):
    """Where a publisher is."""

    NEW = "before its command"
    TOOK = "before the send"
    SENT = "before it says that the message is sent"
    OVER = "done"

    __hash__ = object.__hash__


class Phase(Enum):
    """Where a run is."""

    RUNNING = "in its body"
    RETRIED = "in its body, with its retry sent"
    STOPPING = "in its finally blocks"

    __hash__ = object.__hash__


@quick
class Run(NamedTuple):
    """A message with a worker, which holds the key."""

    nonce: str
    message: Message
    phase: Phase = Phase.RUNNING


@quick
class World(NamedTuple):
    """One state."""

    stages: tuple[Stage, ...]
    jobs: tuple[int, ...]
    """The number that each publisher's call was given; 0 before that."""
    faults: Faults
    holder: Holder | None = None
    ticket: Ticket | None = None
    queue: tuple[Message, ...] = ()
    runs: tuple[Run, ...] = ()
    replaced: frozenset[tuple[int, int]] = frozenset()
    """The jobs whose runs were asked to stop, each with the call that asked, as the lock server knows them."""
    newest: int = 0
    """The greatest number of a call with which a run has begun."""
    last: int = 0
    """The last number that was given."""
    accepted: int = 0
    """The newest call that was accepted: sent, or merged."""
    done: int = 0
    """The newest call whose run has ended by itself."""
    stopped: frozenset[int] = frozenset()
    """The jobs whose runs were stopped."""

    @property
    def is_over(self) -> bool:
        return not (self.queue or self.runs) and all(stage is Stage.OVER for stage in self.stages)

    def at(self, publisher: int, stage: Stage) -> World:
        stages = list(self.stages)
        stages[publisher] = stage
        return self._replace(stages=tuple(stages))

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


class Step(NamedTuple):
    """What leads from one state to the next."""

    label: str
    world: World
    broken: Promise | None = None


def asked_to_stop(holder: Holder | None, job: int, mistakes: Set[Mistake] = frozenset()) -> Holder | None:
    """What the key holds after the ticket of `job` has asked its holder to stop: the rule of lua/prelude.lua."""
    is_itself = holder is not None and holder.job == job and Mistake.STOPS_ITSELF not in mistakes
    if holder is None or holder.asked_by or is_itself:
        return holder
    return holder._replace(asked_by=job)


class Steps:
    """All steps from a state."""

    def __init__(self, scenario: Scenario, mistakes: Set[Mistake]) -> None:
        self.scenario, self.mistakes = scenario, mistakes

    def of(self, world: World) -> Iterator[Step]:
        """The steps from `world`."""
        for publisher, stage in enumerate(world.stages):
            yield from self._publish(world, publisher, stage)
        for message in dict.fromkeys(world.queue):
            yield from self._ask(world, message)
        for run in world.runs:
            yield from self._run(world.without(run), run)

    def _stop(self, label: str, world: World, job: int, number: int) -> Step:
        """The ticket of `job`, whose last call is `number`, asks the holder to stop."""
        before, after = world.holder, asked_to_stop(world.holder, job, self.mistakes)
        if before is None or before == after:
            return Step(label, world)
        broken = Promise.REPLACED if number <= before.number else None
        known = set() if Mistake.COPY_RUNS_AGAIN in self.mistakes else {(before.job, number)}
        return Step(label, world._replace(holder=after, replaced=world.replaced | known), broken)

    def _publish(self, world: World, publisher: int, stage: Stage) -> Iterator[Step]:
        ticket, number = world.ticket, world.last + 1
        match stage:
            case Stage.NEW if ticket and ticket.is_out:
                merged = world.at(publisher, Stage.OVER)._replace(
                    ticket=ticket._replace(number=number), last=number, accepted=number
                )
                yield self._stop(f"call {number} is merged into job {ticket.job}", merged, ticket.job, number)
            case Stage.NEW if ticket is None:
                jobs = (*world.jobs[:publisher], number, *world.jobs[publisher + 1 :])
                took = world.at(publisher, Stage.TOOK)._replace(ticket=Ticket(number, number), jobs=jobs, last=number)
                label = f"call {number} takes the place"
                is_early = Mistake.MARK_BEFORE_OUT in self.mistakes
                yield self._stop(label, took, number, number) if is_early else Step(label, took)
            case Stage.TOOK:
                job = world.jobs[publisher]
                sent = world.at(publisher, Stage.SENT)._replace(accepted=max(world.accepted, job))
                yield Step(f"job {job} is sent", sent.enqueue(Message(job, job)))
                if world.faults.may("failed_publishes"):
                    faults = world.faults.spend("failed_publishes")
                    failed = world.at(publisher, Stage.OVER)._replace(ticket=None, faults=faults)
                    yield Step(f"job {job} cannot be sent", failed)
            case Stage.SENT:
                job, label, said = world.jobs[publisher], "", world.at(publisher, Stage.OVER)
                label = f"the publisher of job {job} says that it is sent"
                if ticket and ticket.claim == (job, 0) and not ticket.is_out:
                    said = said._replace(ticket=ticket._replace(is_out=True))
                    asked = self._stop(label, said, job, ticket.number)
                    yield asked
                    yield Step(f"{label}; the reply is lost", asked.world.at(publisher, Stage.SENT), asked.broken)
                elif ticket and ticket.claim == (job, 0) and Mistake.ASKS_AGAIN in self.mistakes:
                    asked = self._stop(f"{label} again", said, job, ticket.number)
                    yield asked._replace(broken=Promise.REPLACED if asked.world != said else None)
                elif Mistake.MARK_HITS_THE_NEXT in self.mistakes:
                    yield self._stop(label, said, job, job)
                else:
                    yield Step(label, said)

    def _ask(self, world: World, message: Message) -> Iterator[Step]:
        job, holder, label = message.job, world.holder, f"job {message.job}/{message.retries}"
        asks, ticket = world.dequeue(message), world.ticket
        if ticket and ticket.claim != (job, message.retries):
            ticket = None
        number = ticket.number if ticket else message.number
        is_replaced = any(one == job and number < newer for one, newer in world.replaced)
        if message.retries and Mistake.REPLACED_JOB_RETRIES in self.mistakes:
            is_replaced = False
        if is_replaced and not (holder and holder.job == job):
            yield Step(f"{label} ends as replaced", asks._replace(ticket=None if ticket else world.ticket))
        elif number < world.newest:
            yield Step(f"{label} is superseded", asks)
        elif holder is None or (Mistake.NEWCOMER_BEFORE_THE_END in self.mistakes and holder.asked_by == job):
            nonce = next(nonce for nonce in "klmn" if nonce not in {run.nonce for run in world.runs})
            broken = Promise.AT_MOST_N if world.runs else Promise.REPLACED if job in world.stopped else None
            given = message._replace(number=number)  # kept for its copies and for its retry
            begun = asks._replace(
                holder=Holder(nonce, job, number), newest=number, ticket=None if ticket else world.ticket
            )
            yield Step(f"{nonce} runs {label} with call {number}", begun.having(Run(nonce, given)), broken)
        elif ticket or not message.retries:
            stopped = self._stop(f"{label} is refused, and waits", world, job, number)
            if stopped.world != world:
                yield stopped

    def _run(self, world: World, run: Run) -> Iterator[Step]:
        holder, message = world.holder, run.message
        mine = holder if holder and holder.nonce == run.nonce else None
        free = world._replace(holder=None if mine else holder)
        if run.phase is Phase.STOPPING:
            yield Step(f"{run.nonce} ends as replaced", free)
        elif run.phase is Phase.RETRIED:
            yield Step(f"{run.nonce} ends as RETRY", free)
        else:
            yield Step(f"{run.nonce} succeeds", free._replace(done=max(world.done, message.number)))
            if self.scenario.retries and message.job == 1 and not message.retries:
                again = message._replace(retries=1)
                place = world.ticket or Ticket(message.job, message.number, 1, is_out=True)
                retried = world.having(run._replace(phase=Phase.RETRIED))._replace(ticket=place)
                yield Step(f"{run.nonce} retries itself", retried.enqueue(again))
        if run.phase is not Phase.STOPPING and mine and mine.asked_by:
            struck = world._replace(stopped=world.stopped | {message.job})
            yield Step(f"{run.nonce} is stopped", struck.having(run._replace(phase=Phase.STOPPING)))
        if world.faults.may("deaths"):
            dead = free._replace(faults=world.faults.spend("deaths"))
            yield Step(f"{run.nonce} dies {run.phase.value}", dead.enqueue(message))


def explore(scenario: Scenario, mistakes: Set[Mistake] = frozenset()) -> Exploration:
    """Find all that can happen in `scenario`, breadth first, until a promise is broken."""
    start = World((Stage.NEW,) * scenario.calls, (0,) * scenario.calls, scenario.faults)
    return search(start, Steps(scenario, mistakes).of, _broken_in)


def _broken_in(world: World) -> Promise | None:
    return Promise.LATEST if world.is_over and world.accepted > world.done else None
