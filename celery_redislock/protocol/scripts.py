"""Loads the scripts of lua/, which implement the protocol, and defines the types of their arguments and replies.

A script's reply is a list whose first item is a `Tag`; a renewal's is one tag for each of its keys. A tag alone is sent
without the list: Redis takes about a microsecond to turn a Lua table into a reply.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple, Self

from celery_redislock.info import LockInfo

from .tokens import Token

Text = str | bytes

#: How long a note lives by default, in seconds. A copy may wait in the broker's queue for that long.
NOTE_TTL = 24 * 3600.0
#: The line of a script that is replaced by the prelude. The code above that line does not need the prelude.
PRELUDE_STANDS_HERE = "-- The prelude stands here.\n"


#: Where a script tests whether a value begins with an owner of 23 characters and a space, and the test: written out,
#: because a function takes longer.
_OWNS, _TEST = r"\bOWNS\(([\w.\[\]]+), (\w+)\)", r"string.sub(\2, 1, 24) == \1 .. ' ' and string.find(\2, '^[>~=?]')"


def _read(name: str) -> str:
    return re.sub(_OWNS, _TEST, files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8"))


PRELUDE = _read("prelude")


class Script:
    """One Lua file with the prelude inserted, and its SHA-1, under which the server knows it."""

    def __init__(self, name: str) -> None:
        self.text = _read(name).replace(PRELUDE_STANDS_HERE, PRELUDE)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE, RESERVE, RELEASE, RENEW = Script("acquire"), Script("reserve"), Script("release"), Script("renew")
EXPECT, INSPECT = Script("expect"), Script("inspect")
STAND, LEAVE = Script("stand"), Script("leave")


class Tag(bytes, Enum):
    """What a script replies."""

    GRANTED = b"granted"
    FINISHED = b"finished"
    CONFLICT = b"conflict"
    COPY = b"copy"
    QUEUED = b"queued"
    OUTSTANDING = b"outstanding"
    RELEASED = b"released"
    REPLACED = b"replaced"
    MARKED = b"marked"
    KEPT = b"kept"
    LOST = b"lost"
    ENTERED = b"entered"
    CALLED = b"called"
    LEFT = b"left"
    FREE = b"free"


#: A tag, and what the script's header says.
Reply = Sequence[Any]


class Command(NamedTuple):
    """A script with its KEYS and ARGV."""

    script: Script
    keys: tuple[str, ...]
    values: tuple[Text, ...]


class Granted(NamedTuple):
    """The reply to an acquire: the caller now holds the key."""

    sent_at: float
    """`time.monotonic()` just before the command was sent: the lease cannot have begun earlier."""
    fence: int | None = None
    """The fencing number, if the acquire asked for one: greater than any earlier holder's."""
    permit: int = 1
    """The number of the permit granted."""

    @classmethod
    def of(cls, reply: Reply, sent_at: float) -> Self:
        """Return what the reply to a command sent at `sent_at` grants."""
        return cls(sent_at, reply[2] if len(reply) > 2 else None, reply[1] if len(reply) > 1 else 1)


class Conflict(NamedTuple):
    """The reply to an acquire, or to a room that stands in line: another holds the key, or it is kept for another."""

    holder: Token
    ttl: float | None
    """Seconds until the key expires unless it is renewed; None for a key that never expires."""
    now: int = 0
    """The server's clock at the reply, in microseconds; 0 if not known."""
    waiting: int = 0
    """How many rooms stand in line for the key; 0 if the command did not ask."""
    others: tuple[Token, ...] = ()
    """The other holders, if the lock can have several."""
    cannot_wait: bool = False
    """Whether the holder is another delivery of the caller's message, with a permit. In line, the caller would be
    called for every other permit that becomes free, and refused each time."""

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Return who holds the key, by a script's reply."""
        tag, ttl, now, waiting, *values = reply
        # Actual holders first, then the tokens of rooms and waiters that the key is kept for.
        holders = [*map(Token.of, values)]
        holder, *others = sorted(holders, key=lambda one: one.state == "offered") if len(holders) > 1 else holders
        return cls(holder, ttl / 1000 if ttl >= 0 else None, now, waiting, tuple(others), tag == Tag.COPY)

    @property
    def holders(self) -> tuple[Token, ...]:
        """All holders of the key."""
        return (self.holder, *self.others)

    def info(self, key: str) -> LockInfo:
        """Return the holders of `key` as a `LockInfo`: the first one, with the others in `LockInfo.others`."""
        return self.holder.info(key, self.ttl)._replace(
            waiting_processes=self.waiting, others=tuple(other.info(key, None) for other in self.others)
        )


class Reserved(NamedTuple):
    """The reply to a publisher: it may send its message."""

    key: str
    """The key in Redis that is reserved for the message: the lock's, or the place in the queue."""


class Outstanding(NamedTuple):
    """The reply to a publisher: nothing is reserved for its message.

    A job is outstanding, or another task's job has the place in the queue.
    """

    taken: tuple[tuple[Token, float | None], ...]
    """The tokens of the key and of the place in the queue, with the seconds until they expire unless renewed."""

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Return the jobs that a script has reported."""
        _, *pairs = reply
        taken = zip(pairs[::2], pairs[1::2], strict=True)
        return cls(
            tuple((Token.of(value), ttl / 1000 if ttl >= 0 else None) for value, ttl in taken if value is not None)
        )

    def info(self, key: str) -> list[LockInfo]:
        """Return the holders of `key` and of the place in its queue as `LockInfo`."""
        return [token.info(key, ttl) for token, ttl in self.taken]


class Passed(NamedTuple):
    """The task ids of the jobs that a publisher knows about and passes over.

    Tokens would not do: a job that is queued at the first call may be running at the second.
    """

    ended: frozenset[str] = frozenset()
    """Jobs whose end the publisher's caller may have seen: their reservations are no longer needed."""
    preceding: frozenset[str] = frozenset()
    """Jobs whose result cannot answer the call: those that the message must follow, other tasks' jobs, and runs whose
    result is out of reach."""


class Finished(NamedTuple):
    """The reply to an acquire: the caller's attempt has already ended in another execution."""


class Claim(NamedTuple):
    """What a message carries if the key, or the place in the queue, is reserved for it."""

    nonce: str
    """The nonce of the reservation's token."""
    ttl: float
    """If the key turns out to be held, how much longer the place in the queue stays reserved, in seconds."""


class Note(NamedTuple):
    """The note that a release writes for copies of the holder's message, if the attempt is over."""

    key: str
    """The note's key in Redis, from `LockKeys.note`."""
    ttl: float = NOTE_TTL
    """How long the note lives, in seconds."""
    in_any_case: bool = False
    """Write the note even if no copy was seen: one may be waiting in the broker's queue."""
