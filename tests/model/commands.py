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
    """The nonce of an execution, ``n1``; or a claim, ``h1``, under which the key is reserved for a message."""
    attempt: Attempt
    marked: bool = False

    @property
    def is_reserved(self) -> bool:
        """Whether the key is reserved for a message, which carries the nonce as its claim."""
        return self.nonce[0] == "h"


class Server(NamedTuple):
    """All that Redis knows."""

    key: Key | None = None
    """None where the key is free."""
    notes: frozenset[Attempt] = frozenset()
    """The attempts that have a note: they are over."""
    gone: frozenset[str] = frozenset()
    """The claims that were given up before a run handed its key over under them: no message will come with them."""


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


class Claim(NamedTuple):
    """Take the key, if it is free or reserved under the message's claim."""

    nonce: str
    attempt: Attempt
    reads_note: bool
    claim: str


class Renew(NamedTuple):
    """Give the key its lease again."""

    nonce: str


class Release(NamedTuple):
    """Free the key, and leave a note if a copy was seen or may come unseen."""

    nonce: str
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


Command = Acquire | Claim | Renew | Release | HandOver | GiveUp


def apply(server: Server, command: Command, mistakes: Mistakes = frozenset()) -> Effect:
    """What `command` does where Redis is in the state `server`."""
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
    if isinstance(command, Claim) and key.nonce == command.claim:
        nonce = command.claim if Mistake.CLAIM_IS_KEPT in mistakes else command.nonce
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
    # Where the lock was lost, the mark of a copy may be lost with it, so the note is left in any case.
    if command.note and (mine is None or command.unseen_copy or mine.marked) and Mistake.NO_NOTE not in mistakes:
        notes |= {noted(command.note, mistakes)}
    if mine is None:
        return Effect(Reply.NOT_MINE, server._replace(notes=notes))
    if isinstance(command, HandOver) and command.claim in server.gone:
        return Effect(Reply.RELEASED, Server(None, notes, server.gone - {command.claim}))
    if isinstance(command, HandOver):
        reserved = Key(command.claim, command.attempt)
        return Effect(Reply.HANDED_OVER, Server(reserved, notes, server.gone), leased=True)
    return Effect(Reply.RELEASED, Server(None, notes, server.gone))


def give_up(server: Server, command: GiveUp, mistakes: Mistakes) -> Effect:
    if _owns(server.key, command.claim):
        return Effect(Reply.GIVEN_UP, server._replace(key=None))
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
}
