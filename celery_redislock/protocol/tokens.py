"""The token: what a key holds for its one owner. Only this module mints and parses tokens.

A token is ``<state><nonce> <attempt> <milliseconds since the epoch> <host> <task>``. Fields are escaped so that none
contains a space; ``*`` is a field without a value. If the holder is asked to stop, ``<`` and the id of the task that
replaces it come last. The scripts read the state; the nonce, which tells who owns the key; and the attempt, which tells
whether a message is a copy of the holder's. lua/prelude.lua has that code.
"""

import hashlib
import os
import re
import time
from binascii import b2a_base64
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self
from urllib.parse import quote, unquote

#: The states of a key: the first character of its token. No other library's value begins with one of these: theirs are
#: hexadecimal (redis-py), a UUID, a number or base64, and begin with a letter, a digit, "+" or "/".
RUNS, SEEN, RESERVED, SENDING, COOLING, SPENT, OFFERED, CALLED = ">", "&", "~", "^", "=", "#", "?", "!"
_STATES = {
    RUNS: "held",
    SEEN: "held",
    RESERVED: "queued",
    SENDING: "sending",
    COOLING: "cooling",
    SPENT: "spent",
    OFFERED: "offered",
    CALLED: "offered",
}
#: The states that belong to the same owner as another state: a copy of the owner's message was seen; the message has
#: not been sent yet; the room with the offer has called a waiter.
_SAME_OWNER = {SEEN: RUNS, SENDING: RESERVED, CALLED: OFFERED}
#: A field without a value. No escaped field equals it.
NOTHING = "*"
#: What the id of the task that asks the holder to stop begins with. No escaped field contains it.
ASKED_BY = "<"
#: The states in which a run has the key.
RUNNING = ("held", "stopping")
#: The maximum length of an id or a name in a token, in characters: a publisher could choose an id of a megabyte.
MAX_NAME = 200
_PLAIN = re.compile(r"[\w.@:+,~-]+", re.ASCII).fullmatch
_PUBLISH = re.compile(r"[\w-]{8}", re.ASCII).fullmatch
_NONCE = re.compile(r"[\w-]{22}", re.ASCII).fullmatch
_HEAD = re.compile(r"[>&~^=#?!]([\w-]{22})(?![^ ])", re.ASCII).match
_HEAD_LENGTH = 23
#: Makes base64 safe for URLs, as `base64.urlsafe_b64encode` does, but sooner: every run and block needs a nonce.
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_FIELDS = 5


class Attempt(NamedTuple):
    """One try at a task: ``self.retry()``, ``replace()`` and another publish each make a new one under the same id."""

    task_id: str
    retries: int
    replaced: int
    publish: str = ""
    """The name of the publish, from `mint_publish`; empty if the message has none, as with `send_task`."""

    @property
    def job(self) -> str:
        """The attempt as `LockKeys.given` names it, without its publish: each attempt of a task has one."""
        return f"{escape(self.task_id)}/{self.retries}"

    def __str__(self) -> str:
        text = f"{escape(self.task_id)}/{self.retries}/{self.replaced}"
        return f"{text}/{self.publish}" if self.publish else text


class _Fields(NamedTuple):
    attempt: Attempt | None = None
    since: datetime | None = None
    hostname: str | None = None
    task: str | None = None
    asked_by: str | None = None


class Token(str):
    """The text that a key holds, with its fields, which are parsed on first access.

    A text that was not minted here, but comes from another library or the caller of a `Lock`, is a token too: its nonce
    is the whole text, it has no attempt, it counts as running, and no script marks it.

    Attributes:
        value: The text as Redis stores it.
        nonce: The word that only the token's owner knows.
        owner: What identifies the owner to the scripts: state and nonce, or the whole text if it was not minted here.
            It stays the same when a copy is seen, and when a room takes the offer of a key.
    """

    __slots__ = ("_fields", "nonce", "owner", "value")

    value: bytes
    nonce: str
    owner: bytes
    _fields: _Fields | None

    def __new__(cls, text: str, value: bytes, nonce: str, owner: bytes) -> Self:  # noqa: D102
        token = str.__new__(cls, text)
        token.value, token.nonce, token.owner = value, nonce, owner
        token._fields = None
        return token

    def __repr__(self) -> str:
        return f"<Token {self.state} {self.attempt}>"  # not the text, which contains the nonce

    @classmethod
    def of(cls, value: str | bytes) -> Self:
        """Return the token for a text that a key holds or that the caller of a `Lock` has chosen."""
        if isinstance(value, str):
            text, value = value, value.encode("utf-8", "surrogateescape")
        else:
            text = value.decode("utf-8", "surrogateescape")
        if (head := _HEAD(text)) is None:
            return cls(text, value, text, value)
        return cls(text, value, head[1], f"{_SAME_OWNER.get(text[0], text[0])}{head[1]}".encode())

    @property
    def state(self) -> str:
        """The state of a key that holds this token, as in `LockInfo.state`."""
        is_of_a_room = self.nonce != self and self[0] in {OFFERED, CALLED}
        if self.asked_by:
            return "stopping"
        return _STATES[self[0]] if self.attempt or is_of_a_room else "held"

    @property
    def is_running(self) -> bool:
        """Whether a run, a block or another library's lock has the key."""
        return self.state in RUNNING

    @property
    def asked_by(self) -> str | None:
        """The id of the task that asks the holder to stop, as tokens spell it; None if none does."""
        return self._parsed.asked_by

    @property
    def is_reserved(self) -> bool:
        """Whether a key that holds this token is reserved for a message, sent or not."""
        return self.state in {"queued", "sending"}

    @property
    def attempt(self) -> Attempt | None:
        """The attempt of the task that owns the token; None outside tasks."""
        return self._parsed.attempt

    @property
    def since(self) -> datetime | None:
        """When the token was minted; None if it was not minted here."""
        return self._parsed.since

    @property
    def hostname(self) -> str | None:
        """The host on which the token was minted; None if not known."""
        return self._parsed.hostname

    @property
    def task(self) -> str | None:
        """The task's name; None outside tasks."""
        return self._parsed.task

    @property
    def task_field(self) -> str:
        """The task's name as spelled in the token, which must have been minted here."""
        return self.rpartition(" ")[2]

    @property
    def _parsed(self) -> _Fields:
        if self._fields is None:
            self._fields = _parse(self)
        return self._fields


def mint(nonce: str, attempt: Attempt | str | None, origin: str, state: str = RUNS, asks: int = 0) -> Token:
    """Mint a token for an execution, a reservation or a `Lock`.

    Args:
        nonce: From `mint_nonce`: 22 characters. An execution's nonce is also known to the worker's main process.
        attempt: The attempt of the task, or its text; None outside tasks.
        origin: The host and the task's name, from `origin`. Callers make it once, not for each run.
        state: `RESERVED` if the key is reserved for a message, which carries the nonce as its claim; `SENDING` until
            its publisher has sent the message; `SPENT` if it is granted by a rate.
        asks: How many times the owner has asked before. It adds as many milliseconds to the time: each ask needs a
            token of its own, even if the clock stands still.
    """
    text = f"{state}{nonce} {attempt or NOTHING} {int(time.time() * 1000) + asks} {origin}"
    value = text.encode()
    owner = f"{_SAME_OWNER[state]}{nonce}".encode() if state in _SAME_OWNER else value[:_HEAD_LENGTH]
    return Token(text, value, nonce, owner)


def known_by(nonce: str, state: str = RUNS) -> Token:
    """Return a token with only a state and a nonce: enough to tell whether it owns a key."""
    return Token.of(state + nonce)


def of_room(nonce: str, hostname: str, keyprefix: str = "") -> Token:
    """Mint the token of a room, which a key holds while it is offered to that room.

    Its task field is `NOTHING` followed by the prefix of the room's channel.
    """
    return mint(nonce, None, f"{escape(hostname)} {NOTHING}{escape(keyprefix)}", OFFERED)


def for_capacity(room: Token, capacity: int) -> Token:
    """Return the token under which a room stands in line for its waiters with this capacity."""
    return room if capacity == 1 else Token.of(f"{room} {capacity}")


def call(room: Token, rank: int, number: int = 0) -> Token:
    """Return the call of a waiter: what the key holds until that waiter acquires it. lua/stand.lua makes the same text.

    Args:
        room: The token of the room that calls the waiter, from `for_capacity`.
        rank: The waiter's rank.
        number: Distinguishes the waiter from others of the room with the same rank.
    """
    return Token.of(f"{CALLED}{room[1:]} {known_in_line(rank, number)}")


def call_at(call: bytes, capacity: int) -> bytes:
    """Return the call by which the same room has called the same waiter to a key with this capacity."""
    fields = call.split(b" ")
    limit = [] if capacity == 1 else [str(capacity).encode()]
    return b" ".join([*fields[:_FIELDS], *limit, fields[-1]])


def known_in_line(rank: int, number: int) -> str:
    """Return how a call names a waiter: by its rank, plus its number if it has one."""
    return f"{rank}-{number}" if number else str(rank)


def cooling(token: Token) -> Token:
    """Return the token that a key holds while it cools down after the run that owned `token`."""
    return Token.of(COOLING + token[1:])


def mint_nonce() -> str:
    """Return a fresh nonce: 128 random bits as 22 characters."""
    return b2a_base64(os.urandom(16))[:22].translate(_URL_SAFE).decode()


def mint_publish() -> str:
    """Return a fresh name for one publish: 48 random bits as 8 characters.

    That is enough, because the name only distinguishes the publishes under one task id.
    """
    return b2a_base64(os.urandom(6), newline=False).translate(_URL_SAFE).decode()


def is_publish(value: Any) -> bool:
    """Whether `value` looks like the name of a publish, from `mint_publish`."""
    return isinstance(value, str) and bool(_PUBLISH(value))


def is_nonce(value: Any) -> bool:
    """Whether `value` looks like a nonce, from `mint_nonce`."""
    return isinstance(value, str) and _NONCE(value) is not None


def escape(field: str) -> str:
    """Return `field` as one printable word, so that it cannot end its field in a token or break a log line."""
    # The first test, which a UUID passes, is faster than the pattern.
    if len(field) <= MAX_NAME and ((field.isascii() and field.replace("-", "").isalnum()) or _PLAIN(field)):
        return field
    return quote(known_as(field), safe="@:+,", errors="surrogatepass")


def known_as(name: str) -> str:
    """Return `name` as a token spells it: unchanged, or if it is too long, its beginning and a digest of the whole."""
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{name[: MAX_NAME - len(digest) - 1]}~{digest}"


def is_whole(name: str) -> bool:
    """Whether `name`, read from a token, is the whole name. A cut name ends with a digest."""
    return len(name) < MAX_NAME


def origin(hostname: str | None, task: str | None) -> str:
    """Return the last two fields of a token: the host and the task's name."""
    return f"{NOTHING if hostname is None else escape(hostname)} {escape(task) if task else NOTHING}"


def _parse(token: Token) -> _Fields:
    """Return the fields after the nonce; all None if the text was not minted here."""
    head, *fields = token.split(" ")
    asked_by, fields = fields[_FIELDS - 1 :], fields[: _FIELDS - 1]
    try:
        attempt, since, hostname, task = fields
        if not _HEAD(head) or not token.isascii():
            return _Fields()
        return _Fields(
            None if attempt == NOTHING else _parse_attempt(attempt),
            datetime.fromtimestamp(int(since) / 1000, UTC),
            None if hostname == NOTHING else unescape(hostname),
            None if task.startswith(NOTHING) else unescape(task),
            unescape(asked_by[0][1:]) if asked_by and asked_by[0].startswith(ASKED_BY) else None,
        )
    except (ValueError, TypeError, OverflowError, OSError):
        return _Fields()


def _parse_attempt(text: str) -> Attempt:
    task_id, retries, replaced, *publish = text.split("/")
    if not all(map(is_publish, publish)):
        raise ValueError("not the text of an attempt")
    return Attempt(unescape(task_id), int(retries), int(replaced), *publish)


def unescape(field: str) -> str:
    """Return the text that `escape` has made `field` of."""
    return unquote(field, errors="surrogatepass")
