"""Waiter: waits in a room for its turn at a key."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from celery_redislock.errors import LockUnavailable, shown
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Token

logger = logging.getLogger(__name__)


class Waiter(ABC):
    """Waits for a key. Its methods are called in the room's thread and must not block.

    Attributes:
        demand: What the waiter waits for.
        wants: If the waiter needs several keys: all that it needs, in the order of `protocol.several`. Its room moves
            it to the line of one that is held.
        lost_at: When it first lost its turn, because another of these keys was held, by `time.monotonic()`; None before
            that.
        rank: The waiter's rank in line: microseconds since the epoch, by the server's clock; or the virtual time of its
            group's turn.
        number: Tells waiters of one room with the same rank apart; 0 before the waiter has entered.
        deadline: When the waiter stops waiting, by `time.monotonic()`.
        is_asleep: Whether the waiter stands in no line, but only waits for its deadline.
        watches: Whether `need_not_wait` may ever be true.
        look_every: Seconds between two checks of the key while another library's lock, whose release sends no hint,
            holds it; None for the usual interval.
    """

    __slots__ = ()

    demand: Demand
    wants: tuple[Demand, ...] = ()
    lost_at: float | None = None
    rank: int
    number: int = 0
    deadline: float = math.inf
    is_asleep: bool = False
    watches: bool = False
    look_every: float | None = None

    @property
    def group(self) -> str:
        """Waiters of one group need the same thing to start: if one of them cannot start, none can."""
        return ""

    @property
    def key(self) -> str:
        """The key in Redis."""
        return self.demand.key

    @property
    def line(self) -> str:
        """The waiter's line. Waiters in one room share a line if they want the same key with the same capacity."""
        return self.demand.line

    @property
    def published(self) -> int:
        """When the waiter was published or began to wait, in microseconds since the epoch."""
        return self.rank

    @property
    def may_be_displaced(self) -> bool:
        """Whether the waiter makes room for others if it is the last in its line."""
        return False

    def is_ready(self) -> bool:
        """Whether there is a slot for the waiter now."""
        return True

    def is_coming(self) -> bool:
        """Whether the waiter was called but has not asked for its key yet."""
        return False

    def need_not_wait(self, holders: Sequence[Token]) -> bool:
        """Whether the waiter may start before its turn, without a call.

        Args:
            holders: The tokens of the key's holders; empty if the room has just called another waiter to the key.
        """
        return False

    @abstractmethod
    def take_turn(self, *, called: bool) -> None:
        """Stop waiting and ask for the key.

        Args:
            called: Whether the waiter's turn has come. The key is then kept for the waiter for a few seconds. If False,
                the waiter's deadline has passed, or it need not wait any longer.
        """

    def displaced(self) -> None:
        """The room is full, and the waiter is the last in its line: wait elsewhere."""
        raise NotImplementedError  # pragma: no cover - only messages may be displaced

    def unavailable(self, error: LockUnavailable) -> None:  # noqa: B027 - most waiters just keep waiting
        """The server did not answer the room. The waiter stays in line unless it leaves."""


def is_ready(waiter: Waiter) -> bool:
    """Whether there is a slot for `waiter`. A bug in one waiter must not cost the others their turn."""
    try:
        return waiter.is_ready()
    except BaseException:
        logger.exception("could not check whether a waiter for lock %s can start; starting it", shown(waiter.key))
        return True


def give_turn(waiter: Waiter, *, called: bool) -> bool:
    """Call `Waiter.take_turn`; return whether it succeeded."""
    try:
        waiter.take_turn(called=called)
    except BaseException:  # even sys.exit()
        text = "a waiter for lock %s could not start; the next goes ahead; a message comes again once its worker stops"
        logger.exception(text, shown(waiter.key))
        return False
    return True
