"""Fate: timeouts, lost connections, deaths and pauses, and how the main process clears up after a dead child."""

from __future__ import annotations

from collections.abc import Iterator, Set

from .commands import GiveUp, Release, apply
from .executions import CLOSED, IN_BODY, IN_CHILD, Ending, Execution, Phase
from .rules import Excuse, Mistake
from .world import Step, World


class Fate:
    """The steps that happen to an execution.

    Args:
        mistakes: The mistakes that the main process makes.
    """

    def __init__(self, mistakes: Set[Mistake]) -> None:
        self.mistakes = mistakes

    def strike(self, world: World, one: Execution) -> Iterator[Step]:
        """What may happen to the execution `one`, whatever it does."""
        faults = world.faults
        if one.unacked and faults.may("timeouts"):
            yield self._time_out(world.spend("timeouts"), one)
        if one.unacked and one.message.acks_late and faults.may("disconnects"):
            # The main process marks the key of a run that is in its body, as `worker.redelivery.ExpectCopies` does. The
            # mark has the same effect as `overdue`: the release leaves a note in any case.
            marked = one.phase in IN_BODY
            lost = world.spend("disconnects").put(one._replace(unacked=False, overdue=one.overdue or marked))
            lost = lost.enqueue(one.message.again)
            if not marked:
                lost = lost.excuse(one.attempt, Excuse.DISCONNECTED)
            yield Step(f"the broker loses {one.nonce} and gives {one.attempt} again", lost)
        if faults.may("deaths"):
            if one.phase in IN_CHILD:
                dead = _excuse_death(world.spend("deaths"), one)
                dead = dead.put(Execution(one.nonce, one.message, Phase.CHILD_DEAD, one.unacked, one.overdue))
                yield Step(f"the child of {one.nonce} dies {one.phase.value}", dead)
            died = _excuse_death(world.spend("deaths").without(one), one)
            yield _requeue(died, one, f"the worker of {one.nonce} dies {one.phase.value}")

    def _time_out(self, world: World, one: Execution) -> Step:
        if one.phase in {Phase.RELEASING, Phase.RELEASED, Phase.RETURNED}:
            world = world.excuse(one.attempt, Excuse.ACK_TOO_LATE)
        world = world.put(one._replace(unacked=False, overdue=True)).enqueue(one.message.again)
        if one.phase in CLOSED:
            world = world.without(one)
        return Step(f"the visibility timeout of {one.nonce}'s message passes {one.phase.value}", world)

    def clear_up(self, world: World, one: Execution) -> Iterator[Step]:
        """After a child's death the main process releases its key by the nonce and requeues its message, in any order.

        It requeues an unacked message, as with `task_reject_on_worker_lost`. Without that setting Celery acks the
        message, and the attempt is a failure.
        """
        note = one.attempt if Mistake.NOTE_OF_A_DEAD_CHILD in self.mistakes else None
        command = Release(token_of(one, self.mistakes), note, one.overdue)
        effect = apply(world.server, command, self.mistakes)
        server = effect.server
        if one.message.claim:
            before = server.key is not None and server.key.attempt
            is_to_come = bool(before) and before.task_id == one.attempt.task_id and before.retries < one.attempt.retries
            server = apply(server, GiveUp(one.message.claim, is_to_come), self.mistakes).server
        after = world._replace(server=server).without(one)
        label = f"the main process releases for {one.nonce}"
        if one.unacked:
            requeuing = Ending("died", requeues=True)
            waiting = after.put(Execution(one.nonce, one.message, Phase.RELEASED, ending=requeuing))
            yield Step(label, waiting, (world.server, command))
            kept = world.put(one._replace(unacked=False))
            yield _requeue(kept, one, f"the main process gives {one.attempt} of {one.nonce} back")
        else:
            yield Step(label, after, (world.server, command))

    def expire(self, world: World) -> Iterator[Step]:
        """The lease ends: nobody renews the key, because its holder is gone or paused."""
        key = world.server.key
        if key is None:
            return
        free = world._replace(server=world.server._replace(key=None))
        holders = [
            one
            for one in world.executions
            if token_of(one, self.mistakes) == key.nonce and one.phase is not Phase.CHILD_DEAD
        ]
        if not holders:
            yield Step(f"the lease of {key.nonce} ends", free)
        elif world.faults.may("pauses"):
            free = free.spend("pauses")
            for one in holders:
                free = free.put(one._replace(lost=True))
            yield Step(f"{key.nonce} is paused past its lease, and will know that its lock is lost", free)


def token_of(one: Execution, mistakes: Set[Mistake]) -> str:
    """The nonce under which an execution holds its key: its own, unless a mistake says otherwise."""
    shares = Mistake.CLAIM_IS_KEPT in mistakes
    return one.message.claim if shares and one.message.claim else one.nonce


def _requeue(world: World, one: Execution, label: str) -> Step:
    return Step(label, world.enqueue(one.message.again) if one.unacked else world)


def _excuse_death(world: World, one: Execution) -> World:
    done = one.attempt in world.history.finished or one.phase is Phase.RETURNED
    if one.unacked and done:
        return world.excuse(one.attempt, Excuse.DIED_BEFORE_ACK)
    if not one.unacked and not one.message.acks_late:
        return world.excuse(one.attempt, Excuse.ACKED_EARLY)
    return world
