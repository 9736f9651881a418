"""The commands that the store sends: KEYS and ARGV of each script, in the order given by the script's header. Pure.

A script's option is a letter in the flags, ARGV[1]. Its keys and values come after the required ones. Values are
str or bytes, never int: hiredis 3.5 crashes the process if a time limit fires while it packs an int.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from .names import Demand, keys_of
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
from .tokens import RESERVED, Token, cooling, escape, for_capacity, known_by, known_in_line


def acquire(
    demand: Demand,
    owner: bytes,
    token: Token,
    lease: float,
    *,
    note: str | None = None,
    fence: bool = False,
    call: bytes | None = None,
    claim: Claim | None = None,
) -> Command:
    """Acquire the key. Arguments as for `LockStore.acquire`.

    `owner` asks for the key, and the key will hold `token`. The two differ only in `LockStore.rename`, where
    the owner of a minted token replaces that token with another. A lock with a limit cannot have a `fence`.
    """
    names, flags, limit = keys_of(demand.key), "", demand.capacity
    keys: tuple[str, ...] = (demand.key, names.line)
    values: tuple[Text, ...] = (owner, token.value, "" if lease == math.inf else _ms(lease))
    if limit > 1:
        values = (*values, str(limit))
    if note is not None:
        flags, keys = "n", (*keys, note)
    if fence:
        flags, keys = f"{flags}f", (*keys, names.fence)
    if call is not None:
        flags, values = f"{flags}w", (*values, call)
    if claim is not None:  # with a limit, no place is reserved, but a message may run before its permit is handed over
        about, ttl = (names.queued, claim.ttl) if limit == 1 else (names.gone(claim.nonce), NOTE_TTL)
        flags, keys = f"{flags}c", (*keys, about)
        values = (*values, known_by(claim.nonce, RESERVED).owner, _ms(ttl))
    return Command(ACQUIRE if limit == 1 else ACQUIRE_PERMIT, keys, (flags, *values))


def reserve(key: str, token: Token, ttl: float, passed: Passed, *, in_queue: bool) -> Command:
    """Reserve `key`, or the place in its queue, for `ttl` seconds. Arguments as for `LockStore.reserve`."""
    names, flags = keys_of(key), "q" if in_queue else ""
    ended, preceding = ("".join(f" {escape(task_id)} " for task_id in ids) for ids in passed)
    values = (token.owner, token.value, _ms(ttl), token.task_field, ended, preceding)
    return Command(RESERVE, (key, names.line, names.queued), (flags, *values))


def release(
    demand: Demand,
    owner: bytes,
    note: Note | None = None,
    keeps: tuple[Token, float] | None = None,
    gone: str | None = None,
) -> Command:
    """Release the key.

    Args:
        demand: What the owner asked for.
        owner: The owner that releases the key; or a whole token, to release the key only if it holds exactly that.
        note: The note for copies of the owner's message; None if the attempt is not over.
        keeps: The token that the key will hold next, and for how many seconds; None to delete the key.
        gone: The key of the note saying that the claim in `keeps` is no longer needed. If the note exists, the key is
            deleted.
    """
    names = keys_of(demand.key)
    flags = ""
    keys: tuple[str, ...] = (demand.key, names.line)
    values: tuple[Text, ...] = (owner,)
    if note is not None:
        flags, keys = "nu" if note.in_any_case else "n", (*keys, note.key)
        values = (*values, _ms(note.ttl))
    if gone is not None:
        flags, keys = f"{flags}g", (*keys, gone)
    if keeps is not None:
        flags, values = f"{flags}k", (*values, keeps[0].value, _ms(keeps[1]))
    if demand.capacity > 1:
        flags, values = f"{flags}s", (*values, str(demand.capacity))
    return Command(RELEASE, keys, (flags, *values))


def hand_over(demand: Demand, token: Token, to: Token, ttl: float, note: Note | None = None) -> Command:
    """Hand the key, which `token` owns, over to a message, unless the message's reservation has already been given up.

    Until the message arrives, but for at most `ttl` seconds, the key holds `to`, whose nonce the message carries.
    """
    return release(demand, token.owner, note, (to, ttl), keys_of(demand.key).gone(to.nonce))


def cool_down(demand: Demand, token: Token, ttl: float, note: Note | None = None) -> Command:
    """Let the key, which `token` owns, cool down for `ttl` seconds. After that it is free."""
    return release(demand, token.owner, note, (cooling(token), ttl))


def give_up(demand: Demand, claim: str, gone_ttl: float | None) -> Command:
    """Give up the reservations of the message that carries `claim`: of the key, and of the place in its queue.

    If the key is not reserved for the message, a note saying that the claim is no longer needed is left for
    `gone_ttl` seconds, unless that is None.
    """
    names, flags = keys_of(demand.key), ""
    keys: tuple[str, ...] = (demand.key, names.line, names.queued)
    values: tuple[Text, ...] = (known_by(claim, RESERVED).owner,)
    if gone_ttl is not None:
        flags, keys, values = "g", (*keys, names.gone(claim)), (*values, _ms(gone_ttl))
    if demand.capacity > 1:
        flags, values = f"{flags}s", (*values, str(demand.capacity))
    return Command(GIVE_UP, keys, (flags, *values))


def renew(locks: Sequence[tuple[str, Token, float]]) -> Command:
    """Renew several locks: triples of key, token and lease in seconds."""
    values = (value for _, token, lease in locks for value in (token.owner, _ms(lease)))
    return Command(RENEW, tuple(key for key, _, _ in locks), tuple(values))


def lengthen(key: str, token: Token, ttl: float) -> Command:
    """Set the time to live of `key`, which `token` owns, to `ttl` seconds."""
    return Command(RENEW, (key,), (token.owner, _ms(ttl)))


def expect(demand: Demand, token: Token) -> Command:
    """Mark the key, which `token` owns: a copy of the holder's message will arrive."""
    return Command(EXPECT, (demand.key, keys_of(demand.key).line), (token.owner, str(demand.capacity)))


def inspect(demand: Demand) -> Command:
    """Ask what the key holds, for how long, and how many rooms stand in line for it."""
    return Command(INSPECT, (demand.key, keys_of(demand.key).line), (str(demand.capacity),))


def enter(demand: Demand, room: Token, rank: int) -> Command:
    """Enter the line of the key. Arguments as for `LockStore.enter`.

    Raises:
        ValueError: `rank` is not a rank.
    """
    return Command(ENTER, (keys_of(demand.key).line,), (for_capacity(room, demand.capacity).value, _rank(rank)))


def stand(demand: Demand, room: Token, rank: int, next_rank: int | None, number: int = 0) -> Command:
    """Stand in line for the key. Arguments as for `LockStore.stand`.

    Raises:
        ValueError: `rank` or `next_rank` is not a rank.
    """
    following = "" if next_rank is None else _rank(next_rank)
    check_rank(rank)
    values = (for_capacity(room, demand.capacity).value, known_in_line(rank, number), following)
    return Command(STAND, (demand.key, keys_of(demand.key).line), values)


def leave(demand: Demand, room: Token) -> Command:
    """Leave the line of the key, if `room` stands in it."""
    return Command(LEAVE, (demand.key, keys_of(demand.key).line), (for_capacity(room, demand.capacity).value,))


def check_rank(rank: int) -> None:
    """Check that the scripts can compare `rank` with other ranks: Redis scores are exact up to 53 bits.

    Raises:
        ValueError: `rank` is not a rank.
    """
    if type(rank) is not int or not 0 <= rank < 2**53:
        raise ValueError(f"{rank!r} is no rank: a rank is a number of microseconds since the epoch")


def _rank(rank: int) -> str:
    check_rank(rank)
    return str(rank)


@functools.lru_cache(256)  # a process uses few different leases
def _ms(seconds: float) -> str:
    return str(max(1, int(seconds * 1000)))
