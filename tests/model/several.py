"""Several locks for one run, on paper: who holds, keeps and waits for which keys, in every interleaving.

A message wants one key or more. Its run asks for them one after the other, in a child of its worker. If one is refused,
the run gives back the others, and the message waits in its worker's room, in the line of that key. Later the room asks
for all keys of the message, and calls it when it has got them. No hint is delivered: rooms look at any time.

A room keeps keys for at most one message that has lost its turn: the one that was published first. The room keeps a
slot for it too. It asks in the common order, and holds nothing that comes after a key that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from enum import Enum
from typing import NamedTuple

from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.several import gathered, in_order
from promises import Promise

from .memory import quick, remembered
from .world import Faults


class Mistake(Enum):
    """What an implementation may get wrong. A test shows that each one breaks a promise."""

    HOLDS_WHILE_IT_WAITS = "a run that is refused a key keeps the others"
    CHILD_LEAVES_A_PART = "only one key of a dead child is released"
    TRUSTS_ITS_CALL = "a run that was called begins without asking for its keys again"
    CROSSWISE_FOR_EVER = "no room ever keeps keys for a message that has lost its turn"
    FIRST_STAYS = "a room keeps keys for a message though one that was published earlier has lost its turn too"
    HOLDS_UNORDERED = "a room that keeps keys asks for them in the order in which the message names them"
    KEEPS_AFTER_A_GAP = "a room that has lost a key it kept asks for it again, and keeps those that come after it"
    SLOT_FOR_ANYONE = "the slot of the message for which a room keeps keys goes to a later message"
    SHUT_ROOM_KEEPS = "a room that shuts down goes on keeping keys"


class Scenario(NamedTuple):
    """Where an exploration begins, and what may go wrong."""

    name: str
    wants: tuple[str, ...]
    """The keys of each message, in the order of the publishes."""
    slots: tuple[int, ...]
    """For each room, how many runs its worker may have at a time."""
    faults: Faults = Faults()
    waiting: tuple[int, ...] = ()
    """The rooms in which the first messages wait from the beginning: each has lost a turn."""
    endless: frozenset[int] = frozenset()
    """The messages that are published again when they are done."""


TWO_ROOMS = Scenario("two rooms", ("AB", "BA", "A", "B"), (1, 1))
ONE_ROOM = Scenario("one room", ("AB", "BA", "A", "B"), (2,))
TWO_FAIL = Scenario("two rooms with faults", ("AB", "BA"), (1, 1), Faults(2, deaths=1, lapses=2, handovers=1))
ONE_FAILS = Scenario("one room with faults", ("AB", "A", "BA"), (2,), Faults(1, deaths=1, lapses=1))
CROSSWISE = Scenario("four messages that wait crosswise", ("AB", "BA") * 2, (1, 1), waiting=(0, 1, 0, 1))
THREE_KEYS = Scenario("three keys", ("ABC", "BA"), (1, 1), Faults(1, lapses=1), waiting=(0, 1))
ENDLESS = Scenario("others without end", ("AB", "A", "B"), (1, 1), endless=frozenset({1, 2}))
SCENARIOS = (TWO_ROOMS, ONE_ROOM, TWO_FAIL, ONE_FAILS, CROSSWISE, THREE_KEYS, ENDLESS)
NAMES = "ABC"
#: After how many lost turns a room keeps keys for a message at the latest. Only the time decides; here, anything may.
PATIENCE = 2


class State(Enum):
    """What a key holds; nothing if it is free."""

    HELD = "held by the run of a message"
    GOING = "with its release on the way"
    OFFERED = "offered to a room"
    KEPT = "kept for a message that waits or was called"

    __hash__ = object.__hash__


@quick
class Key(NamedTuple):
    """A key that is not free."""

    state: State
    who: int = 0
    """The message; or the room that it is offered to."""


class Place(Enum):
    """Where a message is."""

    QUEUE = "in the queue"
    WAITS = "in a room"
    ASKS = "with a child that asks for the keys"
    RUNS = "in its body"
    DONE = "done"

    __hash__ = object.__hash__


@quick
class Message(NamedTuple):
    """A message; its number is its rank."""

    place: Place = Place.QUEUE
    room: int = 0
    key: int = 0
    """The key that it waits for; or how many of its keys its run has asked for."""
    lost: int = 0
    """How many turns it has lost."""
    keeps: bool = False
    """Whether its room keeps for it what it gets."""
    is_called: bool = False


@quick
class Gathering(NamedTuple):
    """What a room's thread is at: it asks for the keys of one message."""

    message: int
    is_offered: bool = False
    asked: int = 0
    """How many it has been given."""


@quick
class World(NamedTuple):
    """One state."""

    keys: tuple[Key | None, ...]
    lines: tuple[tuple[tuple[int, int], ...], ...]
    """For each key the rooms in line: the rank of the first waiter, and the room."""
    messages: tuple[Message, ...]
    rooms: tuple[Gathering | None, ...]
    faults: Faults
    shut: frozenset[int] = frozenset()
    """The rooms that shut down."""

    def hold(self, number: int, key: Key | None) -> World:
        return self._replace(keys=(*self.keys[:number], key, *self.keys[number + 1 :]))

    def line(self, number: int, line: tuple[tuple[int, int], ...]) -> World:
        return self._replace(lines=(*self.lines[:number], line, *self.lines[number + 1 :]))

    def put(self, number: int, message: Message) -> World:
        return self._replace(messages=(*self.messages[:number], message, *self.messages[number + 1 :]))

    def at(self, room: int, gathering: Gathering | None) -> World:
        return self._replace(rooms=(*self.rooms[:room], gathering, *self.rooms[room + 1 :]))

    def offer(self, key: int) -> World:
        """Offer a key that gets free to the first room in its line."""
        line = self.lines[key]
        return self.hold(key, Key(State.OFFERED, line[0][1]) if line else None).line(key, line[1:])

    def let_go(self, message: int, but: int = -1) -> World:
        """Have the keys of a message released, or passed on. Each release arrives in its own time."""
        mine = Key(State.HELD, message), Key(State.KEPT, message)
        return self._replace(
            keys=tuple(
                Key(State.GOING) if one in mine and number != but else one for number, one in enumerate(self.keys)
            )
        )

    def stop_keeping(self, message: int) -> World:
        return self.let_go(message).put(message, self.messages[message]._replace(keeps=False))

    def waiting(self, room: int) -> list[int]:
        """The messages that wait in a room, the first one first."""
        return [n for n, one in enumerate(self.messages) if one.place is Place.WAITS and one.room == room]


#: Where a message takes a slot of its worker.
IN_SLOT = frozenset({Place.ASKS, Place.RUNS})


class Step(NamedTuple):
    """What leads from one state to the next."""

    label: str
    world: World
    actor: str = ""
    """Whose step it is: no actor puts off for ever what it can do again and again. Empty for a fault."""


@remembered
def wanted(keys: str) -> tuple[int, ...]:
    """The keys of a message, in the order in which its run asks for them."""
    return tuple(NAMES.index(one.key) for one in in_order(map(Demand, keys)))


@remembered
def order(keys: str, waits_for: int, is_offered: bool, keeps: bool, is_sorted: bool) -> tuple[int, ...]:
    """The keys of a message, in the order in which a room asks for them."""
    demands = in_order(map(Demand, keys)) if is_sorted else tuple(map(Demand, keys))
    asked = gathered(demands, Demand(NAMES[waits_for]), is_offered=is_offered, keeps=keeps)
    return tuple(NAMES.index(one.key) for one in asked)


def stand(world: World, room: int, key: int, rank: int, next_rank: int | None) -> tuple[bool, World]:
    """Put a room in line, and keep the key for its waiter with this rank if it is that waiter's turn: lua/stand.lua."""
    others = tuple(one for one in world.lines[key] if one[1] != room)
    line, found = tuple(sorted((*others, (rank, room)))), world.keys[key]
    after = world.line(key, line)
    is_mine = found == Key(State.OFFERED, room)
    if found == Key(State.KEPT, rank) or ((is_mine or found is None) and line[0][1] == room):
        left = others if next_rank is None else tuple(sorted((*others, (next_rank, room))))
        return True, after.hold(key, Key(State.KEPT, rank)).line(key, left)
    return False, after.offer(key) if is_mine or found is None else after


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
                yield from self._die(world, number)
            elif one.place is Place.RUNS:
                after = Message() if number in self.scenario.endless else Message(Place.DONE)
                yield Step(f"{number} is done", world.let_go(number).put(number, after), f"run {number}")
                yield from self._die(world, number)
        for key, found in enumerate(world.keys):
            if found and found.state is State.GOING:
                yield Step(f"the release of {NAMES[key]} arrives", world.offer(key), f"release {key}")
            elif found and found.state is not State.HELD and world.faults.may("lapses"):
                lapsed = world.hold(key, None)._replace(faults=world.faults.spend("lapses"))
                yield Step(f"{NAMES[key]} is no longer {found.state.value} {found.who}", lapsed)
        for room, gathering in enumerate(world.rooms):
            if gathering:
                yield self._gather(world, room, gathering)
            else:
                yield from self._look(world, room)

    def _free(self, world: World, room: int, number: int, *, is_new: bool = False) -> int:
        """How many slots of a room's worker are free for a message.

        The slot of the message for which the room keeps keys is free only for that message, and for waiters before it.
        """
        taken = 0
        for other, one in enumerate(world.messages):
            if one.room == room and one.place in IN_SLOT:
                taken += 1
            elif one.room == room and one.keeps and Mistake.SLOT_FOR_ANYONE not in self.mistakes:
                taken += is_new or other < number
        return self.scenario.slots[room] - taken

    # -- in the children

    def _deliver(self, world: World, number: int) -> Iterator[Step]:
        """A worker with a free slot gives a message to a child, which asks for the first key."""
        for room, gathering in enumerate(world.rooms):
            is_wanted = gathering or Key(State.OFFERED, room) in world.keys
            if room not in world.shut and self._free(world, room, number, is_new=True) > bool(is_wanted):
                asks = self._ask(world.put(number, Message(Place.ASKS, room)), number)
                yield asks._replace(label=f"{asks.label}, in room {room}", actor=f"broker {number}")

    def _ask(self, world: World, number: int) -> Step:
        """A run asks for its next key."""
        one, keys = world.messages[number], wanted(self.scenario.wants[number])
        key = keys[one.key]
        found, label, actor = world.keys[key], f"{number} asks for {NAMES[key]}", f"run {number}"
        is_kept = found == Key(State.KEPT, number) or (one.is_called and Mistake.TRUSTS_ITS_CALL in self.mistakes)
        if is_kept or (found is None and not world.lines[key]):
            place, asked = (Place.RUNS, 0) if one.key + 1 == len(keys) else (Place.ASKS, one.key + 1)
            granted = world.hold(key, Key(State.HELD, number)).put(number, one._replace(place=place, key=asked))
            return Step(f"{label}: granted", granted, actor)
        after = world if found else world.offer(key)
        if Mistake.HOLDS_WHILE_IT_WAITS not in self.mistakes:
            after = after.let_go(number)
        waits = Message() if one.room in world.shut else Message(Place.WAITS, one.room, key)
        return Step(f"{label}: refused", after.put(number, waits), actor)

    def _die(self, world: World, number: int) -> Iterator[Step]:
        if world.faults.may("deaths"):
            held = [key for key, found in enumerate(world.keys) if found == Key(State.HELD, number)]
            but = held[-1] if len(held) > 1 and Mistake.CHILD_LEAVES_A_PART in self.mistakes else -1
            dead = world._replace(faults=world.faults.spend("deaths")).let_go(number, but)
            yield Step(f"the child of {number} dies", dead.put(number, Message()))

    # -- in the rooms

    def _look(self, world: World, room: int) -> Iterator[Step]:
        """What the thread of a room may begin."""
        waiting = world.waiting(room)
        for key, found in enumerate(world.keys):
            is_offered = found == Key(State.OFFERED, room)
            first = next((number for number in waiting if world.messages[number].key == key), None)
            if first is not None and self._free(world, room, first) > 0:
                one = world.messages[first]
                if one.keeps or one.lost < PATIENCE or not self._may_keep(world, first):
                    step = self._gather(world, room, Gathering(first, is_offered))
                    yield step._replace(actor=f"room {room} {key}")
            elif is_offered or (first is None and any(one[1] == room for one in world.lines[key])):
                left = world.line(key, tuple(one for one in world.lines[key] if one[1] != room))
                left = left.offer(key) if is_offered or not found else left
                yield Step(f"room {room} leaves the line of {NAMES[key]}", left, f"room {room} {key}")
        for number in waiting:
            if world.messages[number].keeps and self._free(world, room, number) > 0:
                yield self._gather(world, room, Gathering(number))._replace(actor=f"room {room} for {number}")
            elif world.messages[number].keeps:
                yield Step(f"room {room} has no slot for {number}", world.stop_keeping(number), f"room {room}")
            elif self._may_keep(world, number):
                yield Step(f"room {room} keeps keys for {number}", self._keep(world, room, number), f"time of {number}")
        if world.faults.may("handovers") and len(world.shut) + 1 < len(world.rooms) and room not in world.shut:
            yield Step(f"room {room} shuts down", self._shut(world, room))

    def _gather(self, world: World, room: int, at: Gathering) -> Step:
        """The room asks for the next key of a waiter."""
        number, actor = at.message, f"room {room}"
        one = world.messages[number]
        wants = order(self.scenario.wants[number], one.key, at.is_offered, one.keeps, self.is_sorted)
        kept = [world.keys[key] == Key(State.KEPT, number) for key in wants]
        asked = kept.index(False) if one.keeps else at.asked
        if one.keeps and any(kept[asked:]) and Mistake.KEEPS_AFTER_A_GAP not in self.mistakes:
            return Step(f"room {room} has lost a key of {number}", world.let_go(number), actor)
        key, label = wants[asked], f"room {room} asks for {NAMES[wants[asked]]} for {number}"
        others = [n for n in world.waiting(room) if n != number and world.messages[n].key == key]
        is_granted, after = False, world
        if not others or others[0] > number:
            is_granted, after = stand(world, room, key, number, others[0] if others else None)
        if is_granted and (sum(kept) + 1 == len(wants) if one.keeps else asked + 1 == len(wants)):
            called = after.at(room, None).put(number, Message(Place.ASKS, room, is_called=True))
            return Step(f"{label}: {number} is called", called, actor)
        if is_granted:
            goes_on = after if one.keeps else after.at(room, at._replace(asked=asked + 1))
            return Step(f"{label}: kept", goes_on, actor)
        if not one.keeps:
            after = after.let_go(number).at(room, None)
        lost = min(PATIENCE, one.lost + (key != one.key and not one.keeps))
        return Step(f"{label}: refused", after.put(number, one._replace(key=key, lost=lost)), actor)

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


def broken_in(world: World, scenario: Scenario) -> Promise | None:
    """The promise that does not hold in a state.

    What is held belongs to a run. What is kept is for a message that was called, or that its room is asking for now; or
    for the one message of a room for which it keeps keys.
    """
    used = [scenario.wants[number] for number, one in enumerate(world.messages) if one.place is Place.RUNS]
    if len("".join(used)) > len({*"".join(used)}):
        return Promise.AT_MOST_N
    for found in filter(None, world.keys):
        one = world.messages[found.who]
        if found.state is State.HELD and one.place not in IN_SLOT:
            return Promise.FREED
        gathers = any(at and at.message == found.who for at in world.rooms)
        if found.state is State.KEPT and not (one.is_called or one.keeps or gathers):
            return Promise.RESERVED
    keepers = [one.room for one in world.messages if one.keeps]
    return Promise.RESERVED if len(keepers) > len(set(keepers)) else None


class Exploration(NamedTuple):
    """What was found: every state, and the first broken promise with the way to it."""

    states: dict[World, int]
    broken: Promise | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([str(self.broken or f"{len(self.states)} states, nothing broken"), *self.trace])


#: The steps from each state: whose step it is, and the state that it leads to.
Graph = dict[int, list[tuple[str, int]]]


def explore(scenario: Scenario, mistakes: Set[Mistake] = frozenset()) -> Exploration:
    """Find all that can happen in `scenario`, breadth first, until a promise is broken."""
    steps, count = Steps(scenario, mistakes), len({*"".join(scenario.wants)})
    waiting = tuple(Message(Place.WAITS, room, number % 2, 1) for number, room in enumerate(scenario.waiting))
    messages = (*waiting, *(Message(),) * (len(scenario.wants) - len(waiting)))
    start = World((None,) * count, ((),) * count, messages, (None,) * len(scenario.slots), scenario.faults)
    found, states, ways, graph = {start: 0}, [start], [(0, "")], Graph()

    def way_to(number: int) -> tuple[str, ...]:
        labels = list[str]()
        while number:
            number, label = ways[number]
            labels.append(label)
        return tuple(labels[::-1])

    for at, world in enumerate(states):  # what is found meanwhile is appended
        if broken := broken_in(world, scenario):
            return Exploration(found, broken, way_to(at))
        graph[at] = []
        for label, new, actor in steps.of(world):
            if new == world:
                continue
            if new not in found:
                found[new] = len(states)
                states.append(new)
                ways.append((at, label))
            graph[at].append((actor, found[new]))
        if not graph[at] and any(one.place is not Place.DONE for one in world.messages):
            return Exploration(found, Promise.ENDS, (*way_to(at), "nothing moves"))
        if not graph[at] and (any(world.keys) or any(world.lines)):
            return Exploration(found, Promise.FREED, way_to(at))
    for circle in fair(graph):
        worlds = [states[at] for at in circle]
        for number in {*range(len(messages))} - scenario.endless:
            waits = all(world.messages[number].place not in {Place.QUEUE, Place.DONE} for world in worlds)
            # While others come without end, there may be no free slot; but once keys are kept for it, it has one.
            if waits and (not scenario.endless or any(world.messages[number].keeps for world in worlds)):
                trace = (*way_to(min(circle)), f"{number} waits for ever, in {len(circle)} states")
                return Exploration(found, Promise.ENDS, trace)
    return Exploration(found)


def fair(graph: Graph) -> Iterator[list[int]]:
    """The circles that may go on for ever although each step that is possible again and again is taken at times."""
    for circle in circles(graph):
        inside = set(circle)
        able = {actor for at in circle for actor, _ in graph[at] if actor}
        left = able - {actor for at in circle for actor, to in graph[at] if to in inside}
        if left:
            yield from fair({at: graph[at] for at in circle if not any(actor in left for actor, _ in graph[at])})
        else:
            yield circle


def circles(graph: Graph) -> Iterator[list[int]]:
    """The largest sets of states in which each leads to each: Tarjan's algorithm."""
    low, stack, done = dict[int, int](), list[int](), set[int]()
    for root in graph:
        work = [] if root in low else [(root, len(low), iter(graph[root]))]
        while work:
            at, number, steps = work[-1]
            if at not in low:
                low[at] = number
                stack.append(at)
            for _, to in steps:
                if to in graph and to not in low:
                    work.append((to, len(low), iter(graph[to])))
                    break
                if to in graph and to not in done:
                    low[at] = min(low[at], low[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == number:
                    circle = stack[stack.index(at) :] if stack[-1] != at else [at]
                    del stack[-len(circle) :]
                    done.update(circle)
                    if len(circle) > 1:
                        yield circle
