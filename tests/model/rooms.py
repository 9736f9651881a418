"""Rooms: how the messages that wait in a worker come to their turns, and what is promised of the line.

No wake-up is ever delivered here: whoever waits lives by looks alone. A look may come at any time, so a wake-up would
be nothing but a look that comes early. Only the mistake of never looking makes a difference between the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set

from celery_redislock.protocol.scripts import Tag
from promises import Promise

from .commands import Acquire, Command, Enter, Leave, Stand
from .effects import apply
from .executions import IN_SLOT, Execution, Phase
from .rules import Mistake
from .server import Key, Server, limit_of, member_of
from .world import Step, World

#: The mistakes by which a room calls somebody for whom it has no slot.
CALL_WITHOUT_A_SLOT = {Mistake.ROOM_TAKES_WITHOUT_A_SLOT, Mistake.CALLS_WITHOUT_A_SLOT}


class Rooms:
    """The steps of rooms, and the promises that hold for them.

    Args:
        slots: How many executions each worker can run at a time; empty where each message has a worker of its own.
        limits: The limits that workers know.
        has_others: Whether each worker has fetched tasks with other keys, which take its slots and its tokens.
        mistakes: The mistakes that rooms make.
    """

    def __init__(self, slots: Sequence[int], limits: Sequence[int], has_others: bool, mistakes: Set[Mistake]) -> None:
        self.slots = {f"w{number}": count for number, count in enumerate(slots, 1)}
        self.limits = limits
        self.has_others = has_others
        self.mistakes = mistakes

    def of(self, world: World) -> Iterator[Step]:
        """What the rooms may do next."""
        for room in sorted({one.home for one in world.executions} | set(self.slots)):
            for limit in self.limits:
                yield from self._look(world, room, limit)
        if self.has_others:
            yield from self._work_elsewhere(world)

    def _look(self, world: World, room: str, limit: int) -> Iterator[Step]:
        """What the room may do for those who wait in it with this limit."""
        waiting = world.waiting_in(room, limit)
        for one in waiting:
            is_reserved = bool(one.message.claim) and world.server.number_of(one.message.claim)
            if is_reserved and Mistake.CLAIM_WAITS_IN_LINE not in self.mistakes:
                yield self._begin(world, one)
        if waiting and self._may_call(world, room, limit):
            yield from self._stand(world, waiting)
        elif self._is_known(world.server, member_of(room, limit)):
            yield self._ask(world, Leave(room, limit), "leaves the line")
        elif waiting:
            yield self._ask(world, Enter(room, waiting[0].message.rank, limit), "enters the line without a slot")

    def _may_call(self, world: World, room: str, limit: int) -> bool:
        """Whether the room may call somebody: a slot is free, and nobody whose call has lapsed is on the way."""
        has_slot = self.has_slot(world, room) or bool(self.mistakes & CALL_WITHOUT_A_SLOT)
        is_lapsed = self._outnumber(world, room, limit) and Mistake.SECOND_CALL_ON_THE_WAY not in self.mistakes
        return has_slot and not is_lapsed

    def _work_elsewhere(self, world: World) -> Iterator[Step]:
        """A task with another key, which is none of the model's, takes a slot of a worker, or its run ends.

        There always is such a task: it was fetched before, and takes a slot as soon as it may.
        """
        for room in self.slots:
            if room in world.busy:
                yield Step(f"{room} has a slot again", world.leave_slot(room))
                if Mistake.CALLS_WITHOUT_A_SLOT in self.mistakes and self._has_called_too_many(world, room):
                    yield Step(f"{room} gives the slot that ends to the next fetched task", world, None, Promise.SERVED)
            if self.has_slot(world, room):
                yield from self._take_slot(world, room)
        for one in world.called:
            if one.hold.call and not self._has_called_too_many(world, one.home):
                yield self._forestall(world, one)

    def _take_slot(self, world: World, room: str) -> Iterator[Step]:
        """A task with another key takes a free slot, unless somebody waits for that slot."""
        is_waited_for = self._can_call(world, room)
        if not is_waited_for or Mistake.STRANGER_TAKES_THE_SLOT in self.mistakes:
            broken = Promise.SERVED if is_waited_for else None
            yield Step(f"{room} runs another task", world.take_slot(room), broken=broken)

    def _can_call(self, world: World, room: str) -> bool:
        """Whether somebody waits in the room whose key the room would be given now."""
        queues = [world.waiting_in(room, limit) for limit in self.limits if self._may_call(world, room, limit)]
        asked = [self._ask_for(waiting) for waiting in queues if waiting]
        return any(apply(world.server, command, self.mistakes).reply is Tag.CALLED for command in asked)

    def _forestall(self, world: World, one: Execution) -> Step:
        """Another task takes the token of the rate limit that `one` was to have: `one` passes the key on, and waits on.

        The model does not tell a worker without a token from one without a slot.
        """
        label = f"another task takes the token that {one.nonce} was called for"
        after = world.take_slot(one.home)
        if Mistake.CALLED_IN_VAIN in self.mistakes:
            return Step(label, after)
        command = one.hold.passes_on()
        waits = after.put(one._replace(phase=Phase.WAITING, hold=one.hold._replace(call=None)))
        return Step(label, waits._replace(server=apply(world.server, command).server), (world.server, command))

    def has_slot(self, world: World, room: str) -> bool:
        """Whether the worker can begin another execution."""
        return not self.slots or self.free_slots(world, room, IN_SLOT) > 0

    def is_overbooked(self, world: World, room: str) -> bool:
        """Whether somebody was called for whom there is no slot."""
        return bool(self.slots) and self.free_slots(world, room, IN_SLOT - {Phase.CALLED}) <= 0

    def _has_called_too_many(self, world: World, room: str) -> bool:
        """Whether there are more who were called in the worker than slots for them."""
        return any(one.home == room for one in world.called) and self.free_slots(world, room, IN_SLOT) < 0

    def free_slots(self, world: World, room: str, taking: Set[Phase]) -> int:
        taken = [one for one in world.executions if one.home == room and one.phase in taking]
        return self.slots[room] - len(taken) - world.busy.count(room)

    def _is_known(self, server: Server, member: str) -> bool:
        return any(name == member for _, name in server.line) or bool(server.number_of(f"?{member}"))

    def _stand(self, world: World, waiting: list[Execution]) -> Iterator[Step]:
        if Mistake.NO_LOOKS in self.mistakes and waiting[0].home in world.asleep:
            return
        command = self._ask_for(waiting)
        effect = apply(world.server, command, self.mistakes)
        after = world._replace(server=effect.server)
        if effect.reply is Tag.CALLED:
            called = waiting[0]._replace(phase=Phase.CALLED, hold=waiting[0].hold.called(waiting[0].call))
            step = self._heard(world, command, after.put(called), f"calls {called.nonce}")
            is_second = self._outnumber(after.put(called), command.room, command.limit)
            yield step._replace(broken=Promise.ONE_CALL) if is_second else step
            if world.faults.may("lost_replies"):
                lost = after.spend("lost_replies")
                yield self._heard(world, command, lost, "takes the key, and the reply is lost")
        elif after.server != world.server or Mistake.NO_LOOKS in self.mistakes:
            yield self._heard(world, command, after, "stands in line")

    @staticmethod
    def _ask_for(waiting: list[Execution]) -> Stand:
        """The command that asks for a permit for the first who waits in a room."""
        first, next_rank = waiting[0], waiting[1].message.rank if len(waiting) > 1 else None
        return Stand(first.home, first.message.rank, next_rank, first.limit, first.number)

    @staticmethod
    def _outnumber(world: World, room: str, limit: int) -> bool:
        """Whether there are more who were called from a queue than permits that are kept for it."""
        on_the_way = [one for one in world.called if one.hold.call and one.home == room and one.limit == limit]
        kept = [key for key in world.server.keys if key.member == member_of(room, limit)]
        return len(on_the_way) > len(kept)

    def _begin(self, world: World, one: Execution) -> Step:
        called = world.put(one._replace(phase=Phase.CALLED))
        return Step(f"{one.home} sees that the key is reserved for {one.nonce}", called)

    def _ask(self, world: World, command: Enter | Leave, what: str) -> Step:
        after = world._replace(server=apply(world.server, command, self.mistakes).server)
        return self._heard(world, command, after, what)

    def _heard(self, world: World, command: Enter | Stand | Leave, after: World, what: str) -> Step:
        room = command.room
        if Mistake.NO_LOOKS in self.mistakes:
            is_left = isinstance(command, Leave) or after.server.number_of(f"!{command.member}")
            after = after._replace(asleep=after.asleep - {room} if is_left else after.asleep | {room})
        return Step(f"{room} {what}", after, (world.server, command))

    # -- promises

    def broken_by(self, world: World, step: Step) -> Promise | None:
        """The promise of the line that `step` breaks, which leads on from `world`; None where it breaks none."""
        old, new = world.server, step.world.server
        if self._idles(step.world) or (step.asked and _leaves_one(old, new, step.asked[1])):
            return Promise.NOT_IDLE
        if not step.asked or old.permits == new.permits:
            return None
        for permit, (before, after) in enumerate(zip(old.permits, new.permits, strict=True), 1):
            if before == after:
                continue
            if before and before.nonce[0] == "!" and (after is None or after.is_offered):
                if self._were_called(step.world, before):
                    return Promise.ORDER
            elif self._is_open(before) and after and after.nonce[0] in "!n" and self._passes_by(world, step, permit):
                return Promise.ORDER
        return None

    @staticmethod
    def _were_called(world: World, key: Key) -> bool:
        """Whether somebody whom `key` has called is still on the way."""
        on_the_way = [one for one in world.called if one.hold.call and member_of(one.home, one.limit) == key.member]
        return any((one.message.rank, one.number) == (key.rank, key.number) for one in on_the_way)

    @staticmethod
    def _is_open(key: Key | None) -> bool:
        """Whether a permit that holds `key` is for the first in line, also where it was offered to another before."""
        return key is None or key.is_offered

    @staticmethod
    def _passes_by(world: World, step: Step, permit: int) -> bool:
        """Whether an open permit went to somebody although a room with a smaller rank, which may have it, waited."""
        command, server = step.asked[1] if step.asked else None, world.server
        if isinstance(command, Stand):
            # Of two rooms with one rank either may be offered the permit, which it then need not pass on.
            mine = (command.rank, "" if server.permits[permit - 1] else command.member)
            others = [entry for entry in step.world.server.line if entry[1] != command.member]
            return any(entry < mine and limit_of(entry[1]) >= permit for entry in others)
        if not isinstance(command, Acquire) or command.room:
            return False
        # Where a permit is offered to a room, the room is not in line until it answers, but a second may wait in it.
        offers = [key for key in server.permits[: command.limit] if key and key.is_offered]
        waiting = [world.waiting_in(key.room, limit_of(key.member)) for key in offers if limit_of(key.member) >= permit]
        return bool(server.first_for(permit)) or any(len(those) > 1 for those in waiting)

    def _idles(self, world: World) -> bool:
        """Whether somebody was called who has no slot of its worker, while another one waits who has one."""
        return bool(self.slots) and any(self._idles_for(world, key) for key in world.server.keys if key.nonce[0] == "!")

    def _idles_for(self, world: World, key: Key) -> bool:
        if key.room not in self.slots:
            return False
        mine = [one for one in world.called if one.home == key.room]
        has_slot = self.free_slots(world, key.room, IN_SLOT - {Phase.CALLED}) > 0
        others = [room for room in self.slots if room != key.room and world.waiting_in(room)]
        return bool(mine) and not has_slot and any(self.has_slot(world, room) for room in others)


def _leaves_one(old: Server, new: Server, command: Command) -> bool:
    """Whether a command leaves a permit free that somebody in line may have, or offers one to somebody who may not.

    Only a room that asks for a permit, or leaves, looks at those that were free before.
    """
    if len(new.permits) > 1 and any(map(_is_above_its_limit, new.permits, itertools.count(1))):
        return True
    if not new.line:
        return False
    looks_at_all = isinstance(command, Stand | Leave)
    freed = [
        one for one in new.free(len(new.permits)) if old.permits[one - 1] or (looks_at_all and one <= command.limit)
    ]
    return any(map(new.first_for, freed))


def _is_above_its_limit(key: Key | None, permit: int) -> bool:
    return key is not None and bool(key.member) and limit_of(key.member) < permit


def wake(world: World, step: Step) -> Iterator[Step]:
    """The wake-up of a room to which `step` offers a permit: it may arrive, and it may be lost."""
    yield step
    for before, key in zip(world.server.permits, step.world.server.permits, strict=True):
        if key and key.is_offered and key != before and key.room in step.world.asleep:
            yield step._replace(world=step.world._replace(asleep=step.world.asleep - {key.room}))
