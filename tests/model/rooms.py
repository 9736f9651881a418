"""Rooms: how the messages that wait in a worker come to their turns, and what is promised of the line.

No wake-up is ever delivered here: whoever waits lives by looks alone. A look may come at any time, so a wake-up would
be nothing but a look that comes early. Only the mistake of never looking makes a difference between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from .commands import Leave, Reply, Server, Stand, apply
from .executions import IN_SLOT, Execution, Phase
from .rules import Mistake, Promise
from .world import Faults, Step, World


class Rooms:
    """The steps of rooms, and the promises that hold for them.

    Args:
        slots: How many executions each worker can run at a time; empty where each message has a worker of its own.
        has_others: Whether tasks with other keys take a slot of each worker now and then.
        faults: How many faults may happen in all: where as many may still happen, none has happened.
        mistakes: The mistakes that rooms make.
    """

    def __init__(self, slots: Sequence[int], has_others: bool, faults: Faults, mistakes: Set[Mistake]) -> None:
        self.slots = {f"w{number}": count for number, count in enumerate(slots, 1)}
        self.has_others = has_others
        self.faults = faults
        self.mistakes = mistakes

    def of(self, world: World) -> Iterator[Step]:
        """What the rooms may do next."""
        for room in sorted({one.home for one in world.executions} | set(self.slots)):
            waiting = world.waiting_in(room)
            for one in waiting:
                key = world.server.key
                if key and key.nonce == one.message.claim and Mistake.CLAIM_WAITS_IN_LINE not in self.mistakes:
                    yield self._begin(world, one)
            if waiting and (self.has_slot(world, room) or Mistake.ROOM_TAKES_WITHOUT_A_SLOT in self.mistakes):
                yield from self._stand(world, room, waiting)
            elif self._is_known(world.server, room):
                command = Leave(room)
                yield self._heard(world, command, world._replace(server=self._apply(world, command)), "leaves the line")

        if self.has_others:
            yield from self._work_elsewhere(world)

    def _work_elsewhere(self, world: World) -> Iterator[Step]:
        """A task with another key, which is none of the model's, takes a slot of a worker, or its run ends."""
        for room in self.slots:
            if room in world.busy:
                yield Step(f"{room} has a slot again", world._replace(busy=world.busy - {room}))
            elif self.has_slot(world, room):
                yield Step(f"{room} runs another task", world._replace(busy=world.busy | {room}))

    def has_slot(self, world: World, room: str) -> bool:
        """Whether the worker can begin another execution."""
        return not self.slots or self.free_slots(world, room, IN_SLOT) > 0

    def is_overbooked(self, world: World, room: str) -> bool:
        """Whether somebody was called for whom there is no slot."""
        return bool(self.slots) and self.free_slots(world, room, IN_SLOT - {Phase.CALLED}) <= 0

    def free_slots(self, world: World, room: str, taking: Set[Phase]) -> int:
        taken = [one for one in world.executions if one.home == room and one.phase in taking]
        return self.slots[room] - len(taken) - (room in world.busy)

    def _is_known(self, server: Server, room: str) -> bool:
        key = server.key
        return any(name == room for _, name in server.line) or (key is not None and key.nonce == f"?{room}")

    def _stand(self, world: World, room: str, waiting: list[Execution]) -> Iterator[Step]:
        if Mistake.NO_LOOKS in self.mistakes and room in world.asleep:
            return
        command = Stand(room, waiting[0].message.place, waiting[1].message.place if len(waiting) > 1 else None)
        effect = apply(world.server, command, self.mistakes)
        after = world._replace(server=effect.server)
        if effect.reply is Reply.TAKEN:
            called = waiting[0]._replace(phase=Phase.CALLED, called=True)
            step = self._heard(world, command, after.put(called), f"calls {called.nonce}")
            on_the_way = [one for one in world.executions if one.called and one.phase is Phase.CALLED]
            is_second = world.faults == self.faults and any(one.home == room for one in on_the_way)
            yield step._replace(broken=Promise.ONE_CALL) if is_second else step
            if world.faults.may("lost_replies"):
                lost = after.spend("lost_replies")
                yield self._heard(world, command, lost, "takes the key, and the reply is lost")
        elif after.server != world.server or Mistake.NO_LOOKS in self.mistakes:
            yield self._heard(world, command, after, "stands in line")

    def _begin(self, world: World, one: Execution) -> Step:
        called = world.put(one._replace(phase=Phase.CALLED))
        return Step(f"{one.home} sees that the key is reserved for {one.nonce}", called)

    def _heard(self, world: World, command: Stand | Leave, after: World, what: str) -> Step:
        room = command.room
        if Mistake.NO_LOOKS in self.mistakes:
            is_left = isinstance(command, Leave) or (after.server.key and after.server.key.nonce == f"!{room}")
            after = after._replace(asleep=after.asleep - {room} if is_left else after.asleep | {room})
        return Step(f"{room} {what}", after, (world.server, command))

    def _apply(self, world: World, command: Stand | Leave) -> Server:
        return apply(world.server, command, self.mistakes).server

    # -- promises

    def broken_by(self, world: World, step: Step) -> Promise | None:
        """The promise of the line that `step` breaks, which leads on from `world`; None where it breaks none."""
        old, new = world.server, step.world.server
        if old.key is not None and new.key is None and new.line and step.asked:
            return Promise.NOT_IDLE
        if self._idles(step.world):
            return Promise.NOT_IDLE
        if old.key and old.key.nonce[0] == "!" and step.asked and (new.key is None or new.key.nonce[0] == "?"):
            calls = [one for one in step.world.called if one.called and one.home == old.key.room]
            return Promise.ORDER if calls else None
        if old.key is None and new.key and new.key.nonce[0] in "!n" and old.line and step.asked:
            return Promise.ORDER if self._passes_by(old, step) else None
        return None

    def _passes_by(self, old: Server, step: Step) -> bool:
        """Whether a free key went to somebody although a room with an earlier place stood in line."""
        command = step.asked[1] if step.asked else None
        if isinstance(command, Stand):
            return any(place < command.place and room != command.room for place, room in old.line)
        return not getattr(command, "room", "")

    def _idles(self, world: World) -> bool:
        """Whether somebody was called who has no slot, while another one waits who has one."""
        key = world.server.key
        if not self.slots or key is None or key.nonce[0] != "!" or key.room not in self.slots:
            return False
        mine = [one for one in world.called if one.home == key.room]
        has_slot = self.free_slots(world, key.room, IN_SLOT - {Phase.CALLED}) > 0
        others = [room for room in self.slots if room != key.room and world.waiting_in(room)]
        return bool(mine) and not has_slot and any(self.has_slot(world, room) for room in others)


def wake(world: World, step: Step) -> Iterator[Step]:
    """The wake-up of a room to which `step` offers the key: it may arrive, and it may be lost."""
    key = step.world.server.key
    yield step
    if key and key.nonce[0] == "?" and key != world.server.key and key.room in step.world.asleep:
        yield step._replace(world=step.world._replace(asleep=step.world.asleep - {key.room}))
