"""The commands that the store sends: KEYS and ARGV of each script, in the order given by the script's header. Pure.

A script's option is a letter in ARGV[1]. Its key or value comes after the required ones. Values are str or bytes,
never int: hiredis 3.5 crashes the process if a time limit fires while it packs an int.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

from . import scripts
from .names import Demand, keys_of
from .scripts import NOTE_TTL, Call, Claim, Command, Note, Numbered, Passed, Text
from .tokens import RESERVED, Token, cooling, escape, for_capacity, known_by, known_in_line

#: Makes a `Command` in half of the time that the class takes. For the two that every run sends.
_made = tuple.__new__


def acquire(
    demand: Demand,
    token: Token,
    lease: float,
    *,
    note: str | None = None,
    fence: bool = False,
    call: bytes | None = None,
    claim: Claim | None = None,
    numbered: Numbered | None = None,
) -> Command:
    """Acquire a permit. Arguments as for `LockStore.acquire`. A lock with several holders cannot have a `fence`."""
    names, options = keys_of(demand.key), ""
    keys: tuple[str, ...] = (demand.key, names.line)
    values: tuple[Text, ...] = (token.value, _ms(demand.spent or lease))
    if note is not None:
        options, keys = "n", (*keys, note)
    if fence:
        options, keys = f"{options}f", (*keys, names.fence)
    if call is not None:
        options, values = f"{options}W", (*values, call)
    if claim is not None:
        values = (*values, known_by(claim.nonce, RESERVED).owner)
        options, keys, values = f"{options}CpP", (*keys, names.queued), (*values, _ms(claim.ttl))
        if demand.capacity > 1:  # a message may run before its permit is handed over to it
            options, keys, values = f"{options}gG", (*keys, names.gone(claim.nonce)), (*values, _ms(NOTE_TTL))
    if demand.capacity > 1:
        options, values = f"{options}S", (*values, str(demand.runs or demand.capacity))
    if numbered is not None:
        options, values = f"{options}M", (*values, str(numbered.number or ""))
        if numbered.body is not None:
            options, values = f"{options}L", (*values, numbered.body)
        if numbered.stops_but is not None:
            options, values = f"{options}Z", (*values, _ids(numbered.stops_but))
    if demand.share is not None:
        _, digest, turn, rank = demand.share
        options, values = f"{options}FHY", (*values, digest, str(turn), str(rank or ""))
    return _made(Command, (scripts.ACQUIRE, keys, (options, *values)))


def reserve(
    key: str, token: Token, ttl: float, passed: Passed, *, in_queue: bool, window: float | None = None
) -> Command:
    """Reserve `key`, or the place in its queue, for `ttl` seconds. Arguments as for `LockStore.reserve`."""
    names, options = keys_of(key), "Q" if in_queue else ""
    keys: tuple[str, ...] = (key, names.line, names.queued)
    lists = map(_ids, passed)
    values: tuple[Text, ...] = (token.owner, token.value, _ms(ttl), token.task_field, *lists, *options)
    if window is not None:
        options, keys, values = f"{options}wD", (*keys, names.window(token.task_field)), (*values, _ms(window))
    return Command(scripts.RESERVE, keys, (options, *values))


def merge(key: str, token: Token, ttl: float, queued_ttl: float, passed: Passed, call: Call) -> Command:
    """Take the place in the queue of `key`, or merge `call`. Arguments as for `LockStore.merge`."""
    names = keys_of(key)
    given = {
        "A": call.channel,
        "V": _ms(call.due_in) if call.due_in else None,
        "E": None if call.expires_in is None else _ms(call.expires_in),
        "B": None if call.debounce is None else _ms(call.debounce),
        "X": None if call.debounce_max is None else _ms(call.debounce_max),
        "M": str(call.number) if call.number else None,
        "Z": None if call.stops_but is None else _ids(call.stops_but),
        "R": "1" if call.is_retry else None,
    }
    options = {letter: value for letter, value in given.items() if value is not None}
    ended, _, unsent = (_ids(ids) for ids in passed)
    values: tuple[Text, ...] = (token.owner, token.value, _ms(ttl), _ms(queued_ttl), token.task_field, ended, unsent)
    values = ("".join(options), *values, call.body, *options.values())
    return Command(scripts.MERGE, (key, names.line, names.queued), values)


def replace(key: str, token: Token, ttl: float, stops_but: Iterable[str]) -> Command:
    """Keep the place in the queue of `key` for a ticket that was sent, and ask the run that has the key to stop.

    Args:
        key: The lock's key.
        token: The token of the ticket's reservation.
        ttl: How long the place is reserved, in seconds.
        stops_but: The ids of the jobs that caused the call; their runs are not asked.
    """
    names = keys_of(key)
    return Command(scripts.REPLACE, (key, names.line, names.queued), (token.owner, _ms(ttl), _ids(stops_but)))


def release(
    demand: Demand,
    owner: bytes,
    note: Note | None = None,
    keeps: tuple[Token, float] | None = None,
    gone: tuple[str, float | None] | None = None,
    *,
    places: tuple[str, ...] = (),
) -> Command:
    """Release a permit.

    Args:
        demand: What the owner asked for.
        owner: The owner that releases the permit; or a whole token, to release it only if it holds exactly that.
        note: The note for copies of the owner's message; None if the attempt is not over.
        keeps: The token that the permit holds next, and for how many seconds; None to free the permit.
        gone: The key of the note saying that a claim is no longer needed. With seconds, the claim is the owner's: if
            it owns no permit, the note is left for that long. Without, it is the claim in `keeps`: if the note exists,
            the permit is freed.
        places: The place in the queue, which is freed if `owner` has it; and if the owner's job never runs, its window,
            and the calls that are kept for it.
    """
    options = ""
    keys: tuple[str, ...] = (demand.key, keys_of(demand.key).line)
    values: tuple[Text, ...] = (owner,)
    if note is not None:
        options, keys, values = "nN", (*keys, note.key), (*values, _ms(note.ttl))
        if note.in_any_case:
            options, values = "nNU", (*values, "1")
    if gone is not None:
        options, keys = f"{options}g", (*keys, gone[0])
        if gone[1] is not None:
            options, values = f"{options}G", (*values, _ms(gone[1]))
    if places:
        options, keys = options + "pwa"[: len(places)], keys + places
    if note is not None and note.given is not None:
        options, keys = f"{options}a", (*keys, note.given)
    if keeps is not None:
        options, values = f"{options}KT", (*values, keeps[0].value, _ms(keeps[1]))
    if demand.capacity > 1:
        options, values = f"{options}S", (*values, str(demand.capacity))
    return _made(Command, (scripts.RELEASE, keys, (options, *values)))


def hand_over(demand: Demand, token: Token, to: Token, ttl: float, note: Note | None = None) -> Command:
    """Hand the key, which `token` owns, over to a message, unless the message's reservation has already been given up.

    Until the message arrives, and at most for `ttl` seconds, the key holds `to`, whose nonce the message carries.
    """
    return release(demand, token.owner, note, (to, ttl), (keys_of(demand.key).gone(to.nonce), None))


def cool_down(demand: Demand, token: Token, ttl: float, note: Note | None = None) -> Command:
    """Let the key, which `token` owns, cool down for `ttl` seconds. After that it is free."""
    return release(demand, token.owner, note, (cooling(token), ttl))


def give_up(demand: Demand, claim: str, *, is_to_come: bool, closes: tuple[str, ...] = ()) -> Command:
    """Give up the reservations of the message that carries `claim`: of the key, and of the place in its queue.

    If its job never runs, `closes` has its window, and the calls that are kept for it. If no permit is reserved for the
    message, but one is to come by a hand-over, a note is left: the claim is no longer needed.
    """
    names, owner = keys_of(demand.key), known_by(claim, RESERVED).owner
    gone = (names.gone(claim), NOTE_TTL) if is_to_come else None
    return release(demand, owner, gone=gone, places=(names.queued, *closes))


def renew(locks: Sequence[tuple[str, Token, float]]) -> Command:
    """Renew several locks: triples of key, token and lease in seconds; infinite to leave the key its time to live."""
    values = (value for _, token, lease in locks for value in (token.owner, _ms(lease)))
    return Command(scripts.RENEW, tuple(key for key, _, _ in locks), tuple(values))


def inspect(demand: Demand) -> Command:
    """Ask what the key holds, for how long, and how many rooms stand in line for it."""
    return Command(scripts.INSPECT, (demand.key, keys_of(demand.key).line), (str(demand.capacity),))


def enter(demand: Demand, room: Token, rank: int) -> Command:
    """Enter the line of the key. Arguments as for `LockStore.enter`.

    Raises:
        ValueError: `rank` is not a rank.
    """
    values = (for_capacity(room, demand.capacity).value, _rank(rank), "enter")
    return Command(scripts.STAND, (demand.key, keys_of(demand.key).line), values)


def stand(demand: Demand, room: Token, rank: int, next_rank: int | None, number: int = 0) -> Command:
    """Stand in line for the key. Arguments as for `LockStore.stand`.

    Raises:
        ValueError: `rank` or `next_rank` is not a rank.
    """
    following = "" if next_rank is None else _rank(next_rank)
    check_rank(rank)
    values = (for_capacity(room, demand.capacity).value, known_in_line(rank, number), following)
    return Command(scripts.STAND, (demand.key, keys_of(demand.key).line), values)


def leave(demand: Demand, room: Token) -> Command:
    """Leave the line of the key, if `room` stands in it."""
    return Command(scripts.LEAVE, (demand.key, keys_of(demand.key).line), (for_capacity(room, demand.capacity).value,))


def check_rank(rank: int) -> None:
    """Check that the scripts can compare `rank` with other ranks: Redis scores are exact up to 53 bits.

    Raises:
        ValueError: `rank` is not a rank.
    """
    if type(rank) is not int or not 0 <= rank < 2**53:
        raise ValueError(f"{rank!r} is not a rank: a rank is a number of microseconds since the epoch")


def _rank(rank: int) -> str:
    check_rank(rank)
    return str(rank)


def _ids(ids: Iterable[str]) -> str:
    return "".join(f" {escape(task_id)} " for task_id in ids)


@functools.lru_cache(256)  # a process uses few different leases
def _ms(seconds: float) -> str:
    """Return `seconds` as the scripts read a time to live: in milliseconds; empty for a key that never expires.

    A time of more than 30 years is cut: Redis refuses one that ends beyond its clock.
    """
    return "" if seconds == math.inf else str(max(1, int(min(seconds, 1e9) * 1000 + 1e-6)))
