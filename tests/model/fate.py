"""Fate: timeouts, lost connections, deaths and pauses, and how the main process clears up after a dead child."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from celery_redislock.protocol.tokens import Attempt
from promises import Excuse

from .commands import GiveUp, Leave
from .effects import apply
from .executions import CLOSED, IN_BODY, IN_CHILD, Execution, Phase
from .holds import Hold, token
from .messages import LOST, Ending
from .rules import Mistake
from .server import Key, Server, limit_of, member_of, room_of
from .world import Step, World


class Fate:
    """The steps that happen to an execution.

    Args:
        plays: How the body of each attempt may end, and whether it has a retry if its process dies.
        mistakes: The mistakes that the main process makes.
        spares_jobs: Whether no reservation lapses whose message is yet to come: as `Faults.spares_jobs`.
    """

    def __init__(
        self, plays: Mapping[Attempt, tuple[Ending, ...]], mistakes: Set[Mistake], *, spares_jobs: bool
    ) -> None:
        self.plays = plays
        self.mistakes = mistakes
        self.spares_jobs = spares_jobs

    def strike(self, world: World, one: Execution) -> Iterator[Step]:
        """What may happen to the execution `one`, whatever it does."""
        faults = world.faults
        if one.unacked and faults.may("timeouts"):
            yield self._time_out(world.spend("timeouts"), one)
        if faults.may("deaths") and one.phase in IN_CHILD:
            dead = _excuse_death(world.spend("deaths"), one)
            if one.has_parted:  # the child may have begun another run: then its lease ends the lock
                yield Step(f"the child of {one.nonce} dies {one.phase.value}", dead.without(one))
                return
            hold = Hold.of(token(token_of(one, self.mistakes), one.attempt), self._limit(world)).asked()
            body = Execution(
                one.nonce, one.message, Phase.CHILD_DEAD, one.unacked, one.overdue, hold=hold, room=one.room
            )
            if _is_acked_early(one):
                body = body._replace(unacked=False)  # the child has told that its key was granted, and so it is acked
            if lost := next((ending for ending in self.plays[one.attempt] if ending.state == LOST), None):
                heir = hold.gives_to(world.fresh("h"), _retry_of(one))
                body = body._replace(ending=lost, hold=heir)
            yield Step(f"the child of {one.nonce} dies {one.phase.value}", dead.put(body))

    def strike_worker(self, world: World, room: str) -> Iterator[Step]:
        """What may happen to the worker that `room` is in, and so to all its executions."""
        if world.faults.may("disconnects"):
            yield from self._disconnect(world, room)
        if world.faults.may("deaths"):
            mine = [one for one in world.executions if one.home == room]
            died = world.spend("deaths")
            for one in mine:
                died = _excuse_death(died, one).without(one)
                if one.phase is Phase.KEPT:  # its key is kept for seconds only, as that of a publisher that dies
                    died = died.remember("failed", _retry_of(one))
                died = died.enqueue(one.message.again) if one.unacked else died
            what = ", ".join(f"{one.nonce} {one.phase.value}" for one in mine)
            yield Step(f"the worker {room} dies: {what}", _forget(died, room))

    def _disconnect(self, world: World, room: str) -> Iterator[Step]:
        """The broker gives all unacked messages of the worker again. Those who wait are forgotten, for they cannot ack.

        The main process says so to its children, as `worker.early_acks` does. That has the same effect as `overdue`:
        the release leaves a note in any case. So does the release of a message that was published again.
        """
        mine = [one for one in world.executions if one.home == room and one.unacked]
        if not mine:
            return
        lost = world.spend("disconnects")
        for one in mine:
            is_over = one.phase in CLOSED or one.phase is Phase.IN_DOUBT
            is_told = one.phase in IN_BODY or Mistake.LOST_OUTSIDE_ITS_BODY_LEAVES_NO_NOTE not in self.mistakes
            lost = lost.enqueue(one.message.again)
            if one.phase is Phase.WAITING:
                lost = lost.without(one)
                continue
            lost = lost.put(one._replace(unacked=False, overdue=one.overdue or (is_told and not is_over)))
            if is_over and not (one.header.returned or _will_leave_note(world, one)):
                lost = lost.excuse(one.attempt, Excuse.DISCONNECTED)
        what = f"the broker loses {', '.join(one.nonce for one in mine)} and gives their messages again"
        yield Step(what, lost)
        left = lost
        for command in [Leave(room, limit) for limit in sorted({one.limit for one in mine})]:
            asked = (left.server, command)
            left = left._replace(server=apply(left.server, command, self.mistakes).server)
        if left.server != lost.server:
            yield Step(f"{what}, {room} leaves the line", left, asked)

    def _time_out(self, world: World, one: Execution) -> Step:
        is_released = one.phase is Phase.IN_DOUBT and not _will_leave_note(world, one)
        if is_released or one.phase is Phase.RELEASED:
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
        if one.hold.gives:
            yield from self._hand_on(world, one)
            return
        note = one.attempt if Mistake.NOTE_OF_A_DEAD_CHILD in self.mistakes else None
        command = one.hold.noted(note, one.overdue).release()
        effect = apply(world.server, command, self.mistakes)
        server = effect.server
        if one.message.claim:
            before = [key.attempt for key in server.keys if key.attempt.task_id == one.attempt.task_id]
            is_to_come = any(attempt.retries < one.attempt.retries for attempt in before)
            server = apply(server, GiveUp(one.message.claim, is_to_come, self._limit(world)), self.mistakes).server
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

    def _hand_on(self, world: World, one: Execution) -> Iterator[Step]:
        """With `task_retry_on_worker_lost` one thread hands the key over, and another one publishes the retry, or not.

        They come in any order. While `one` has its ending, the second has not come.
        """
        limit = self._limit(world)
        if one.ending is not None:
            yield self._publish_retry(world, one, one.ending)
            yield from self._publish_nothing(world, one, limit)
        if one.phase is Phase.CHILD_DEAD:
            command = one.hold.ended().release()
            effect = apply(world.server, command, self.mistakes)
            after = world._replace(server=effect.server)
            after = after.put(one._replace(phase=Phase.KEPT)) if one.ending is not None else after.without(one)
            label = f"the main process hands the key of {one.nonce} on: {effect.reply.value}"
            yield Step(label, after, (world.server, command))

    @staticmethod
    def _publish_retry(world: World, one: Execution, ending: Ending) -> Step:
        assert ending.publishes
        message = ending.publishes._replace(claim=one.hold.gives)
        if message.attempt in world.history.published:
            world = world.excuse(message.attempt, Excuse.PUBLISHED_TWICE)
        world = world.remember("published", message.attempt).remember("settled", one.attempt).enqueue(message)
        return Step(f"the main process publishes {message} for {one.nonce}", _told(world, one))

    def _publish_nothing(self, world: World, one: Execution, limit: int) -> Iterator[Step]:
        """It was terminated, or is out of retries. The other thread may be about to hand the key over."""
        label = f"the main process publishes nothing for {one.nonce}"
        world = world.remember("settled", one.attempt)
        if one.phase is Phase.CHILD_DEAD:
            yield Step(label, world.put(one._replace(ending=None, hold=one.hold._replace(heir=None), unacked=False)))
        if Mistake.LOST_KEY_IS_KEPT_FOR_NOBODY in self.mistakes:
            yield Step(label, _told(world, one))
            return
        command = GiveUp(one.hold.gives, True, limit)
        server = apply(world.server, command, self.mistakes).server
        yield Step(f"{label}, and gives up", _told(world._replace(server=server), one), (world.server, command))

    def _limit(self, world: World) -> int:
        """The limit that the main process names: the greatest there is, for it does not know that of each run."""
        return 1 if Mistake.MAIN_PROCESS_KNOWS_ONE_PERMIT in self.mistakes else len(world.server.permits)

    def expire(self, world: World) -> Iterator[Step]:
        """A lease ends: nobody renews it, because its holder is gone or paused. So may a reservation."""
        queued = world.server.queued
        if queued is not None and queued.nonce not in world.claims:
            yield from self._lapse_early(world, world.server._replace(queued=None), queued)
        window = world.server.window
        if window is not None and not window.sending and world.faults.may("lapses"):
            closed = world._replace(server=world.server._replace(window=None)).close_window(window.attempt)
            yield Step(f"the window of {window.attempt} ends", closed.spend("lapses"))
        for permit, key in enumerate(world.server.permits, 1):
            if key is not None:
                yield from self._end(world, permit, key)

    def _end(self, world: World, permit: int, key: Key) -> Iterator[Step]:
        free = world._replace(server=world.server.put(permit, None))
        if key.room:
            yield from self._lapse(world, free, key)
            return
        holders = [
            one
            for one in world.executions
            if token_of(one, self.mistakes) == key.nonce and one.phase is not Phase.CHILD_DEAD
        ]
        if not holders:
            yield from self._lapse_early(world, free.server, key)
        elif world.faults.may("pauses"):
            free = free.spend("pauses")
            for one in holders:
                if one.phase is Phase.IN_DOUBT:  # now neither the key nor a note keeps copies away
                    free = free.excuse(one.attempt, Excuse.RELEASE_IN_DOUBT)
                else:
                    free = free.put(one._replace(lost=True))
            yield Step(f"{key.nonce} is paused past its lease, and will know that its lock is lost", free)

    def _lapse_early(self, world: World, after: Server, key: Key) -> Iterator[Step]:
        """A key or the place in the queue ends whose holder is gone, or whose message is still on its way."""
        is_too_late = key.nonce in world.claims
        is_unsent = key.nonce in {one.claim for one in world.publishers}
        if self.spares_jobs and (is_too_late or is_unsent):
            return
        free = world._replace(server=after)
        if is_unsent:
            free = free.remember("failed", key.attempt)
        yield Step(f"what {key.nonce} has ends", free, is_too_late=is_too_late)

    def _lapse(self, world: World, free: World, key: Key) -> Iterator[Step]:
        """An offer, or a call, ends. Nobody may answer it, or who would has been too slow."""
        is_offer = key.is_offered
        if is_offer and Mistake.OFFER_NEVER_LAPSES in self.mistakes:
            return
        phase = Phase.WAITING if is_offer else Phase.CALLED
        limit = limit_of(key.member)
        if not any(one.home == key.room and one.limit == limit and one.phase is phase for one in world.executions):
            yield Step(f"{key.nonce} lapses, which nobody answers", free)
        elif world.faults.may("lapses"):
            yield Step(f"{key.nonce} lapses", free.spend("lapses"))


def token_of(one: Execution, mistakes: Set[Mistake]) -> str:
    """The nonce under which an execution holds its key: its own, unless a mistake says otherwise."""
    shares = Mistake.CLAIM_IS_KEPT in mistakes
    return one.message.claim if shares and one.message.claim else one.nonce


def _retry_of(one: Execution) -> Attempt:
    return one.attempt._replace(retries=one.attempt.retries + 1)


def _told(world: World, one: Execution) -> World:
    """The message is acked, and no retry is to come any more, or it has come; the key may be handed over only now."""
    if one.phase is Phase.KEPT:
        return world.without(one)
    return world.put(one._replace(ending=None, unacked=False))


def _requeue(world: World, one: Execution, label: str) -> Step:
    return Step(label, world.enqueue(one.message.again) if one.unacked else world)


def _will_leave_note(world: World, one: Execution) -> bool:
    """Whether the release is in doubt because it has not run: until it is sent again, the key keeps copies away."""
    return one.phase is Phase.IN_DOUBT and bool(world.server.number_of(one.nonce))


def _excuse_death(world: World, one: Execution) -> World:
    if _will_leave_note(world, one):
        world = world.excuse(one.attempt, Excuse.RELEASE_IN_DOUBT)
    done = one.attempt in world.history.finished
    if _is_acked_early(one):
        return world.excuse(one.attempt, Excuse.ACKED_EARLY)
    return world.excuse(one.attempt, Excuse.DIED_BEFORE_ACK) if one.unacked and done else world


def _is_acked_early(one: Execution) -> bool:
    """Whether the message is acked early, and its key was granted: it is acked, or about to be."""
    return not one.message.acks_late and one.phase in IN_CHILD - {Phase.CALLED, Phase.ASKED}


def _forget(world: World, room: str) -> World:
    """The room is gone for good: the worker that starts in its place has a room of another name."""
    server, name = world.server, f"x{room[1:]}"

    def member(old: str) -> str:
        return member_of(name, limit_of(old)) if room_of(old) == room else old

    line = tuple(sorted((rank, member(old)) for rank, old in server.line))
    permits = tuple(
        key._replace(nonce=key.nonce[0] + member(key.member)) if key is not None and key.member else key
        for key in server.permits
    )
    return world._replace(server=server._replace(line=line, permits=permits), asleep=world.asleep - {room})
