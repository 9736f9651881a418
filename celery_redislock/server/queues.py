"""Queues: those who wait in a room, for each key in the order of their places."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque

from .tokens import Token
from .waiter import Waiter


class Queue:
    """Those who wait for one key, and what their room knows of the key's line.

    Attributes:
        heap: The waiters by place, and then in the order in which they came; some of them may wait no longer.
        stands: Whether the room may stand in line.
        watching: Those who may begin before their turn.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Waiter]] = []
        self.stands = False
        self.watching: list[Waiter] = []


class Queues:
    """The waiters of a room.

    `add`, `remove`, `waiting` and `len` are for any thread; no lock guards what they do, because a time limit may
    strike anywhere. All else is for the room's thread alone.

    Attributes:
        by_key: The queue of each key.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, Queue] = {}
        #: Those who wait. Who takes one out decides what becomes of it: it begins, or it leaves.
        self._waiters: dict[int, Waiter] = {}
        self._new: deque[Waiter] = deque()
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._waiters)

    def waiting(self) -> list[Waiter]:
        """Those who wait."""
        return [*self._waiters.copy().values()]

    def add(self, waiter: Waiter) -> None:
        """Let `waiter` wait."""
        self._waiters[id(waiter)] = waiter
        self._new.append(waiter)

    def remove(self, waiter: Waiter) -> bool:
        """Let `waiter` wait no longer; return whether it did, and nobody else has taken it out."""
        return self._waiters.pop(id(waiter), None) is not None

    def take_in(self) -> list[str]:
        """Give the newcomers their places; return the keys for which the room's place has changed, or is none yet."""
        changed = []
        while self._new:
            waiter = self._new.popleft()
            queue = self.by_key.setdefault(waiter.key, Queue())
            heapq.heappush(queue.heap, (waiter.place, next(self._order), waiter))
            if waiter.watches:
                queue.watching.append(waiter)
            if waiter.deadline != math.inf:
                heapq.heappush(self._deadlines, (waiter.deadline, next(self._order), waiter))
            if not queue.stands or queue.heap[0][2] is waiter:
                changed.append(waiter.key)
        if len(self._deadlines) > 2 * len(self._waiters) + 100:  # most of them wait no longer
            self._deadlines = [one for one in self._deadlines if self._waits(one[2])]
            heapq.heapify(self._deadlines)
        return changed

    def end(self, now: float) -> list[Waiter]:
        """Take out those whose deadline has passed."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heapq.heappop(self._deadlines)[2]
            if self._waits(waiter) and self.remove(waiter):
                ended.append(waiter)
        return ended

    @property
    def next_deadline(self) -> float:
        """When the next deadline passes, by `time.monotonic()`."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def first(self, key: str) -> Waiter | None:
        """The first of those who wait for `key`."""
        heap = self.by_key[key].heap if key in self.by_key else []
        while heap and not self._waits(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def second(self, key: str) -> Waiter | None:
        """The one behind the first of those who wait for `key`."""
        if self.first(key) is None:
            return None
        first = heapq.heappop(self.by_key[key].heap)
        second = self.first(key)
        heapq.heappush(self.by_key[key].heap, first)
        return second

    def drop_empty(self) -> None:
        """Forget the keys for which nobody waits."""
        for key in [*self.by_key]:
            if self.first(key) is None:
                del self.by_key[key]

    def take_watching(self, key: str, holder: Token | None) -> list[Waiter]:
        """Take out those who wait for `key` and need not; `holder` as for `Waiter.need_not_wait`."""
        queue = self.by_key[key]
        queue.watching = [waiter for waiter in queue.watching if self._waits(waiter)]
        return [waiter for waiter in queue.watching if waiter.need_not_wait(holder) and self.remove(waiter)]

    def place(self, key: str) -> int:
        """The place of the first of those who wait for `key`; 0 where there is none."""
        first = self.first(key)
        return first.place if first else 0

    def _waits(self, waiter: Waiter) -> bool:
        return self._waiters.get(id(waiter)) is waiter
