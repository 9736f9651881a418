"""The places of a connection pool, and those who wait where all of them are taken."""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty, LifoQueue
from typing import Any, Generic, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

T = TypeVar("T")


class NoConnectionFree(RedisConnectionError):
    """All connections of the pool are in use."""


class Places(LifoQueue[Any]):
    """The queue of a redis-py pool. It lets nobody wait: that is for a `WaitingLine`."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As `LifoQueue.get_nowait`.

        Raises:
            NoConnectionFree: No place is free.
        """
        try:
            return super().get(block=False)
        except Empty:
            raise NoConnectionFree("No connection available.") from None


class Waiting(Generic[T]):
    """Somebody who waits in a `WaitingLine`."""

    def __init__(self) -> None:
        self.gift: T | None = None
        self.called = threading.Event()


class WaitingLine(Generic[T]):
    """Those who wait for what others return, each of whom is given it by hand, in the order in which they came.

    Nobody who comes later takes it from them, and nothing is locked: a time limit may strike anywhere.
    """

    def __init__(self) -> None:
        self._line: deque[Waiting[T]] = deque()
        self._moved_at = 0.0

    def give(self, gift: T | None) -> bool:
        """Give something to the first in line, or have it look for itself; return whether anybody stands there."""
        try:
            first = self._line.popleft()
        except IndexError:
            return False
        if gift is not None:
            self._moved_at = time.monotonic()
        first.gift = gift
        first.called.set()
        return True

    def stand(self, *, first: bool = False) -> Waiting[T]:
        """Stand in line, at its end or at its head."""
        mine: Waiting[T] = Waiting()
        if first:
            self._line.appendleft(mine)
        else:
            self._line.append(mine)
        return mine

    def wait(self, mine: Waiting[T], patience: float) -> T | None:
        """Wait until `mine` is called, for as long as others are given something; return what it was given.

        Raises:
            NoConnectionFree: Nobody was given anything for so many seconds.
        """
        since = time.monotonic()
        while not mine.called.wait(patience):
            if self._moved_at < since:
                raise NoConnectionFree("No connection available.")
            since = time.monotonic()
        gift, mine.gift = mine.gift, None
        return gift

    def leave(self, mine: Waiting[T]) -> T | None:
        """Leave the line; return what was given to `mine` meanwhile, which is for somebody else now."""
        try:
            self._line.remove(mine)
        except ValueError:  # it was called
            mine.called.wait(1.0)
        gift, mine.gift = mine.gift, None
        return gift
