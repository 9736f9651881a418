"""Header: what a message says of itself, in a message header of ours."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from celery_redislock.server.tokens import is_claim, is_publish

#: The name of the message header.
HEADER = "redislock"
_MAX_DOUBLINGS = 16
#: A longer name of a key is none of ours, in characters.
MAX_KEY = 1000


class Left(NamedTuple):
    """A key that its publisher, or its last attempt, has left to a message."""

    key: str
    """In Redis. The place in its queue may be left instead."""
    claim: str
    """The nonce that opens it."""


class Header(NamedTuple):
    """What a message says of itself: its publish, what was left to it, and how often it has come back, since when."""

    publish: str = ""
    """The name of its publish, from `mint_publish`; it stays when the message comes back."""
    claim: str | None = None
    """The nonce under which a key, or the place in its queue, was left to it."""
    key: str | None = None
    """That key in Redis, as its publisher made it of the arguments."""
    times: int = 0
    since: float = 0.0
    """When it was first sent back: seconds since the epoch; 0 before that."""
    begun: bool = False
    """A process that ran it may have died: work that has begun, which no policy may drop."""
    joins: str | None = None
    """The task whose outcome it waits for, by the policy ``join``."""

    @classmethod
    def read(cls, header: Any) -> Self:
        """From a message header. A field that is odd counts as not there, and costs no other field."""
        if not isinstance(header, Mapping):
            return cls()
        said = cls(**{name: value for name, value in header.items() if name in _IS_SOUND and _IS_SOUND[name](value)})
        # By a clock that is ahead, it lies in the future.
        return said._replace(since=float(min(said.since, time.time()))) if said.since else said

    @property
    def left(self) -> Left | None:
        """The key that was left to the message, if one was."""
        return Left(self.key, self.claim) if self.key is not None and self.claim is not None else None

    @property
    def wire(self) -> dict[str, Any]:
        """The message header: what is not said is left out."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}

    def next(self, *, begun: bool, joins: str | None = None) -> Self:
        """The header of the message when it is sent back once more."""
        since = self.since or time.time()
        return self._replace(times=self.times + 1, since=since, begun=self.begun or begun, joins=joins or self.joins)

    def delay(self, shortest: float, longest: float) -> float:
        """Seconds until it should be tried again: exponential, with jitter."""
        doubled = shortest * 2 ** min(self.times + 1, _MAX_DOUBLINGS)
        return min(random.uniform(shortest, doubled), longest)  # noqa: S311 - jitter, no secret


#: What each field of a message header may be.
_IS_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "publish": is_publish,
    "claim": is_claim,
    "key": lambda value: isinstance(value, str) and 0 < len(value) <= MAX_KEY,
    "times": lambda value: type(value) is int and value >= 0,
    "since": lambda value: type(value) in {int, float} and 0 < value < math.inf,
    "begun": lambda value: type(value) is bool,
    "joins": lambda value: isinstance(value, str),
}
