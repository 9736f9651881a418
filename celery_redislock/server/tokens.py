"""The token: what a key holds for its one owner. Minted and parsed here, and nowhere else.

``<state><nonce> <attempt> <milliseconds since the epoch> <host> <task>``, fields escaped so that none holds a space;
``*`` stands for a field without value. The scripts read the state, the nonce (who owns the key) and the attempt (is
this message a copy of the holder's?); lua/prelude.lua says how.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self
from urllib.parse import quote, unquote

from celery_redislock.info import LockInfo
from celery_redislock.shown import shown

#: The states of a key, the first character of its value. Values of other libraries begin with none of them: they are
#: hexadecimal, as redis-py's, a UUID, a number, or base64, and so begin with a letter, a digit, "+" or "/".
RUNS, SEEN, RESERVED, COOLING = ">", "&", "~", "="
_STATES = {RUNS: "held", SEEN: "held", RESERVED: "queued", COOLING: "cooling"}
#: A field without value; no escaped field looks so.
NOTHING = "*"
#: Characters of an id or a name in a token: who publishes may choose an id of a megabyte.
MAX_NAME = 200
_PLAIN = re.compile(r"[\w.@:+,~-]+", re.ASCII).fullmatch
_PUBLISH = re.compile(r"[\w-]{8}", re.ASCII).fullmatch
_NONCE = re.compile(r"[\w-]{22}", re.ASCII).fullmatch
_HEAD = re.compile(r"[>&~=]([\w-]{22})(?![^ ])", re.ASCII).match
_HEAD_LENGTH = 23
_FIELDS = 5


class Attempt(NamedTuple):
    """One try at one task: ``self.retry()``, ``replace()`` and another publish make a new one under the same id."""

    task_id: str
    retries: int
    replaced: int
    publish: str = ""
    """From `mint_publish`; empty where the publisher did not write it into the message, as `send_task`."""

    def __str__(self) -> str:
        return _written(self)


class _Fields(NamedTuple):
    attempt: Attempt | None = None
    since: datetime | None = None
    hostname: str | None = None
    task: str | None = None


class Token(str):
    """The text that a key holds, and what it tells, which is read when it is asked for.

    A text that nobody has minted here is a token too, whether another library stored it or a caller chose it: its nonce
    is the whole of it, it has no attempt, counts as running, and no script marks it.

    Attributes:
        value: The text as it is stored.
        nonce: The word that its owner alone knows.
        owner: By what the scripts know whose it is: the state and the nonce, or a whole text that was not minted here.
            Two tokens have one owner if these are equal; that a copy was seen makes no difference.
    """

    __slots__ = ("_fields", "nonce", "owner", "value")

    value: bytes
    nonce: str
    owner: bytes
    _fields: _Fields | None

    def __new__(cls, text: str, value: bytes, nonce: str, owner: bytes) -> Self:  # noqa: D102
        token = super().__new__(cls, text)
        token.value, token.nonce, token.owner = value, nonce, owner
        token._fields = None
        return token

    @classmethod
    def of(cls, value: str | bytes) -> Self:
        """What a key holds, or what a caller wants it to hold."""
        if isinstance(value, str):
            text, value = value, value.encode("utf-8", "surrogateescape")
        else:
            text = value.decode("utf-8", "surrogateescape")
        head = _HEAD(text)
        if head is None:
            return cls(text, value, text, value)
        owner = f"{RUNS}{head[1]}".encode() if text[0] == SEEN else value[:_HEAD_LENGTH]
        return cls(text, value, head[1], owner)

    @property
    def state(self) -> str:
        """As `LockInfo.state`."""
        return _STATES[self[0]] if self.attempt else "held"

    @property
    def attempt(self) -> Attempt | None:
        """The try at a task; None outside tasks."""
        return self._told.attempt

    @property
    def since(self) -> datetime | None:
        """When it was minted; None where another library wrote it."""
        return self._told.since

    @property
    def hostname(self) -> str | None:
        """Where it was minted; None where another library wrote it."""
        return self._told.hostname

    @property
    def task(self) -> str | None:
        """The task's name; None outside tasks."""
        return self._told.task

    @property
    def name(self) -> str:
        """Whose it is, for log lines: ``task shop.bill[<id>]``."""
        if self.attempt is None:
            return "a lock outside tasks"
        return f"task {shown(str(self.task))}[{shown(self.attempt.task_id)}]"

    def info(self, key: str, ttl: float | None) -> LockInfo:
        """The holder of `key`, which ends in `ttl` seconds unless it is renewed."""
        task_id = self.attempt.task_id if self.attempt else None
        return LockInfo(key, task_id, self.task, self.hostname, self.since, ttl, self.state)

    @property
    def _told(self) -> _Fields:
        if self._fields is None:
            self._fields = _parse(self)
        return self._fields


def mint(nonce: str, attempt: Attempt | str | None, origin: str, state: str = RUNS) -> Token:
    """A token for one execution.

    Args:
        nonce: From `mint_nonce`; also known to the worker's main process.
        attempt: The try it belongs to, or its text; None outside tasks.
        origin: Where it runs, from `origin`; made once, not per run.
        state: `RESERVED` where the key is kept for a message, which carries the nonce as its claim.
    """
    text = f"{state}{nonce} {attempt or NOTHING} {int(time.time() * 1000)} {origin}"
    value = text.encode()
    return Token(text, value, nonce, value[:_HEAD_LENGTH])


def known_by(nonce: str, state: str = RUNS) -> Token:
    """A token of which only the nonce is known: enough to say whose a key is."""
    return Token.of(state + nonce)


def cooling(token: Token) -> Token:
    """What the key holds while it cools down, after the run that owned `token`."""
    return Token.of(COOLING + token[1:])


def mint_nonce() -> str:
    """A fresh nonce: 128 random bits as 22 characters."""
    return secrets.token_urlsafe(16)


def mint_publish() -> str:
    """A fresh name for one publish: it tells apart those of one task id alone, so 48 random bits as 8 characters do."""
    return secrets.token_urlsafe(6)


def is_publish(value: Any) -> bool:
    """Whether this may be from `mint_publish`."""
    return isinstance(value, str) and bool(_PUBLISH(value))


def is_nonce(value: Any) -> bool:
    """Whether this may be from `mint_nonce`."""
    return isinstance(value, str) and _NONCE(value) is not None


@functools.lru_cache(128)  # each run asks for its own twice: for its token and for its note
def _written(attempt: Attempt) -> str:
    text = f"{escape(attempt.task_id)}/{attempt.retries}/{attempt.replaced}"
    return f"{text}/{attempt.publish}" if attempt.publish else text


def escape(field: str) -> str:
    """`field` as one printable word, so that it can neither end its place in a token nor break a log line."""
    field = known_as(field)
    return field if _PLAIN(field) else quote(field, safe="@:+,", errors="surrogatepass")


def known_as(name: str) -> str:
    """What a token calls `name`: itself, or where that is too long, its beginning and a digest of the whole."""
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{name[: MAX_NAME - len(digest) - 1]}~{digest}"


def is_whole(name: str) -> bool:
    """Whether this name, out of a token, is that of a task and no digest of it."""
    return len(name) < MAX_NAME


def origin(hostname: str | None, task: str | None) -> str:
    """The end of a token: the host and the task's name."""
    return f"{NOTHING if hostname is None else escape(hostname)} {escape(task) if task else NOTHING}"


def _parse(token: Token) -> _Fields:
    """The fields behind the nonce; none where the text was not minted here."""
    head, *fields = token.split(" ")[:_FIELDS]
    try:
        attempt, since, hostname, task = fields
        if not _HEAD(head) or not token.isascii():
            return _Fields()
        return _Fields(
            None if attempt == NOTHING else _parse_attempt(attempt),
            datetime.fromtimestamp(int(since) / 1000, UTC),
            None if hostname == NOTHING else _unescape(hostname),
            None if task == NOTHING else _unescape(task),
        )
    except (ValueError, TypeError, OverflowError, OSError):
        return _Fields()


def _parse_attempt(text: str) -> Attempt:
    task_id, retries, replaced, *publish = text.split("/")
    if not all(map(is_publish, publish)):
        raise ValueError("no attempt of ours")
    return Attempt(_unescape(task_id), int(retries), int(replaced), *publish)


def _unescape(field: str) -> str:
    return unquote(field, errors="surrogatepass")
