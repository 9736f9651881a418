"""Merging in a small world of its own: publishers, runs of one key and the ticket, in every interleaving.

Time is a tick here: it makes a ticket due, lets its calls expire and its place lapse. A message whose key is held stays
in the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from enum import Enum
from typing import Any, NamedTuple

from celery_redislock.protocol.scripts import Tag
from celery_redislock.protocol.tokens import Attempt
from promises import Excuse, Promise

from .commands import Acquire, GiveUp, Release, Renew
from .memory import quick
from .merging import FULL, Ask, Calls, Command, Effect, End, Merge, Mistake, Server, Time, apply, calls_of
from .world import Faults


class Scenario(NamedTuple):
    """Where an exploration begins, and what may go wrong."""

    name: str
    calls: int
    """How many publishers there are. Each calls the task once."""
    faults: Faults
    retries: frozenset[str] = frozenset()
    """The ids of the jobs whose first attempt may retry itself."""
    joins: bool = False
    """Whether a run is given all calls, and not only the last one."""
    is_debounced: bool = False
    expires: bool = False
    """Whether calls may expire."""
    full: int = FULL
    """With how many calls a ticket is full."""
    swallows: bool = False
    """Whether a run may succeed after it has sent its next attempt."""


@quick
class Message(NamedTuple):
    """A message in the broker's queue, or with a run."""

    attempt: Attempt
    claim: str
    number: int
    """The number in the message, which has the arguments of that call."""
    is_numbered: bool = True
    redelivered: bool = False


class Stage(Enum):
    """How far a publisher is."""

    NEW = "before it asks"
    ASKS = "before it asks again"
    MERGED = "before it looks whether the job has ended"
    TOOK = "before the send"
    SENT = "after the send"

    __hash__ = object.__hash__


@quick
class Publisher(NamedTuple):
    """Who calls the task, or a run that retries itself."""

    merge: Merge
    stage: Stage = Stage.NEW
    number: int = 0
    """The number that the call was given."""
    job: str = ""
    """The job into which it was merged."""
    run: str = ""
    """The nonce of the run that retries itself."""

    @property
    def attempt(self) -> Attempt:
        return self.merge.attempt


class Phase(Enum):
    """Where a run is."""

    ASKED = "with its acquire unanswered"
    RUNNING = "in its body"
    RETRIES = "in its body, retrying itself"
    REFUSED = "before it stores its outcome and gives up"
    STORED = "before it gives up"
    GAVE_UP = "before it stores its outcome"

    __hash__ = object.__hash__


@quick
class Run(NamedTuple):
    """A message with a worker."""

    nonce: str
    message: Message
    phase: Phase
    number: int = 0
    bodies: tuple[int, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return self.message.attempt


@quick
class History(NamedTuple):
    """What the promises are checked by."""

    begun: int = 0
    """The greatest number of a body that has begun."""
    served: frozenset[int] = frozenset()
    """The calls whose arguments a finished run had; the last one only, where a later call stands for those before."""
    owed: frozenset[tuple[int, str]] = frozenset()
    """The accepted calls that are not served yet, each with the job that the caller waits for."""
    ended: frozenset[str] = frozenset()
    """The jobs whose outcome is stored."""
    expired: frozenset[tuple[str, int]] = frozenset()
    """The tickets whose calls were seen to have expired, with the number of the last call."""
    failed: frozenset[str] = frozenset()
    """The claims of publishers that have died, failed or were too slow."""
    retried: frozenset[str] = frozenset()
    """The jobs of which a run has retried itself."""
    excused: frozenset[str] = frozenset()
    """The jobs of which two runs have retried themselves, so that the next attempt was published twice."""


@quick
class World(NamedTuple):
    """One state."""

    server: Server
    publishers: tuple[Publisher, ...]
    faults: Faults
    queue: tuple[Message, ...] = ()
    runs: tuple[Run, ...] = ()
    history: History = History()

    @property
    def is_over(self) -> bool:
        return not (self.publishers or self.queue or self.runs or self.server.lock.permits[0])

    @property
    def claims(self) -> set[str]:
        """The claims of those who may come with them."""
        messages = {one.claim for one in self.queue} | {one.message.claim for one in self.runs}
        return messages | {one.merge.claim for one in self.publishers}

    def is_retrying(self, run: Run) -> bool:
        """Whether the next attempt of `run` has not been sent yet."""
        return any(one.run == run.nonce and one.stage is not Stage.SENT for one in self.publishers)

    def enqueue(self, message: Message) -> World:
        return self._replace(queue=tuple(sorted((*self.queue, message))))

    def dequeue(self, message: Message) -> World:
        others = list(self.queue)
        others.remove(message)
        return self._replace(queue=tuple(others))

    def put(self, run: Run) -> World:
        others = [one for one in self.runs if one.nonce != run.nonce]
        return self._replace(runs=tuple(sorted((*others, run), key=lambda one: one.nonce)))

    def without(self, run: Run) -> World:
        return self._replace(runs=tuple(one for one in self.runs if one.nonce != run.nonce))

    def turn(self, old: Publisher, new: Publisher | None = None) -> World:
        """This state with `new` in place of the publisher `old`.

        None: `old` is gone, and so is the answer to its call, which is not asked for any more.
        """
        others, server = [one for one in self.publishers if one != old], self.server
        if new is None:
            server = server._replace(merged=frozenset(one for one in server.merged if one.claim != old.merge.claim))
        publishers = tuple(sorted([*others, *([new] if new else [])], key=lambda one: one.merge.claim))
        return self._replace(publishers=publishers, server=server)

    def remember(self, **changes: Any) -> World:
        return self._replace(history=self.history._replace(**changes))

    def spend(self, fault: str) -> World:
        return self._replace(faults=self.faults.spend(fault))

    def fresh(self, kind: str) -> str:
        """A nonce of a run, ``n``, or a claim, ``h``, that is in use nowhere."""
        lock, pending = self.server.lock, self.server.pending
        used = self.claims | {one.nonce for one in self.runs} | {key.nonce for key in (*lock.keys, *lock.reserved)}
        used |= {pending.claim} if pending else set()
        used |= {one.claim for one in self.server.merged}
        return next(nonce for number in range(1, 100) if (nonce := f"{kind}{number}") not in used)


class Step(NamedTuple):
    """What leads from one state to the next."""

    label: str
    world: World
    asked: tuple[Server, Command] | None = None
    broken: Promise | None = None


class Steps:
    """All steps from a state."""

    def __init__(self, scenario: Scenario, mistakes: Set[Mistake], excuses: Set[Excuse]) -> None:
        self.scenario, self.mistakes, self.excuses = scenario, frozenset(mistakes), excuses

    def of(self, world: World) -> Iterator[Step]:
        """The steps from `world`."""
        for message in dict.fromkeys(world.queue):
            yield from self._ask(world.dequeue(message), Run(world.fresh("n"), message, Phase.ASKED))
            if world.faults.may("deaths") and message.claim:
                yield self._die_first(world.dequeue(message).spend("deaths"), message)
            if world.faults.may("revokes") and not message.redelivered:
                yield from self._revoke(world.dequeue(message).spend("revokes"), message)
        for run in world.runs:
            yield from self._run(world, run)
        new = [one for one in world.publishers if one.stage is Stage.NEW and not one.run]
        for one in world.publishers:
            if one not in new[1:]:  # which of them asks first makes no difference but in names
                yield from self._publish(world, one)
        yield from self._pass_time(world)

    def _makes(self, mistake: Mistake) -> bool:
        return mistake in self.mistakes

    def _send(self, world: World, command: Command) -> tuple[Effect, World]:
        effect = apply(world.server, command, self.mistakes)
        return effect, world._replace(server=effect.server)

    # Publishers.

    def _publish(self, world: World, one: Publisher) -> Iterator[Step]:
        name = f"the retry {one.attempt}" if one.run else f"the publisher of {one.attempt.task_id}"
        match one.stage:
            case Stage.NEW | Stage.ASKS:
                yield self._merge(world, one, name)
                if world.faults.may("lost_replies"):
                    after = self._send(world, one.merge)[1].spend("lost_replies")
                    after = after.turn(one, one._replace(stage=Stage.ASKS))
                    yield Step(f"{name} asks, the reply is lost", after, (world.server, one.merge))
            case Stage.MERGED:
                is_last = bool(one.merge.number) and self._makes(Mistake.NO_THIRD_QUESTION)
                is_last |= self._makes(Mistake.NO_SECOND_QUESTION)
                if one.job in world.history.ended and not is_last:
                    merge = one.merge._replace(number=one.number, ended=one.merge.ended | {one.job})
                    again = one._replace(merge=merge, stage=Stage.ASKS, job="", number=0)
                    yield Step(f"{name} sees that {one.job} has ended", world.turn(one, again))
                else:
                    accepted = _accept(world, one.number, one.job, self.scenario.joins)
                    yield Step(f"{name} is answered with {one.job}", accepted.turn(one))
            case Stage.TOOK:
                message = Message(one.attempt, one.merge.claim, one.number)
                sent = world.enqueue(message).turn(one, one._replace(stage=Stage.SENT))
                accepted = sent if one.run else _accept(sent, one.number, one.attempt.task_id, self.scenario.joins)
                yield Step(f"{name} sends the message with {one.number}", accepted)
                if world.faults.may("failed_publishes") and not one.run:
                    yield from self._fail(world.spend("failed_publishes"), one, name)
            case Stage.SENT:
                command = Renew(one.merge.claim, permit=0)
                yield Step(
                    f"{name} says that it is sent",
                    self._send(world, command)[1].turn(one),
                    (world.server, command),
                )
        if world.faults.may("deaths") and one.stage is not Stage.NEW and not one.run:
            dead = world.spend("deaths").remember(failed=world.history.failed | {one.merge.claim}).turn(one)
            yield Step(f"{name} dies {one.stage.value}", dead)

    def _merge(self, world: World, one: Publisher, name: str) -> Step:
        effect, after = self._send(world, one.merge)
        asked = (world.server, one.merge)
        match effect.reply, effect.ticket:
            case Tag.QUEUED, _:
                took = one._replace(stage=Stage.TOOK, number=effect.number)
                return Step(f"{name} takes the place with {effect.number}", after.turn(one, took), asked)
            case Tag.MERGED, None:
                accepted = _accept(after, effect.number, "", self.scenario.joins)
                return Step(f"{name} learns that {effect.number} has begun", accepted.turn(one), asked)
            case Tag.MERGED, ticket:
                assert ticket
                merged = one._replace(stage=Stage.MERGED, number=effect.number, job=ticket.attempt.task_id)
                label = f"{name} is merged into {ticket.attempt} with {effect.number}"
                return Step(label, after.turn(one, merged), asked)
        queued = world.server.lock.queued
        assert queued
        if one.run and not queued.sending:
            alone = Message(one.attempt, "", one.merge.number, not self._makes(Mistake.RETRY_HAS_NO_NUMBER))
            return Step(f"{name} is sent without a place", after.enqueue(alone).turn(one), asked)
        if not queued.sending:
            return Step(f"{name} sends a message of its own, which takes no place", after.turn(one), asked)
        is_sent_soon = any(other.merge.claim == queued.nonce for other in world.publishers)
        waits = one._replace(stage=Stage.ASKS)
        if is_sent_soon and not world.faults.may("slow_publishes"):
            return Step(f"{name} waits for {queued.attempt} to be sent", after.turn(one, waits), asked)
        after = after.spend("slow_publishes") if is_sent_soon else after
        after = after.remember(failed=after.history.failed | {queued.nonce})
        merge = one.merge._replace(unsent=one.merge.unsent | {queued.attempt.task_id})
        return Step(f"{name} is to take {queued.attempt} over", after.turn(one, waits._replace(merge=merge)), asked)

    def _fail(self, world: World, one: Publisher, name: str) -> Iterator[Step]:
        """The broker reports an error. It may have taken the message all the same."""
        command = GiveUp(one.merge.claim, is_to_come=False, exactly=one.attempt)
        failed = self._send(world, command)[1].turn(one)
        failed = failed.remember(failed=failed.history.failed | {one.merge.claim})
        yield Step(f"{name} cannot send it", failed, (world.server, command))
        out = failed.enqueue(Message(one.attempt, one.merge.claim, one.number))
        yield Step(f"{name} seems not to have sent it", out, (world.server, command))

    # Runs.

    def _ask(self, world: World, run: Run) -> Iterator[Step]:
        """A message that is not with a run in `world` asks for the key."""
        message, asks_again = run.message, any(one.nonce == run.nonce for one in world.runs)
        acquire = Acquire(run.nonce, run.attempt, message.redelivered, claim=message.claim)
        number = 0 if self.scenario.joins else message.number
        command = Ask(acquire, number if message.is_numbered else None)
        effect, after = self._send(world, command)
        asked, gone = (world.server, command), after.without(run)
        if world.faults.may("lost_replies") and not asks_again and effect.server != world.server:
            yield Step(f"{run.nonce} asks, the reply is lost", after.spend("lost_replies").put(run), asked)
        match effect.reply:
            case Tag.GRANTED:
                bodies = effect.bodies or (message.number,)
                begun = bodies[-1]
                is_stale = not self.scenario.joins and begun < world.history.begun
                running = run._replace(phase=Phase.RUNNING, number=effect.number or message.number, bodies=bodies)
                after = after.put(running).remember(begun=max(begun, world.history.begun))
                label = f"{run.nonce} runs {run.attempt} with {bodies}"
                yield Step(label, after, asked, Promise.NOT_STALE if is_stale else None)
            case Tag.SUPERSEDED | Tag.EXPIRED:
                if effect.reply is Tag.EXPIRED:
                    calls = calls_of(world.server, acquire)
                    assert calls
                    after = _expire(after, run.attempt.task_id, calls.number)
                after = after.put(run._replace(phase=Phase.REFUSED))
                yield Step(f"{run.nonce} learns that {run.attempt} is {effect.reply.value.decode()}", after, asked)
            case Tag.FINISHED:
                label = f"{run.nonce} finds the note of {run.attempt}"
                yield Step(label, after.put(run._replace(phase=Phase.STORED)), asked)
            case _:
                yield Step(f"{run.nonce} does not get the key: {run.attempt}", gone.enqueue(message), asked)

    def _run(self, world: World, run: Run) -> Iterator[Step]:
        match run.phase:
            case Phase.ASKED:
                yield from self._ask(world, run)
            case Phase.RUNNING:
                served = self._finish(world, run.bodies, run.attempt.task_id)
                yield from self._end(served, run, "finishes", over=run.attempt)
                if run.attempt.task_id in self.scenario.retries and not run.attempt.retries:
                    yield self._retry(world, run)
            case Phase.RETRIES if not any(
                one.run == run.nonce and one.stage is not Stage.SENT for one in world.publishers
            ):
                yield from self._end(world, run, "ends with its retry", over=None)
                if self.scenario.swallows:
                    served = self._finish(world, run.bodies, run.attempt.task_id)
                    yield from self._end(served, run, "succeeds after its retry", over=run.attempt)
            case Phase.REFUSED | Phase.GAVE_UP | Phase.STORED:
                yield from self._leave(world, run)
        yield from self._strike(world, run)

    def _end(self, world: World, run: Run, what: str, over: Attempt | None) -> Iterator[Step]:
        command = End(Release(run.nonce, run.attempt, unseen_copy=run.message.redelivered), over)
        released, asked = self._send(world, command)[1].without(run), (world.server, command)
        yield Step(f"{run.nonce} {what}", released, asked)
        if world.faults.may("deaths"):
            again = released.spend("deaths").enqueue(run.message._replace(redelivered=True))
            yield Step(f"{run.nonce} {what}, and dies before its ack", again, asked)

    def _finish(self, world: World, bodies: tuple[int, ...], job: str) -> World:
        past, joins = world.history, self.scenario.joins
        served = past.served | set(bodies) if joins else frozenset({max(bodies[-1], *past.served, 0)})
        owed = frozenset(one for one in past.owed if not _is_served(one[0], served, joins))
        return world.remember(served=served, owed=owed, ended=past.ended | {job})

    def _retry(self, world: World, run: Run) -> Step:
        attempt = run.attempt._replace(retries=1)
        joins, full = self.scenario.joins, self.scenario.full
        merge = Merge(world.fresh("h"), attempt, number=run.number, is_retry=True, joins=joins, full=full)
        retry, job = Publisher(merge, run=run.nonce), attempt.task_id
        after = world.put(run._replace(phase=Phase.RETRIES))
        if job in world.history.retried and Excuse.PUBLISHED_TWICE in self.excuses:
            after = _excuse(after, job)
        after = after.remember(retried=after.history.retried | {job})
        return Step(f"{run.nonce} retries itself", after._replace(publishers=(*after.publishers, retry)))

    def _leave(self, world: World, run: Run) -> Iterator[Step]:
        """A run that does not begin stores its outcome, and gives up what is reserved for its message."""
        job = run.attempt.task_id
        if run.phase is not Phase.STORED:
            stored = world.remember(ended=world.history.ended | {job})
            is_last = run.phase is Phase.GAVE_UP
            after = stored.without(run) if is_last else stored.put(run._replace(phase=Phase.STORED))
            yield Step(f"{run.nonce} stores the outcome of {job}", after)
        if run.phase is not Phase.GAVE_UP:
            never_runs = not run.message.redelivered
            over = run.attempt if never_runs else None
            command = GiveUp(run.message.claim, is_to_come=False, closes_window=never_runs, over=over)
            given_up = self._send(world, command)[1] if run.message.claim else world
            is_last = run.phase is Phase.STORED
            after = given_up.without(run) if is_last else given_up.put(run._replace(phase=Phase.GAVE_UP))
            yield Step(f"{run.nonce} gives up", after, (world.server, command) if run.message.claim else None)

    def _revoke(self, world: World, message: Message) -> Iterator[Step]:
        """A job is revoked: its callers are told so, unless they came after that."""
        run, past = Run(world.fresh("n"), message, Phase.STORED), world.history
        job = message.attempt.task_id
        told = world.remember(owed=frozenset(one for one in past.owed if one[1] != job), ended=past.ended | {job})
        yield Step(f"{job} is revoked", told.put(run))
        if message.claim:
            command = GiveUp(message.claim, is_to_come=False, closes_window=True, over=message.attempt)
            given_up = self._send(told, command)[1]
            yield Step(f"{job} is revoked, and gives up first", given_up, (world.server, command))

    def _die_first(self, world: World, message: Message) -> Step:
        """The child that has `message` dies before it asks. The main process gives up; the message comes again."""
        command = GiveUp(message.claim, is_to_come=False)
        again = self._send(world, command)[1].enqueue(message._replace(redelivered=True))
        return Step(f"a child dies before it asks for {message.attempt}", again, (world.server, command))

    def _strike(self, world: World, run: Run) -> Iterator[Step]:
        """What may happen to a run: its process dies, its key lapses, or its message is delivered to another worker."""
        if world.faults.may("deaths"):
            dead = world.spend("deaths").without(run).enqueue(run.message._replace(redelivered=True))
            for retry in [one for one in world.publishers if one.run == run.nonce]:
                dead = dead.turn(retry).remember(failed=dead.history.failed | {retry.merge.claim})
            yield Step(f"{run.nonce} dies {run.phase.value}", dead)
        has_key = world.server.lock.number_of(run.nonce) > 0
        if world.faults.may("pauses") and has_key:
            yield Step(f"the key of {run.nonce} lapses", _without_key(world.spend("pauses")))
        if world.faults.may("timeouts") and not run.message.redelivered and has_key:
            copy = run.message._replace(redelivered=True)
            yield Step(f"{run.attempt} is delivered again", world.spend("timeouts").enqueue(copy))

    def _pass_time(self, world: World) -> Iterator[Step]:
        lock, pending = world.server.lock, world.server.pending
        holder, queued = lock.permits[0], lock.queued
        if holder and all(run.nonce != holder.nonce for run in world.runs):
            label = f"the main process releases for {holder.attempt}"
            server = world.server
            if self._makes(Mistake.DEAD_CHILD_LOSES_ITS_ARGUMENTS):
                server = server.give(holder.attempt, None)
            yield Step(label, _without_key(world._replace(server=server)))
        if queued:
            is_orphan = queued.nonce not in world.claims
            if is_orphan or world.faults.may("lapses"):
                lapsed = world if is_orphan else world.spend("lapses")
                server = world.server._replace(lock=lock._replace(queued=None))
                yield Step(f"the place of {queued.attempt} lapses", lapsed._replace(server=server))
        waiting = {calls.time for _, calls in world.server.given} | ({pending.time} if pending else set())
        if Time.EARLY in waiting:
            yield Step("the calls are due", _at(world, Time.EARLY, Time.DUE))
        elif Time.DUE in waiting and self.scenario.expires:
            yield Step("the calls expire", _at(world, Time.DUE, Time.EXPIRED))


def _accept(world: World, number: int, job: str, joins: bool) -> World:
    """This state, in which a caller was told that its call is accepted."""
    past = world.history
    if _is_served(number, past.served, joins) or job in past.excused:
        return world
    if any(one == job and number <= last for one, last in past.expired):
        return world
    return world.remember(owed=past.owed | {(number, job)})


def _expire(world: World, job: str, last: int) -> World:
    """This state, in which the calls of a ticket up to the last one have expired."""
    past = world.history
    owed = frozenset(one for one in past.owed if one[1] != job or one[0] > last)
    return world.remember(owed=owed, expired=past.expired | {(job, last)})


def _excuse(world: World, job: str) -> World:
    """This state, in which the calls merged into `job` are excused. Further faults are not explored after that."""
    past = world.history
    owed = frozenset(one for one in past.owed if one[1] != job)
    return world.remember(owed=owed, excused=past.excused | {job})._replace(faults=Faults())


def _is_served(number: int, served: frozenset[int], joins: bool) -> bool:
    return number in served if joins else number <= max(served, default=0)


def _without_key(world: World) -> World:
    return world._replace(server=world.server._replace(lock=world.server.lock.put(1, None)))


def _at(world: World, old: Time, new: Time) -> World:
    """This state some time later: all calls that wait and were `old` are `new`."""
    server = world.server

    def later(calls: Calls) -> Calls:
        return calls._replace(time=new) if calls.time is old else calls

    given = frozenset((attempt, later(calls)) for attempt, calls in server.given)
    return world._replace(server=server._replace(pending=server.pending and later(server.pending), given=given))
