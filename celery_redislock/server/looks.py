"""Looks: when a room is to look at which key."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import deque
from collections.abc import Collection

_random = random.SystemRandom()
#: A key is kept for so many seconds for a room to which it is offered, by lua/prelude.lua.
OFFERED = 1.0
#: A room looks again so much later than what it waits for ends, in seconds at least and at most: so that it has ended,
#: and not all rooms look at the same moment.
MARGIN = 0.005, 0.03


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

    def soon(self, key: str | None) -> None:
        """Look at `key`; None for all keys."""
        self._asked.append(key)

    def hear(self, hint: str | None) -> None:
        """Look when a hint says so: ``now <key>``; or ``soon <key>``, once an offer to the room before has ended.

        Args:
            hint: What the listener has heard; None where it may have missed hints: look at all keys.
        """
        if hint is None:
            self.soon(None)
        else:
            self._hints.append(hint)

    def later(self, key: str, seconds: float) -> None:
        """Look at `key` in so many seconds, and not at the time that was set before."""
        self._at[key] = at = time.monotonic() + seconds
        heapq.heappush(self._to_come, (at, key))

    def due(self, keys: Collection[str]) -> dict[str, None]:
        """The keys at which to look now, each of them once.

        Args:
            keys: All keys for which somebody waits in the room.
        """
        due: dict[str, None] = {}
        while self._hints:
            when, _, key = self._hints.popleft().partition(" ")
            if when == "now":
                due[key] = None
            elif key in keys and self._at.get(key, math.inf) > time.monotonic() + OFFERED + MARGIN[1]:
                self.later(key, OFFERED + margin())
        while self._asked:
            asked = self._asked.popleft()
            due |= dict.fromkeys(keys) if asked is None else {asked: None}
        while self._to_come and self._to_come[0][0] <= time.monotonic():
            at, key = heapq.heappop(self._to_come)
            if self._at.get(key) == at:
                del self._at[key]
                due |= {key: None} if key in keys else {}
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
