"""Fair turns on paper: what ranks the groups of a key are given, and every order in which messages come and go.

The rank of a message is a virtual time: the server's books know the latest at which a message was granted the key, and
for each group the time of its next turn. lua/acquire.lua keeps the same books, and `test_fair` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from typing import NamedTuple

from promises import Promise

#: The virtual time of a turn of a group with the weight 1.
TURN = 6
#: The virtual time when books begin: by the server's clock, which is ahead of all turns.
START = 1000


class Mistake(Enum):
    """What an implementation may get wrong. A test shows that each one breaks a promise."""

    TAG_FROM_ZERO = "a group that was idle begins at zero, and takes all turns until it has caught up"
    V_NEVER_MOVES = "the virtual time stays where it was when the books began"
    CLAMPED = "a rank that is ahead of the clock is cut to the clock"
    CHARGED_TWICE = "a message that asks again is charged again"
    ASKS_AS_A_NEWCOMER = "a message that asks again gets a rank behind those of its group that came later"
    LOST_BOOKS_BEGIN_AT_ZERO = "books that were lost begin with a virtual time before that of the messages that wait"
    TIES_STAY_OPEN = "a group that comes after a turn gets the same rank as those whose turn it was"


Mistakes = Set[Mistake]


class Books(NamedTuple):
    """What the server keeps about the groups of a key."""

    virtual: int | None = None
    """Just after the latest rank with which a message was granted the key; None: there are no books."""
    turns: tuple[tuple[str, int], ...] = ()
    """For each group, the virtual time of its next turn."""
    ranks: tuple[tuple[int, int], ...] = ()
    """The rank that each message was given."""

    def asks(
        self, group: str, cost: int, message: int, rank: int, start: int, mistakes: Mistakes = frozenset()
    ) -> tuple[int, Books]:
        """The rank of a message that is refused, and the books after that.

        Args:
            group: Its group.
            cost: The virtual time of a turn of that group.
            message: Names the message.
            rank: The rank that it carries; 0 if it carries none.
            start: The virtual time at which new books begin.
            mistakes: What is done wrong.
        """
        virtual = start if self.virtual is None else self.virtual
        turns, ranks = dict(self.turns), dict(self.ranks)
        newest = max(0 if Mistake.TAG_FROM_ZERO in mistakes else virtual, turns.get(group, 0))
        known = ranks.get(message, rank) or newest
        if Mistake.ASKS_AS_A_NEWCOMER in mistakes:
            known = newest
        rank = min(known, newest)
        if rank == newest or Mistake.CHARGED_TWICE in mistakes:
            turns[group] = max(newest, rank) + cost
            ranks[message] = rank
        turns, ranks = ({one: at for one, at in kept.items() if at >= virtual - 1} for kept in (turns, ranks))
        return rank, Books(virtual, tuple(sorted(turns.items())), tuple(sorted(ranks.items())))

    def granted(self, group: str, message: int, rank: int, mistakes: Mistakes = frozenset()) -> Books:
        """The books after a message of `group` was granted the key with this rank.

        If the message comes again, it takes the turn that its group would have had next.
        """
        turn = dict(self.turns).get(group, 0)
        if self.virtual is None or rank >= turn or Mistake.V_NEVER_MOVES in mistakes:
            return self
        ranks, past = {**dict(self.ranks), message: turn}, rank + (Mistake.TIES_STAY_OPEN not in mistakes)
        return self._replace(virtual=max(self.virtual, past), ranks=tuple(sorted(ranks.items())))


class Waiting(NamedTuple):
    """A message that waits."""

    rank: int
    number: int
    """Which of all messages it is, in the order in which they came."""
    group: str
    is_left: bool = False
    """Whether the books were lost while it waited."""
    is_next: bool = False
    """Whether it came with the turn that was next."""
    goes_before: float = math.inf
    """The number of the first message that must not go before it. If it is next, this is the first that comes after one
    that did."""


class World(NamedTuple):
    """The books, the messages that wait, and what a witness has seen."""

    books: Books = Books()
    waiting: tuple[Waiting, ...] = ()
    sent: tuple[str, ...] = ()
    """The groups of all messages that have come, sorted."""
    is_lost: bool = False
    """Whether the books were lost."""
    ahead: tuple[tuple[tuple[str, str], int], ...] = ()
    """For two groups, as long as messages of both wait: how much virtual time more the first one was given."""


class Event(NamedTuple):
    """What may happen next: a message comes, asks again or is granted the key, or the books are lost."""

    what: str
    who: str | int = ""


class Scenario(NamedTuple):
    """How many messages each group sends, and what else may happen."""

    name: str
    sends: Mapping[str, int]
    costs: Mapping[str, int]
    may_ask_again: bool = False
    may_lose: bool = False


SCENARIOS = [
    Scenario("two groups", {"A": 6, "B": 5}, {"A": TURN, "B": TURN}),
    Scenario("weights 3 to 1", {"A": 6, "B": 4}, {"A": TURN // 3, "B": TURN}),
    Scenario("three groups", {"A": 3, "B": 3, "C": 2}, {"A": TURN, "B": TURN, "C": TURN // 2}),
    Scenario("asked again", {"A": 5, "B": 4}, {"A": TURN, "B": TURN}, may_ask_again=True),
    Scenario("lost", {"A": 4, "B": 3}, {"A": TURN, "B": TURN}, may_lose=True),
    Scenario("many groups", {"A": 2, "B": 2, "C": 1, "D": 1}, dict.fromkeys("ABCD", TURN)),
]


def events(scenario: Scenario, world: World) -> Iterator[Event]:
    """What may happen next."""
    yield from (Event("comes", group) for group, most in scenario.sends.items() if world.sent.count(group) < most)
    first = min((one.rank for one in world.waiting), default=None)
    yield from (Event("is granted", one.number) for one in world.waiting if one.rank == first)  # rooms know no more
    if scenario.may_ask_again:
        yield from (Event("asks again", one.number) for one in world.waiting)
    if scenario.may_lose and world.waiting and not world.is_lost:
        yield Event("is lost")


def after(
    scenario: Scenario, world: World, event: Event, mistakes: Mistakes = frozenset()
) -> tuple[World, Promise | None]:
    """The world after an event, and the promise that was broken by it."""
    match event.what:
        case "comes":
            group = str(event.who)
            number, cost = len(world.sent), scenario.costs[group]
            rank, books = world.books.asks(group, cost, number, 0, _start(world, mistakes), mistakes)
            if Mistake.CLAMPED in mistakes:
                rank = min(rank, START)
            one = Waiting(rank, number, group, is_next=rank == world.books.virtual)
            waiting, sent = (*world.waiting, one), tuple(sorted((*world.sent, group)))
            return _watched(world._replace(books=books, waiting=waiting, sent=sent)), None
        case "asks again":
            one = next(one for one in world.waiting if one.number == event.who)
            about = one.group, scenario.costs[one.group], one.number, one.rank
            rank, books = world.books.asks(*about, _start(world, mistakes), mistakes)
            others = tuple(other for other in world.waiting if other is not one)
            waiting = tuple(sorted((*others, one._replace(rank=rank)), key=lambda one: one.number))
            return world._replace(books=books, waiting=waiting), None
        case "is lost":
            waiting = tuple(one._replace(is_left=True) for one in world.waiting)
            return world._replace(books=Books(), waiting=waiting, is_lost=True, ahead=()), None
    return _granted(scenario, world, int(event.who), mistakes)


def _start(world: World, mistakes: Mistakes) -> int:
    """Where new books begin. The clock goes faster than the virtual time."""
    if not world.is_lost:
        return START
    return 0 if Mistake.LOST_BOOKS_BEGIN_AT_ZERO in mistakes else 2 * START


def _granted(scenario: Scenario, world: World, number: int, mistakes: Mistakes) -> tuple[World, Promise | None]:
    """A message that is first in line is granted the key.

    `ORDER` is broken if another of its group came before it, if it came after the books were lost and another waited by
    then, or if it must not go before another. `FAIR` is broken if of two groups, one is ahead by more virtual time than
    a turn of each.
    """
    one = next(one for one in world.waiting if one.number == number)
    broken = None
    if any(other.group == one.group and other.number < one.number for other in world.waiting):
        broken = Promise.ORDER
    if any(other.is_left for other in world.waiting) and not one.is_left:
        broken = Promise.ORDER
    if any(one.number >= other.goes_before for other in world.waiting):
        broken = Promise.ORDER
    cost = scenario.costs[one.group]
    ahead = {pair: more + cost * ((pair[0] == one.group) - (pair[1] == one.group)) for pair, more in world.ahead}
    for (first, second), more in ahead.items():
        if abs(more) > scenario.costs[first] + scenario.costs[second] and not world.is_lost:
            broken = Promise.FAIR
    books = world.books.granted(one.group, one.number, one.rank, mistakes)
    waiting = tuple(
        other._replace(goes_before=min(other.goes_before, len(world.sent)))
        if other.is_next and other.number < one.number
        else other
        for other in world.waiting
        if other is not one
    )
    numbers = {other.number for other in waiting}  # no other message asks again
    books = books._replace(ranks=tuple(known for known in books.ranks if known[0] in numbers))
    return _watched(world._replace(books=books, waiting=waiting, ahead=tuple(sorted(ahead.items())))), broken


def _watched(world: World) -> World:
    """The world as the witness sees it: it compares two groups from the moment at which messages of both wait."""
    groups = sorted({one.group for one in world.waiting})
    known = dict(world.ahead)
    pairs = [(first, second) for first in groups for second in groups if first < second]
    return world._replace(ahead=tuple((pair, known.get(pair, 0)) for pair in pairs))


class Found(NamedTuple):
    """What an exploration has found."""

    states: int
    broken: Promise | None = None
    trace: tuple[Event, ...] = ()


def explore(scenario: Scenario, mistakes: Mistakes = frozenset()) -> Found:
    """Play every order of the scenario's events, the shortest first; stop where a promise is broken."""
    seen = {World()}
    front: list[tuple[World, tuple[Event, ...]]] = [(World(), ())]
    while front:
        following = []
        for world, trace in front:
            for event in events(scenario, world):
                then, broken = after(scenario, world, event, mistakes)
                if broken is not None:
                    return Found(len(seen), broken, (*trace, event))
                if then not in seen:
                    seen.add(then)
                    following.append((then, (*trace, event)))
        front = following
    return Found(len(seen))
