"""Redis in the model: what each command answers, and what it leaves. Pure functions of the state of one key."""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import Enum
from typing import NamedTuple

from celery_redislock.server.tokens import Attempt

from .rules import Mistake

Mistakes = Set[Mistake]


class Key(NamedTuple):
    """What the key holds: the nonce and the attempt of a token, and whether an acquire of a copy has marked it.

    Only the key of a running execution can be marked.
    """

    nonce: str
    """That of an execution, ``n1``; a claim, ``h1``, under which the key is reserved for a message; or a room, to which
    the key is offered, ``?r1``, or from which somebody is on the way to it, ``!r1``."""
    attempt: Attempt
    marked: bool = False
    place: int = 0
    """The place of the one who is on the way."""

    @property
    def is_reserved(self) -> bool:
        """Whether the key is reserved for a message, which carries the nonce as its claim."""
        return self.nonce[0] == "h"

    @property
    def room(self) -> str:
        """The room to which the key is offered, or from which somebody is called; empty for any other key."""
        return self.nonce[1:] if self.nonce[0] in "?!" else ""


#: An offer names a room, and no attempt.
NOBODY = Attempt("", 0, 0)


class Server(NamedTuple):
    """All that Redis knows."""

    key: Key | None = None
    """None where the key is free."""
    notes: frozenset[Attempt] = frozenset()
    """The attempts that have a note: they are over."""
    gone: frozenset[str] = frozenset()
    """The claims that were given up before a run handed its key over under them: no message will come with them."""
    line: tuple[tuple[int, str], ...] = ()
    """The rooms that wait for the key, each with its place: that of the first of those who wait in it. In order."""

    def placed(self, room: str, place: int | None) -> Server:
        """This state with `room` at `place` in the line; None: not in the line."""
        others = [entry for entry in self.line if entry[1] != room]
        return self._replace(line=tuple(sorted(others if place is None else [*others, (place, room)])))


class Reply(Enum):
    """What Redis answers."""

    GRANTED = "granted"
    HELD = "held by another"
    FINISHED = "finished elsewhere"
    RELEASED = "released"
    HANDED_OVER = "handed over"
    RENEWED = "renewed"
    GIVEN_UP = "given up"
    NOT_MINE = "not mine"
    TAKEN = "taken for the first"
    LEFT = "left"
    PASSED_ON = "left, and passed on"


class Effect(NamedTuple):
    """What a command does: its answer, and the state of Redis after it."""

    reply: Reply
    server: Server
    leased: bool = False
    """Whether the key was given a whole lease."""


class Acquire(NamedTuple):
    """Take the key, if it is free."""

    nonce: str
    attempt: Attempt
    reads_note: bool
    """Whether the attempt's note is looked for first, because the message may be a copy."""
    room: str = ""
    """The room from which the asker was called."""


class Claim(NamedTuple):
    """Take the key, if it is free or reserved under the message's claim."""

    nonce: str
    attempt: Attempt
    reads_note: bool
    claim: str
    room: str = ""


class Renew(NamedTuple):
    """Give the key its lease again."""

    nonce: str


class Release(NamedTuple):
    """Free the key, and leave a note if a copy was seen or may come unseen."""

    nonce: str
    """Who holds it; ``?r1`` for whoever was called from that room, and will not run."""
    note: Attempt | None
    """The attempt that is over; None where it is not over, or nobody knows."""
    unseen_copy: bool
    """Whether a copy may wait in the queue, where no acquire of it can mark the key: the note is left in any case."""


class HandOver(NamedTuple):
    """A release that does not free the key but reserves it under `claim`, for the next attempt."""

    nonce: str
    note: Attempt | None
    unseen_copy: bool
    claim: str
    attempt: Attempt
    """The next attempt."""


class GiveUp(NamedTuple):
    """Free the key that was reserved under `claim`: its message will not run."""

    claim: str
    is_to_come: bool
    """Whether a run may hand its key over under this claim later. Then Redis remembers that nobody comes with it."""


class Stand(NamedTuple):
    """A room asks for the key for the first who waits in it, or takes its place in the line."""

    room: str
    place: int
    next_place: int | None
    """The place of the one who waits behind the first; None where nobody does."""


class Leave(NamedTuple):
    """A room leaves the line, and passes on an offer that it was given."""

    room: str


Command = Acquire | Claim | Renew | Release | HandOver | GiveUp | Stand | Leave


def apply(server: Server, command: Command, mistakes: Mistakes = frozenset()) -> Effect:
    """What `command` does where Redis is in the state `server`."""
    run: Callable[[Server, Command, Mistakes], Effect] = _COMMANDS[type(command)]
    return run(server, command, mistakes)


def offer_next(server: Server, mistakes: Mistakes) -> Server:
    """A key that is free is offered to the first room in the line."""
    if server.key is not None or not server.line or Mistake.RELEASE_OFFERS_NOTHING in mistakes:
        return server
    return server._replace(key=Key(f"?{server.line[0][1]}", NOBODY), line=server.line[1:])


def acquire(server: Server, command: Acquire | Claim, mistakes: Mistakes) -> Effect:
    key, mine = server.key, Key(command.nonce, command.attempt)
    is_called = key is not None and bool(command.room) and key.room == command.room
    if command.reads_note and noted(command.attempt, mistakes) in server.notes:
        passes = (_owns(key, command.nonce) and Mistake.FINISHED_LEAVES_ITS_KEY not in mistakes) or is_called
        return Effect(Reply.FINISHED, offer_next(server._replace(key=None), mistakes) if passes else server)
    if key is None and server.line and not command.room:
        return Effect(Reply.HELD, offer_next(server, mistakes))
    if key is None or is_called:
        return Effect(Reply.GRANTED, server._replace(key=mine), leased=True)
    if key.nonce == command.nonce and Mistake.OWN_GRANT_IS_A_CONFLICT not in mistakes:
        return Effect(Reply.GRANTED, server, leased=True)
    if isinstance(command, Claim) and key.nonce == command.claim:
        nonce = command.claim if Mistake.CLAIM_IS_KEPT in mistakes else command.nonce
        return Effect(Reply.GRANTED, server._replace(key=mine._replace(nonce=nonce, marked=key.marked)), leased=True)
    is_copy = noted(command.attempt, mistakes) == noted(key.attempt, mistakes)
    return Effect(Reply.HELD, server._replace(key=key._replace(marked=key.marked or (is_copy and not key.is_reserved))))


def stand(server: Server, command: Stand, mistakes: Mistakes) -> Effect:
    key, room = server.key, command.room
    standing = server.placed(room, command.place)
    if key is None and standing.line[0][1] != room and Mistake.STAND_IGNORES_AN_EARLIER_PLACE not in mistakes:
        return Effect(Reply.HELD, offer_next(standing, mistakes))
    called = Key(f"!{room}", NOBODY, place=command.place)
    if key is None or key == called or key.nonce == f"?{room}":
        if Mistake.CALL_IS_AN_OFFER in mistakes:
            called = Key(f"?{room}", NOBODY)
        return Effect(Reply.TAKEN, server.placed(room, command.next_place)._replace(key=called))
    return Effect(Reply.HELD, standing)


def leave(server: Server, command: Leave, mistakes: Mistakes) -> Effect:
    key, room = server.key, command.room
    ends_the_call = Mistake.SECOND_ENDS_THE_CALL in mistakes
    mine = key is not None and (key.nonce == f"?{room}" or (key.nonce == f"!{room}" and ends_the_call))
    left = server.placed(room, None)
    reply = Reply.PASSED_ON if mine else Reply.LEFT
    return Effect(reply, offer_next(left._replace(key=None) if mine else left, mistakes))


def renew(server: Server, command: Renew, mistakes: Mistakes) -> Effect:
    if _owns(server.key, command.nonce) or (server.key and Mistake.RENEW_WITHOUT_OWNER_CHECK in mistakes):
        return Effect(Reply.RENEWED, server, leased=True)
    return Effect(Reply.NOT_MINE, server)


def release(server: Server, command: Release | HandOver, mistakes: Mistakes) -> Effect:
    key = server.key
    is_mine = key is not None and command.nonce in {key.nonce, f"?{key.room}"}
    mine = key if key and (is_mine or Mistake.RELEASE_WITHOUT_OWNER_CHECK in mistakes) else None
    notes = server.notes
    # Where the lock was lost, the mark of a copy may be lost with it, so the note is left in any case.
    if command.note and (mine is None or command.unseen_copy or mine.marked) and Mistake.NO_NOTE not in mistakes:
        notes |= {noted(command.note, mistakes)}
    if mine is None:
        return Effect(Reply.NOT_MINE, server._replace(notes=notes))
    if isinstance(command, HandOver) and command.claim in server.gone:
        freed = server._replace(key=None, notes=notes, gone=server.gone - {command.claim})
        return Effect(Reply.RELEASED, offer_next(freed, mistakes))
    if isinstance(command, HandOver):
        reserved = Key(command.claim, command.attempt)
        return Effect(Reply.HANDED_OVER, server._replace(key=reserved, notes=notes), leased=True)
    return Effect(Reply.RELEASED, offer_next(server._replace(key=None, notes=notes), mistakes))


def give_up(server: Server, command: GiveUp, mistakes: Mistakes) -> Effect:
    if _owns(server.key, command.claim):
        return Effect(Reply.GIVEN_UP, offer_next(server._replace(key=None), mistakes))
    if command.is_to_come and Mistake.GIVEN_UP_IS_FORGOTTEN not in mistakes:
        return Effect(Reply.NOT_MINE, server._replace(gone=server.gone | {command.claim}))
    return Effect(Reply.NOT_MINE, server)


def noted(attempt: Attempt, mistakes: Mistakes) -> Attempt:
    """What notes and copies of `attempt` are recognised by: the attempt itself, unless a mistake says otherwise."""
    if Mistake.SAME_ID_IS_A_COPY in mistakes:
        return Attempt(attempt.task_id, 0, 0)
    return attempt._replace(publish="") if Mistake.NOTE_NAMES_NO_PUBLISH in mistakes else attempt


def _owns(key: Key | None, nonce: str) -> bool:
    return key is not None and key.nonce == nonce


_COMMANDS: dict[type, Callable[..., Effect]] = {
    Acquire: acquire,
    Claim: acquire,
    Renew: renew,
    Release: release,
    HandOver: release,
    GiveUp: give_up,
    Stand: stand,
    Leave: leave,
}
