"""Commands: what Redis is asked to do with one lock, and the effect of that."""

from __future__ import annotations

from typing import NamedTuple

from celery_redislock.protocol.scripts import Tag
from celery_redislock.protocol.tokens import Attempt

from .server import Key, Server, member_of


class Effect(NamedTuple):
    """What a command does: its answer, and the state of Redis after it."""

    reply: Tag
    server: Server
    permit: int = 0
    """The number of the permit that was given a whole lease; 0 where none was."""
    holders: tuple[Key, ...] = ()
    """Who was told to hold the lock, to somebody who may not have it."""


class Acquire(NamedTuple):
    """Take the permit that is reserved under the message's claim, or a free one."""

    nonce: str
    attempt: Attempt
    reads_note: bool
    """Whether the attempt's note is looked for first, because the message may be a copy."""
    room: str = ""
    """The room from which the asker was called."""
    limit: int = 1
    """How many may hold the lock at once. The asker takes no free permit of a higher number."""
    rank: int = 0
    """The rank for which the asker was called: a room may have called others."""
    number: int = 0
    """What tells the asker from others of its room with the same rank."""
    times: int = 0
    """How many times the asker has minted its token anew."""
    claim: str = ""
    """The message's claim: the permit that is reserved under it may be taken too."""


class Reserve(NamedTuple):
    """Reserve the key for a job that is about to be sent, or the place in the queue, unless another job is outstanding.

    The limit of a job is 1.
    """

    claim: str
    attempt: Attempt
    ended: frozenset[str] = frozenset()
    """The ids of the jobs whose end the publisher may have seen."""
    preceding: frozenset[str] = frozenset()
    """The ids of the jobs that the message is to follow, so that it is no duplicate of them."""
    unsent: frozenset[str] = frozenset()
    """The ids of the jobs whose publishers were too slow: what is reserved for them is taken, unless they were sent."""
    opens_window: bool = False
    """Whether no other job is to be sent for a while, whatever becomes of this one."""

    @property
    def limit(self) -> int:
        return 1


class Renew(NamedTuple):
    """Give a permit its lease again. If it is reserved for a message, that message has been sent."""

    nonce: str
    permit: int = 1
    """The number of the permit; 0 for the place in the queue."""
    has_window: bool = False
    """Whether the message has opened a window."""


class Release(NamedTuple):
    """Free the permit of an owner, and leave a note if a copy was seen or may come unseen."""

    nonce: str
    """Who holds it; the nonce of the call, ``!r1``, for whoever was called and will not run."""
    note: Attempt | None
    """The attempt that is over; None where it is not over, or nobody knows."""
    unseen_copy: bool
    """Whether a copy may wait in the queue, where no acquire of it can mark the permit: the note is left anyway."""
    limit: int = 1
    """The owner's limit. The main process does not know it, and names the greatest."""
    rank: int = 0
    """That of the call that is released; else 0."""
    number: int = 0
    exactly: tuple[Attempt, int] | None = None
    """The rest of the token that the permit must hold: its attempt, and how many times it was minted anew. None: any
    token of the owner will do."""


class HandOver(NamedTuple):
    """A release that does not free the permit but reserves it under `claim`, for the next attempt."""

    nonce: str
    note: Attempt | None
    unseen_copy: bool
    claim: str
    attempt: Attempt
    """The next attempt."""
    limit: int = 1
    rank: int = 0
    number: int = 0


class GiveUp(NamedTuple):
    """Free the permit that was reserved under `claim`: its message will not run."""

    claim: str
    is_to_come: bool
    """Whether a run may hand its permit over under this claim later. Then Redis remembers that nobody comes with it."""
    limit: int = 1
    exactly: Attempt | None = None
    """The attempt of the reservation's token, where the whole token must match."""
    closes_window: bool = False
    """Whether the window that the message has opened is closed."""
    over: Attempt | None = None
    """The attempt, if it never runs: the calls that are kept for it are deleted. Given with `closes_window`."""


class Enter(NamedTuple):
    """A room that has no slot enters the line for the first who waits in it."""

    room: str
    rank: int
    limit: int = 1

    @property
    def member(self) -> str:
        return member_of(self.room, self.limit)


class Stand(NamedTuple):
    """A room asks for a permit for the first who waits in it, or enters the line."""

    room: str
    rank: int
    next_rank: int | None
    """The rank of the one who waits behind the first; None where nobody does."""
    limit: int = 1
    """That of those who wait: a room has one queue for each."""
    number: int = 0
    """What tells the first from others of its room with the same rank."""

    @property
    def member(self) -> str:
        return member_of(self.room, self.limit)


class Leave(NamedTuple):
    """A room leaves the line, and passes on the permits that it was offered."""

    room: str
    limit: int = 1

    @property
    def member(self) -> str:
        return member_of(self.room, self.limit)


Command = Acquire | Reserve | Renew | Release | HandOver | GiveUp | Enter | Stand | Leave
