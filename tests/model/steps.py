"""Steps: all that can happen next in a state; above all what each execution does, from its delivery to its ack.

An execution of the model does what `celery_redislock.task.executions` does, and asks the same rules,
`celery_redislock.policy.conflict`. Where the two differ, a comment says so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set

from celery_redislock.policy.skip import Skip
from celery_redislock.policy.wait import ComeBack
from celery_redislock.protocol.scripts import Tag
from celery_redislock.protocol.tokens import Attempt
from promises import Excuse, Promise

from . import known
from .commands import Command, Effect, Release
from .driver import Driver
from .effects import noted
from .executions import Execution, Phase
from .fate import Fate, token_of
from .messages import LOST, Ending
from .publishing import Publisher, Publishing
from .rooms import Rooms, wake
from .rules import Mistake
from .server import Key, Server
from .world import Step, World

#: How many executions there may be at a time. How often a message comes back has no bound.
MOST_EXECUTIONS = 3


class Steps(Driver):
    """All steps from a state.

    Args:
        plays: How the body of each attempt may end.
        rooms: The rooms in which messages wait.
        limit: How many messages may wait in a room.
        mistakes: The mistakes to make.
        excuses: The excuses to accept.
        spares_jobs: As `Faults.spares_jobs`.
        publishes_are_slow: Whether a publisher may be so slow that another one takes its reservation over.
    """

    def __init__(
        self,
        plays: Mapping[Attempt, tuple[Ending, ...]],
        rooms: Rooms,
        limit: int | None,
        mistakes: Set[Mistake],
        excuses: Set[Excuse],
        spares_jobs: bool,
        publishes_are_slow: bool,
    ) -> None:
        self.plays = plays
        self.rooms = rooms
        super().__init__(limit, mistakes, excuses)
        self.fate = Fate(plays, mistakes, spares_jobs=spares_jobs)
        self.publishing = Publishing(mistakes, promises_one_job=spares_jobs, are_slow=publishes_are_slow)

    def of(self, world: World) -> Iterator[Step]:
        """The steps from `world`."""
        for step in self._steps(world):
            broken = step.broken or self.rooms.broken_by(world, step)
            after = step.world.settle() if step.world.is_calm else step.world
            if broken is not step.broken or after is not step.world:
                step = step._replace(world=after, broken=broken)
            yield from wake(world, step) if self._makes(Mistake.NO_LOOKS) else (step,)

    def _steps(self, world: World) -> Iterator[Step]:
        yield from self._deliver(world)
        yield from self.rooms.of(world)
        for one in world.executions:
            match one.phase:
                case Phase.RESERVED if self.rooms.has_slot(world, one.home):
                    yield from self._ask(world, one)
                case Phase.CALLED if not self.rooms.is_overbooked(world, one.home):
                    yield from self._ask(world, one)
                case Phase.ASKED:
                    yield from self._ask_again(world, one)
                case Phase.RUNNING | Phase.PUBLISHED:
                    yield from self._run(world, one)
                case Phase.ENDED:
                    yield from self._release(world, one)
                case Phase.IN_DOUBT:
                    yield self._send_again(world, one)
                    if not one.has_parted:
                        yield self._part_with_message(world, one)
                case Phase.CHILD_DEAD | Phase.KEPT:
                    yield from self.fate.clear_up(world, one)
                case Phase.RELEASED | Phase.RETURNED | Phase.DROPPED:
                    yield self._part_with_message(world, one)
            yield from self.fate.strike(world, one)
        for room in {one.home for one in world.executions}:
            yield from self.fate.strike_worker(world, room)
        for publisher in world.publishers:
            yield from self.publishing.of(world, publisher)
        if world.faults.may("revokes"):
            yield from self._revoke(world)
        if world.faults.may("handovers"):
            for one in world.executions:
                yield from self._leave(world, one) if one.phase is Phase.WAITING else ()
        if world.faults.may("doublings"):
            for message in {message for message in world.queue if message.returned}:
                yield Step(f"{message} was sent twice", world.enqueue(message).spend("doublings"))
        for undo in world.late:
            yield from self._arrive(world, undo)
        yield from self.fate.expire(world)

    def _deliver(self, world: World) -> Iterator[Step]:
        for message, limit in itertools.product(set(world.queue), self.rooms.limits):
            for room in self._receivers(world):
                one = Execution(world.fresh("n"), message, room=room)
                one = one._replace(hold=self._new_hold(one, limit))
                delivered = Step(f"{one.nonce} gets {message}", world.dequeue(message).put(one))
                ready = world.is_calm and not room
                yield from self._on(delivered, one, self._ask) if ready else (delivered,)

    def _receivers(self, world: World) -> list[str]:
        """The rooms of the workers that may receive a message. Those who wait in a room leave the window open."""
        counts = [one for one in world.executions if one.phase is not Phase.WAITING and not one.has_parted]
        if self._makes(Mistake.FULL_ROOM_CLOSES_THE_WINDOW):
            counts = list(world.executions)
        if not self.rooms.slots:
            return [""] if len(counts) < MOST_EXECUTIONS else []
        received = Counter(one.home for one in counts)
        return [room for room, slots in self.rooms.slots.items() if received[room] <= slots]

    def _revoke(self, world: World) -> Iterator[Step]:
        """A message with a claim is revoked, and the main process gives up its reservation. Others need no command."""
        for message in {message for message in world.queue if message.claim}:
            closes = message.window and not self._makes(Mistake.REVOKED_LEAVES_ITS_WINDOW)
            command = self._give_up(message, world)._replace(closes_window=closes)
            after = world._replace(server=self._apply(world, command).server)
            after = after.dequeue(message).spend("revokes").remember("settled", message.attempt)
            window = after.server.window
            broken = Promise.FREED if window is not None and window.nonce == message.claim else None
            yield Step(f"{message} is revoked", after.close_window(message.attempt), (world.server, command), broken)

        for one in world.executions:
            if one.phase in {Phase.WAITING, Phase.CALLED} and not one.message.claim:
                revoked = world.without(one).spend("revokes").remember("settled", one.attempt)
                label = f"{one.nonce} is revoked {one.phase.value}"
                if not one.hold.call:
                    yield Step(label, revoked)
                    continue
                release = one.hold.passes_on()
                server = self._apply(revoked, release).server
                yield Step(label, revoked._replace(server=server), (world.server, release))

    @staticmethod
    def _on(step: Step, one: Execution, go: Callable[[World, Execution], Iterator[Step]]) -> Iterator[Step]:
        """Take `step` and what `go` leads to as one step, to have fewer states.

        Only in a calm world, where nothing can come between the two: their order with others' steps changes nothing.
        """
        for last in go(step.world, one):
            yield last._replace(label=f"{step.label}; {last.label}")

    # -- asking for the key

    def _conflict(self, world: World, one: Execution, asked: tuple[Server, Command], effect: Effect) -> Step:
        holders = effect.holders
        ended = {key.attempt.task_id for key in holders if world.has_ended(key.attempt)}
        mine = noted(one.attempt, self.mistakes)
        decision = known.on_conflict(
            one,
            holders,
            self.mistakes,
            is_own_copy=any(noted(key.attempt, self.mistakes) == mine for key in holders),
            has_ended=lambda holder: holder.task_id in ended and not self._makes(Mistake.ENDED_IS_A_HOLDER),
        )
        if isinstance(decision, Skip):
            return self._skip(world, one, holders, asked)
        begun = isinstance(decision, ComeBack) and decision.is_begun
        met = ", ".join(key.room or str(key.attempt) for key in holders)
        if effect.reply is Tag.COPY:  # in line it would be called to every permit that becomes free, and refused
            return self._send_back(world, one, begun, f"meets its twin {met} and comes back", asked)
        step = self._wait(world, one, begun, f"meets {met}", asked)
        must_be_skipped = self._must_be_skipped(world, one, holders)
        return step._replace(broken=step.broken or Promise.POLICY) if must_be_skipped else step

    def _skip(self, world: World, one: Execution, holders: tuple[Key, ...], asked: tuple[Server, Command]) -> Step:
        message = one.message
        is_in_favour = not any(key.room or key.sending for key in holders) or self._waits_to_run(world, one)
        is_owed_its_key = bool(message.claim) and not message.queued
        is_new = not is_owed_its_key and message.attempt not in world.history.started
        if not self._follows(one, holders) and is_new and is_in_favour:
            world = world.remember("settled", message.attempt)
        if message.claim:
            world = world._replace(server=self._apply(world, self._give_up(message, world)).server)
        others = ", ".join(str(key.attempt) for key in holders)
        step = self._close(world, one, Phase.DROPPED, f"{one.nonce} is skipped as a duplicate of {others}", asked)
        has_seen_one = message.after in {key.attempt.task_id for key in holders}
        return step._replace(broken=Promise.SERVED_ANEW) if has_seen_one else step

    @staticmethod
    def _waits_to_run(world: World, one: Execution) -> bool:
        """Whether another one waits whose work is not over, so that `one` may be dropped in favour of it."""
        waiting = [other for other in world.executions if other.phase in {Phase.WAITING, Phase.CALLED}]
        return any(not world.has_ended(other.attempt) and other.attempt != one.attempt for other in waiting)

    def _must_be_skipped(self, world: World, one: Execution, holders: tuple[Key, ...]) -> bool:
        """Whether the promise `POLICY` demands a skip: nobody has begun the work, and no rule excepts it."""
        message, makes = one.message, self._makes(Mistake.CLAIMED_MESSAGE_MEETS_THE_POLICY)
        is_owed_its_key = message.claim and not message.queued and not makes
        excepted = is_owed_its_key or message.attempt.retries or self._follows(one, holders)
        fresh = message.attempt not in world.history.started and not one.header.may_be_known_as_begun
        is_duplicate = not any(key.room or key.sending or world.has_ended(key.attempt) for key in holders)
        return bool(message.policy == "skip" and fresh and not excepted and is_duplicate)

    @staticmethod
    def _follows(one: Execution, holders: tuple[Key, ...]) -> bool:
        return any(key.attempt.task_id in {one.attempt.task_id, one.message.parent} for key in holders)

    def _leave(self, world: World, one: Execution) -> Iterator[Step]:
        """A message that waits is published again. Its worker may hear that it was not, although it is.

        The worker then goes on with the message. In the code it asks for the key once more before it waits on.
        """
        sent = self._resend(world.spend("handovers"), one)
        label = f"{one.nonce} leaves its room"
        yield self._close(sent, one, Phase.RETURNED, f"{label}, and is published again", None)
        waits = one._replace(resent=True)
        yield Step(f"{label}, is published again, and hears that it is not", sent.put(waits))

    # -- the body

    def _run(self, world: World, one: Execution) -> Iterator[Step]:
        if one.unacked and not one.message.acks_late:
            # The child has told that its key was granted, before its body; so the ack comes before its outcome.
            yield Step(f"{one.nonce} acks early", world.put(one._replace(unacked=False)))
            yield self._renew(world, one)
            return
        for ending in self.plays[one.attempt]:
            if ending.state == LOST:
                continue
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
        """The outcome is stored, so a caller who has waited for it may publish a message."""
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
        message, hold = ending.publishes, one.hold
        if ending.hands_over:
            claim = one.nonce if self._makes(Mistake.CLAIM_OPENS_THE_HELD_KEY) else world.fresh("h")
            message, hold = message._replace(claim=claim), hold.gives_to(claim, message.attempt)
        if message.attempt in world.history.published:
            world = world.excuse(message.attempt, Excuse.PUBLISHED_TWICE)
        world = world.remember("published", message.attempt).enqueue(message)
        published = one._replace(phase=Phase.PUBLISHED, ending=ending, hold=hold)
        return Step(f"{one.nonce} publishes {message}", world.put(published))

    # -- releasing the key

    # -- what an execution knows

    def _token(self, one: Execution) -> str:
        return token_of(one, self.mistakes)
