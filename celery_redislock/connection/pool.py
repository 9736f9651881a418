"""A pool's free connections, the queue of callers that wait when all are in use, and how one thread wakes another."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from queue import Full
from typing import Any, Generic, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

T = TypeVar("T")


class NoConnectionFree(RedisConnectionError):
    """All connections of the pool are in use."""


class FreeConnections:
    """Holds a redis-py pool's free connections, in place of a `queue.LifoQueue`; None for each one not made yet.

    `get` never blocks; callers wait in a `ConnectionQueue` instead. (A time limit that fires inside a `LifoQueue` can
    leave its mutex locked.)

    Args:
        most: The maximum number of connections in the pool.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.queue: list[Any] = []  # redis-py reads this attribute of a `LifoQueue`

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the connection that was put back last. The arguments are ignored.

        Raises:
            NoConnectionFree: No connection is free.
        """
        try:
            return self.queue.pop()
        except IndexError:
            raise NoConnectionFree("No connection available.") from None

    def put_nowait(self, connection: Any) -> None:
        """Put a connection back.

        Raises:
            Full: All of the pool's connections are free already.
        """
        if len(self.queue) >= self._most:
            raise Full
        self.queue.append(connection)


class Wake:
    """Wakes the one thread that waits for it.

    Not an Event: a time limit that fires inside an Event's methods can leave it locked for good. So can the garbage
    collector, if it calls `set` in the very thread that waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread. If it does not wait now, its next `wait` returns at once."""
        with suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait for `set`, for at most so many seconds; return whether it was called since the last `wait`."""
        return self._lock.acquire(timeout=-1 if seconds > threading.TIMEOUT_MAX else max(0.0, seconds))


class QueuedCaller(Generic[T]):
    """A caller in a `ConnectionQueue`."""

    def __init__(self) -> None:
        self.gift: T | None = None
        self.called = Wake()


class ConnectionQueue(Generic[T]):
    """The callers that wait for a connection.

    A returned connection is handed directly to the first of them, so that no newcomer can take it. Each step is atomic:
    a time limit cannot interrupt it halfway.

    Attributes:
        callers: Those that wait, the first one first.
    """

    def __init__(self) -> None:
        self.callers: deque[QueuedCaller[T]] = deque()
        self._moved_at = 0.0

    def give(self, gift: T | None) -> bool:
        """Wake the first caller and hand it `gift`. Return False if no caller waits.

        Without a gift, the caller looks for a free connection itself.
        """
        try:
            first = self.callers.popleft()
        except IndexError:
            return False
        if gift is not None:
            self._moved_at = time.monotonic()
        first.gift = gift
        first.called.set()
        return True

    def add(self, *, first: bool = False) -> QueuedCaller[T]:
        """Queue a caller at the end, or at the head if `first`."""
        mine: QueuedCaller[T] = QueuedCaller()
        if first:
            self.callers.appendleft(mine)
        else:
            self.callers.append(mine)
        return mine

    def wait(self, mine: QueuedCaller[T], patience: float) -> T | None:
        """Wait until `mine` is called, for as long as other callers are being served, and return its gift.

        Raises:
            NoConnectionFree: No caller was given a connection for `patience` seconds.
        """
        since = time.monotonic()
        while not mine.called.wait(patience):
            if self._moved_at < since:
                raise NoConnectionFree("No connection available.")
            since = time.monotonic()
        mine.called.set()  # for `leave`
        gift, mine.gift = mine.gift, None
        return gift

    def leave(self, mine: QueuedCaller[T]) -> T | None:
        """Leave the queue. Return what `mine` was given but did not take; it must go to the next caller."""
        try:
            self.callers.remove(mine)
        except ValueError:  # it has been called
            mine.called.wait(1.0)
        gift, mine.gift = mine.gift, None
        return gift
