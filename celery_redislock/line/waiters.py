"""Waiter: waits in a room for its turn at a key. Queues: all waiters of a room, line by line and in order."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from celery_redislock.errors import LockUnavailable
from celery_redislock.info import shown
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Token

logger = logging.getLogger(__name__)

N = TypeVar("N", int, float)
#: Seconds after which a room without a slot enters its lines again, because lines expire.
REFRESHED = 60.0
#: Stale entries are dropped once there are this many more of them than waiters.
FORGOTTEN_LATE = 16


class Waiter(ABC):
    """Waits for a key. Its methods are called in the room's thread and must not block.

    Attributes:
        demand: What the waiter waits for.
        rank: The waiter's rank in line: microseconds since the epoch, by the server's clock.
        number: Tells waiters of one room with the same rank apart; 0 before the waiter has entered.
        deadline: When the waiter stops waiting, by `time.monotonic()`.
        watches: Whether `need_not_wait` may ever be true.
        look_every: Seconds between two checks of the key while another library's lock, whose release sends no hint,
            holds it; None for the usual interval.
    """

    __slots__ = ()

    demand: Demand
    rank: int
    number: int = 0
    deadline: float = math.inf
    watches: bool = False
    look_every: float | None = None

    @property
    def group(self) -> str:
        """Waiters of one group need the same thing to start: if one of them cannot start, none can."""
        return ""

    @property
    def key(self) -> str:
        """The key in Redis."""
        return self.demand.key

    @property
    def line(self) -> str:
        """The waiter's line. Waiters in one room share a line if they want the same key with the same capacity."""
        return self.demand.line

    def is_ready(self) -> bool:
        """Whether there is a slot for the waiter now."""
        return True

    def is_coming(self) -> bool:
        """Whether the waiter was called but has not asked for its key yet."""
        return False

    def need_not_wait(self, holders: Sequence[Token]) -> bool:
        """Whether the waiter may start before its turn, without a call.

        Args:
            holders: The tokens of the key's holders; empty if the room has just called another waiter to the key.
        """
        return False

    @abstractmethod
    def take_turn(self, *, called: bool) -> None:
        """Stop waiting and ask for the key.

        Args:
            called: Whether the waiter's turn has come. The key is then kept for the waiter for a few seconds. If False,
                the waiter's deadline has passed, or it need not wait any longer.
        """

    def unavailable(self, error: LockUnavailable) -> None:  # noqa: B027 - most waiters just keep waiting
        """The server did not answer the room. The waiter stays in line unless it leaves."""


def is_ready(waiter: Waiter) -> bool:
    """Whether there is a slot for `waiter`. A bug in one waiter must not cost the others their turn."""
    try:
        return waiter.is_ready()
    except BaseException:
        logger.exception("who waits for the lock %s cannot tell whether it can begin; it begins", shown(waiter.key))
        return True


def give_turn(waiter: Waiter, *, called: bool) -> bool:
    """Call `Waiter.take_turn`; return whether it succeeded."""
    try:
        waiter.take_turn(called=called)
    except BaseException:  # even sys.exit()
        logger.exception(
            "who waited for the lock %s could not begin, and the next in line has its turn; a message is delivered "
            "again when its worker ends",
            shown(waiter.key),
        )
        return False
    return True


class Queue:
    """The waiters in one line, and what their room knows about that line.

    Attributes:
        heap: The waiters by rank, then by arrival. Some of them may have stopped waiting.
        rank: The room's rank in line, as far as it knows; None if the room is not in line.
        refreshed: When the room last told the server its rank, by `time.monotonic()`.
        has_declined: Whether the room was offered the key while it had no slot. It then stays out of line until it has
            a slot.
        watching: The waiters that may start before their turn.
        watched_since: When the latest of them arrived, by `time.monotonic()`.
        called: The waiters that were called and may still be on their way, each with the time of its call.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Waiter]] = []
        self.rank: int | None = None
        self.refreshed = -math.inf
        self.has_declined = False
        self.watching: list[Waiter] = []
        self.watched_since = -math.inf
        self.called: list[tuple[float, Waiter]] = []

    def call(self, waiter: Waiter) -> None:
        """Record that `waiter` was called just now."""
        self.called.append((time.monotonic(), waiter))

    def lapsed(self, seconds: float) -> int:
        """How many waiters were called more than `seconds` seconds ago and are still on their way."""
        self.called = [(at, waiter) for at, waiter in self.called if waiter.is_coming()]
        return sum(time.monotonic() - at > seconds for at, _ in self.called)

    def stand(self, rank: int) -> None:
        """Record that the room stands in line with `rank` from now on."""
        self.rank, self.refreshed = rank, time.monotonic()

    def must_enter(self, rank: int) -> bool:
        """Whether the room, which has no slot, must enter the line with `rank` so that no later waiter overtakes it."""
        is_there = self.rank is not None and self.rank <= rank and time.monotonic() < self.refreshed + REFRESHED
        return not is_there and not self.has_declined


class Queues:
    """The waiters of a room.

    `add`, `remove`, `waiting` and `len` may be called from any thread. They use no lock, because a time limit may
    interrupt them at any point. Only the room's thread calls the other methods.

    Attributes:
        by_line: The queue of each line, by `Waiter.line`.
    """

    def __init__(self) -> None:
        self.by_line: dict[str, Queue] = {}
        #: All waiters, each with True. Whatever removes one must start it or drop it.
        self._waiters: dict[Waiter, bool] = {}
        self._new: deque[Waiter] = deque()
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._order = itertools.count()
        #: How many entries the heaps may have: the waiters at the last cleanup plus all that have come since.
        self._taken_in = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def waiting(self) -> list[Waiter]:
        """All waiters."""
        return [*self._waiters.copy()]

    def add(self, waiter: Waiter) -> None:
        """Add `waiter`."""
        self._waiters[waiter] = True
        self._new.append(waiter)

    def remove(self, waiter: Waiter) -> bool:
        """Remove `waiter`; return False if something else has already removed it."""
        return self._waiters.pop(waiter, False)

    def take_in(self) -> list[str]:
        """Put new waiters into their queues; return the lines to check.

        A line must be checked if its first waiter is new, if the room has no rank in it, or if a new waiter watches it:
        what the waiter watches for may have happened already.
        """
        changed = []
        while self._new:
            waiter = self._new.popleft()
            queue = self.by_line.setdefault(waiter.line, Queue())
            number = next(self._order)
            self._taken_in += 1
            heapq.heappush(queue.heap, (waiter.rank, number, waiter))
            if waiter.watches:
                queue.watching.append(waiter)
                queue.watched_since = time.monotonic()
            if waiter.deadline != math.inf:
                heapq.heappush(self._deadlines, (waiter.deadline, number, waiter))
            if waiter.watches or queue.rank is None or self.first(waiter.line) is waiter:
                changed.append(waiter.line)
        return changed

    def end(self, now: float) -> list[Waiter]:
        """Remove the waiters whose deadline has passed; return them."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heapq.heappop(self._deadlines)[2]
            if waiter in self._waiters and self.remove(waiter):
                ended.append(waiter)
        if self._taken_in > 2 * len(self._waiters) + FORGOTTEN_LATE:  # most entries are stale
            self._forget()
        return ended

    def _forget(self) -> None:
        """Drop the entries of waiters that no longer wait. This takes time proportional to the number of entries."""
        self._deadlines = self._of_waiting(self._deadlines)
        for queue in self.by_line.values():
            queue.heap = self._of_waiting(queue.heap)
            queue.watching = [waiter for waiter in queue.watching if waiter in self._waiters]
        self._taken_in = len(self._waiters)

    def _of_waiting(self, heap: list[tuple[N, int, Waiter]]) -> list[tuple[N, int, Waiter]]:
        waiting = [one for one in heap if one[2] in self._waiters]
        heapq.heapify(waiting)
        return waiting

    @property
    def next_deadline(self) -> float:
        """When the next deadline passes, by `time.monotonic()`."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def first(self, line: str) -> Waiter | None:
        """The first waiter in `line`; None if there is none."""
        heap = self.by_line[line].heap if line in self.by_line else []
        while heap and heap[0][2] not in self._waiters:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def second(self, line: str) -> Waiter | None:
        """The second waiter in `line`; None if there is none."""
        if self.first(line) is None:
            return None
        heap = self.by_line[line].heap
        first = heapq.heappop(heap)
        while (second := self.first(line)) is first[2]:  # called, now waiting again: two entries
            heapq.heappop(heap)
        heapq.heappush(heap, first)
        return second

    def take_out(self, line: str, holders: Sequence[Token]) -> list[Waiter]:
        """Remove and return the waiters in `line` that need not wait for their turn; see `Waiter.need_not_wait`."""
        queue = self.by_line[line]
        taken_out = [waiter for waiter in queue.watching if waiter.need_not_wait(holders) and self.remove(waiter)]
        queue.watching = [waiter for waiter in queue.watching if waiter in self._waiters]
        return taken_out

    def rank(self, line: str) -> int:
        """The rank of the first waiter in `line`; 0 if there is none."""
        first = self.first(line)
        return first.rank if first else 0
