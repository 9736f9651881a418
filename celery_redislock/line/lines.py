"""Lines: the waiters of one room, line by line and in order, and when the room checks which line. No I/O."""

from __future__ import annotations

import itertools
import math
import random
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from celery_redislock.protocol.names import FIRST_TURN, Demand, is_line
from celery_redislock.protocol.replies import Called, Conflict

from .waiters import Waiter, is_ready

_random = random.SystemRandom()

T = TypeVar("T")

#: How many seconds a key is kept for the room it is offered to. lua/prelude.lua sets it.
OFFERED_FOR = 1.0
#: How many seconds a key is kept for a waiter that was called. lua/prelude.lua sets it.
CALLED_FOR = 5.0
#: A room checks a key this many seconds after its expected expiry, at random between these bounds: the key has expired
#: by then, and the rooms do not all check at once.
MARGIN = 0.005, 0.03
#: The same where permits are spent, so that only the first room in line checks at once.
SPENT_MARGIN = 0.003
#: The longest time between two checks of a key while the room stands in line, in seconds.
LONGEST_LOOK = 60.0
#: The longest time between two checks while the room hears no hints or the server does not answer, in seconds.
SHORT_LOOK = 1.0
#: The bounds of the time between two checks of a key with watching waiters, in seconds.
WATCHED = 1.0, 10.0
#: Seconds after which a room without a slot enters its lines again, because lines expire.
REFRESHED = 60.0


class Ordered(Generic[T]):
    """Items ordered by a place each, those with the same place as they came. Removed items leave nothing behind."""

    def __init__(self) -> None:
        self._entries: dict[T, tuple[Any, int, T]] = {}
        self._sorted: list[tuple[Any, int, T]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[T]:
        return iter([item for *_, item in self._sorted])

    def put(self, item: T, place: Any) -> None:
        """Add `item`, or move it to another place."""
        self.discard(item)
        self._entries[item] = entry = place, next(self._numbers), item
        insort(self._sorted, entry)

    def discard(self, item: T) -> None:
        """Remove `item` if it is here."""
        if (entry := self._entries.pop(item, None)) is not None:
            del self._sorted[bisect_left(self._sorted, entry)]

    def place_of(self, item: T) -> Any:
        """The place of `item`; infinite if it is not here."""
        return self._entries[item][0] if item in self._entries else math.inf

    def around(self, item: T) -> tuple[Iterator[T], Iterator[T]]:
        """The items before and after `item`, those next to it first."""
        at = bisect_left(self._sorted, self._entries[item])
        before, after = range(at - 1, -1, -1), range(at + 1, len(self))
        return (self._sorted[one][-1] for one in before), (self._sorted[one][-1] for one in after)

    def between(self, least: Any, below: Any) -> list[T]:
        """The items whose places are at least `least`, and below `below`, in order."""
        start, end = (bisect_left(self._sorted, (place,)) for place in (least, below))
        return [item for *_, item in self._sorted[start:end]]

    def first(self, count: int) -> list[T]:
        """The first `count` items, or fewer."""
        return [item for *_, item in self._sorted[:count]]

    @property
    def last(self) -> T:
        """The last item."""
        return self._sorted[-1][-1]

    @property
    def lowest(self) -> Any:
        """The place of the first item; infinite if there is none."""
        return self._sorted[0][0] if self._sorted else math.inf


class Line:
    """The waiters in one line, and what their room knows about that line. Only the room's thread uses it.

    Args:
        demand: What the waiters wait for.
        rank: The room's rank in line, as far as it knows; None if the room is not in line.

    Attributes:
        waiters: The waiters by rank, then by arrival.
        watching: Those of them that may start before their turn.
        aside: The lines that the line is set aside with; see `Lines`.
        refreshed: When the room last told the server its rank, by `time.monotonic()`.
        is_offered: Whether a hint says that the key is offered to the room, which has not answered yet.
        has_declined: Whether the room was offered the key while it had no slot. It then stays out of line until it has
            a slot.
    """

    def __init__(self, demand: Demand, rank: int | None = None) -> None:
        self.demand, self.rank = demand, rank
        self.waiters: Ordered[Waiter] = Ordered()
        self.watching: dict[Waiter, None] = {}
        #: The waiters of each group, by when they were published.
        self._groups: dict[str, Ordered[Waiter]] = {}
        self.aside: Ordered[Line] | None = None
        self.is_offered = self.has_declined = False
        self.refreshed = -math.inf
        self._watched_since = -math.inf
        #: The waiters that were called and may still be on their way, each with the time of its call.
        self._called: list[tuple[float, Waiter]] = []

    @property
    def first(self) -> Waiter:
        """The first waiter."""
        return self.waiters.first(1)[0]

    def add(self, waiter: Waiter) -> bool:
        """Add `waiter`; return whether the line must be checked.

        It must be if the waiter is the first, if the room has no rank in line, or if the waiter watches: what it
        watches for may have happened already.
        """
        self.waiters.put(waiter, (waiter.rank, waiter.published))
        if waiter.demand.share is not None:
            self._put_in_group(waiter, waiter.demand.share.digest)
        if waiter.watches:
            self.watching[waiter] = None
            self._watched_since = time.monotonic()
        return waiter.watches or self.rank is None or self.first is waiter or self.first.rank < self.rank

    def _put_in_group(self, waiter: Waiter, group: str) -> None:
        """Give the oldest of a group's waiters the group's first turn: the server ranks them as they have asked."""
        mine = self._groups.setdefault(group, Ordered())
        mine.put(waiter, waiter.published)
        before, after = mine.around(waiter)
        older = [*itertools.takewhile(lambda one: one.rank > waiter.rank, before)]
        moved = [*reversed(older), waiter, *itertools.takewhile(lambda one: one.rank < waiter.rank, after)]
        for one, rank in zip(moved, sorted(one.rank for one in moved), strict=True):
            if one.rank != rank:
                one.rank = rank  # type: ignore[misc] # each subclass has a slot or a dict for it
                self.waiters.put(one, (rank, one.published))

    def discard(self, waiter: Waiter) -> None:
        """Remove `waiter` if it is here."""
        self.waiters.discard(waiter)
        self.watching.pop(waiter, None)
        if (share := waiter.demand.share) is not None and share.digest in self._groups:
            self._groups[share.digest].discard(waiter)
            if not self._groups[share.digest]:
                del self._groups[share.digest]

    def call(self, waiter: Waiter) -> None:
        """Record that `waiter` was called just now."""
        self._called.append((time.monotonic(), waiter))

    @property
    def is_called_in_vain(self) -> bool:
        """Whether as many waiters as can hold the key were called, found no slot in time, and are still coming."""
        self._called = [(at, waiter) for at, waiter in self._called if waiter.is_coming()]
        return sum(time.monotonic() - at > CALLED_FOR for at, _ in self._called) >= self.demand.capacity

    def stand(self, rank: int) -> None:
        """Record that the room stands in line with this rank from now on."""
        self.rank, self.refreshed = rank, time.monotonic()
        self.has_declined = self.is_offered = False

    def next_rank(self, waiter: Waiter) -> int | None:
        """The rank of the first waiter but `waiter`; None if there is none."""
        return next((one.rank for one in self.waiters.first(2) if one is not waiter), None)

    @property
    def must_enter(self) -> bool:
        """Whether the room, which has no slot, must enter the line so that no later waiter overtakes its first one."""
        is_there = self.rank is not None and self.rank <= self.first.rank
        return not (is_there and time.monotonic() < self.refreshed + REFRESHED) and not self.has_declined

    def moves_up(self, now: int) -> bool:
        """Move up the waiters whose ranks are ahead of the server's clock, which was set back; return whether any are.

        Otherwise those who come later would go before them. A waiter that needs several keys keeps its rank: its calls
        bear it. `now` is the server's time in microseconds.
        """
        for one in (ahead := [one for one in self.waiters.between((now + 1,), (FIRST_TURN,)) if not one.wants]):
            one.rank = now  # type: ignore[misc] # as in `_put_in_group`
            self.waiters.put(one, (now, one.published))
        return bool(ahead)

    def look_in(self, reply: Conflict | Called, look_every: float | None, *, hears: bool) -> float:
        """Seconds until the next check of the key while the room stands in line.

        Only a hint tells watching waiters that they may start. In case the hint is lost, the time to the next check is
        as long as they have watched so far, within `WATCHED`: a lost hint at most about doubles their wait.

        Args:
            reply: The server's reply to the room.
            look_every: See `Waiter`, of the first waiter.
            hears: Whether the room hears hints.
        """
        longest = LONGEST_LOOK if hears else SHORT_LOOK
        if isinstance(reply, Called):
            return min(longest, CALLED_FOR + margin() if reply.ttl is None else reply.ttl + SPENT_MARGIN)
        if look_every is not None and any(one.since is None for one in reply.holders):
            longest = min(longest, look_every)
        if self.watching:
            longest = min(longest, max(WATCHED[0], min(time.monotonic() - self._watched_since, WATCHED[1])))
        after = SPENT_MARGIN if reply.is_spent else margin()
        return longest if reply.ttl is None else min(longest, reply.ttl + after)


def margin() -> float:
    """Seconds from an expected expiry to the room's check; random, within `MARGIN`."""
    return _random.uniform(*MARGIN)


class Lines:
    """The lines of a room's waiters, and when to check which of them. Only the room's thread uses it.

    Attributes:
        by_name: The lines that have waiters, or that the room may still be in, by `Waiter.line`.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Line] = {}
        #: When to check which line, and when which waiter stops waiting, by `time.monotonic()`.
        self._timers: Ordered[Waiter | Line] = Ordered()
        #: The lines to check in the next round, each with whether a hint says that its key is offered to the room.
        self._due: dict[Line, bool] = {}
        #: The lines whose first waiters cannot start yet, by `Waiter.group`, those of a silent server last.
        self._aside: dict[str, Ordered[Line]] = {}

    def add(self, waiter: Waiter) -> None:
        """Add `waiter`, and check its line if need be."""
        if waiter.deadline != math.inf:
            self._timers.put(waiter, waiter.deadline)
        if not waiter.is_asleep and self.of(waiter.demand).add(waiter):
            self.soon(waiter.line)

    def remove(self, waiter: Waiter) -> None:
        """Remove `waiter` if it is here."""
        self._timers.discard(waiter)
        if waiter.line in self.by_name:
            self.by_name[waiter.line].discard(waiter)

    def of(self, demand: Demand) -> Line:
        """The line for `demand`. To be dropped if no waiter enters it."""
        return self.by_name.setdefault(demand.line, Line(demand))

    def move(self, waiter: Waiter, to: Line) -> None:
        """Have `waiter` wait in another line from now on."""
        self.by_name[waiter.line].discard(waiter)
        # Not the line's own demand, which may be that of a waiter of a group.
        waiter.demand = next(one for one in waiter.wants if one.line == to.demand.line)  # type: ignore[misc] # as `rank`
        to.add(waiter)

    def drop(self, line: Line) -> None:
        """Drop `line`, which has no waiters."""
        self.by_name.pop(line.demand.line, None)
        self._timers.discard(line)
        self._due.pop(line, None)

    def hear(self, hint: str | None) -> None:
        """Schedule the check that a hint asks for; `names.channel_of` lists the hints. Any other text is ignored.

        None means that hints may have been missed: check all lines. A hint may name a line without waiters, which the
        room then leaves: a command that arrived late may have put the room there.
        """
        what, _, name = (hint or "").partition(" ")
        if hint is None:
            self._due = dict.fromkeys(self.by_name.values(), False) | self._due
        elif what == "soon" and name in self.by_name:
            self.within(self.by_name[name], OFFERED_FOR + margin())
        elif what in {"offer", "look"} and (name in self.by_name or is_line(name)):
            line = self.by_name.setdefault(name, Line(Demand.of_line(name), rank=0))
            self._due[line] = self._due.get(line, False) or what == "offer"
        elif what.startswith("in") and what[2:].isdecimal() and name in self.by_name:
            self.within(self.by_name[name], int(what[2:11]) / 1000 + SPENT_MARGIN)
        elif what == "due":
            for one in self._timers:  # a copy
                if isinstance(one, Waiter) and one.is_asleep and one.line == name:
                    self._timers.put(one, -math.inf)

    def soon(self, name: str) -> None:
        """Check the line `name` in the next round, if there is one."""
        if name in self.by_name:
            self._due.setdefault(self.by_name[name], False)

    def later(self, line: Line, seconds: float) -> None:
        """Check `line` in `seconds` seconds. This replaces any time set before."""
        self._timers.put(line, time.monotonic() + seconds)

    def within(self, line: Line, seconds: float) -> None:
        """Check `line` in at most `seconds` seconds."""
        self._timers.put(line, min(self._timers.place_of(line), time.monotonic() + seconds))

    def time_is_up(self) -> list[Waiter]:
        """Make the lines due whose time has come; return the waiters whose deadline has passed."""
        over = self._timers.between(-math.inf, time.monotonic())
        for one in over:
            self._timers.discard(one)
            if isinstance(one, Line):
                self._due.setdefault(one, False)
        return [one for one in over if isinstance(one, Waiter)]

    def take_due(self) -> dict[Line, bool]:
        """The lines to check now, each with whether a hint says that its key is offered to the room."""
        due, self._due = self._due, {}
        return due

    def set_aside(self, line: Line, *, is_out: bool) -> None:
        """Set `line` aside until its first waiter can start; `is_out`: its server does not answer."""
        line.aside = self._aside.setdefault(line.first.group, Ordered())
        line.aside.put(line, (is_out, line.first.rank))

    def take_aside(self, line: Line) -> None:
        """Set `line` aside no longer."""
        if line.aside is not None:
            line.aside.discard(line)
            line.aside = None

    def next_ready(self) -> Line | None:
        """Take the line that comes first of those set aside whose first waiters can start; None if there is none."""
        for lines in sorted(filter(None, self._aside.values()), key=lambda lines: lines.lowest):
            (line,) = lines.first(1)
            if is_ready(line.first):
                self.take_aside(line)
                return line
        return None

    @property
    def counts(self) -> dict[str, int]:
        """How many lines are set aside, by `Waiter.group`."""
        return {group: len(lines) for group, lines in self._aside.items() if lines}

    @property
    def next_at(self) -> float:
        """When there is something to do, by `time.monotonic()`."""
        return float(self._timers.lowest)
