"""Outage: logs when a server cannot be asked any more, and when it can again; meanwhile one caller at a time looks."""

from __future__ import annotations

import logging
import threading
import time

from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.errors import describe
from celery_redislock.protocol.scripts import ACQUIRE, Script

logger = logging.getLogger(__name__)

#: While a server cannot be reached, the pause before the next look is so many times as long as the last look took: a
#: look at a silent server takes a time-out, for which the caller who looks has to wait.
PAUSE_PER_LOOK = 4
#: The pause before the next look lasts at least and at most so many seconds.
SHORTEST_PAUSE = 1.0
LONGEST_PAUSE = 5.0


class Outage:
    """Says once when a server cannot be asked any more, and once when it can again.

    Args:
        where: Is logged behind "the lock server": which node of a Cluster it is.

    Attributes:
        since: When the outage began, by `time.monotonic()`; None while there is none.
        unreachable: Why the server cannot be reached, for people. None while it can be reached, also if it refuses
            commands: a refusal comes at once, so every caller may ask.
        look_at: When the next caller may look whether the server can be reached again, by `time.monotonic()`.
    """

    def __init__(self, where: str = "") -> None:
        self._where = f" {where}" if where else ""
        self.since: float | None = None
        self.unreachable: str | None = None
        self.look_at = 0.0
        self._failing: Script | None = None
        self._changing = threading.Lock()

    def failed(self, script: Script, error: RedisError) -> None:
        """Note that a command failed: the server refused it, or it was sent twice without an answer: an outage."""
        with self._changing:
            if self.since is None:
                self.since, self._failing = time.monotonic(), script
                logger.warning(
                    "the lock server%s cannot be asked: %s; until it can, lock_on_outage decides about runs, and "
                    "held locks last until their deadline",
                    *(self._where, describe(error)),
                )
            if self.unreachable is None:
                self.look_at = time.monotonic() + SHORTEST_PAUSE
            self.unreachable = _why_unreachable(error)

    def let_look(self) -> bool:
        """Whether the caller is the one who looks now whether the server can be reached again.

        Nobody else looks until this caller has called `look_failed` or `answered`. If it is interrupted before that, no
        other caller looks until `LONGEST_PAUSE` is over.
        """
        with self._changing:
            now = time.monotonic()
            if now < self.look_at:
                return False
            self.look_at = now + LONGEST_PAUSE
            return True

    def look_failed(self, error: RedisError, seconds: float) -> None:
        """Note that a look has failed, after so many seconds."""
        with self._changing:
            if self.unreachable is not None:  # else another command was answered during the look
                self.unreachable = _why_unreachable(error)
            pause = min(PAUSE_PER_LOOK * seconds, LONGEST_PAUSE)
            self.look_at = time.monotonic() + max(pause, SHORTEST_PAUSE)

    def answered(self, script: Script) -> None:
        """Note that a command was answered. Where there is no outage, nothing happens.

        The outage ends with an answer to an acquire, or to the script whose failure began it: a server that refuses to
        write still answers the scripts that only read.
        """
        if self.since is None:
            return
        with self._changing:
            self.unreachable = None
            is_over = script in {self._failing, ACQUIRE}
        if is_over:
            self.end()

    def end(self, *, has_gone: bool = False) -> None:
        """End the outage, if there is one; with `has_gone`, since other nodes of the Cluster have the keys now."""
        with self._changing:
            self.unreachable = None
            if self.since is not None:
                seconds = time.monotonic() - self.since
                self.since = None
                if has_gone:
                    logger.warning("the lock server%s has been replaced, after %.1f s", self._where, seconds)
                else:
                    logger.warning("the lock server%s answers again, after %.1f s", self._where, seconds)


def _why_unreachable(error: RedisError) -> str | None:
    is_a_refusal = isinstance(error, AuthenticationError | BusyLoadingError)  # both derive from ConnectionError
    is_no_answer = isinstance(error, RedisConnectionError | RedisTimeoutError) and not is_a_refusal
    return describe(error) if is_no_answer else None
