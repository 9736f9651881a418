"""Several locks for one run, on paper: who holds, keeps and waits for which keys, in every interleaving.

A message wants one key or more. Its run asks for them one after the other, in a child of its worker. If one is refused,
the run gives back the others, and the message waits in its worker's room, in the line of that key. Later the room asks
for all keys of the message, and calls it when it has got them. No hint is delivered: rooms look at any time.

A room keeps keys for at most one message that has lost its turn: the one that was published first. It asks in the
common order, and holds nothing that comes after a key that it waits for. Once it has all, it keeps a slot too. If there
is none for too long, it lets the keys go, because a body in that slot may wait for one of them.

If a run gets no reply, it may have been granted the key all the same. Its undo is sent until it is answered; meanwhile
the run asks again, or comes back later with another nonce.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from .several_world import (
    NAMES,
    PATIENCE,
    Gathering,
    Key,
    Message,
    Mistake,
    Place,
    Scenario,
    State,
    World,
    acquire,
    leave,
    order,
    stand,
    undo,
    wanted,
)

#: Where a message takes a slot of its worker.
IN_SLOT = frozenset({Place.ASKS, Place.RUNS})


class Step(NamedTuple):
    """What leads from one state to the next."""

    label: str
    world: World
    actor: str = ""
    """Whose step it is: no actor puts off for ever what it can do again and again. Empty for a fault."""


class Steps:
    """All steps from a state."""

    def __init__(self, scenario: Scenario, mistakes: Set[Mistake]) -> None:
        self.scenario, self.mistakes = scenario, mistakes
        self.is_sorted = Mistake.HOLDS_UNORDERED not in mistakes

    def of(self, world: World) -> Iterator[Step]:
        """The steps from `world`."""
        for number, one in enumerate(world.messages):
            if one.place is Place.QUEUE:
                yield from self._deliver(world, number)
            elif one.place is Place.ASKS:
                yield self._ask(world, number)
                yield from self._ask_without_reply(world, number)
                yield from self._die(world, number)
            elif one.place is Place.RUNS:
                yield self._run(world, number)
                yield from self._die(world, number)
        for key, permits in enumerate(world.keys):
            for permit, found in enumerate(permits):
                if found and found.state is State.GOING:
                    arrived = world.offer(key, permit)
                    yield Step(f"the release of {NAMES[key]} arrives", arrived, f"release {key} {permit}")
                elif found and found.state is not State.HELD and world.faults.may("lapses"):
                    lapsed = world.hold(key, permit, None)._replace(faults=world.faults.spend("lapses"))
                    yield Step(f"{NAMES[key]} is no longer {found.state.value} {found.who}", lapsed)
        for key, held in world.undos:
            yield from self._undo(world, key, held)
        for room, gathering in enumerate(world.rooms):
            if gathering:
                yield self._gather(world, room, gathering)
            else:
                yield from self._look(world, room)

    def _free(self, world: World, room: int, number: int, *, is_new: bool = False) -> int:
        """How many slots of a room's worker are free for a message.

        The slot of the message for which the room keeps all keys is free only for it, and for waiters before it.
        """
        taken = 0
        for other, one in enumerate(world.messages):
            if one.room == room and one.place in IN_SLOT:
                taken += 1
            elif one.room == room and one.keeps and Mistake.SLOT_FOR_ANYONE not in self.mistakes:
                taken += (is_new or other < number) and self._has_all(world, other)
        return self.scenario.slots[room] - taken

    def _has_all(self, world: World, number: int) -> bool:
        """Whether a room keeps all keys of a message."""
        return all(Key(State.KEPT, number) in world.keys[key] for key in wanted(self.scenario.wants[number]))

    # -- in the children

    def _deliver(self, world: World, number: int) -> Iterator[Step]:
        """A worker with a free slot gives a message to a child, which asks for the first key."""
        for room, gathering in enumerate(world.rooms):
            is_wanted = gathering or any(Key(State.OFFERED, room) in permits for permits in world.keys)
            if room not in world.shut and self._free(world, room, number, is_new=True) > bool(is_wanted):
                given = world.put(number, Message(Place.ASKS, room, run=world.next_run(number)))
                asks = self._ask(given, number)
                yield asks._replace(label=f"{asks.label}, in room {room}", actor=f"broker {number}")
                yield from self._ask_without_reply(given, number)

    def _ask(self, world: World, number: int) -> Step:
        """A run asks for its next key."""
        one, keys = world.messages[number], wanted(self.scenario.wants[number])
        key = keys[one.key]
        label, actor = f"{number} asks for {NAMES[key]}", f"run {number}"
        is_granted, after = self._acquire(world, key, number)
        if is_granted or (one.is_called and Mistake.TRUSTS_ITS_CALL in self.mistakes):
            place, asked = (Place.RUNS, 0) if one.key + 1 == len(keys) else (Place.ASKS, one.key + 1)
            return Step(f"{label}: granted", after.put(number, one._replace(place=place, key=asked)), actor)
        is_third = Mistake.THIRD_KEEPS in self.mistakes and len(world.keys[key]) > 1
        if Mistake.HOLDS_WHILE_IT_WAITS not in self.mistakes and not is_third:
            after = after.let_go(number)
        waits = Message() if one.room in world.shut else Message(Place.WAITS, one.room, key)
        return Step(f"{label}: refused", after.put(number, waits), actor)

    def _acquire(self, world: World, key: int, number: int) -> tuple[bool, World]:
        return acquire(world, key, number, takes_new_token=Mistake.FIRST_GRANT_STAYS not in self.mistakes)

    def _ask_without_reply(self, world: World, number: int) -> Iterator[Step]:
        """The reply to a run that asks is lost. It asks again, or gives all back and its message is sent again."""
        if not world.faults.may("lost_replies"):
            return
        one = world.messages[number]
        key = wanted(self.scenario.wants[number])[one.key]
        after = self._acquire(world, key, number)[1].doubts(key, number)
        after, label = after._replace(faults=world.faults.spend("lost_replies")), f"the reply to {number} is lost"
        token = one.token if Mistake.ASKS_AS_BEFORE in self.mistakes else after.next_token(number)
        yield Step(f"{label}: it asks again for {NAMES[key]}", after.put(number, one._replace(token=token)))
        yield Step(f"{label}: it comes back later", after.let_go(number, but=(key,)).put(number, Message()))

    def _undo(self, world: World, key: int, held: Key) -> Iterator[Step]:
        """A run takes back what it was perhaps granted. Its process does so until it is answered."""
        undone = undo(world, key, held, by_owner=Mistake.UNDONE_BY_OWNER in self.mistakes)
        answered, label = world.undos - {(key, held)}, f"the undo of {held.who} for {NAMES[key]}"
        yield Step(f"{label} arrives", undone._replace(undos=answered), f"undo {key} {held.who}")
        if world.faults.may("lost_replies"):
            faults = world.faults.spend("lost_replies")
            yield Step(f"{label} arrives, and is sent again", undone._replace(faults=faults))
            if Mistake.UNDONE_ONCE in self.mistakes:
                yield Step(f"{label} is lost", world._replace(faults=faults, undos=answered))

    def _run(self, world: World, number: int) -> Step:
        """The body of a run takes the key that it needs inside, or ends."""
        one, actor = world.messages[number], f"run {number}"
        inside = wanted("".join(self.scenario.inside[number : number + 1]))
        if one.key < len(inside):
            is_granted, after = self._acquire(world, inside[one.key], number)
            return Step(
                f"the body of {number} takes a key", after.put(number, one._replace(key=one.key + is_granted)), actor
            )
        after = Message() if number in self.scenario.endless else Message(Place.DONE)
        return Step(f"{number} is done", world.let_go(number).put(number, after), actor)

    def _die(self, world: World, number: int) -> Iterator[Step]:
        if world.faults.may("deaths"):
            mine = State.HELD, number, world.messages[number].run
            held = [key for key, permits in enumerate(world.keys) if any(one and one[:3] == mine for one in permits)]
            but = held[1:] if Mistake.CHILD_LEAVES_A_PART in self.mistakes else ()
            undos = frozenset(one for one in world.undos if one[1][:3] != mine)  # its keeper dies with it
            dead = world._replace(faults=world.faults.spend("deaths"), undos=undos).let_go(number, but=but)
            yield Step(f"the child of {number} dies", dead.put(number, Message()))

    # -- in the rooms

    def _look(self, world: World, room: int) -> Iterator[Step]:
        """What the thread of a room may begin."""
        waiting = world.waiting(room)
        for key, permits in enumerate(world.keys):
            is_offered = Key(State.OFFERED, room) in permits
            first = next((number for number in waiting if world.messages[number].key == key), None)
            if first is not None and world.messages[first].keeps:
                continue
            if first is not None and self._free(world, room, first) > 0:
                if world.messages[first].lost < PATIENCE or not self._may_keep(world, first):
                    step = self._gather(world, room, Gathering(first, is_offered))
                    yield step._replace(actor=f"room {room} {key}")
            elif is_offered or (first is None and any(one[1] == room for one in world.lines[key])):
                yield Step(
                    f"room {room} leaves the line of {NAMES[key]}", leave(world, room, key), f"room {room} {key}"
                )
        for number in waiting:
            if world.messages[number].keeps:
                yield self._gather(world, room, Gathering(number))._replace(actor=f"room {room} for {number}")
                yield from self._ask_again(world, room, number)
                if self._lets_go(world, room, number):
                    gone = world.stop_keeping(number)
                    yield Step(f"room {room} has had no slot for {number} for too long", gone, f"time of {number}")
            elif self._may_keep(world, number):
                yield Step(f"room {room} keeps keys for {number}", self._keep(world, room, number), f"time of {number}")
        if world.faults.may("handovers") and len(world.shut) + 1 < len(world.rooms) and room not in world.shut:
            yield Step(f"room {room} shuts down", self._shut(world, room))

    def _gather(self, world: World, room: int, at: Gathering) -> Step:
        """The room asks for the next key of a waiter."""
        number, actor = at.message, f"room {room}"
        one = world.messages[number]
        wants = order(self.scenario.wants[number], one.key, at.is_offered, one.keeps, self.is_sorted)
        if one.keeps and self._has_all(world, number):
            return self._call(world, room, number) if self._free(world, room, number) > 0 else Step("no slot", world)
        kept = [Key(State.KEPT, number) in world.keys[key] for key in wants]
        asked = kept.index(False) if one.keeps else at.asked
        if one.keeps and any(kept[asked:]) and Mistake.KEEPS_AFTER_A_GAP not in self.mistakes:
            return Step(f"room {room} has lost a key of {number}", world.let_go(number), actor)
        key, label = wants[asked], f"room {room} asks for {NAMES[wants[asked]]} for {number}"
        others = [n for n in world.waiting(room) if n != number and world.messages[n].key == key]
        is_granted, after = False, world
        if not others or others[0] > number:
            is_granted, after = stand(world, room, key, number, others[0] if others else None)
        if is_granted and not one.keeps and asked + 1 == len(wants):
            return self._call(after, room, number)
        if is_granted:
            goes_on = after if one.keeps else after.at(room, at._replace(asked=asked + 1))
            return Step(f"{label}: kept", goes_on, actor)
        if not one.keeps:
            after = after.let_go(number).at(room, None)
        lost = min(PATIENCE, one.lost + (key != one.key and not one.keeps))
        return Step(f"{label}: refused", after.put(number, one._replace(key=key, lost=lost)), actor)

    def _ask_again(self, world: World, room: int, number: int) -> Iterator[Step]:
        """The room asks again for what it keeps, before its calls end."""
        knows_call, wants = Mistake.SECOND_PERMIT not in self.mistakes, wanted(self.scenario.wants[number])
        for asked, key in enumerate(wants):
            if Key(State.KEPT, number) in world.keys[key]:
                others = [n for n in world.waiting(room) if n != number and world.messages[n].key == key]
                if others and others[0] < number:
                    after = world.let_go(number, but=wants[:asked])
                else:
                    _, after = stand(world, room, key, number, others[0] if others else None, knows_call=knows_call)
                yield Step(f"room {room} asks again for {NAMES[key]} for {number}", after, f"room {room} again")

    def _call(self, world: World, room: int, number: int) -> Step:
        called = Message(Place.ASKS, room, is_called=True, run=world.next_run(number))
        return Step(f"room {room} calls {number}", world.at(room, None).put(number, called), f"room {room}")

    def _lets_go(self, world: World, room: int, number: int) -> bool:
        """Whether the room may have had no slot for too long.

        Where others come without end, each leaves its slot in time, and the next one to come does not get the slot that
        the room keeps.
        """
        if self._free(world, room, number) > 0 or Mistake.KEEPS_WITHOUT_SLOT in self.mistakes:
            return False
        if Mistake.SLOT_FOR_ANYONE in self.mistakes:
            return True
        if not self._has_all(world, number) and Mistake.LETS_GO_OF_A_PART not in self.mistakes:
            return False
        if not self.scenario.endless:
            return True
        is_busy = any(one.place is Place.RUNS and one.room == room for one in world.messages)
        return is_busy and not self._has_all(world, number)

    def _may_keep(self, world: World, number: int) -> bool:
        """Whether a message that has lost its turn may become the one for which its room keeps keys."""
        one = world.messages[number]
        if not one.lost or Mistake.CROSSWISE_FOR_EVER in self.mistakes or self._free(world, one.room, number) <= 0:
            return False
        before = [other for other in world.waiting(one.room) if world.messages[other].keeps]
        return not before or (before[0] > number and Mistake.FIRST_STAYS not in self.mistakes)

    def _keep(self, world: World, room: int, number: int) -> World:
        for other in world.waiting(room):
            if world.messages[other].keeps:
                world = world.stop_keeping(other)
        first = order(self.scenario.wants[number], 0, False, True, self.is_sorted)[0]
        return world.put(number, world.messages[number]._replace(keeps=True, key=first))

    def _shut(self, world: World, room: int) -> World:
        """The messages that wait in a room are published again, and what it keeps is passed on."""
        after = world._replace(shut=world.shut | {room}, faults=world.faults.spend("handovers")).at(room, None)
        for number in world.waiting(room):
            after = after if Mistake.SHUT_ROOM_KEEPS in self.mistakes else after.let_go(number)
            after = after.put(number, Message())
        return after
