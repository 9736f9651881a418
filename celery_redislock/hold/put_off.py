"""PutOff: commands, such as releases, that the server has not accepted yet. The keeper sends them again."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from redis.exceptions import ResponseError

from celery_redislock.connection.outage import Outage
from celery_redislock.errors import LockUnavailable, fields

logger = logging.getLogger(__name__)

#: Seconds to wait before sending another command to a server that did not accept one.
PAUSE = 1.0
#: Seconds to wait before resending a command that was refused because its key holds a value of another type:
#: someone has to delete that value first.
LONG_PAUSE = 60.0
#: The keeper spends at most this many seconds of each round on these commands, because renewals may be due.
SHIFT = 0.05
#: One process keeps at most this many commands for one server. Each takes about a kilobyte.
MOST = 10_000
#: How many of them it drops at once when there are more: to look for one takes as long.
AT_ONCE = 100
#: The shortest time between two warnings about dropped commands, in seconds.
TELL_EVERY = 60.0


class Unsent(NamedTuple):
    """A command that the server has not accepted yet."""

    key: str
    """The key in Redis."""
    until: float
    """When the command stops being useful, by `time.monotonic()`: what it would release has expired by then."""
    send: Callable[[], object]
    """Sends the command; raises LockUnavailable if that fails."""


class PutOff:
    """The commands that a server has not accepted yet. Any thread may add one; the keeper's thread sends them.

    A silent node of a Cluster, or a command refused because of its key, does not hold up the commands for other nodes
    or keys.

    Args:
        outage_of: Returns the `Outage` of the server that has a key.
    """

    def __init__(self, outage_of: Callable[[str], Outage]) -> None:
        self._outage_of = outage_of
        #: Oldest first, each with the earliest time to send it.
        self._commands: dict[Unsent, float] = {}
        #: The servers that are sent no commands for now, each with the time when that pause ends.
        self._silent: dict[Outage, float] = {}
        #: When to check for due commands. With thousands of them, a check at every `add` would cost too much.
        self._look_at = -math.inf
        self._has_news = False
        self._dropped = 0
        self._logged_at = -math.inf

    @property
    def next_at(self) -> float:
        """When there may be something to send, by `time.monotonic()`; infinite without commands."""
        if not self._commands:
            return math.inf
        return -math.inf if self._has_news else self._look_at

    def add(self, unsent: Unsent) -> None:
        """Have `unsent` sent soon. If there are too many commands, drop those that stop being useful soonest."""
        if len(self._commands) >= MOST:
            self._drop_some()
        self._commands[unsent] = -math.inf
        if self._silent.get(self._outage_of(unsent.key), -math.inf) <= time.monotonic():
            self._has_news = True

    def pause(self, outage: Outage) -> None:
        """Send nothing to the server of `outage` for a while, because it did not answer or refused a command."""
        self._silent[outage] = time.monotonic() + PAUSE

    def send(self, watching: Callable[[], AbstractContextManager[None]]) -> None:
        """Send the due commands for up to `SHIFT` seconds, each inside a `with watching()` block."""
        now = time.monotonic()
        if now < self.next_at:
            return
        self._has_news = False  # first, so that a command added during this call is noticed
        self._look_at = -math.inf
        self._silent = {outage: until for outage, until in self._silent.items() if until > now}
        for one in self._due(now):
            if self._outage_of(one.key) in self._silent:
                continue
            with watching():
                self._send(one)
            if time.monotonic() > now + SHIFT:
                return
        self._look_at = time.monotonic() + PAUSE

    def _due(self, now: float) -> list[Unsent]:
        """The commands that may be sent, least recently tried first. Drops commands that are no longer useful."""
        commands = self._commands.copy()
        for one in [one for one in commands if one.until <= now]:
            del commands[one]
            self._commands.pop(one, None)
        return sorted((one for one, at in commands.items() if at <= now), key=commands.__getitem__)

    def _send(self, one: Unsent) -> None:
        self._put_off(one, PAUSE)  # first, so that a bug in sending it does not hold up the others
        try:
            one.send()
        except LockUnavailable as error:
            # Of this command alone, because of its key's value? Then the server may accept others at once.
            if isinstance(error.__cause__, ResponseError) and str(error.__cause__).startswith("WRONGTYPE"):
                self._put_off(one, LONG_PAUSE)
            else:
                self.pause(self._outage_of(one.key))
        else:
            self._commands.pop(one, None)

    def _put_off(self, one: Unsent, seconds: float) -> None:
        if one in self._commands:  # it may have been dropped meanwhile
            self._commands[one] = time.monotonic() + seconds

    def _drop_some(self) -> None:
        now, soonest = time.monotonic(), heapq.nsmallest(AT_ONCE, self._commands.copy(), key=lambda one: one.until)
        for one in soonest:
            if self._commands.pop(one, None) is not None and one.until > now:  # not if it is sent, or useless
                self._dropped += 1
        if not soonest or not self._dropped or now < self._logged_at + TELL_EVERY:
            return
        dropped, self._dropped, self._logged_at = self._dropped, 0, now
        text = "more than %d commands wait for the lock server: %d dropped; locks and reservations expire by themselves"
        logger.warning(text, MOST, dropped, extra=fields("release_dropped", key=soonest[0].key))
