"""What an acquire and a release are told, and what an acquire answers; pure."""

from __future__ import annotations

from typing import NamedTuple

from .tokens import Token

#: How long a note lives at least, in seconds. A copy may wait in the queue for as long.
NOTE_TTL = 24 * 3600.0


class Granted(NamedTuple):
    """The key is ours."""

    sent_at: float
    """`time.monotonic()` before the command was sent: the lease began no earlier."""
    fence: int | None = None
    """Where it was asked for: greater than that of every earlier holder of the key."""


class Conflict(NamedTuple):
    """The key is held by another."""

    holder: Token
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""


class Finished(NamedTuple):
    """The attempt that asks has already finished in another execution."""


class Claim(NamedTuple):
    """What a message carries whose publisher, or whose last attempt, has left it the key or the place in the queue."""

    nonce: str
    """Of the token that the key, or the place, is kept by."""
    ttl: float
    """Seconds that the place is kept for it from now on where the key is held."""


class Note(NamedTuple):
    """What a release leaves for copies of the message, where the attempt has ended for good."""

    key: str
    """From `LockKeys.note`."""
    ttl: float = NOTE_TTL
    """Seconds that it lives."""
    in_any_case: bool = False
    """A copy may wait in the queue unseen: leave the note also where none was seen."""
