"""Header: what a message carries for the plugin, in a single message header."""

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from celery_redislock.options import allowed_of_call
from celery_redislock.protocol.names import FIRST_TURN
from celery_redislock.protocol.tokens import is_nonce, is_publish

_random = random.SystemRandom()
#: The name of the message header.
HEADER = "redislock"
#: How many times the delay may double. Without a limit, a message that is often sent back would overflow the float.
_MAX_DOUBLINGS = 16
#: The longest key that a header may carry, in characters. The plugin's own keys are shorter.
MAX_KEY = 1000
#: A message's rank is at most this many microseconds earlier than the time when it first waits: one hour.
LONGEST_AHEAD = 3_600_000_000


class Reservation(NamedTuple):
    """A reservation for a message, made by its publisher or by the previous attempt."""

    key: str
    """The key in Redis, even if the reservation is for the place in the key's queue, `<key>:queued`."""
    claim: str
    """The nonce of the reservation's token. A message that carries it may take the key."""


class Header(NamedTuple):
    """What a message carries, such as its publish's name, its reservation, its rank and how often it has waited."""

    publish: str = ""
    """The name of the message's publish, from `mint_publish`. It stays the same when the message is sent back."""
    claim: str | None = None
    """The nonce of the token that reserves a key, or the place in the queue, for the message."""
    key: str | None = None
    """The key in Redis that the publisher computed from the arguments."""
    queued: bool = False
    """The place in the queue was reserved, not the key."""
    times: int = 0
    """How many times the message has waited, in line or in the broker's queue."""
    since: float = 0.0
    """When the message first had to wait, in seconds since the epoch; 0 before that."""
    begun: bool = False
    """A process may have died while it ran the message. No policy may drop work that has begun."""
    joins: str | None = None
    """The id of the task whose outcome the message waits for under the policy ``join``."""
    published: int = 0
    """When the message was published or, with a countdown or an eta, is due, in microseconds since the epoch, by the
    clock of its publisher's host; 0 if unknown."""
    rank: int = 0
    """The message's rank in the line for its key, from `rank_at` or the lock server; 0 before it has waited."""
    republished: bool = False
    """A worker published the message again, or tried to. This stays set: a copy of the message may arrive late."""
    died: int = 0
    """How many children died with the message before its run began."""
    number: int = 0
    """The number of the message's call, from lua/merge.lua; 0 if it has none."""
    unmerged: bool = False
    """The message is the next attempt of a run, and the lock server has not been told its arguments."""
    options: Mapping[str, Any] | None = None
    """The lock options that the message's call has set, without the prefix ``lock_``; None if it has set none."""

    @classmethod
    def read(cls, header: Any) -> Self:
        """Read what arrived under `HEADER`. Fields with invalid values are ignored; the others are still read."""
        if not isinstance(header, dict):
            return cls()
        read = cls(**{name: value for name, value in header.items() if name in _IS_SOUND and _IS_SOUND[name](value)})
        if read.options is not None:
            read = read._replace(options=allowed_of_call(read.options))
        # The clock of the host that sent the message back may be ahead of this one's.
        return read._replace(since=float(min(read.since, time.time()))) if read.since else read

    @property
    def reservation(self) -> Reservation | None:
        """The message's reservation; None if it has none."""
        return Reservation(self.key, self.claim) if self.key is not None and self.claim is not None else None

    @property
    def wire(self) -> dict[str, Any]:
        """The value to send under `HEADER`: the fields that differ from their defaults, which are all empty or zero."""
        return {name: value for name, value in zip(self._fields, self, strict=True) if value}

    def next(self, *, begun: bool = False, joins: str | None = None, rank: int = 0, sleeps: bool = False) -> Self:
        """The header for the next time that the message waits, or sleeps until it is due.

        Args:
            begun: Whether the work may have begun. Once a message is marked as begun, it stays marked.
            joins: The id of the task whose outcome the message waits for; None to keep the current one.
            rank: The message's rank in line; 0 to keep the current one.
            sleeps: Whether the message sleeps, which does not count as waiting.
        """
        rank = rank or self.rank
        if sleeps:
            return self._replace(rank=rank)
        since = self.since or time.time()
        return self._replace(
            times=self.times + 1, since=since, begun=self.begun or begun, joins=joins or self.joins, rank=rank
        )

    def rank_at(self, now: int) -> int:
        """The message's rank in the line for its key: the first published goes first. Once set, the rank is kept.

        Args:
            now: The lock server's time. Clocks differ between hosts, so a publish time outside the hour before `now`
                is moved to the nearer end of that hour. All times are in microseconds since the epoch.
        """
        if 0 < self.rank < FIRST_TURN:
            return min(self.rank, now)
        return min(max(self.published, now - LONGEST_AHEAD), now) if self.published else now

    def delay(self, shortest: float, longest: float) -> float:
        """Seconds until the message is tried again, from `shortest` to `longest`: doubling each time, with jitter."""
        doubled = shortest * 2 ** min(self.times + 1, _MAX_DOUBLINGS)
        # The longest delay has jitter too: otherwise messages that have waited long would arrive together.
        return _random.uniform(shortest, max(shortest, min(doubled, longest)))


#: The header of a message without one, such as `send_task` sends. It is immutable, so all such messages share it.
NO_HEADER = Header()


#: For each field of the header, a check of whether a received value is valid.
_IS_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "publish": is_publish,
    "claim": is_nonce,
    "key": lambda value: isinstance(value, str) and 0 < len(value) <= MAX_KEY,
    "times": lambda value: type(value) is int and value >= 0,
    "since": lambda value: type(value) in {int, float} and 0 < value < math.inf,
    "joins": lambda value: isinstance(value, str),
    "died": lambda value: type(value) is int and 0 < value < 1000,
    "options": lambda value: isinstance(value, dict),
    # Times in microseconds. The lock server orders them as floats, which are exact below 2**53.
    **dict.fromkeys(("published", "rank", "number"), lambda value: type(value) is int and 0 < value < 2**53),
    **dict.fromkeys(("queued", "begun", "republished", "unmerged"), lambda value: type(value) is bool),
}
