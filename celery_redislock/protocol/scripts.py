"""The Lua scripts of the folder lua/, in which the protocol is written."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from celery_redislock.info import LockInfo

from .tokens import Token

Text = str | bytes


def _read(name: str) -> str:
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


PRELUDE = _read("prelude")


#: The line of a script behind which it needs the prelude.
PRELUDE_STANDS_HERE = "\n-- The prelude stands here.\n"


class Script:
    """One Lua file with the prelude in it, and the SHA-1 of both by which the server knows the script."""

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


#: How long a note lives by default, in seconds: a copy may wait in the broker's queue for as long.
NOTE_TTL = 24 * 3600.0


class Granted(NamedTuple):
    """The answer to an acquire: the caller holds the key now."""

    sent_at: float
    """`time.monotonic()` just before the command was sent: the lease did not begin before that."""
    fence: int | None = None
    """The fencing number, where the acquire asked for one: greater than that of every earlier holder of the key."""
    permit: int = 1
    """The number of the permit that was granted, of a lock that more than one may hold."""


class Conflict(NamedTuple):
    """The answer to an acquire, and to a room that stands in line: another holds the key, or it is kept for another."""

    holder: Token
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""
    now: int = 0
    """The microseconds of the server's clock at the answer; 0 where they are not known."""
    waiting: int = 0
    """How many rooms stand in line for the key; 0 where that was not asked for."""
    others: tuple[Token, ...] = ()
    """Who else holds the key, where more than one may."""
    cannot_wait: bool = False
    """Whether the holder is another delivery of the caller's message, with a permit of a lock with a limit. In line the
    caller would be called to each other permit that becomes free, and be refused."""

    @property
    def holders(self) -> tuple[Token, ...]:
        """All who hold the key."""
        return (self.holder, *self.others)

    def info(self, key: str) -> LockInfo:
        """The holders of `key` in words: the first, and `LockInfo.others`."""
        return self.holder.info(key, self.ttl)._replace(
            waiting_processes=self.waiting, others=tuple(other.info(key, None) for other in self.others)
        )


class Reserved(NamedTuple):
    """The answer to a publisher: its message may be sent."""

    key: str
    """The key in Redis that is reserved for it: the lock's, or the place in the queue."""


class Outstanding(NamedTuple):
    """The answer to a publisher: nothing is reserved for its message.

    A job is outstanding, or another task's has the place in the queue.
    """

    taken: tuple[tuple[Token, float | None], ...]
    """Who has the key and the place in the queue, with the seconds for which they are kept unless renewed."""

    def info(self, key: str) -> list[LockInfo]:
        """Who has `key`, and who has the place in its queue, in words."""
        return [token.info(key, ttl) for token, ttl in self.taken]


class Passed(NamedTuple):
    """The jobs that a publisher has been told of and passes over, by their task ids.

    A token would not name them: a job that was queued at the first call may run by the second.
    """

    ended: frozenset[str] = frozenset()
    """Those that its caller may have seen end: what is reserved for them is not needed."""
    preceding: frozenset[str] = frozenset()
    """Holders that are no answer: those it is to follow, other tasks', and runs whose result nobody else can read."""


class Taken(NamedTuple):
    """The answer to a room that stands in line: it is the turn of its first waiter, who is to acquire the key now."""


class Finished(NamedTuple):
    """The answer to an acquire: the attempt that asks has already ended in another execution."""


class Claim(NamedTuple):
    """What a message carries if the key, or the place in the queue, is reserved for it."""

    nonce: str
    """The nonce of the token by which the key, or the place, is reserved."""
    ttl: float
    """If the key turns out to be held: for how many seconds from then on the place in the queue is reserved."""


class Note(NamedTuple):
    """The note that a release writes for copies of the holder's message, where the attempt is over."""

    key: str
    """The note's key in Redis, from `LockKeys.note`."""
    ttl: float = NOTE_TTL
    """Seconds that the note lives."""
    in_any_case: bool = False
    """Write the note even where no copy was seen: one may wait in the broker's queue."""
