"""Outage: logs when a server stops being usable and when it recovers. In between, one caller at a time checks it."""

from __future__ import annotations

import logging
import threading
import time

from redis.exceptions import AuthenticationError, BusyLoadingError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.errors import describe
from celery_redislock.protocol.scripts import ACQUIRE, Script

logger = logging.getLogger(__name__)

#: By these errors, the server has answered that it does not run a command. The last two are also ConnectionErrors.
REFUSALS = (ResponseError, AuthenticationError, BusyLoadingError)
#: While a server is unreachable, the pause before the next check is this many times as long as the last check took. (If
#: the server is silent, the caller that checks it waits for a time-out.)
PAUSE_PER_LOOK = 4
#: Limits for that pause, in seconds.
SHORTEST_PAUSE = 1.0
LONGEST_PAUSE = 5.0
#: Seconds between two log lines about the same refusal. A server that refuses only some commands, such as those of one
#: script or of new connections, begins an outage with each of them.
SAY_EVERY = 60.0


def is_refusal(error: RedisError, outer: BaseException | None) -> bool:
    """Whether a server has refused a command with `error`, sent by a caller that handles the error `outer`."""
    within = error.__context__  # behind Sentinels, redis-py turns a ReadOnlyError into a ConnectionError
    return isinstance(error, REFUSALS) or (within is not outer and isinstance(within, ReadOnlyError))


class Outage:
    """Logs once when a server can no longer be used, and once when it can be used again.

    Args:
        where: Which node of a Cluster this is. Logged after "the lock server".

    Attributes:
        since: When the outage began, by `time.monotonic()`; None outside an outage.
        unreachable: Why the server cannot be reached, for messages; None if it can be. A server that refuses commands
            counts as reachable: it refuses at once, so every caller may try.
        look_at: When the next caller may check whether the server can be reached again, by `time.monotonic()`.
    """

    def __init__(self, where: str = "") -> None:
        self._where = f" {where}" if where else ""
        self.since: float | None = None
        self.unreachable: str | None = None
        self.look_at = 0.0
        self._failing: Script | None = None
        self._refuses = self._is_said = False
        self._said_at: dict[str, float] = {}
        self._changing = threading.Lock()

    def failed(self, script: Script, error: RedisError) -> None:
        """Record a failed command: the server refused it, or twice failed to answer it. This begins an outage."""
        with self._changing:
            now, why = time.monotonic(), describe(error)
            self.unreachable = _why_unreachable(error)
            self._refuses = self.unreachable is None
            if self.since is None:
                self.since, self._failing, self._is_said = now, script, False
            if not self._is_said and not (self._refuses and now < self._said_at.get(why, -SAY_EVERY) + SAY_EVERY):
                self._is_said = True
                if self._refuses:
                    self._said_at[why] = now
                logger.warning(
                    "the lock server%s is unavailable: %s; until it is available again, new runs follow their "
                    "lock_on_outage, and running tasks keep their locks until the deadlines",
                    *(self._where, why),
                )
            self.look_at = now + SHORTEST_PAUSE

    def let_look(self) -> bool:
        """Whether the caller may now check if the server can be reached again.

        If so, no other caller may until this one has called `look_failed` or `answered`. If this one is
        interrupted before that, others may check again after `LONGEST_PAUSE`.
        """
        with self._changing:
            now = time.monotonic()
            if now < self.look_at:
                return False
            self.look_at = now + LONGEST_PAUSE
            return True

    def look_failed(self, error: RedisError, seconds: float) -> None:
        """Record that a check has failed after `seconds`."""
        with self._changing:
            if self.unreachable is not None:  # if it is None, another command was answered during the check
                self.unreachable = _why_unreachable(error)
            self.look_at = time.monotonic() + max(min(PAUSE_PER_LOOK * seconds, LONGEST_PAUSE), SHORTEST_PAUSE)

    def answered(self, script: Script, *, granted: bool = True) -> None:
        """Record that a command was answered. Does nothing outside an outage.

        The outage ends when an acquire is answered, or the script whose failure began the outage. Other scripts might
        only read. If the server has refused a command, an acquire must be `granted`: a server that refuses to write can
        still say who has a key.
        """
        if self.since is None:
            return
        with self._changing:
            self.unreachable = None
            is_over = (granted or not self._refuses) if script is ACQUIRE else script is self._failing
        if is_over:
            self.end()

    def end(self, *, has_gone: bool = False) -> None:
        """End the outage, if there is one. `has_gone` means that other nodes of the Cluster have the keys now."""
        with self._changing:
            since, self.since, self.unreachable = self.since, None, None
            if since is not None and self._is_said:
                text = "the lock server%s is available again after %.1f s"
                if has_gone:
                    text = "the lock server%s was replaced by other nodes after %.1f s"
                logger.warning(text, self._where, time.monotonic() - since)


def _why_unreachable(error: RedisError) -> str | None:
    is_no_answer = isinstance(error, RedisConnectionError | RedisTimeoutError) and not isinstance(error, REFUSALS)
    return describe(error) if is_no_answer else None
