"""Term: until when a holder may count on its key, in whatever order the server meets the renewals under way."""

from __future__ import annotations

import math
import threading
import time

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

    def begin(self, sent_at: float) -> None:
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
