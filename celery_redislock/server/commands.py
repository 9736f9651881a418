"""The commands that the store sends: KEYS and ARGV of each script, in the order that the script's header tells. Pure.

What is optional is named by a letter in the flags, and follows what is always given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from .answers import Claim, Note
from .names import keys_of
from .scripts import ACQUIRE, EXPECT, GIVE_UP, INSPECT, RELEASE, RENEW, Command, Text
from .tokens import RESERVED, Token, known_by

#: A waiter that has died is remembered no longer than this, in milliseconds; a living one looks every second.
#: Text, as all that is sent: hiredis 3.5 crashes the process where a time limit strikes while it writes an int.
WAITER_TTL_MS = "3000"


def acquire(
    key: str,
    owner: bytes,
    token: Token,
    lease: float,
    *,
    note: str | None = None,
    fence: bool = False,
    waits: bool | None = None,
    claim: Claim | None = None,
) -> Command:
    """Take `key`: arguments as `LockStore.acquire`; `owner` is who asks, whatever token the key is to hold."""
    flags = ""
    keys: tuple[str, ...] = (key,)
    values: tuple[Text, ...] = (owner, token.value, "" if lease == math.inf else _ms(lease))
    if note is not None:
        flags, keys = "n", (key, note)
    if fence:
        flags, keys = f"{flags}f", (*keys, keys_of(key).fence)
    if waits is not None:
        flags, keys = f"{flags}{'w' if waits else 's'}", (*keys, keys_of(key).waiters)
        if waits:
            values = (*values, WAITER_TTL_MS)
    if claim is not None:
        flags, keys = f"{flags}c", (*keys, keys_of(key).queued)
        values = (*values, known_by(claim.nonce, RESERVED).owner, _ms(claim.ttl))
    return Command(ACQUIRE, keys, (flags, *values))


def release(
    key: str, owner: bytes, note: Note | None = None, keeps: tuple[Token, float] | None = None, gone: str | None = None
) -> Command:
    """Give `key` back.

    Args:
        key: The key in Redis.
        owner: Who gives it back; a whole token where the key must hold no other of the same owner.
        note: For copies.
        keeps: What the key holds from then on, for so many seconds.
        gone: The note that nobody comes for what it is to hold: then it is free.
    """
    names = keys_of(key)
    flags = ""
    keys: tuple[str, ...] = (key, names.waiters, names.wake)
    values: tuple[Text, ...] = (owner,)
    if note is not None:
        flags, keys = "nu" if note.in_any_case else "n", (*keys, note.key)
        values = (*values, _ms(note.ttl))
    if gone is not None:
        flags, keys = f"{flags}g", (*keys, gone)
    if keeps is not None:
        flags, values = f"{flags}k", (*values, keeps[0].value, _ms(keeps[1]))
    return Command(RELEASE, keys, (flags, *values))


def give_up(key: str, claim: str, gone_ttl: float | None) -> Command:
    """Give back what was left to a message: `key` and its place in the queue.

    Args:
        key: The key in Redis.
        claim: Of the message.
        gone_ttl: How long it is remembered that nobody comes with this claim, in seconds; None: not at all.
    """
    names, owner = keys_of(key), known_by(claim, RESERVED).owner
    keys = (key, names.waiters, names.wake, names.queued)
    if gone_ttl is None:
        return Command(GIVE_UP, keys, ("", owner))
    return Command(GIVE_UP, (*keys, names.gone(claim)), ("g", owner, _ms(gone_ttl)))


def renew(locks: Sequence[tuple[str, Token, float]]) -> Command:
    """Give each lock its lease again."""
    values = (value for _, token, lease in locks for value in (token.owner, _ms(lease)))
    return Command(RENEW, tuple(key for key, _, _ in locks), tuple(values))


def expect(key: str, token: Token) -> Command:
    """Say that a copy of the holder's message is to come."""
    return Command(EXPECT, (key,), (token.owner,))


def inspect(key: str) -> Command:
    """Look at `key`."""
    return Command(INSPECT, (key,), ())


@functools.lru_cache(256)  # there are few leases
def _ms(seconds: float) -> str:
    return str(max(1, int(seconds * 1000)))
