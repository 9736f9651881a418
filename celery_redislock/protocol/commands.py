"""The commands that the store sends: KEYS and ARGV of each script, in the order that the script's header tells. Pure.

An option of a script is a letter in the flags, ARGV[1]. Its keys and values follow those that are always given. Every
value is text: hiredis 3.5 crashes the process where a time limit strikes while hiredis writes an int.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from .names import keys_of, limit_of
from .scripts import (
    ACQUIRE,
    ACQUIRE_PERMIT,
    ENTER,
    EXPECT,
    GIVE_UP,
    INSPECT,
    LEAVE,
    NOTE_TTL,
    RELEASE,
    RENEW,
    RESERVE,
    STAND,
    Claim,
    Command,
    Note,
    Passed,
    Text,
)
from .tokens import RESERVED, Token, cooling, escape, for_limit, known_by, known_in_line


def acquire(
    key: str,
    owner: bytes,
    token: Token,
    lease: float,
    *,
    note: str | None = None,
    fence: bool = False,
    call: bytes | None = None,
    claim: Claim | None = None,
) -> Command:
    """Acquire `key`: arguments as `LockStore.acquire`.

    `owner` is who asks for the key, and `token` is what the key is to hold. The two differ in `LockStore.rename`, where
    the owner of the minted token replaces that token by another. A lock with a limit has no `fence`.
    """
    names, flags, limit = keys_of(key), "", limit_of(key)
    keys: tuple[str, ...] = (key, names.line)
    values: tuple[Text, ...] = (owner, token.value, "" if lease == math.inf else _ms(lease))
    if limit > 1:
        values = (*values, str(limit))
    if note is not None:
        flags, keys = "n", (*keys, note)
    if fence:
        flags, keys = f"{flags}f", (*keys, names.fence)
    if call is not None:
        flags, values = f"{flags}w", (*values, call)
    if claim is not None:  # a limit leaves no place in a queue; but a message may come before its permit is handed over
        about, ttl = (names.queued, claim.ttl) if limit == 1 else (names.gone(claim.nonce), NOTE_TTL)
        flags, keys = f"{flags}c", (*keys, about)
        values = (*values, known_by(claim.nonce, RESERVED).owner, _ms(ttl))
    return Command(ACQUIRE if limit == 1 else ACQUIRE_PERMIT, keys, (flags, *values))


def reserve(key: str, token: Token, ttl: float, passed: Passed, *, in_queue: bool) -> Command:
    """Reserve `key`, or the place in its queue, for `ttl` seconds: arguments as `LockStore.reserve`."""
    names, flags = keys_of(key), "q" if in_queue else ""
    ended, preceding = ("".join(f" {escape(task_id)} " for task_id in ids) for ids in passed)
    values = (token.owner, token.value, _ms(ttl), token.task_field, ended, preceding)
    return Command(RESERVE, (key, names.line, names.queued), (flags, *values))


def release(
    key: str, owner: bytes, note: Note | None = None, keeps: tuple[Token, float] | None = None, gone: str | None = None
) -> Command:
    """Release `key`.

    Args:
        key: The key in Redis.
        owner: Who releases the key; or a whole token, where only a key that holds exactly that token is meant.
        note: For copies of the owner's message; None where the attempt is not over.
        keeps: The token that the key holds next, and for how many seconds; None where the key is deleted.
        gone: The key of the note that nobody comes with the claim in `keeps`: if there is one, the key is deleted.
    """
    names = keys_of(key)
    flags = ""
    keys: tuple[str, ...] = (key, names.line)
    values: tuple[Text, ...] = (owner,)
    if note is not None:
        flags, keys = "nu" if note.in_any_case else "n", (*keys, note.key)
        values = (*values, _ms(note.ttl))
    if gone is not None:
        flags, keys = f"{flags}g", (*keys, gone)
    if keeps is not None:
        flags, values = f"{flags}k", (*values, keeps[0].value, _ms(keeps[1]))
    if limit_of(key) > 1:
        flags, values = f"{flags}s", (*values, str(limit_of(key)))
    return Command(RELEASE, keys, (flags, *values))


def hand_over(key: str, token: Token, to: Token, ttl: float, note: Note | None = None) -> Command:
    """Hand `key`, which `token` owns, over to a message, unless its reservation has been given up already.

    Until the message comes, and for `ttl` seconds at most, the key holds `to`, whose nonce the message carries.
    """
    return release(key, token.owner, note, (to, ttl), keys_of(key).gone(to.nonce))


def cool_down(key: str, token: Token, ttl: float, note: Note | None = None) -> Command:
    """Let `key`, which `token` owns, cool down for `ttl` seconds: it is free only then."""
    return release(key, token.owner, note, (cooling(token), ttl))


def give_up(key: str, claim: str, gone_ttl: float | None) -> Command:
    """Give up the reservations of the message that carries `claim`: of `key`, and of the place in its queue.

    A note that nobody comes with this claim lives for `gone_ttl` seconds; None for no note.
    """
    names, flags = keys_of(key), ""
    keys: tuple[str, ...] = (key, names.line, names.queued)
    values: tuple[Text, ...] = (known_by(claim, RESERVED).owner,)
    if gone_ttl is not None:
        flags, keys, values = "g", (*keys, names.gone(claim)), (*values, _ms(gone_ttl))
    if limit_of(key) > 1:
        flags, values = f"{flags}s", (*values, str(limit_of(key)))
    return Command(GIVE_UP, keys, (flags, *values))


def renew(locks: Sequence[tuple[str, Token, float]]) -> Command:
    """Renew each of these triples of key, token and lease in seconds."""
    values = (value for _, token, lease in locks for value in (token.owner, _ms(lease)))
    return Command(RENEW, tuple(key for key, _, _ in locks), tuple(values))


def lengthen(key: str, token: Token, ttl: float) -> Command:
    """Let `key`, which `token` owns, live for `ttl` seconds from now."""
    return Command(RENEW, (key,), (token.owner, _ms(ttl)))


def expect(key: str, token: Token) -> Command:
    """Mark `key`, which `token` owns: a copy of the holder's message is to come."""
    return Command(EXPECT, (key, keys_of(key).line), (token.owner, str(limit_of(key))))


def inspect(key: str) -> Command:
    """Ask what `key` holds, and for how long, and how many rooms stand in line for it."""
    return Command(INSPECT, (key, keys_of(key).line), (str(limit_of(key)),))


def enter(key: str, room: Token, rank: int) -> Command:
    """Enter the line of `key`: arguments as `LockStore.enter`.

    Raises:
        ValueError: The rank is no rank.
    """
    return Command(ENTER, (keys_of(key).line,), (for_limit(room, limit_of(key)).value, _rank(rank)))


def stand(key: str, room: Token, rank: int, next_rank: int | None, number: int = 0) -> Command:
    """Stand in line for `key`: arguments as `LockStore.stand`.

    Raises:
        ValueError: A rank is no rank.
    """
    following = "" if next_rank is None else _rank(next_rank)
    check_rank(rank)
    values = (for_limit(room, limit_of(key)).value, known_in_line(rank, number), following)
    return Command(STAND, (key, keys_of(key).line), values)


def leave(key: str, room: Token) -> Command:
    """Leave the line of `key`, in which `room` may stand."""
    return Command(LEAVE, (key, keys_of(key).line), (for_limit(room, limit_of(key)).value,))


def check_rank(rank: int) -> None:
    """Refuse what the scripts could not compare with other ranks: a Redis score is exact up to 53 bits.

    Raises:
        ValueError: `rank` is no rank.
    """
    if type(rank) is not int or not 0 <= rank < 2**53:
        raise ValueError(f"{rank!r} is no rank: a rank is a number of microseconds since the epoch")


def _rank(rank: int) -> str:
    check_rank(rank)
    return str(rank)


@functools.lru_cache(256)  # a process uses few different leases
def _ms(seconds: float) -> str:
    return str(max(1, int(seconds * 1000)))
