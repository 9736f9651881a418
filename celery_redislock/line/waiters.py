"""Waiter: somebody who waits in a room for its turn at a key."""

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
from celery_redislock.protocol.names import line_of
from celery_redislock.protocol.tokens import Token

logger = logging.getLogger(__name__)

N = TypeVar("N", int, float)
#: A room that has no slot says again after so many seconds that it stands in line: a line ends by itself.
REFRESHED = 60.0
#: So many who wait no longer may be kept besides as many as wait.
FORGOTTEN_LATE = 16


class Waiter(ABC):
    """Somebody who waits for a key. Its methods are called in the thread of the room, and must not block.

    Attributes:
        key: The key in Redis.
        rank: Its rank in line: microseconds since the epoch, by the server's clock.
        number: Tells it from other waiters of its room with the same rank; 0 before it has entered.
        deadline: When it waits no longer, by `time.monotonic()`.
        watches: Whether `need_not_wait` may ever be true.
        look_every: Seconds between two looks while another library's lock holds the key, whose release tells nobody;
            None for no sooner than otherwise.
    """

    __slots__ = ()

    key: str
    rank: int
    number: int = 0
    deadline: float = math.inf
    watches: bool = False
    look_every: float | None = None

    @property
    def group(self) -> str:
        """Waiters of one group need the same to begin: where one of them cannot, no other one can."""
        return ""

    @property
    def line(self) -> str:
        """The line in which it waits. Those of its room who wait for one key with one limit wait in one line."""
        return line_of(self.key)

    def is_ready(self) -> bool:
        """Whether there is a slot for it now."""
        return True

    def is_coming(self) -> bool:
        """Whether it was called and has not got as far as asking for its key."""
        return False

    def need_not_wait(self, holders: Sequence[Token]) -> bool:
        """Whether it is to begin, uncalled, before its turn.

        Args:
            holders: Who holds the key; empty where another waiter of the room has just been called to it.
        """
        return False

    @abstractmethod
    def take_turn(self, *, called: bool) -> None:
        """It waits no longer, and is to ask for the key itself.

        Args:
            called: Whether its turn has come: the key is kept for its room for a moment. Else its deadline has passed.
        """

    def unavailable(self, error: LockUnavailable) -> None:  # noqa: B027 - most of them just wait on
        """The server did not answer the room. The waiter stays in line, unless it leaves."""


def is_ready(waiter: Waiter) -> bool:
    """Whether there is a slot for `waiter`. A defect of one waiter must not cost the others their turn."""
    try:
        return waiter.is_ready()
    except BaseException:
        logger.exception("who waits for the lock %s cannot tell whether it can begin; it begins", shown(waiter.key))
        return True


def give_turn(waiter: Waiter, *, called: bool) -> bool:
    """Let `waiter` begin, as `Waiter.take_turn`; return whether it did."""
    try:
        waiter.take_turn(called=called)
    except BaseException:  # also a sys.exit() in it
        logger.exception(
            "who waited for the lock %s could not begin, and the next in line has its turn; a message is delivered "
            "again when its worker ends",
            shown(waiter.key),
        )
        return False
    return True


class Queue:
    """Those who wait in one line, and what their room knows of it.

    Attributes:
        heap: The waiters by rank, and then in the order in which they came; some of them may wait no longer.
        rank: With which the room stands in line, as far as it knows; None where it does not.
        refreshed: When it last told the server so, by `time.monotonic()`.
        has_declined: Whether it was offered the key while it had no slot. It stays out of line until it has one.
        watching: Those who may begin before their turn.
        watched_since: When the last of them came, by `time.monotonic()`.
        called: Those who were called and may still be on their way, each with the time of the call.
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
        """`waiter` was called just now."""
        self.called.append((time.monotonic(), waiter))

    def lapsed(self, seconds: float) -> int:
        """How many were called more than so many seconds ago, and are still on their way."""
        self.called = [(at, waiter) for at, waiter in self.called if waiter.is_coming()]
        return sum(time.monotonic() - at > seconds for at, _ in self.called)

    def stand(self, rank: int) -> None:
        """The room stands in line with `rank` from now on."""
        self.rank, self.refreshed = rank, time.monotonic()

    def must_enter(self, rank: int) -> bool:
        """Whether the room, which has no slot, is to enter the line with `rank`, so that nobody later passes it."""
        is_there = self.rank is not None and self.rank <= rank and time.monotonic() < self.refreshed + REFRESHED
        return not is_there and not self.has_declined


class Queues:
    """The waiters of a room.

    `add`, `remove`, `waiting` and `len` are for any thread; no lock guards what they do, because a time limit may
    strike anywhere. All else is for the room's thread alone.

    Attributes:
        by_line: The queue of each line, as `Waiter.line` names it.
    """

    def __init__(self) -> None:
        self.by_line: dict[str, Queue] = {}
        #: Those who wait: True for each. Who takes one out decides what becomes of it: it begins, or it leaves.
        self._waiters: dict[Waiter, bool] = {}
        self._new: deque[Waiter] = deque()
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._order = itertools.count()
        #: How many may be in the heaps: those who have come since the others were dropped, and who waited then.
        self._taken_in = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def waiting(self) -> list[Waiter]:
        """Those who wait."""
        return [*self._waiters.copy()]

    def add(self, waiter: Waiter) -> None:
        """Let `waiter` wait."""
        self._waiters[waiter] = True
        self._new.append(waiter)

    def remove(self, waiter: Waiter) -> bool:
        """Let `waiter` wait no longer; return whether it did, and nobody else has taken it out."""
        return self._waiters.pop(waiter, False)

    def take_in(self) -> list[str]:
        """Give the newcomers their ranks; return the lines in which to look for them.

        These are the lines in which the room's rank has changed, or is none yet; and those that a newcomer watches,
        for what it waits for may have come before it.
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
        """Take out those whose deadline has passed."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heapq.heappop(self._deadlines)[2]
            if self._waits(waiter) and self.remove(waiter):
                ended.append(waiter)
        if self._taken_in > 2 * len(self._waiters) + FORGOTTEN_LATE:  # most of them wait no longer
            self._forget()
        return ended

    def _forget(self) -> None:
        """Drop what is left of waiters that wait no longer. The time it takes grows with their number."""
        self._deadlines = self._of_waiting(self._deadlines)
        for queue in self.by_line.values():
            queue.heap = self._of_waiting(queue.heap)
            queue.watching = [waiter for waiter in queue.watching if self._waits(waiter)]
        self._taken_in = len(self._waiters)

    def _of_waiting(self, heap: list[tuple[N, int, Waiter]]) -> list[tuple[N, int, Waiter]]:
        waiting = [one for one in heap if self._waits(one[2])]
        heapq.heapify(waiting)
        return waiting

    @property
    def next_deadline(self) -> float:
        """When the next deadline passes, by `time.monotonic()`."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def first(self, line: str) -> Waiter | None:
        """The first of those who wait in `line`."""
        heap = self.by_line[line].heap if line in self.by_line else []
        while heap and not self._waits(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def second(self, line: str) -> Waiter | None:
        """The one behind the first of those who wait in `line`."""
        if self.first(line) is None:
            return None
        heap = self.by_line[line].heap
        first = heapq.heappop(heap)
        while (second := self.first(line)) is first[2]:  # it was called, and waits on
            heapq.heappop(heap)
        heapq.heappush(heap, first)
        return second

    def take_out(self, line: str, holders: Sequence[Token]) -> list[Waiter]:
        """Take out those who wait in `line` and need not wait for their turn; as for `Waiter.need_not_wait`."""
        queue = self.by_line[line]
        taken_out = [waiter for waiter in queue.watching if waiter.need_not_wait(holders) and self.remove(waiter)]
        queue.watching = [waiter for waiter in queue.watching if self._waits(waiter)]
        return taken_out

    def rank(self, line: str) -> int:
        """The rank of the first of those who wait in `line`; 0 where there is none."""
        first = self.first(line)
        return first.rank if first else 0

    def _waits(self, waiter: Waiter) -> bool:
        return waiter in self._waiters
