"""The server's side of the protocol: what each command answers, and what it leaves. Pure functions of one key."""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import Enum
from typing import NamedTuple

from celery_redislock.server.tokens import Attempt

from .rules import Mistake

Mistakes = Set[Mistake]


class Key(NamedTuple):
    """A held key: its token's nonce and attempt, and whether a copy has left its mark, as on a running one."""

    nonce: str
    attempt: Attempt
    marked: bool = False

    @property
    def is_reserved(self) -> bool:
        """It is kept for a message that carries the nonce."""
        return self.nonce[0] == "h"


class Server(NamedTuple):
    """All that Redis knows: the key, and the attempts that have a note."""

    key: Key | None = None
    notes: frozenset[Attempt] = frozenset()
    gone: frozenset[str] = frozenset()
    """Claims that nobody will come with."""


class Reply(Enum):
    GRANTED = "granted"
    HELD = "held by another"
    FINISHED = "finished elsewhere"
    RELEASED = "released"
    HANDED_OVER = "handed over"
    RENEWED = "renewed"
    GIVEN_UP = "given up"
    NOT_MINE = "not mine"


class Effect(NamedTuple):
    """What a command does."""

    reply: Reply
    server: Server
    leased: bool = False
    """The key was given a whole lease."""


class Acquire(NamedTuple):
    nonce: str
    attempt: Attempt
    reads_note: bool


class Claim(NamedTuple):
    """An acquire whose message carries a hand-over token."""

    nonce: str
    attempt: Attempt
    reads_note: bool
    token: str


class Renew(NamedTuple):
    nonce: str


class Release(NamedTuple):
    nonce: str
    note: Attempt | None
    """The attempt that is over; None where it is not, or nobody knows."""
    unseen_copy: bool
    """A copy may wait unseen: leave the note in any case."""


class HandOver(NamedTuple):
    """A release that leaves the key to whoever carries `token`."""

    nonce: str
    note: Attempt | None
    unseen_copy: bool
    token: str
    attempt: Attempt
    """The one that the key is left to."""


class GiveUp(NamedTuple):
    """A release of what was left to a message that will not run."""

    token: str
    is_to_come: bool
    """It may still be left to it."""


Command = Acquire | Claim | Renew | Release | HandOver | GiveUp


def apply(server: Server, command: Command, mistakes: Mistakes = frozenset()) -> Effect:
    """Run `command` on `server`."""
    run: Callable[[Server, Command, Mistakes], Effect] = _COMMANDS[type(command)]
    return run(server, command, mistakes)


def acquire(server: Server, command: Acquire | Claim, mistakes: Mistakes) -> Effect:
    key, mine = server.key, Key(command.nonce, command.attempt)
    if command.reads_note and noted(command.attempt, mistakes) in server.notes:
        left = key if not _owns(key, command.nonce) or Mistake.FINISHED_LEAVES_ITS_KEY in mistakes else None
        return Effect(Reply.FINISHED, server._replace(key=left))
    if key is None:
        return Effect(Reply.GRANTED, server._replace(key=mine), leased=True)
    if key.nonce == command.nonce and Mistake.OWN_GRANT_IS_A_CONFLICT not in mistakes:
        return Effect(Reply.GRANTED, server, leased=True)
    if isinstance(command, Claim) and key.nonce == command.token:
        nonce = command.token if Mistake.CLAIM_IS_KEPT in mistakes else command.nonce
        return Effect(Reply.GRANTED, server._replace(key=mine._replace(nonce=nonce, marked=key.marked)), leased=True)
    is_copy = noted(command.attempt, mistakes) == noted(key.attempt, mistakes)
    return Effect(Reply.HELD, server._replace(key=key._replace(marked=key.marked or (is_copy and not key.is_reserved))))


def renew(server: Server, command: Renew, mistakes: Mistakes) -> Effect:
    if _owns(server.key, command.nonce) or (server.key and Mistake.RENEW_WITHOUT_OWNER_CHECK in mistakes):
        return Effect(Reply.RENEWED, server, leased=True)
    return Effect(Reply.NOT_MINE, server)


def release(server: Server, command: Release | HandOver, mistakes: Mistakes) -> Effect:
    key = server.key
    mine = key if key and (key.nonce == command.nonce or Mistake.RELEASE_WITHOUT_OWNER_CHECK in mistakes) else None
    notes = server.notes
    # Where the lock was lost, a mark that a copy left on it is lost too.
    if command.note and (mine is None or command.unseen_copy or mine.marked) and Mistake.NO_NOTE not in mistakes:
        notes |= {noted(command.note, mistakes)}
    if mine is None:
        return Effect(Reply.NOT_MINE, server._replace(notes=notes))
    if isinstance(command, HandOver) and command.token in server.gone:
        return Effect(Reply.RELEASED, Server(None, notes, server.gone - {command.token}))
    if isinstance(command, HandOver):
        left = Key(command.token, command.attempt)
        return Effect(Reply.HANDED_OVER, Server(left, notes, server.gone), leased=True)
    return Effect(Reply.RELEASED, Server(None, notes, server.gone))


def give_up(server: Server, command: GiveUp, mistakes: Mistakes) -> Effect:
    if _owns(server.key, command.token):
        return Effect(Reply.GIVEN_UP, server._replace(key=None))
    if command.is_to_come and Mistake.GIVEN_UP_IS_FORGOTTEN not in mistakes:
        return Effect(Reply.NOT_MINE, server._replace(gone=server.gone | {command.token}))
    return Effect(Reply.NOT_MINE, server)


def noted(attempt: Attempt, mistakes: Mistakes) -> Attempt:
    """What a note, and a copy, is known by."""
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
}
