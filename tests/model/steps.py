"""What can happen next: what each execution does, from its delivery to its ack.

It follows `Execution` and the scripts; where it differs, a comment says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

from celery_redislock.server.tokens import Attempt

from .commands import Acquire, Claim, Command, Effect, GiveUp, HandOver, Release, Renew, Reply, Server, apply, noted
from .executions import Ending, Execution, Message, Phase
from .fate import Fate, token_of
from .publishing import Publisher, Publishing
from .rules import OVER, Excuse, Mistake, Promise
from .world import Step, World

#: Simultaneous executions. How often a message comes back has no bound.
MOST_EXECUTIONS = 3


class Steps:
    """All steps from a state.

    Args:
        plays: How the body of each attempt may end.
        mistakes: Those to make.
        excuses: Those to accept.
    """

    def __init__(
        self, plays: Mapping[Attempt, tuple[Ending, ...]], mistakes: Set[Mistake], excuses: Set[Excuse]
    ) -> None:
        self.plays = plays
        self.mistakes = mistakes
        self.excuses = excuses
        self.fate = Fate(mistakes)
        self.publishing = Publishing(mistakes)

    def of(self, world: World) -> Iterator[Step]:
        for step in self._steps(world):
            yield step._replace(world=step.world.settle()) if step.world.is_calm else step

    def _steps(self, world: World) -> Iterator[Step]:
        if len(world.executions) < MOST_EXECUTIONS:
            yield from self._deliver(world)
        for one in world.executions:
            match one.phase:
                case Phase.RESERVED:
                    yield from self._ask(world, one)
                case Phase.ASKED:
                    yield from self._ask_again(world, one)
                case Phase.RUNNING | Phase.PUBLISHED:
                    yield from self._run(world, one)
                case Phase.ENDED | Phase.RELEASING:
                    yield from self._release(world, one)
                case Phase.CHILD_DEAD:
                    yield from self.fate.clear_up(world, one)
                case Phase.RELEASED | Phase.RETURNED | Phase.DROPPED:
                    yield self._part_with_message(world, one)
            yield from self.fate.strike(world, one)
        for publisher in world.publishers:
            yield from self.publishing.of(world, publisher)
        if world.faults.may("revokes"):
            yield from self._revoke(world)
        if world.faults.may("doublings"):
            for message in {message for message in world.queue if message.returned}:
                yield Step(f"{message} was sent twice", world.enqueue(message).spend("doublings"))
        yield from self.fate.expire(world)

    def _deliver(self, world: World) -> Iterator[Step]:
        for message in set(world.queue):
            one = Execution(world.fresh("n"), message)
            delivered = Step(f"{one.nonce} gets {message}", world.dequeue(message).put(one))
            yield from self._on(delivered, one, self._ask) if world.is_calm else (delivered,)

    def _revoke(self, world: World) -> Iterator[Step]:
        """As far as it is for a message with a claim: the main process gives it up."""
        for message in {message for message in world.queue if message.claim}:
            command = self._give_up(message)
            after = world._replace(server=self._apply(world, command).server)
            after = after.dequeue(message).spend("revokes").remember("settled", message.attempt)
            yield Step(f"{message} is revoked", after, (world.server, command))

    @staticmethod
    def _give_up(message: Message) -> GiveUp:
        return GiveUp(message.claim, is_to_come=message.attempt.retries > 0)

    @staticmethod
    def _on(step: Step, one: Execution, go: Callable[[World, Execution], Iterator[Step]]) -> Iterator[Step]:
        """Two steps at once: where nothing can come between them, their order with others' makes no difference."""
        for last in go(step.world, one):
            yield last._replace(label=f"{step.label}; {last.label}")

    # -- asking for the key

    def _ask(self, world: World, one: Execution) -> Iterator[Step]:
        accepted = one if one.message.acks_late else one._replace(unacked=False)
        yield self._answer(world, accepted)
        if world.faults.may("lost_replies"):
            asked = self._acquire(one)
            server = self._apply(world, asked).server
            world = world._replace(server=server).spend("lost_replies")
            label = f"{one.nonce} asks for the key, the reply is lost"
            yield Step(label, world.put(accepted._replace(phase=Phase.ASKED)), (world.server, asked))

    def _ask_again(self, world: World, one: Execution) -> Iterator[Step]:
        yield self._answer(world, one)
        # Or that reply is lost too: undone, by a release that needs no reply, and an outage to the execution.
        undo = Release(one.nonce, None, unseen_copy=False)
        after = world._replace(server=self._apply(world, undo).server)
        begun = self._has_begun(one) and not self._makes(Mistake.OUTAGE_FORGETS_BEGUN_WORK)
        asked = (world.server, undo)
        yield self._send_back(after, one, begun, "has no answer, undoes it and comes back", asked)

    def _answer(self, world: World, one: Execution) -> Step:
        command = self._acquire(one)
        effect = self._apply(world, command)
        asked = (world.server, command)
        after = world._replace(server=effect.server)
        if effect.reply is Reply.GRANTED:
            return self._start(after, one, asked)
        if effect.reply is Reply.FINISHED:
            if one.message.claim and not self._makes(
                Mistake.DROPPED_KEEPS_ITS_CLAIM
            ):  # the run before may have been run again, and have sent this one anew
                after = after._replace(server=self._apply(after, self._give_up(one.message)).server)
            return self._close(after, one, Phase.DROPPED, f"{one.nonce} finds the note and is dropped", asked)
        assert world.server.key
        return self._conflict(after, one, world.server.key.attempt, asked)

    def _start(self, world: World, one: Execution, asked: tuple[Server, Command]) -> Step:
        again = one.attempt in world.history.finished and not self._is_excused(world, one.attempt)
        world = world.put(one._replace(phase=Phase.RUNNING, lost=False)).remember("started", one.attempt)
        label = f"{one.nonce} is granted the key and starts {one.attempt}"
        return Step(label, world, asked, Promise.NOT_AGAIN if again else None)

    def _conflict(self, world: World, one: Execution, holder: Attempt, asked: tuple[Server, Command]) -> Step:
        message = one.message
        is_copy = noted(holder, self.mistakes) == noted(one.attempt, self.mistakes)
        begun = is_copy or self._has_begun(one)
        follows = holder.task_id in {message.attempt.task_id, message.parent}
        claimed = message.claim and not self._makes(Mistake.CLAIMED_MESSAGE_MEETS_THE_POLICY)
        ended = world.has_ended(holder)
        if self._makes(Mistake.BEGUN_WORK_MEETS_THE_POLICY):
            begun = is_copy
        spared = (
            begun
            or claimed
            or message.attempt.retries
            or (follows and not self._makes(Mistake.SUCCESSOR_MEETS_THE_POLICY))
            or (ended and not self._makes(Mistake.ENDED_IS_A_HOLDER))
        )
        if not spared and message.policy == "skip":
            if not follows and not message.claim and message.attempt not in world.history.started:
                world = world.remember("settled", message.attempt)
            label = f"{one.nonce} is skipped as a duplicate of {holder}"
            step = self._close(world, one, Phase.DROPPED, label, asked)
            return step._replace(broken=Promise.SERVED_ANEW) if message.after == holder.task_id else step
        # Nobody can have begun it, or it would have been marked so.
        fresh = message.attempt not in world.history.started and not message.may_be_known_as_begun
        step = self._send_back(world, one, begun, f"meets {holder} and comes back", asked)
        if message.policy == "skip" and fresh and not (claimed or message.attempt.retries or follows or ended):
            return step._replace(broken=Promise.POLICY)
        return step

    def _send_back(self, world: World, one: Execution, begun: bool, why: str, asked: tuple[Server, Command]) -> Step:
        again = one.message._replace(redelivered=False, returned=True, begun=one.message.begun or begun)
        return self._close(world.enqueue(again), one, Phase.RETURNED, f"{one.nonce} {why}", asked)

    # -- the body

    def _run(self, world: World, one: Execution) -> Iterator[Step]:
        for ending in self.plays[one.attempt]:
            if one.phase is Phase.RUNNING and ending.publishes is not None:
                yield self._publish(world, one, ending)
            elif one.phase is Phase.RUNNING or one.ending == ending:
                ended = one._replace(phase=Phase.ENDED, ending=ending)
                after = self._tell_caller(world.put(ended), one, ending)
                step = Step(f"{one.nonce} ends {one.attempt} with {ending.state}", after)
                yield from self._on(step, ended, self._release) if world.is_calm else (step,)
        yield self._renew(world, one)
        if self._makes(Mistake.RELEASE_WHILE_THE_CHILD_RUNS) and world.faults.may("deaths"):
            hard_limit = Release(one.nonce, None, unseen_copy=False)
            after = world.spend("deaths")._replace(server=self._apply(world, hard_limit).server)
            yield Step(f"the main process releases {one.nonce}'s key at its hard time limit", after)

    @staticmethod
    def _tell_caller(world: World, one: Execution, ending: Ending) -> World:
        """The outcome is stored: who has waited for it publishes."""
        if ending.state not in {"SUCCESS", "FAILURE"} or one.attempt in world.history.stored:
            return world
        world = world.remember("stored", one.attempt)
        if ending.caller is None:
            return world
        message = ending.caller._replace(after=one.attempt.task_id)
        if ending.caller_of_job:
            return world._replace(publishers=(*world.publishers, Publisher(message)))
        return world.remember("published", message.attempt).enqueue(message)

    def _publish(self, world: World, one: Execution, ending: Ending) -> Step:
        assert ending.publishes
        message, gives = ending.publishes, ""
        if ending.hands_over:
            gives = one.nonce if self._makes(Mistake.CLAIM_OPENS_THE_HELD_KEY) else world.fresh("h")
            message = message._replace(claim=gives)
        if message.attempt in world.history.published:
            world = world.excuse(message.attempt, Excuse.PUBLISHED_TWICE)
        world = world.remember("published", message.attempt).enqueue(message)
        published = one._replace(phase=Phase.PUBLISHED, ending=ending, gives=gives)
        return Step(f"{one.nonce} publishes {message}", world.put(published))

    def _renew(self, world: World, one: Execution) -> Step:
        command = Renew(self._token(one))
        effect = self._apply(world, command)
        after = world if effect.reply is Reply.RENEWED else world.put(one._replace(lost=True))
        return Step(
            f"{one.nonce} renews", after, (world.server, command), self._stolen(world.server, effect, command.nonce)
        )

    # -- giving it back

    def _release(self, world: World, one: Execution) -> Iterator[Step]:
        command = one.sent or self._last_word(one)
        effect = self._apply(world, command)
        asked, broken = (world.server, command), self._stolen(world.server, effect, command.nonce)
        after = world._replace(server=effect.server)
        assert one.ending
        if one.ending.state in OVER:
            after = after.remember("finished", one.attempt)
        elif not one.ending.requeues:
            after = after.remember("settled", one.attempt)
        label = f"{one.nonce} releases: {effect.reply.value}"
        step = self._close(after, one, Phase.RELEASED, label, asked)
        yield step._replace(broken=broken or step.broken)
        if one.sent is None and world.faults.may("lost_replies"):
            waiting = one._replace(phase=Phase.RELEASING, sent=command)
            yield Step(label + ", the reply is lost", after.spend("lost_replies").put(waiting), asked, broken)

    def _last_word(self, one: Execution) -> Release | HandOver:
        ending = one.ending
        assert ending
        is_over = (
            ending.state in OVER
            or (ending.state == "SystemExit" and self._makes(Mistake.NOTE_ON_SYSTEM_EXIT))
            or (ending.state == "REJECTED" and self._makes(Mistake.NOTE_ON_REQUEUE))
        )
        note = one.attempt if is_over else None
        unseen_copy = one.overdue
        if not self._makes(Mistake.FIRST_DELIVERY_IGNORES_ITS_COPY):
            unseen_copy = self._may_be_copy(one)
        unseen_copy &= not self._makes(Mistake.NO_NOTE_FOR_AN_UNSEEN_COPY)
        if one.gives and ending.publishes:
            return HandOver(self._token(one), note, unseen_copy, one.gives, ending.publishes.attempt)
        return Release(self._token(one), note, unseen_copy)

    def _part_with_message(self, world: World, one: Execution) -> Step:
        verb = "gives its message back" if one.ending is not None else "acks"
        return Step(f"{one.nonce} {verb}", world.part(one))

    def _close(self, world: World, one: Execution, phase: Phase, label: str, asked: tuple[Server, Command]) -> Step:
        """The execution has done its work, and may still have its message."""
        key = world.server.key
        broken = Promise.NOTHING_LEFT if key is not None and key.nonce == one.nonce else None
        requeues = one.ending is not None and one.ending.requeues
        if one.unacked:
            done = Execution(one.nonce, one.message, phase, ending=one.ending if requeues else None)
            return Step(label, world.put(done), asked, broken)
        if requeues and not one.message.acks_late:
            world = world.excuse(one.attempt, Excuse.ACKED_EARLY)
        return Step(label, world.without(one), asked, broken)

    # -- what they know

    def _makes(self, mistake: Mistake) -> bool:
        return mistake in self.mistakes

    def _acquire(self, one: Execution) -> Acquire | Claim:
        message = one.message
        reads_note = message.returned or self._may_be_copy(one)
        if message.claim:
            return Claim(self._token(one), one.attempt, reads_note, message.claim)
        return Acquire(one.nonce, one.attempt, reads_note)

    def _may_be_copy(self, one: Execution) -> bool:
        """Whether another delivery of its message may have begun before, or be still to come."""
        late = one.overdue and not self._makes(Mistake.FIRST_DELIVERY_IGNORES_ITS_COPY)
        returned = one.message.returned and not self._makes(Mistake.COMEBACK_LEAVES_NO_NOTE)
        return one.message.redelivered or one.message.begun or late or returned

    def _has_begun(self, one: Execution) -> bool:
        """Whether the work may have begun in an execution that has died, so that no policy may drop it."""
        if self._makes(Mistake.OLD_IS_BEGUN):
            return one.overdue or one.message.redelivered or one.message.begun
        return one.message.may_be_known_as_begun

    def _token(self, one: Execution) -> str:
        return token_of(one, self.mistakes)

    def _apply(self, world: World, command: Command) -> Effect:
        return apply(world.server, command, self.mistakes)

    def _is_excused(self, world: World, attempt: Attempt) -> bool:
        return any(
            whose == attempt and excuse in self.excuses and excuse is not Excuse.ACKED_EARLY
            for whose, excuse in world.history.excused
        )

    @staticmethod
    def _stolen(before: Server, effect: Effect, nonce: str) -> Promise | None:
        """Whether the command took or extended a key that was not its sender's."""
        touched = effect.leased or effect.server.key is None
        theirs = before.key is not None and before.key.nonce != nonce
        return Promise.OWN_KEY if touched and theirs else None
