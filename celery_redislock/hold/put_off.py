"""PutOff: the commands that a server has not taken, such as releases. They are sent again until it takes them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from redis.exceptions import ResponseError

from celery_redislock.connection.outage import Outage
from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockUnavailable
from celery_redislock.info import fields

logger = logging.getLogger(__name__)

#: Seconds until a server that has not taken one of the commands is sent the next one.
PAUSE = 1.0
#: The same for a command that is refused because something else is stored under its key, until that is deleted.
LONG_PAUSE = 60.0
#: The commands take no longer than this at a time, in seconds: renewals may be due.
SHIFT = 0.05
#: At most so many commands are kept, of one process for one server; each takes about a kilobyte.
MOST = 10_000
#: That there are more is logged once in so many seconds.
TELL_EVERY = 60.0


class Unsent(NamedTuple):
    """A command that the server has not taken."""

    key: str
    """The key in Redis."""
    until: float
    """When it is of no use any more, by `time.monotonic()`: what it is to release has ended by itself."""
    send: Callable[[LockStore], object]
    """Sends it by the store that it is called with, and raises LockUnavailable where that fails."""


class PutOff:
    """The commands that a server has not taken. Any thread may add one; the keeper's thread sends them.

    What one node of a Cluster does not take, or refuses because of its key, holds up no other command.

    Args:
        store: Sends them.
    """

    def __init__(self, store: LockStore) -> None:
        self._store = store
        #: The oldest first; each with the time from when it may be sent.
        self._commands: dict[Unsent, float] = {}
        #: Servers that are sent nothing until these times.
        self._silent: dict[Outage, float] = {}
        #: When to look for what is due: where thousands wait, a look at all of them for each that comes is too much.
        self._look_at = -math.inf
        self._has_news = False
        self._dropped = 0
        self._logged_at = -math.inf

    @property
    def next_at(self) -> float:
        """When there may be something to send, by `time.monotonic()`; infinite where there is nothing."""
        if not self._commands:
            return math.inf
        return -math.inf if self._has_news else self._look_at

    def add(self, unsent: Unsent) -> None:
        """Have `unsent` sent soon. Where there are too many, the one that is of no use soonest is dropped."""
        if len(self._commands) >= MOST:
            self._drop_one()
        self._commands[unsent] = -math.inf
        if self._silent.get(self._store.outage_of(unsent.key), -math.inf) <= time.monotonic():
            self._has_news = True

    def pause(self, outage: Outage) -> None:
        """Send nothing to the server of `outage` for a while: it has not answered, or has refused."""
        self._silent[outage] = time.monotonic() + PAUSE

    def send(self, watching: Callable[[], AbstractContextManager[None]]) -> None:
        """Send what is due, for `SHIFT` seconds, each inside of a block that `watching` makes."""
        now = time.monotonic()
        if now < self.next_at:
            return
        self._has_news = False  # before the look: what comes after it must be looked for
        self._look_at = -math.inf
        self._silent = {outage: until for outage, until in self._silent.items() if until > now}
        for one in self._due(now):
            if self._store.outage_of(one.key) in self._silent:
                continue
            with watching():
                self._send(one)
            if time.monotonic() > now + SHIFT:
                return
        self._look_at = time.monotonic() + PAUSE

    def _due(self, now: float) -> list[Unsent]:
        """What may be sent, the least recently tried first; and forget what is of no use any more."""
        commands = self._commands.copy()
        for one in [one for one in commands if one.until <= now]:
            del commands[one]
            self._commands.pop(one, None)
        return sorted((one for one, at in commands.items() if at <= now), key=commands.__getitem__)

    def _send(self, one: Unsent) -> None:
        self._put_off(one, PAUSE)  # first, so that a bug in sending it does not hold up the others
        try:
            one.send(self._store)
        except LockUnavailable as error:
            if _is_of_key(error):
                self._put_off(one, LONG_PAUSE)
            else:
                self.pause(self._store.outage_of(one.key))
        else:
            self._commands.pop(one, None)

    def _put_off(self, one: Unsent, seconds: float) -> None:
        if one in self._commands:  # else it was dropped meanwhile
            self._commands[one] = time.monotonic() + seconds

    def _drop_one(self) -> None:
        soonest = min(self._commands.copy(), key=lambda one: one.until, default=None)
        if soonest is None or self._commands.pop(soonest, None) is None:
            return  # another thread has just sent or dropped it
        now = time.monotonic()
        if soonest.until <= now:
            return  # nothing is lost
        self._dropped += 1
        if now < self._logged_at + TELL_EVERY:
            return
        dropped, self._dropped, self._logged_at = self._dropped, 0, now
        logger.warning(
            "more than %d commands, such as releases, wait for the lock server: those are dropped that are of no use "
            "soonest, %d so far; what they were to release ends by itself",
            *(MOST, dropped),
            extra=fields("release_dropped", key=soonest.key),
        )


def _is_of_key(error: LockUnavailable) -> bool:
    """Whether the server refuses a command because of what its key holds, and may take others at once."""
    return isinstance(error.__cause__, ResponseError) and str(error.__cause__).startswith("WRONGTYPE")
