"""Several locks for one run, on paper: the states, the scenarios, the known mistakes, and what the server does."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.several import gathered, in_order

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
    SLOT_FOR_ANYONE = "the slot of the message for which a room keeps all keys goes to a later message"
    KEEPS_WITHOUT_SLOT = "a room keeps keys for a message without a slot for ever"
    # In a worker with a backlog, a room that keeps a part sees no free slot, though runs end all the time.
    LETS_GO_OF_A_PART = "a room without a slot lets go of keys though others are missing, and so has no slot kept"
    SHUT_ROOM_KEEPS = "a room that shuts down goes on keeping keys"
    THIRD_KEEPS = "a third run at a key that two may hold keeps its other keys"
    SECOND_PERMIT = "a room that asks again for a key that two may hold is given the second permit too"
    UNDONE_ONCE = "an undo that is lost is not sent again"
    UNDONE_BY_OWNER = "an undo names the run, not the token that it has asked with"
    ASKS_AS_BEFORE = "a run whose reply was lost asks again with the same token"
    FIRST_GRANT_STAYS = "a run that asks again for a key that it was granted leaves its first token there"


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
    twice: str = ""
    """The keys that two may hold."""
    inside: tuple[str, ...] = ()
    """For each message the key, if any, that its body waits for with a `Lock`."""

    def used(self, number: int, message: Message) -> str:
        """The keys that the body of a message uses now."""
        if message.place is not Place.RUNS:
            return ""
        return self.wants[number] + "".join(self.inside[number : number + 1])[: message.key]


TWO_ROOMS = Scenario("two rooms", ("AB", "BA", "A", "B"), (1, 1))
ONE_ROOM = Scenario("one room", ("AB", "BA", "A", "B"), (2,))
TWO_FAIL = Scenario("two rooms with faults", ("AB", "BA"), (1, 1), Faults(2, deaths=1, lapses=2, handovers=1))
ONE_FAILS = Scenario("one room with faults", ("AB", "A", "BA"), (2,), Faults(1, deaths=1, lapses=1))
CROSSWISE = Scenario("four messages that wait crosswise", ("AB", "BA") * 2, (1, 1), waiting=(0, 1, 0, 1))
THREE_KEYS = Scenario("three keys", ("ABC", "BA"), (1, 1), Faults(1, lapses=1), waiting=(0, 1))
ENDLESS = Scenario("others without end", ("AB", "A", "B"), (1, 1), endless=frozenset({1, 2}))
BACKLOG = Scenario("a backlog of others", ("AB", "B", "C"), (1, 1), endless=frozenset({1, 2}))
NESTED = Scenario("a body that waits for a key", ("BC", "A", "B"), (1, 1), waiting=(0,), inside=("", "C", ""))
TWO_HOLD = Scenario("a key that two may hold", ("AB", "B", "BA"), (2, 1), Faults(1, lapses=1), twice="B")
LOST = Scenario("lost replies", ("AB", "B"), (1, 1), Faults(2, lost_replies=2, deaths=1))
SCENARIOS = (
    *(TWO_ROOMS, ONE_ROOM, TWO_FAIL, ONE_FAILS, CROSSWISE, THREE_KEYS),
    *(ENDLESS, BACKLOG, NESTED, TWO_HOLD, LOST),
)
IN_ORDER = Scenario("a body that takes its keys in order", ("AB", "A"), (1, 1), waiting=(0,), inside=("", "B"))
OUT_OF_ORDER = Scenario("the other way around", ("AB", "B"), (1, 1), waiting=(0,), inside=("", "A"))
NAMES = "ABC"
#: After how many lost turns a room keeps keys for a message at the latest. Only the time decides; here, anything may.
PATIENCE = 2


class State(Enum):
    """What a permit of a key holds; nothing if it is free."""

    HELD = "held by the run of a message"
    GOING = "with its release on the way"
    OFFERED = "offered to a room"
    KEPT = "kept for a message that waits or was called"

    __hash__ = object.__hash__


@quick
class Key(NamedTuple):
    """A permit that is not free. A key has one; two if two may hold it."""

    state: State
    who: int = 0
    """The message; or the room that it is offered to."""
    run: int = 0
    """Which of the message's runs holds it: the nonce."""
    token: int = 0
    """With which of its tokens that run has asked."""


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
    """The key that it waits for; or how many of its keys its run has asked for; or how many its body has taken."""
    lost: int = 0
    """How many turns it has lost."""
    keeps: bool = False
    """Whether its room keeps for it what it gets."""
    is_called: bool = False
    run: int = 0
    token: int = 0


@quick
class Gathering(NamedTuple):
    """What a room's thread is at: it asks for the keys of one message."""

    message: int
    is_offered: bool = False
    asked: int = 0
    """How many it has been given."""


#: The permits of a key, in their order.
Permits = tuple[Key | None, ...]


@quick
class World(NamedTuple):
    """One state."""

    keys: tuple[Permits, ...]
    lines: tuple[tuple[tuple[int, int], ...], ...]
    """For each key the rooms in line: the rank of the first waiter, and the room."""
    messages: tuple[Message, ...]
    rooms: tuple[Gathering | None, ...]
    faults: Faults
    shut: frozenset[int] = frozenset()
    """The rooms that shut down."""
    undos: frozenset[tuple[int, Key]] = frozenset()
    """What runs take back of which key because a reply was lost: on the way, or with a keeper that sends it again."""

    def hold(self, number: int, permit: int, one: Key | None) -> World:
        permits = self.keys[number]
        permits = (*permits[:permit], one, *permits[permit + 1 :])
        return self._replace(keys=(*self.keys[:number], permits, *self.keys[number + 1 :]))

    def line(self, number: int, line: tuple[tuple[int, int], ...]) -> World:
        return self._replace(lines=(*self.lines[:number], line, *self.lines[number + 1 :]))

    def put(self, number: int, message: Message) -> World:
        return self._replace(messages=(*self.messages[:number], message, *self.messages[number + 1 :]))

    def at(self, room: int, gathering: Gathering | None) -> World:
        return self._replace(rooms=(*self.rooms[:room], gathering, *self.rooms[room + 1 :]))

    def offer(self, key: int, *freed: int) -> World:
        """Free some permits of a key, and offer each free one to the first room in line."""
        after = self
        for permit, one in enumerate(self.keys[key]):
            if one is None or permit in freed:
                line = after.lines[key]
                after = after.hold(key, permit, Key(State.OFFERED, line[0][1]) if line else None).line(key, line[1:])
        return after

    def let_go(self, message: int, *, but: Collection[int] = ()) -> World:
        """Have the keys of a message, and of its run, released or passed on. Each release arrives in its own time.

        The keys `but` stay as they are. What an earlier run may hold is left to its undo.
        """
        run = self.messages[message].run

        def is_mine(key: int, one: Key | None) -> bool:
            if one is None or one.who != message or key in but:
                return False
            return one.state is State.KEPT or (one.state is State.HELD and one.run == run)

        return self._replace(
            keys=tuple(
                tuple(Key(State.GOING) if is_mine(key, one) else one for one in permits)
                for key, permits in enumerate(self.keys)
            )
        )

    def stop_keeping(self, message: int) -> World:
        return self.let_go(message).put(message, self.messages[message]._replace(keeps=False))

    def waiting(self, room: int) -> list[int]:
        """The messages that wait in a room, the first one first."""
        return [n for n, one in enumerate(self.messages) if one.place is Place.WAITS and one.room == room]

    def doubts(self, key: int, number: int) -> World:
        """The reply to the run of a message that has asked for a key is lost: an undo is sent until it is answered."""
        one = self.messages[number]
        return self._replace(undos=self.undos | {(key, Key(State.HELD, number, one.run, one.token))})

    def next_run(self, number: int) -> int:
        """The nonce of the next run of a message: one by which nothing is held or taken back."""
        keys = [one for permits in self.keys for one in permits if one and one.state is State.HELD]
        used = {one.run for one in (*keys, *(one for _, one in self.undos)) if one.who == number}
        return min({*range(len(used) + 1)} - used)

    def next_token(self, number: int) -> int:
        """The next token of a run: one that nothing takes back."""
        used = {one.token for _, one in self.undos if one[1:3] == (number, self.messages[number].run)}
        return min({*range(len(used) + 1)} - used)


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


# What the server does.


def acquire(world: World, key: int, who: int, *, takes_new_token: bool = True) -> tuple[bool, World]:
    """Give a run a permit that it has, that is kept for it, or that no room waits for: lua/acquire.lua."""
    one, permits = world.messages[who], world.keys[key]
    token = Key(State.HELD, who, one.run, one.token)
    mine = next((n for n, had in enumerate(permits) if had and had[:3] == token[:3]), None)
    kept = next((n for n, had in enumerate(permits) if had == Key(State.KEPT, who)), None)
    is_waited = world.lines[key] or any(had and had.state is State.OFFERED for had in permits)
    free = permits.index(None) if None in permits and (one.is_called or not is_waited) else None
    granted = next((n for n in (mine, kept, free) if n is not None), None)
    if granted is None:
        return False, world.offer(key)
    after = world if granted == mine and not takes_new_token else world.hold(key, granted, token)
    return True, after if kept in {None, granted} else after.offer(key, kept)


def undo(world: World, key: int, held: Key, *, by_owner: bool) -> World:
    """Take back a permit that a run may have been granted with one token: lua/release.lua."""
    for permit, one in enumerate(world.keys[key]):
        if one == held or (by_owner and one and one[:3] == held[:3]):
            return world.offer(key, permit)
    return world


def stand(
    world: World, room: int, key: int, rank: int, next_rank: int | None, *, knows_call: bool = True
) -> tuple[bool, World]:
    """Put a room in line, and keep a permit for its waiter with this rank if that has its turn: lua/stand.lua."""
    others = tuple(one for one in world.lines[key] if one[1] != room)
    line, permits = tuple(sorted((*others, (rank, room)))), world.keys[key]
    offered = [n for n, one in enumerate(permits) if one == Key(State.OFFERED, room)]
    is_first = line[0][1] == room
    called = permits.index(Key(State.KEPT, rank)) if knows_call and Key(State.KEPT, rank) in permits else None
    mine = called
    if mine is None and is_first:
        mine = offered.pop() if offered else permits.index(None) if None in permits else None
    after = world.line(key, line)
    if mine is not None:
        # A second permit that is offered to the room is for its next waiter.
        left = others if next_rank is None or (offered and is_first) else tuple(sorted((*others, (next_rank, room))))
        after = after.hold(key, mine, Key(State.KEPT, rank)).line(key, left)
    return mine is not None, after.offer(key, *(() if is_first else offered))


def leave(world: World, room: int, key: int) -> World:
    """Take a room out of a line, and pass on what is offered to it: lua/leave.lua."""
    after = world.line(key, tuple(one for one in world.lines[key] if one[1] != room))
    return after.offer(key, *(n for n, one in enumerate(world.keys[key]) if one == Key(State.OFFERED, room)))
