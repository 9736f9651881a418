"""Driver: drives the hold of an execution, as a worker's run, its keeper and its store do in the code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set

from celery_redislock.policy import leaves_note
from celery_redislock.protocol.scripts import Tag
from celery_redislock.protocol.tokens import Attempt
from promises import Excuse, Promise

from . import known
from .commands import Acquire, Command, Effect, GiveUp, Release, Renew
from .effects import apply
from .executions import IN_BODY, Execution, Phase
from .fate import token_of
from .holds import LEASE, Hold, token
from .messages import Message
from .rules import Mistake
from .server import Server
from .world import Step, World


class Driver:
    """Asks for keys and releases them.

    Args:
        limit: How many messages may wait in a room.
        mistakes: The mistakes to make.
        excuses: The excuses to accept.
    """

    def __init__(self, limit: int | None, mistakes: Set[Mistake], excuses: Set[Excuse]) -> None:
        self.limit = limit
        self.mistakes = mistakes
        self.excuses = excuses

    def _conflict(self, world: World, one: Execution, asked: tuple[Server, Command], effect: Effect) -> Step:
        """What becomes of an execution that meets a holder."""
        raise NotImplementedError

    def _ask(self, world: World, one: Execution) -> Iterator[Step]:
        accepted = one
        if self._makes(Mistake.ACK_BEFORE_THE_GRANT) and not one.message.acks_late:
            accepted = one._replace(unacked=False)
        accepted = accepted._replace(hold=one.hold.asked())
        yield self._answer(world, accepted)
        if world.faults.may("lost_replies"):
            asked = self._acquire(accepted)
            server = self._apply(world, asked).server
            world = world._replace(server=server).spend("lost_replies")
            label = f"{one.nonce} asks for the key, the reply is lost"
            yield Step(label, world.put(accepted._replace(phase=Phase.ASKED)), (world.server, asked))

    def _ask_again(self, world: World, one: Execution) -> Iterator[Step]:
        yield self._answer(world, one)
        # Or the second reply is lost as well. The store then undoes it, and to the execution it is an outage.
        undo = one.hold.undo()
        after = world._replace(server=self._apply(world, undo).server)
        begun = known.comes_back_begun(one, self.mistakes)
        yield self._wait(after, one, begun, "has no answer and undoes it", (world.server, undo))
        if world.faults.may("late_undos"):
            mine = one.hold.token
            hold = one.hold.doubted(one.hold.asks).minted(token(mine.nonce, one.attempt, mine.times + 1))
            if self._makes(Mistake.DOUBT_ASKS_AGAIN_AS_BEFORE):
                hold = hold.renamed(mine)
            again = world.spend("late_undos").put(one._replace(phase=Phase.RESERVED, hold=hold))
            yield Step(f"{one.nonce} has no answer, and undoes it, late", again._replace(late=(*world.late, undo)))

    def _arrive(self, world: World, undo: Release) -> Iterator[Step]:
        """An undo on its way arrives, or is lost."""
        effect = self._apply(world, undo)
        gone = world._replace(late=tuple(one for one in world.late if one != undo))
        yield Step(f"the undo of {undo.nonce} is lost", gone)
        arrived = gone._replace(server=effect.server)
        body = [one for one in world.executions if one.nonce == undo.nonce and one.phase in IN_BODY]
        broken = Promise.OWNER if body and effect.reply is Tag.RELEASED else None
        yield Step(f"the undo of {undo.nonce} arrives", arrived, (world.server, undo), broken)

    def _answer(self, world: World, one: Execution) -> Step:
        command = self._acquire(one)
        effect = self._apply(world, command)
        asked = (world.server, command)
        after = world._replace(server=effect.server)
        one = one._replace(hold=one.hold.answered(one.hold.asks, effect.reply))
        if effect.reply is Tag.GRANTED:
            return self._start(after, one._replace(permit=effect.permit), asked)
        if effect.reply is Tag.FINISHED:
            if one.message.claim and not self._makes(Mistake.DROPPED_KEEPS_ITS_CLAIM):
                # The attempt before this one may have run twice, and have handed its key over to this message again.
                after = after._replace(server=self._apply(after, self._give_up(one.message, world)).server)
            return self._close(after, one, Phase.DROPPED, f"{one.nonce} finds the note and is dropped", asked)
        return self._conflict(after, one, asked, effect)

    def _start(self, world: World, one: Execution, asked: tuple[Server, Command]) -> Step:
        again = one.attempt in world.history.finished and not self._is_excused(world, one.attempt)
        world = world.put(one._replace(phase=Phase.RUNNING, lost=False)).remember("started", one.attempt)
        label = f"{one.nonce} is granted the key and starts {one.attempt}"
        return Step(label, world, asked, Promise.NOT_AGAIN if again else None)

    def _wait(self, world: World, one: Execution, begun: bool, why: str, asked: tuple[Server, Command]) -> Step:
        """The message enters its worker's room, unacked. If the room is full, it is published again."""
        if self.limit is not None and len(world.waiting_in(one.home)) >= self.limit:
            return self._send_back(world, one, begun, f"{why} and comes back", asked)
        number = 0 if self._makes(Mistake.EQUALS_SHARE_A_CALL) else self._number(world, one)
        hold = self._new_hold(one, one.limit)
        waiting = one._replace(phase=Phase.WAITING, hold=hold, begun=one.begun or begun, number=number)
        broken = Promise.FREED if world.server.number_of(one.nonce) else None
        return Step(f"{one.nonce} {why} and waits", world.put(waiting), asked, broken)

    @staticmethod
    def _number(world: World, one: Execution) -> int:
        """A number that no other of the room has who has the rank of `one`. The code just counts those who come."""
        rank = one.message.rank
        others = [other for other in world.executions if other.home == one.home and other.nonce != one.nonce]
        taken = {other.number for other in others if other.message.rank == rank}
        taken |= {key.number for key in world.server.keys if key.room == one.home and key.rank == rank}
        return next(number for number in itertools.count() if number not in taken)

    def _send_back(self, world: World, one: Execution, begun: bool, why: str, asked: tuple[Server, Command]) -> Step:
        return self._close(self._resend(world, one, begun), one, Phase.RETURNED, f"{one.nonce} {why}", asked)

    @staticmethod
    def _resend(world: World, one: Execution, begun: bool = False) -> World:
        again = one.header._replace(redelivered=False, returned=True, begun=one.header.begun or begun)
        return world.enqueue(again)

    def _renew(self, world: World, one: Execution) -> Step:
        command = Renew(self._token(one), one.permit)
        effect = self._apply(world, command)
        after = world if effect.reply is Tag.KEPT else world.put(one._replace(lost=True))
        return Step(
            f"{one.nonce} renews", after, (world.server, command), self._stolen(world.server, effect, command.nonce)
        )

    def _release(self, world: World, one: Execution) -> Iterator[Step]:
        """The execution sends its release, and does not wait for the answer: it goes on as if the release had run."""
        one = one._replace(hold=self._ended(one))
        command = one.hold.release()
        effect = self._apply(world, command)
        asked, broken = (world.server, command), self._stolen(world.server, effect, command.nonce)
        assert one.ending
        if leaves_note(one.ending.state):
            world = world.remember("finished", one.attempt)
        elif not one.ending.requeues:
            world = world.remember("settled", one.attempt)
        released = world._replace(server=effect.server)
        label = f"{one.nonce} releases: {effect.reply.value}"
        step = self._close(released, one, Phase.RELEASED, label, asked)
        yield step._replace(broken=broken or step.broken)
        if world.faults.may("lost_replies"):
            yield self._doubt(released.spend("lost_replies"), one, label + ", the reply is lost")._replace(asked=asked)
            lost = world.spend("lost_replies")
            if command.note and not world.server.number_of(command.nonce):  # neither key nor note keeps copies away
                lost = lost.excuse(one.attempt, Excuse.RELEASE_IN_DOUBT)
            yield self._doubt(lost, one, f"{one.nonce} sends its release, which is lost")

    def _doubt(self, world: World, one: Execution, label: str) -> Step:
        """The connection is lost before the answer was read, or the server refuses the command, and the run ends.

        When the release is sent again it leaves the note in any case, for the ack may be lost as well.
        """
        if self._makes(Mistake.DOUBT_IS_FORGOTTEN):
            return self._close(world, one, Phase.RELEASED, label, None)
        hold = one.hold.noted(one.attempt, True) if self._makes(Mistake.DOUBT_NOTES_UNFINISHED_WORK) else one.hold
        return self._close(world, one._replace(hold=hold), Phase.IN_DOUBT, label, None)

    def _send_again(self, world: World, one: Execution) -> Step:
        """The keeper sends a release that is in doubt once more, at any later time."""
        command = one.hold.release(in_any_case=not self._makes(Mistake.DOUBT_LEAVES_NO_NOTE))
        if self._makes(Mistake.DOUBT_NAMES_THE_NEXT_RUN):
            running = [other.nonce for other in world.executions if other.home == one.home and other.phase in IN_BODY]
            command = command._replace(nonce=next(iter(running), command.nonce))
        effect = self._apply(world, command)
        label = f"the keeper sends the release of {one.nonce} again: {effect.reply.value}"
        after = world._replace(server=effect.server)
        step = self._close(after, one, Phase.RELEASED, label, (world.server, command))
        return step._replace(broken=self._stolen(world.server, effect, self._token(one)) or step.broken)

    def _ended(self, one: Execution) -> Hold:
        assert one.ending
        note = one.attempt if known.is_over(one.ending.state, self.mistakes) else None
        return one.hold.noted(note, known.copy_may_wait(one, self.mistakes))

    def _part_with_message(self, world: World, one: Execution) -> Step:
        verb = "requeues its message" if one.ending is not None else "acks"
        return Step(f"{one.nonce} {verb}", world.part(one))

    def _close(
        self, world: World, one: Execution, phase: Phase, label: str, asked: tuple[Server, Command] | None
    ) -> Step:
        """The execution has done its work. It stays only while its ack is to come, or its release is in doubt."""
        is_in_doubt = phase is Phase.IN_DOUBT
        broken = Promise.FREED if world.server.number_of(one.nonce) and not is_in_doubt else None
        requeues = one.ending is not None and one.ending.requeues
        if requeues and not one.unacked and not one.message.acks_late:
            world = world.excuse(one.attempt, Excuse.ACKED_EARLY)
        if not (one.unacked or is_in_doubt):
            return Step(label, world.without(one), asked, broken)
        done = Execution(one.nonce, one.message, phase, one.unacked, ending=one.ending if requeues else None)
        if is_in_doubt:
            done = done._replace(hold=one.hold, room=one.room)
        return Step(label, world.put(done), asked, broken)

    def _makes(self, mistake: Mistake) -> bool:
        return mistake in self.mistakes

    def _acquire(self, one: Execution) -> Acquire:
        return one.hold.acquire(LEASE, one.attempt if known.reads_note(one, self.mistakes) else None)

    def _new_hold(self, one: Execution, limit: int) -> Hold:
        """The hold as it is rebuilt at the delivery, and again when the message is called."""
        minted = token(token_of(one, self.mistakes), one.attempt, one.hold.token.times)
        return Hold.of(minted, limit, one.message.claim)

    def _apply(self, world: World, command: Command) -> Effect:
        return apply(world.server, command, self.mistakes)

    def _is_excused(self, world: World, attempt: Attempt) -> bool:
        return any(
            whose == attempt and excuse in self.excuses and excuse is not Excuse.ACKED_EARLY
            for whose, excuse in world.history.excused
        )

    @staticmethod
    def _stolen(before: Server, effect: Effect, nonce: str) -> Promise | None:
        """The promise `OWNER`, if a command freed or extended a key that was not its sender's."""
        for permit, (old, new) in enumerate(zip(before.permits, effect.server.permits, strict=True), 1):
            if old is not None and old.nonce != nonce and (old != new or permit == effect.permit):
                return Promise.OWNER
        return None

    def _give_up(self, message: Message, world: World) -> GiveUp:
        limit = 1 if self._makes(Mistake.MAIN_PROCESS_KNOWS_ONE_PERMIT) else len(world.server.permits)
        return GiveUp(message.claim, known.may_be_handed_a_key(message.attempt.retries), limit)
