"""Looks: when a room checks each of its lines. Aside: the lines whose first waiters cannot start now."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import Counter, deque
from collections.abc import Collection

from celery_redislock.protocol.names import is_line
from celery_redislock.protocol.replies import Conflict

from .waiters import Queue, Waiter

_random = random.SystemRandom()
#: How many seconds a key is kept for the room it is offered to. lua/prelude.lua sets it.
OFFERED_FOR = 1.0
#: A room checks a key this many seconds after its expected expiry, at random between these bounds: the key has expired
#: by then, and the rooms do not all check at once.
MARGIN = 0.005, 0.03
#: The longest time between two checks of a key while the room stands in line, in seconds.
LONGEST_LOOK = 60.0
#: The longest time between two checks while the room hears no hints or the server does not answer, in seconds.
SHORT_LOOK = 1.0
#: How many seconds a key is kept for a waiter that was called. lua/prelude.lua sets it.
CALLED_FOR = 5.0
#: The bounds of the time between two checks of a key with watching waiters, in seconds.
WATCHED = 1.0, 10.0


class Looks:
    """When to check which line: the checks that are due, and the checks scheduled for later.

    `soon` and `hear` may be called from any thread. They use no lock, because a time limit may interrupt them at any
    point. Only the room's thread calls the other methods.
    """

    def __init__(self) -> None:
        self._asked: deque[str | None] = deque()
        self._hints: deque[str] = deque()
        self._at: dict[str, float] = {}
        self._to_come: list[tuple[float, str]] = []

    def soon(self, line: str | None) -> None:
        """Check `line` in the next round; None for all lines."""
        self._asked.append(line)

    def hear(self, hint: str | None) -> None:
        """Schedule the check that a hint asks for; `names.channel_of` lists the hints. Any other text is ignored.

        None means that hints may have been missed: check all lines.
        """
        if hint is None:
            self.soon(None)
        else:
            self._hints.append(hint)

    def later(self, line: str, seconds: float) -> None:
        """Check `line` in `seconds` seconds. This replaces any time set before."""
        self._at[line] = at = time.monotonic() + seconds
        heapq.heappush(self._to_come, (at, line))

    def within(self, line: str, seconds: float) -> None:
        """Check `line` in at most `seconds` seconds."""
        if self._at.get(line, math.inf) > time.monotonic() + seconds:
            self.later(line, seconds)

    def due(self, lines: Collection[str]) -> dict[str, bool]:
        """The lines to check now, each mapped to whether a hint says that its key is offered to the room.

        `lines` are the lines with a queue. A hint may name another line, which the room then leaves.
        """
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
        """When the next check is due, by `time.monotonic()`."""
        if self._asked or self._hints:
            return -math.inf
        return self._to_come[0][0] if self._to_come else math.inf


def margin() -> float:
    """Seconds from an expected expiry to the room's check; random, within `MARGIN`."""
    return _random.uniform(*MARGIN)


def look_in(conflict: Conflict | None, queue: Queue, first: Waiter, *, hears: bool) -> float:
    """Seconds until the next check of a key while the room stands in line.

    Only a hint tells watching waiters that they may start. In case the hint is lost, the time to the next check is as
    long as they have watched so far, within `WATCHED`: a lost hint at most about doubles their wait.

    Args:
        conflict: Who holds the key; None if the key is kept for a waiter that was called.
        queue: The waiters in the line.
        first: The first waiter in the line.
        hears: Whether the room hears hints.
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
    """The lines whose first waiters cannot start now, grouped by `Waiter.group`, smallest rank first.

    A room may have thousands of such lines, so adding or removing one does not go through the others.

    Attributes:
        counts: How many lines are aside, by group.
    """

    def __init__(self) -> None:
        #: The group and the rank of each line's first waiter.
        self._lines: dict[str, tuple[str, int]] = {}
        #: A heap of ranks and lines for each group. Some of the lines may no longer be aside.
        self._heaps: dict[str, list[tuple[int, str]]] = {}
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._lines)

    def put(self, line: str, group: str, rank: int) -> None:
        """Set `line` aside."""
        self.discard(line)
        self._lines[line] = group, rank
        self.counts[group] += 1
        heap = self._heaps.setdefault(group, [])
        heapq.heappush(heap, (rank, line))
        if len(heap) > 2 * self.counts[group] + 100:  # most of them are stale
            heap[:] = sorted({entry for entry in heap if self._is_aside(group, *entry)})

    def discard(self, line: str) -> None:
        """Record that `line` is no longer aside."""
        if line in self._lines:
            group, _ = self._lines.pop(line)
            self.counts[group] -= 1
            if not self.counts[group]:
                del self.counts[group], self._heaps[group]

    def heads(self) -> list[tuple[int, str]]:
        """The smallest rank of each group and its line, ordered by rank."""
        heads = []
        for group, heap in self._heaps.items():
            while not self._is_aside(group, *heap[0]):
                heapq.heappop(heap)
            heads.append(heap[0])
        return sorted(heads)

    def _is_aside(self, group: str, rank: int, line: str) -> bool:
        return self._lines.get(line) == (group, rank)
