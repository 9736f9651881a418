"""Publishers of scope ``job``: they reserve the key, or the place in the queue, send the message with the claim, and
lengthen the reservation.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from enum import Enum
from typing import NamedTuple

from celery_redislock.policy.conflict import Answer, NotSent, on_outstanding
from celery_redislock.protocol.scripts import Passed, Tag
from promises import Promise

from . import known
from .commands import Command, Effect, Renew
from .effects import apply
from .executions import CLOSED, OVER, Phase
from .holds import LEASE, PLACE, WINDOW, Hold, token
from .messages import Message
from .rules import Mistake
from .server import Key
from .world import Step, World


class Stage(Enum):
    """Where a publisher is in its publish."""

    WANTS = "before it asks"
    ASKED = "with its question unanswered"
    PASSES = "before it asks again"
    TOOK = "before it sends"
    SENT = "before it lets the reservation live longer"

    __hash__ = object.__hash__


class Publisher(NamedTuple):
    """Somebody who calls ``delay()`` once, on a task of scope ``job``."""

    message: Message
    stage: Stage = Stage.WANTS
    passed: Passed = Passed()
    """The jobs of which it was told, and that it passes over."""
    hold: Hold = OVER

    @property
    def claim(self) -> str:
        return self.message.claim

    @property
    def question(self) -> Command:
        window = LEASE if self.message.window else None
        return self.hold.reserve(LEASE, self.passed, in_queue=False, window=window)


class Publishing:
    """The steps of publishers.

    Args:
        mistakes: The mistakes that the publishers make.
        promises_one_job: Whether nothing can happen that makes a job's reservation end before the job.
        are_slow: Whether a publisher may be so slow that another one takes its reservation over.
    """

    def __init__(self, mistakes: Set[Mistake], *, promises_one_job: bool, are_slow: bool) -> None:
        self.mistakes = mistakes
        self.promises_one_job = promises_one_job
        self.are_slow = are_slow

    def of(self, world: World, one: Publisher) -> Iterator[Step]:
        """What the publisher `one` may do next, and that it may die."""
        gone = world.without_publisher(one)
        match one.stage:
            case Stage.WANTS:
                claim = world.fresh("h")
                places = (PLACE, WINDOW) if one.message.window else (PLACE,)
                hold = Hold.of(token(claim, one.message.attempt), places=places)
                claimed = one._replace(message=one.message._replace(claim=claim), hold=hold.asked())
                yield self._ask(gone, claimed)
                if world.faults.may("lost_replies"):
                    yield self._lose_reply(gone.spend("lost_replies"), claimed)
            case Stage.ASKED:
                yield self._ask(gone, one)
            case Stage.PASSES:
                yield self._ask(gone, one._replace(hold=one.hold.asked()))
            case Stage.TOOK:
                yield self._send(gone, one)
                if world.faults.may("failed_publishes"):
                    yield from self._fail(gone.spend("failed_publishes"), one)
            case Stage.SENT:
                yield self._say_sent(gone, one)
        if world.faults.may("deaths"):
            dead = gone.spend("deaths").remember("failed", one.message.attempt)
            yield Step(f"the publisher of {one.message} dies {one.stage.value}", dead)

    def _ask(self, world: World, one: Publisher) -> Step:
        command = one.question
        effect = apply(world.server, command, self.mistakes)
        one = one._replace(hold=one.hold.answered(one.hold.asks, effect.reply))
        after, asked = world._replace(server=effect.server), (world.server, command)
        if effect.reply in {Tag.OUTSTANDING, Tag.WINDOW}:
            return self._outstanding(after, one, effect, asked)
        key = world.server.permits[0]
        is_stolen = key is not None and not key.is_reserved and key != effect.server.permits[0]
        is_queued = effect.reply is Tag.QUEUED
        took = one._replace(message=one.message._replace(queued=is_queued), passed=Passed())
        label = f"a publisher takes the {'place' if is_queued else 'key'} for {one.message}"
        return Step(label, after.put_publisher(took, Stage.TOOK), asked, Promise.OWNER if is_stolen else None)

    def _outstanding(self, world: World, one: Publisher, effect: Effect, asked: tuple[object, ...]) -> Step:
        holders, in_window = effect.holders, effect.reply is Tag.WINDOW
        causes = frozenset({one.message.parent} - {""})
        taken = [known.holder(key, self.mistakes - {Mistake.UNSENT_IS_A_HOLDER}) for key in holders]
        decision = on_outstanding(
            *("task", causes, taken, one.passed),
            lambda holder: self._has_ended(world, holder.task_id),
            in_window=in_window,
        )
        if isinstance(decision, NotSent):
            return self._be_patient(
                world, one, next(key for key in holders if key.attempt.task_id == decision.task_id), asked
            )
        if decision is None:
            sent = world.remember("published", one.message.attempt).enqueue(one.message._replace(claim=""))
            return Step(f"{one.message} is sent without a place", sent, asked, self._second_job(world, one))
        if not isinstance(decision, Answer):
            passes = world.put_publisher(one._replace(passed=decision), Stage.PASSES)
            met = ", ".join(str(key.attempt) for key in holders)
            return Step(f"the publisher of {one.message.attempt} passes over {met}", passes, asked)
        job = next(key.attempt for key in holders if key.attempt.task_id == decision.job.task_id)
        label = f"the publisher of {one.message.attempt} is answered with {job}"
        broken = Promise.SERVED_ANEW if one.message.after == job.task_id and not in_window else None
        return Step(label, world.remember("answered", job), asked, broken)

    def _be_patient(self, world: World, one: Publisher, holder: Key, asked: tuple[object, ...]) -> Step:
        """Ask again, until the job has been sent or its publisher has been given the time for it."""
        lives = any(other.claim == holder.nonce for other in world.publishers)
        one = one._replace(hold=one.hold._replace(asks=0))  # how often it has asked must not make another state
        if lives and not world.faults.may("slow_publishes"):
            waits = world.put_publisher(one, Stage.PASSES)
            return Step(f"the publisher of {one.message.attempt} waits for {holder.attempt} to be sent", waits, asked)
        world = world.spend("slow_publishes") if lives else world
        unsent = one.passed.unsent | {holder.attempt.task_id}
        takes = one._replace(passed=one.passed._replace(unsent=unsent))
        label = f"the publisher of {one.message.attempt} is to take {holder.attempt} over"
        return Step(label, world.put_publisher(takes, Stage.PASSES), asked)

    def _say_sent(self, world: World, one: Publisher) -> Step:
        command = Renew(one.claim, 0 if one.message.queued else 1, one.message.window)
        effect = apply(world.server, command, self.mistakes)
        after, is_kept = world._replace(server=effect.server), effect.reply is Tag.KEPT
        if effect.server.window is not None and effect.server.window.nonce == one.claim:
            after = after.remember("windows", one.message.attempt)
        if self.promises_one_job and self.are_slow and is_kept:
            after = after.remember("jobs", one.message.attempt)
        return Step(f"the publisher of {one.message} says that it is sent", after, (world.server, command))

    def _has_ended(self, world: World, task_id: str | None) -> bool:
        ended = any(attempt.task_id == task_id for attempt in world.history.stored)
        return ended and Mistake.ENDED_IS_A_HOLDER not in self.mistakes

    def _lose_reply(self, world: World, one: Publisher) -> Step:
        command = one.question
        after = world._replace(server=apply(world.server, command, self.mistakes).server)
        label = f"a publisher asks for the key for {one.message}, the reply is lost"
        return Step(label, after.put_publisher(one, Stage.ASKED), (world.server, command))

    def _send(self, world: World, one: Publisher) -> Step:
        sent, broken = world.remember("published", one.message.attempt), None
        if self.promises_one_job:
            is_overtaken = self.are_slow and not any(key.nonce == one.claim for key in world.server.reserved)
            broken = None if is_overtaken else self._second_job(world, one)
            sent = sent if self.are_slow else sent.remember("jobs", one.message.attempt)
        if one.message.window and world.history.windows:
            broken = Promise.ONE_IN_WINDOW
        sent = sent.enqueue(one.message).put_publisher(one, Stage.SENT)
        return Step(f"the publisher sends {one.message}", sent, None, broken)

    def _second_job(self, world: World, one: Publisher) -> Promise | None:
        """The promise `ONE_JOB`, if another job is outstanding in whose place `one` could have been answered."""
        sent = {attempt.task_id for attempt in world.history.jobs} - {one.message.parent}
        past = world.history
        over = {attempt.task_id for attempt in past.stored | past.settled | past.failed}
        there = {message.attempt.task_id for message in world.queue}
        there |= {run.attempt.task_id for run in world.executions if run.phase not in CLOSED | {Phase.IN_DOUBT}}
        return Promise.ONE_JOB if (sent - over) & there else None

    def _fail(self, world: World, one: Publisher) -> Iterator[Step]:
        """The broker reports an error. The broker may have taken the message all the same."""
        command = one.hold.undo()
        server, asked = world.server, None
        if Mistake.FAILED_PUBLISH_LEAVES_ITS_WINDOW in self.mistakes:
            command = command._replace(closes_window=False)
        if Mistake.FAILED_PUBLISH_LEAVES_ITS_KEY not in self.mistakes:
            server, asked = apply(world.server, command, self.mistakes).server, (world.server, command)
        failed = world._replace(server=server).remember("failed", one.message.attempt)
        is_left = any(key is not None and key.nonce == one.claim for key in (*server.reserved, server.window))
        yield Step(f"{one.message} cannot be sent", failed, asked, Promise.FREED if is_left else None)
        out = failed.remember("published", one.message.attempt).enqueue(one.message)
        yield Step(f"{one.message} is out, but seems not to be", out, asked)
