"""Term: until when a holder may count on its key, in whatever order the server meets the renewals under way."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from redis.exceptions import RedisError

from celery_redislock.connection.store import LockStore
from celery_redislock.errors import LockLost, LockUnavailable, describe
from celery_redislock.info import fields
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.scripts import Granted
from celery_redislock.protocol.tokens import Token

logger = logging.getLogger(__name__)

State = Literal["held", "at_risk", "lost"]
LostHandler = Callable[["HeldLock", str], Any]

PAST_DEADLINE = "it was not renewed until its deadline"
HELD_TOO_LONG = "it was held for longer than lock_max_hold"
KEY_GONE = "its key was deleted, expired or taken"
NOT_OURS = "its key was not ours at the release"

#: Renewal is due after this share of the lease.
INTERVAL = 1 / 3
#: How long before the key's end in Redis the holder's own deadline comes, as a share of the lease: the holder's clock
#: and the server's may not run at the same speed.
DEADLINE_MARGIN = 0.01
#: The share of the key's time on which its holder counts.
TRUSTED = 1 - DEADLINE_MARGIN


class Renewal:
    """A command that gives the key a time to live, from when it is sent.

    The keeper and each caller of `HeldLock.extend` have connections of their own, so one renewal may overtake another.

    Attributes:
        sent_at (float): When it is sent, by `time.monotonic()`.
        ttl (float): The time that it gives the key, in seconds.
        counts (float): The time that its holder may count on once it is answered: no more than any renewal gives that
            was under way at the same time, for that one may reach the server after this one.
    """

    __slots__ = ("counts", "sent_at", "ttl")

    def __init__(self, ttl: float) -> None:
        self.sent_at = time.monotonic()
        self.ttl = self.counts = ttl


class Term:
    """For how long a key is held. Several threads may renew it at the same time.

    Args:
        lease: The time to live that the key is granted for, in seconds.

    Attributes:
        lease (float): As given.
        deadline (float): Until when the holder counts on the key, by `time.monotonic()`. The server never ends the key
            before that, whatever becomes of the renewals that were sent until now.
        renew_at (float): When a keeper is to renew the key.
    """

    __slots__ = ("_asked_until", "_guard", "_in_doubt", "_under_way", "deadline", "lease", "renew_at")

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self.deadline = self.renew_at = -math.inf  # until it is granted
        self._asked_until = -math.inf
        self._under_way: list[Renewal] = []
        self._in_doubt = math.inf  # the shortest time that an unanswered renewal gives; it may yet arrive
        self._guard = threading.Lock()  # not one for all: a child would inherit it for ever locked by another thread

    @property
    def was_granted(self) -> bool:
        """Whether an answer of the server has ever granted the key to this lock."""
        return self.deadline > -math.inf

    @property
    def ends_at(self) -> float:
        """When the key ends at the latest if no renewal is sent from now on, by `time.monotonic()`."""
        now = time.monotonic()  # a renewal under way may reach the server only now
        return now + max(self.lease, self._asked_until - now) / TRUSTED

    def start_lease(self, sent_at: float) -> None:
        """Note that the server has granted the key for a lease, no earlier than at `sent_at`."""
        with self._guard:
            self._count(sent_at, self.lease)

    def extending(self, ttl: float | None = None) -> Renewal:
        """Note that a renewal for `ttl` seconds, or for a lease, is about to be sent. Then `answered` or `unanswered`.

        Where it shortens the time, the holder counts on no more from now on: its answer may be lost.
        """
        with self._guard:
            renewal = self._send(self.lease if ttl is None else ttl)
            self._asked_until = renewal.sent_at + renewal.ttl
            return renewal

    def renewing(self) -> Renewal:
        """As `extending`, for the keeper: for a lease, or for what is left of the time of the last `extending`."""
        with self._guard:
            return self._send(max(self.lease, self._asked_until - time.monotonic()))

    def answered(self, renewal: Renewal) -> None:
        """Note that the server has renewed the key."""
        with self._guard:
            self._under_way.remove(renewal)
            self._count(renewal.sent_at, renewal.counts, self.deadline)

    def unanswered(self, renewal: Renewal) -> None:
        """Note that nobody waits for the answer any more. The renewal may still arrive, at any time."""
        with self._guard:
            self._in_doubt = min(self._in_doubt, renewal.ttl)
            self._under_way.remove(renewal)

    def _send(self, ttl: float) -> Renewal:
        renewal = Renewal(ttl)
        for other in self._under_way:
            other.counts = min(other.counts, ttl)
            renewal.counts = min(renewal.counts, other.ttl)
        if self._in_doubt < renewal.counts:
            renewal.counts = self._in_doubt
        self._under_way.append(renewal)
        if renewal.sent_at + ttl * TRUSTED < self.deadline:
            self._count(renewal.sent_at, ttl)
        return renewal

    def _count(self, sent_at: float, ttl: float, at_least: float = -math.inf) -> None:
        self.deadline = max(sent_at + ttl * TRUSTED, at_least)
        if ttl > self.lease:  # a third of a lease after no more than a lease is left
            self.renew_at = sent_at + ttl - self.lease * (1 - INTERVAL)
        else:
            self.renew_at = sent_at + ttl * INTERVAL


class HeldLock(Term):
    """A lock that is held, from its grant to its release.

    Attributes:
        key (str): The key in Redis.
        token (Token): What the key holds while the lock is held.
        permit (str): The key that holds the token: `key`, or where more than one may hold the lock, that of the permit.
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
        "permit",
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
        self.key = self.permit = key
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
            (still_held,) = self.store.renew([(self.permit, self.token, renewal.ttl)])
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
        """Let the key hold `token`, which the caller of a `Lock` has chosen, instead of the minted token.

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
                self.start_lease(sent_at)
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
        if grant.permit > 1:
            self.permit = keys_of(self.key).permit(grant.permit)
        self.start_lease(grant.sent_at)
        if self.max_hold is not None:
            self.stop_at = grant.sent_at + self.max_hold

    def fields(self, event: str, **about: object) -> dict[str, str]:
        """The fields of a log line about this lock, as `celery_redislock.info.fields`."""
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
