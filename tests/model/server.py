"""Server: the state that Redis is in, as far as it has to do with one lock."""

from __future__ import annotations

from typing import NamedTuple

from celery_redislock.protocol.tokens import Attempt

from .memory import quick


@quick
class Key(NamedTuple):
    """What one permit of the lock holds: a token's nonce and attempt, and whether an acquire of a copy has marked it.

    Only the permit of a running execution can be marked. A lock with the limit 1 has one permit, and that is its key.
    """

    nonce: str
    """That of an execution, ``n1``; a claim, ``h1``, under which the permit is reserved for a message; or a member of
    the line, to which the permit is offered, ``?r1``, or from which somebody is on the way to it, ``!r1``."""
    attempt: Attempt
    marked: bool = False
    rank: int = 0
    """The rank of the one who is on the way."""
    number: int = 0
    """What tells that one from others of its room with the same rank."""
    times: int = 0
    """How many times its owner had minted its token anew."""
    sending: bool = False
    """The permit, or the place, is reserved for a message that its publisher has not said to be sent."""

    @property
    def is_reserved(self) -> bool:
        """Whether the permit is reserved for a message, which carries the nonce as its claim."""
        return self.nonce[0] == "h"

    @property
    def is_offered(self) -> bool:
        """Whether the permit is offered to a room that has not answered yet."""
        return self.nonce[0] == "?"

    @property
    def member(self) -> str:
        """The member of the line to which the permit is offered, or from which somebody is called; else empty."""
        return self.nonce[1:] if self.nonce[0] in "?!" else ""

    @property
    def room(self) -> str:
        """The room of that member; empty where there is none."""
        return room_of(self.member)


#: An offer names a room, and no attempt.
NOBODY = Attempt("", 0, 0)


def member_of(room: str, limit: int) -> str:
    """How `room` stands in line for those who wait in it with `limit`: ``r1``, or ``r1 2``."""
    return room if limit == 1 else f"{room} {limit}"


def room_of(member: str) -> str:
    return member.partition(" ")[0]


def limit_of(member: str) -> int:
    return int(member.partition(" ")[2] or 1)


@quick
class Server(NamedTuple):
    """All that Redis knows."""

    permits: tuple[Key | None, ...] = (None,)
    """What each permit of the lock holds; None where it is free. The first one is the lock's key."""
    notes: frozenset[Attempt] = frozenset()
    """The attempts that have a note: they are over."""
    gone: frozenset[str] = frozenset()
    """The claims that were given up before a run handed its permit over under them: no message will come with them."""
    line: tuple[tuple[int, str], ...] = ()
    """The rooms that wait for the lock, each with its rank: that of the first of those who wait in it. In order."""
    queued: Key | None = None
    """The place in the queue, reserved for a message that is to run after the lock's holder; None where it is free."""
    window: Key | None = None
    """The last job of the task, for as long as no other one is to be sent; None where the window is closed."""

    @property
    def keys(self) -> list[Key]:
        """What the permits hold that are not free."""
        return [key for key in self.permits if key is not None]

    @property
    def runs(self) -> list[Key]:
        """The permits of executions."""
        return [key for key in self.permits if key is not None and key.nonce[0] == "n"]

    @property
    def reserved(self) -> list[Key]:
        """What is reserved for messages: permits, and the place in the queue."""
        reserved = [key for key in self.keys if key.is_reserved]
        return reserved if self.queued is None else [*reserved, self.queued]

    @property
    def is_free(self) -> bool:
        """Whether nobody has any permit, nor the place in the queue."""
        return not any(self.permits) and self.queued is None

    def number_of(self, nonce: str) -> int:
        """The number of the permit that holds `nonce`, from 1 on; 0 where none does."""
        for number, key in enumerate(self.permits, 1):
            if key is not None and key.nonce == nonce:
                return number
        return 0

    def free(self, limit: int) -> list[int]:
        """The numbers of the free permits that somebody with `limit` may have."""
        return [number for number, key in enumerate(self.permits[:limit], 1) if key is None]

    def first_for(self, permit: int) -> str:
        """The first in line that may have the permit of this number: its limit is not below it. Empty: nobody."""
        return next((member for _, member in self.line if limit_of(member) >= permit), "")

    def put(self, permit: int, key: Key | None) -> Server:
        """This state with `key` as the permit of this number."""
        return self._replace(permits=(*self.permits[: permit - 1], key, *self.permits[permit:]))

    def ranked(self, member: str, rank: int | None) -> Server:
        """This state with `member` in the line with `rank`; None: not in the line."""
        others = [entry for entry in self.line if entry[1] != member]
        return self._replace(line=tuple(sorted(others if rank is None else [*others, (rank, member)])))
