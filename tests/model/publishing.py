"""Publishers of scope ``job``: they reserve the key, send the message with the claim, and lengthen the reservation."""

from __future__ import annotations

from collections.abc import Iterator, Set
from enum import Enum
from typing import NamedTuple

from celery_redislock.task.publish_decisions import Published, on_publish
from celery_redislock.task.publish_decisions import Publishing as Decision

from . import known
from .commands import Acquire, Release, Renew, Reply
from .effects import apply
from .executions import Message
from .rules import Mistake, Promise
from .world import Step, World


class Stage(Enum):
    """Where a publisher is in its publish."""

    WANTS = "before it asks"
    ASKED = "with its acquire unanswered"
    TOOK = "before it sends"
    SENT = "before it lets the key live longer"

    __hash__ = object.__hash__


class Publisher(NamedTuple):
    """Somebody who calls ``delay()`` once, on a task of scope ``job``."""

    message: Message
    stage: Stage = Stage.WANTS

    @property
    def claim(self) -> str:
        return self.message.claim


class Publishing:
    """The steps of publishers.

    Args:
        mistakes: The mistakes that the publishers make.
    """

    def __init__(self, mistakes: Set[Mistake]) -> None:
        self.mistakes = mistakes

    def of(self, world: World, one: Publisher) -> Iterator[Step]:
        """What the publisher `one` may do next, and that it may die."""
        match one.stage:
            case Stage.WANTS:
                claimed = one._replace(message=one.message._replace(claim=world.fresh("h")))
                yield self._take(world.without_publisher(one), claimed)
                if world.faults.may("lost_replies"):
                    yield self._lose_reply(world.without_publisher(one).spend("lost_replies"), claimed)
            case Stage.ASKED:
                yield self._take(world.without_publisher(one), one)
            case Stage.TOOK:
                yield self._send(world.without_publisher(one), one)
                if world.faults.may("failed_publishes"):
                    yield from self._fail(world.without_publisher(one).spend("failed_publishes"), one)
            case Stage.SENT:
                command = Renew(one.claim)
                gone = world.without_publisher(one)
                yield Step(f"the publisher of {one.message} lets the key live longer", gone, (world.server, command))
        if world.faults.may("deaths"):
            dead = world.without_publisher(one).spend("deaths").remember("failed", one.message.attempt)
            yield Step(f"the publisher of {one.message} dies {one.stage.value}", dead)

    def _take(self, world: World, one: Publisher) -> Step:
        command = Acquire(one.claim, one.message.attempt, reads_note=False)
        effect = apply(world.server, command, self.mistakes)
        after, asked = world._replace(server=effect.server), (world.server, command)
        if effect.reply is Reply.GRANTED:
            return Step(f"a publisher takes the key for {one.message}", after.put_publisher(one, Stage.TOOK), asked)
        key = effect.holders[0]  # the limit of a job is 1
        holder = key.attempt
        decision = on_publish(
            Published("task", is_bare=True, causes=frozenset()),
            known.holder(key),
            lambda _: world.has_ended(holder) and Mistake.ENDED_IS_A_HOLDER not in self.mistakes,
        )
        if decision is Decision.SEND:
            # The key is offered to somebody who waits. The message has no claim, and meets its policy when it starts.
            message = one.message._replace(claim="")
            sent = after.remember("published", message.attempt).enqueue(message)
            return Step(f"{message} is sent, for the key is offered", sent, asked)
        if decision is Decision.OUTLIVE:
            # The message gets the place in the queue, which the model leaves out: it takes its turn like any other.
            sent = after.remember("published", one.message.attempt).enqueue(one.message)
            return Step(f"{one.message} is sent, for {holder} has ended", sent, asked)
        label = f"the publisher of {one.message.attempt} is answered with {holder}"
        broken = Promise.SERVED_ANEW if one.message.after == holder.task_id else None
        return Step(label, after.remember("answered", holder), asked, broken)

    def _lose_reply(self, world: World, one: Publisher) -> Step:
        command = Acquire(one.claim, one.message.attempt, reads_note=False)
        after = world._replace(server=apply(world.server, command, self.mistakes).server)
        label = f"a publisher asks for the key for {one.message}, the reply is lost"
        return Step(label, after.put_publisher(one, Stage.ASKED), (world.server, command))

    def _send(self, world: World, one: Publisher) -> Step:
        sent = world.remember("published", one.message.attempt).enqueue(one.message).put_publisher(one, Stage.SENT)
        return Step(f"the publisher sends {one.message}", sent)

    def _fail(self, world: World, one: Publisher) -> Iterator[Step]:
        """The broker reports an error. The broker may have taken the message all the same."""
        command = Release(one.claim, None, unseen_copy=False)
        server, asked = world.server, None
        if Mistake.FAILED_PUBLISH_LEAVES_ITS_KEY not in self.mistakes:
            server, asked = apply(world.server, command, self.mistakes).server, (world.server, command)
        failed = world._replace(server=server).remember("failed", one.message.attempt)
        is_left = server.number_of(one.claim)
        yield Step(f"{one.message} cannot be sent", failed, asked, Promise.NOTHING_LEFT if is_left else None)
        out = failed.remember("published", one.message.attempt).enqueue(one.message)
        yield Step(f"{one.message} is out, but seems not to be", out, asked)
