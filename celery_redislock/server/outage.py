"""Outage: one log line when a server cannot be asked any more, and one when it can again; meanwhile few look."""

from __future__ import annotations

import logging
import threading
import time

from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.errors import describe

from .scripts import ACQUIRE, Script

logger = logging.getLogger(__name__)

#: While a server cannot be reached, the next look at it is so many times as long after the last as that one took: to a
#: silent server it takes a time-out, and the caller who looks waits for it.
PAUSE_PER_LOOK = 4
#: And at least and at most so many seconds after it.
SHORTEST_PAUSE = 1.0
LONGEST_PAUSE = 5.0


class Outage:
    """Says once when a server cannot be asked any more, and once when it can again.

    Attributes:
        since: When it began, by `time.monotonic()`; None while there is none.
        unreachable: Why the server cannot be reached, for people. None while it can be, though it may refuse: that
            costs nobody any time.
        look_at: When the next caller may look whether it can be reached again, by `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.unreachable: str | None = None
        self.look_at = 0.0
        self._failing: Script | None = None
        self._changing = threading.Lock()

    def begin(self, script: Script, error: RedisError) -> None:
        """A command failed, and so did its second try."""
        with self._changing:
            if self.since is None:
                self.since, self._failing = time.monotonic(), script
                logger.warning(
                    "the lock server cannot be asked: %s; until it can, runs go by their lock_on_outage and held locks "
                    "live until their deadline",
                    describe(error),
                )
            if self.unreachable is None:
                self.look_at = time.monotonic() + SHORTEST_PAUSE
            self.unreachable = _why_unreachable(error)

    def let_look(self) -> bool:
        """Whether the caller is the one who looks now whether the server can be reached again.

        Nobody else does until it has said what it saw; should it be interrupted, until the longest pause is over.
        """
        with self._changing:
            now = time.monotonic()
            if now < self.look_at:
                return False
            self.look_at = now + LONGEST_PAUSE
            return True

    def looked(self, error: RedisError, seconds: float) -> None:
        """A look has failed, after so many seconds."""
        with self._changing:
            if self.unreachable is not None:  # else another command has been answered meanwhile
                self.unreachable = _why_unreachable(error)
            pause = min(PAUSE_PER_LOOK * seconds, LONGEST_PAUSE)
            self.look_at = time.monotonic() + max(pause, SHORTEST_PAUSE)

    def end(self, script: Script) -> None:
        """A command was answered. A server that refuses to write may still answer others."""
        with self._changing:
            self.unreachable = None
            if self.since is not None and script in {self._failing, ACQUIRE}:
                logger.warning("the lock server answers again, after %.1f s", time.monotonic() - self.since)
                self.since = None


def _why_unreachable(error: RedisError) -> str | None:
    is_a_refusal = isinstance(error, AuthenticationError | BusyLoadingError)  # redis-py counts them as no connection
    is_no_answer = isinstance(error, RedisConnectionError | RedisTimeoutError) and not is_a_refusal
    return describe(error) if is_no_answer else None
