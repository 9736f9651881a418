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


class Held(NamedTuple):
    """The key is held by another."""

    holder: Token
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""


class Finished(NamedTuple):
    """The attempt that asks has already finished in another execution."""


class Claim(NamedTuple):
    """What a message carries whose publisher, or whose last attempt, has left it the key or the place in the queue."""

    nonce: str
    ttl: float
    """Seconds that the place is kept for it from now on where the key is held."""


class Leaves(NamedTuple):
    """What a release leaves behind, besides a free key."""

    note: str | None = None
    """The key of the attempt's note, where the attempt has ended for good; or that a claim has been given up."""
    copy_may_wait: bool = False
    """A copy may wait in the queue unseen, so leave the note in any case."""
    token: str | None = None
    """The key is not free but holds this, for `ttl` seconds."""
    ttl: float = 0.0
    note_ttl: float = NOTE_TTL
    """Seconds that the note lives."""
