"""HeldLock: a lock from its grant to its release, and what its holder knows of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal

from redis.exceptions import RedisError

from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockLost, LockUnavailable, describe
from celery_redislock.protocol.answers import Granted
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.tokens import Token
from celery_redislock.shown import fields

from .term import Term

logger = logging.getLogger(__name__)

PAST_DEADLINE = "it was not renewed until its deadline"
HELD_TOO_LONG = "it was held for longer than lock_max_hold"
KEY_GONE = "its key was deleted, expired or taken"
NOT_OURS = "its key was not ours at the release"

State = Literal["held", "at_risk", "lost"]
LostHandler = Callable[["HeldLock", str], Any]


class HeldLock(Term):
    """A lock that is held, from its grant to its release.

    Attributes:
        key (str): The key in Redis.
        token (Token): What the key holds while the lock is held.
        slot (str): The key that holds the token: `key`, or where more than one may hold the lock, that of the slot.
        lease (float): How long the key outlives a dead holder, in seconds.
        fence (int | None): The fencing number of this hold, where it was asked for.
    """

    __slots__ = (
        "__weakref__",
        "_lost",
        "fence",
        "key",
        "max_hold",
        "on_lost",
        "slot",
        "stop_at",
        "store",
        "token",
    )

    def __init__(
        self,
        store: LockStore,
        key: str,
        token: Token,
        lease: float,
        max_hold: float | None = None,
        on_lost: LostHandler | None = None,
    ) -> None:
        self.store = store
        self.key = self.slot = key
        self.token = token
        super().__init__(lease)
        self.fence: int | None = None
        self.on_lost = on_lost
        self.max_hold = max_hold
        self.stop_at = math.inf
        self._lost: str | None = None

    def __repr__(self) -> str:
        return f"<HeldLock {self.key} {self.state}>"

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline, which every renewal moves. 0.0 once the lock is lost."""
        return 0.0 if self._lost else max(0.0, self.deadline - time.monotonic())

    @property
    def state(self) -> State:
        """``"held"``, ``"at_risk"`` (renewals are late: less than half of the lease is left) or ``"lost"``."""
        remaining = self.remaining
        if remaining <= 0:
            return "lost"
        return "held" if remaining >= self.lease / 2 else "at_risk"

    def check(self) -> None:
        """Raise if the lock is lost. Call it before what must not happen twice.

        Raises:
            LockLost: The key was lost, or could not be renewed until the holder's deadline.
        """
        if self.remaining <= 0:
            raise LockLost(self.key, self._lost or "its lease has ended")

    def extend(self, ttl: float | None = None) -> None:
        """Renew the key now. While a keeper renews the lock, nobody needs this.

        Args:
            ttl: Seconds from now; None for a whole lease.

        Raises:
            LockLost: The key is not held any more.
            LockUnavailable: Redis did not answer or refused; the lock is still held until its deadline.
        """
        self.check()
        renewal = self.extending(ttl)
        try:
            (still_held,) = self.store.renew([(self.slot, self.token, renewal.ttl)])
        except BaseException as error:
            self.unanswered(renewal)
            if isinstance(error, RedisError):
                raise LockUnavailable(self.key, describe(error)) from error
            raise
        if not still_held:
            self.lose(KEY_GONE)
        self.check()
        self.answered(renewal)

    def rename(self, token: Token, *, fence: bool) -> bool:
        """Let the key hold `token`, which the caller of a `Lock` has chosen, in place of the minted token.

        The key is acquired with a minted token first: another caller may choose an equal token, so after a lost reply
        only a minted one shows that the key was granted to this lock.

        Returns:
            Whether the lock is still held.

        Raises:
            LockUnavailable: Redis did not answer or refused; the lock is not held.
        """
        sent_at = time.monotonic()
        try:
            result = self.store.rename(self.key, self.token, token, self.lease, fence=fence)
            if isinstance(result, Granted):
                self.granted(result)
            elif self._has_stored(token):
                self.begin(sent_at)
            else:
                return False
        except BaseException:
            if self.remaining > 0:
                self.store.undo(self.key, token)
            raise
        self.token = token
        return True

    def _has_stored(self, token: Token) -> bool:
        """Whether the key holds `token` because the reply to this lock's `rename` was lost.

        Nobody else can have stored it while the deadline is ahead: until then the key held the minted token.
        """
        found = self.store.look(self.key)
        if found is None or found.holder != token:
            return False
        if self.remaining <= 0:
            raise LockUnavailable(self.key, "Redis answered too late to tell whose the token is")
        return True

    def granted(self, grant: Granted) -> None:
        """Note that the server has granted the key."""
        self.fence = grant.fence
        if grant.slot > 1:
            self.slot = keys_of(self.key).slot(grant.slot)
        self.begin(grant.sent_at)
        if self.max_hold is not None:
            self.stop_at = grant.sent_at + self.max_hold

    def fields(self, event: str, **about: object) -> dict[str, str]:
        """The fields of a log line about this lock, as `celery_redislock.shown.fields`."""
        attempt = self.token.attempt
        return fields(event, task=self.token.task, task_id=attempt and attempt.task_id, key=self.key, **about)

    @property
    def was_lost(self) -> bool:
        """Whether `lose` has noted that the lock is lost."""
        return self._lost is not None

    def lose(self, reason: str) -> None:
        """Note for good that the lock is lost; log that and call `on_lost`, once."""
        with self._guard:  # the keeper's thread and one that releases the lock may see the loss at the same time
            if self._lost is not None:
                return
            self._lost = reason
        about = self.fields("lost", reason=reason)
        logger.warning("%s: %s", self.token.name, LockLost(self.key, reason), extra=about)
        if self.on_lost:
            self.on_lost(self, reason)
