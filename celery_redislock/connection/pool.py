"""The connections of a pool, and the callers that wait while all of them are in use."""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Full
from typing import Any, Generic, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

T = TypeVar("T")


class NoConnectionFree(RedisConnectionError):
    """All connections of the pool are in use."""


class FreeConnections:
    """What a redis-py pool keeps its connections in, instead of a `queue.LifoQueue`. None stands for one to be made.

    It lets nobody wait: that is for a `ConnectionQueue`. A queue's mutex could stay locked where a time limit strikes.

    Args:
        most: How many connections the pool may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.queue: list[Any] = []  # redis-py reads it, as it does that of a `LifoQueue`

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the connection that was put last, whatever the arguments.

        Raises:
            NoConnectionFree: None is free.
        """
        try:
            return self.queue.pop()
        except IndexError:
            raise NoConnectionFree("No connection available.") from None

    def put_nowait(self, connection: Any) -> None:
        """Put a connection back.

        Raises:
            Full: All are there already.
        """
        if self.full():
            raise Full
        self.queue.append(connection)

    def full(self) -> bool:
        """Whether no connection is in use."""
        return len(self.queue) >= self._most

    def qsize(self) -> int:
        """How many connections are free."""
        return len(self.queue)


class QueuedCaller(Generic[T]):
    """Somebody who waits in a `ConnectionQueue`."""

    def __init__(self) -> None:
        self.gift: T | None = None
        #: Unlocked by the call. An event would not do: a time limit that strikes in its code can leave it locked.
        self.called = threading.Lock()
        self.called.acquire()


class ConnectionQueue(Generic[T]):
    """Those who wait for what others return, each of whom is given it by hand, in the order in which they came.

    Nobody who comes later takes it from them. Each step is one that a time limit cannot cut in two.
    """

    def __init__(self) -> None:
        self._callers: deque[QueuedCaller[T]] = deque()
        self._moved_at = 0.0

    def give(self, gift: T | None) -> bool:
        """Give something to the first in the queue, or have it look for itself; return whether there is one."""
        try:
            first = self._callers.popleft()
        except IndexError:
            return False
        if gift is not None:
            self._moved_at = time.monotonic()
        first.gift = gift
        first.called.release()
        return True

    def add(self, *, first: bool = False) -> QueuedCaller[T]:
        """Queue a caller, at the end or at the head."""
        mine: QueuedCaller[T] = QueuedCaller()
        if first:
            self._callers.appendleft(mine)
        else:
            self._callers.append(mine)
        return mine

    def wait(self, mine: QueuedCaller[T], patience: float) -> T | None:
        """Wait until `mine` is called, for as long as others are given something; return what it was given.

        Raises:
            NoConnectionFree: Nobody was given anything for so many seconds.
        """
        since = time.monotonic()
        while not mine.called.acquire(timeout=patience):
            if self._moved_at < since:
                raise NoConnectionFree("No connection available.")
            since = time.monotonic()
        mine.called.release()
        gift, mine.gift = mine.gift, None
        return gift

    def leave(self, mine: QueuedCaller[T]) -> T | None:
        """Leave the queue; return what was given to `mine` meanwhile, which goes to the next caller."""
        try:
            self._callers.remove(mine)
        except ValueError:  # it was called
            mine.called.acquire(timeout=1.0)
        gift, mine.gift = mine.gift, None
        return gift
