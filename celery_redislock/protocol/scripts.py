"""Loads the scripts of lua/, which implement the protocol, and defines the types of their arguments and replies."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from celery_redislock.info import LockInfo

from .tokens import Token

Text = str | bytes

#: How long a note lives by default, in seconds. A copy may wait in the broker's queue for that long.
NOTE_TTL = 24 * 3600.0
#: The line of a script that is replaced by the prelude. The code above that line does not need the prelude.
PRELUDE_STANDS_HERE = "\n-- The prelude stands here.\n"


def _read(name: str) -> str:
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


PRELUDE = _read("prelude")


class Script:
    """One Lua file with the prelude inserted, and the SHA-1 under which the server caches it."""

    def __init__(self, name: str) -> None:
        before, _, after = _read(name).rpartition(PRELUDE_STANDS_HERE)
        self.text = f"{before}\n{PRELUDE}\n{after}"
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE, ACQUIRE_PERMIT = Script("acquire"), Script("acquire_permit")
RESERVE, EXPECT, GIVE_UP = Script("reserve"), Script("expect"), Script("give_up")
RELEASE, RENEW = Script("release"), Script("renew")
ENTER, STAND, LEAVE, INSPECT = Script("enter"), Script("stand"), Script("leave"), Script("inspect")


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
    """The number of the permit granted, for a lock with a limit."""


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
    """The other holders, if the lock has a limit."""
    cannot_wait: bool = False
    """Whether the holder is another delivery of the caller's message, with a permit. In line, the caller would be
    called for every other permit that becomes free, and refused each time."""

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


class Taken(NamedTuple):
    """The reply to a room that stands in line: it is the turn of its first waiter, which must acquire the key now."""


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
