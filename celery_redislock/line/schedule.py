"""Looks: when a room is to look at which line."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import Counter, deque
from collections.abc import Collection

from celery_redislock.protocol.names import is_line
from celery_redislock.protocol.scripts import Conflict

from .waiters import Queue, Waiter

_random = random.SystemRandom()
#: A key is kept for so many seconds for a room to which it is offered, by lua/prelude.lua.
OFFERED_FOR = 1.0
#: How many seconds after the end of what it waits for a room looks again, at least and at most: that has ended by then,
#: and not all rooms look at the same moment.
MARGIN = 0.005, 0.03
#: Seconds until a room looks again at a key for which it stands in line, at the latest.
LONGEST_LOOK = 60.0
#: The same while the room cannot hear that a key is offered to it, or while the server does not answer.
SHORT_LOOK = 1.0
#: A key is kept for so many seconds for a waiter that was called, by lua/prelude.lua.
CALLED_FOR = 5.0
#: The shortest and the longest time until the next look at a key that somebody watches, in seconds.
WATCHED = 1.0, 10.0


class Looks:
    """The looks that are due, and those that are to come.

    `soon` and `hear` are for any thread; no lock guards what they do, because a time limit may strike anywhere. All
    else is for the room's thread alone.
    """

    def __init__(self) -> None:
        self._asked: deque[str | None] = deque()
        self._hints: deque[str] = deque()
        self._at: dict[str, float] = {}
        self._to_come: list[tuple[float, str]] = []

    def soon(self, line: str | None) -> None:
        """Look at `line`; None for all lines."""
        self._asked.append(line)

    def hear(self, hint: str | None) -> None:
        """Look when a hint says so, of those that `names.channel_of` lists. Anything else costs nothing.

        None says that hints may have been missed: look at all lines.
        """
        if hint is None:
            self.soon(None)
        else:
            self._hints.append(hint)

    def later(self, line: str, seconds: float) -> None:
        """Look at `line` in so many seconds, and not at the time that was set before."""
        self._at[line] = at = time.monotonic() + seconds
        heapq.heappush(self._to_come, (at, line))

    def within(self, line: str, seconds: float) -> None:
        """Look at `line` in so many seconds at the latest."""
        if self._at.get(line, math.inf) > time.monotonic() + seconds:
            self.later(line, seconds)

    def due(self, lines: Collection[str]) -> dict[str, bool]:
        """Those of the room's lines at which to look now, and whether a hint says that its key is offered here."""
        due: dict[str, bool] = {}
        while self._hints:
            what, _, line = self._hints.popleft().partition(" ")
            if what in {"offer", "look"} and (line in lines or is_line(line)):
                due[line] = due.get(line, False) or what == "offer"
            elif what == "soon" and line in lines:
                self.within(line, OFFERED_FOR + margin())
        while self._asked:
            asked = self._asked.popleft()
            for line in lines if asked is None else (asked,):
                due.setdefault(line, False)
        while self._to_come and self._to_come[0][0] <= time.monotonic():
            at, line = heapq.heappop(self._to_come)
            if self._at.get(line) == at:
                del self._at[line]
                if line in lines:
                    due.setdefault(line, False)
        return due

    @property
    def next(self) -> float:
        """When the next look is due, by `time.monotonic()`."""
        if self._asked or self._hints:
            return -math.inf
        return self._to_come[0][0] if self._to_come else math.inf


def margin() -> float:
    """How much later than what it waits for ends a room looks, in seconds."""
    return _random.uniform(*MARGIN)


def look_in(conflict: Conflict | None, queue: Queue, first: Waiter, *, hears: bool) -> float:
    """Seconds until the next look at a key for which a room stands in line.

    A key that is watched is looked at after as long as it was watched: what its watchers wait for is told by a hint
    alone, and if that is lost, they wait for at most twice as long.

    `conflict` tells who holds the key; None where it is kept for one who was called. `hears` tells whether the room
    hears hints.
    """
    longest = LONGEST_LOOK if hears else SHORT_LOOK
    if conflict is None:
        return min(longest, CALLED_FOR + margin())
    if first.look_every is not None and any(one.since is None for one in conflict.holders):
        longest = min(longest, first.look_every)
    if queue.watching:
        watched = time.monotonic() - queue.watched_since
        longest = min(longest, max(WATCHED[0], min(watched, WATCHED[1])))
    return longest if conflict.ttl is None else min(longest, conflict.ttl + margin())


class Aside:
    """Those lines, by the groups of their first waiters; in each group the smallest rank first.

    A room may have thousands of them, so a look at one costs nothing for the others.
    """

    def __init__(self) -> None:
        #: The group and the rank of each line's first waiter.
        self._lines: dict[str, tuple[str, int]] = {}
        #: For each group a heap of ranks and lines, of which some are not aside any more.
        self._heaps: dict[str, list[tuple[int, str]]] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def counts(self) -> Counter[str]:
        """How many lines of each group are aside."""
        return self._counts

    def put(self, line: str, group: str, rank: int) -> None:
        """Put `line` aside."""
        self.discard(line)
        self._lines[line] = group, rank
        self._counts[group] += 1
        heap = self._heaps.setdefault(group, [])
        heapq.heappush(heap, (rank, line))
        if len(heap) > 2 * self._counts[group] + 100:  # most of them are not aside any more
            heap[:] = sorted({entry for entry in heap if self._is_aside(group, *entry)})

    def discard(self, line: str) -> None:
        """`line` is aside no longer."""
        if line in self._lines:
            group, _ = self._lines.pop(line)
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group], self._heaps[group]

    def heads(self) -> list[tuple[int, str]]:
        """The smallest rank and its line, of each group, the smallest first."""
        heads = []
        for group, heap in self._heaps.items():
            while not self._is_aside(group, *heap[0]):
                heapq.heappop(heap)
            heads.append(heap[0])
        return sorted(heads)

    def _is_aside(self, group: str, rank: int, line: str) -> bool:
        return self._lines.get(line) == (group, rank)
