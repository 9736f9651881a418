"""Waiter: somebody who waits in a room for its turn at a key."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from celery_redislock.errors import LockUnavailable
from celery_redislock.protocol.names import line_of
from celery_redislock.protocol.tokens import Token
from celery_redislock.shown import shown

logger = logging.getLogger(__name__)


class Waiter(ABC):
    """Somebody who waits for a key. Its methods are called in the thread of the room, and must not block.

    Attributes:
        key: The key in Redis.
        place: Its place in line: microseconds since the epoch, by the server's clock.
        number: Tells it from other waiters of its room with the same place; 0 before it has entered.
        deadline: When it waits no longer, by `time.monotonic()`.
        watches: Whether `need_not_wait` may ever be true.
        look_every: Seconds between two looks while another library's lock holds the key, whose release tells nobody;
            None for no sooner than otherwise.
    """

    __slots__ = ()

    key: str
    place: int
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

    def can_begin(self) -> bool:
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
    def begin(self, *, called: bool) -> None:
        """It waits no longer, and is to ask for the key itself.

        Args:
            called: Whether its turn has come: the key is kept for its room for a moment. Else its deadline has passed.
        """

    def unavailable(self, error: LockUnavailable) -> None:  # noqa: B027 - most of them just wait on
        """The server did not answer the room. The waiter stays in line, unless it leaves."""


def can_begin(waiter: Waiter) -> bool:
    """Whether there is a slot for `waiter`. A defect of one waiter must not cost the others their turn."""
    try:
        return waiter.can_begin()
    except BaseException:
        logger.exception("who waits for the lock %s cannot tell whether it can begin; it begins", shown(waiter.key))
        return True


def begin(waiter: Waiter, *, called: bool) -> bool:
    """Let `waiter` begin, as `Waiter.begin`; return whether it did."""
    try:
        waiter.begin(called=called)
    except BaseException:  # also a sys.exit() in it
        logger.exception(
            "who waited for the lock %s could not begin, and the next in line has its turn; a message is delivered "
            "again when its worker ends",
            shown(waiter.key),
        )
        return False
    return True
