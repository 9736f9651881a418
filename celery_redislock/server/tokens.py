"""The token: the string that one execution owns. Minted and parsed here, and nowhere else.

``<nonce> <attempt> <milliseconds since the epoch> <host> <task>``, fields escaped so that none holds a space;
``*`` stands for a field without value. The scripts read the nonce (who owns the key) and the attempt (is
this message a copy of the holder's?), and append ``copy`` once a copy has been seen. A nonce that begins with ``~``
or ``=`` is no execution's: the key is kept for a message that carries that nonce as its claim, or cools down.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from celery_redislock.info import LockInfo
from celery_redislock.shown import shown

#: A field without value; no escaped field looks so.
NOTHING = "*"
#: A token that begins so belongs to no execution. It keeps the key for a message, or until a cooldown is over.
_QUEUED, _COOLING = "~", "="
_STATES = {_QUEUED: "queued", _COOLING: "cooling"}
_PLAIN = re.compile(r"[\w.@:+,~-]+", re.ASCII).fullmatch
_PUBLISH = re.compile(r"[\w-]{8}", re.ASCII).fullmatch
_FIELDS = 5
#: Characters of an id or a name in a token: who publishes may choose an id of a megabyte.
MAX_NAME = 200
_CLAIM = re.compile(r"~[\w-]{1,64}", re.ASCII).fullmatch


class Attempt(NamedTuple):
    """One try at one task: ``self.retry()``, ``replace()`` and another publish make a new one under the same id."""

    task_id: str
    retries: int
    replaced: int
    publish: str = ""
    """From `mint_publish`; empty where the publisher did not write it into the message, as `send_task`."""

    def __str__(self) -> str:
        attempt = f"{escape(self.task_id)}/{self.retries}/{self.replaced}"
        return f"{attempt}/{self.publish}" if self.publish else attempt


class Token(NamedTuple):
    """A parsed token. All but the nonce are None where another library wrote the value."""

    nonce: str
    attempt: Attempt | None = None
    since: datetime | None = None
    hostname: str | None = None
    task: str | None = None

    @property
    def state(self) -> str:
        """As `LockInfo.state`."""
        return _STATES.get(self.nonce[:1], "held") if self.attempt else "held"

    @property
    def owner(self) -> str:
        """Whose it is, as log lines begin: ``task shop.bill[<id>]``."""
        if self.attempt is None:
            return "a lock outside tasks"
        return f"task {shown(str(self.task))}[{shown(self.attempt.task_id)}]"

    def info(self, key: str, ttl: float | None) -> LockInfo:
        """The holder of `key`, which ends in `ttl` seconds unless it is renewed."""
        task_id = self.attempt.task_id if self.attempt else None
        return LockInfo(key, task_id, self.task, self.hostname, self.since, ttl, self.state)


def mint_nonce() -> str:
    """A fresh nonce: 128 random bits as 22 characters."""
    return secrets.token_urlsafe(16)


def mint_publish() -> str:
    """A fresh name for one publish: it tells apart those of one task id alone, so 48 random bits as 8 characters do."""
    return secrets.token_urlsafe(6)


def is_publish(value: Any) -> bool:
    """Whether this may be from `mint_publish`."""
    return isinstance(value, str) and bool(_PUBLISH(value))


def mint_claim() -> str:
    """A fresh nonce to keep a key for a message, which carries it."""
    return _QUEUED + mint_nonce()


def is_claim(value: Any) -> bool:
    """Whether this may be from `mint_claim`: what a message says must not open the key of a running execution."""
    return isinstance(value, str) and _CLAIM(value) is not None


def cooling(token: str) -> str:
    """What the key holds while it cools down, after the run that owned `token`."""
    return _COOLING + token


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


def mint(nonce: str, attempt: Attempt | str | None, origin: str) -> str:
    """A token for one execution.

    Args:
        nonce: From `mint_nonce`; also known to the worker's main process.
        attempt: The try it belongs to, or its text; None outside tasks.
        origin: Where it runs, from `origin`; made once, not per run.
    """
    return f"{nonce} {attempt or NOTHING} {int(time.time() * 1000)} {origin}"


def origin(hostname: str | None, task: str | None) -> str:
    """The end of a token: the host and the task's name."""
    return f"{NOTHING if hostname is None else escape(hostname)} {escape(task) if task else NOTHING}"


def parse(value: str) -> Token:
    """The parts of a token; of a value that is no token of ours, itself as the nonce."""
    fields = value.split(" ")[:_FIELDS]
    try:
        nonce, attempt, since, hostname, task = fields
        return Token(
            nonce,
            None if attempt == NOTHING else _parse_attempt(attempt),
            datetime.fromtimestamp(int(since) / 1000, UTC),
            None if hostname == NOTHING else _unescape(hostname),
            None if task == NOTHING else _unescape(task),
        )
    except (ValueError, TypeError, OverflowError, OSError):
        return Token(value)


def _parse_attempt(text: str) -> Attempt:
    task_id, retries, replaced, *publish = text.split("/")
    if not all(map(is_publish, publish)):
        raise ValueError("no attempt of ours")
    return Attempt(_unescape(task_id), int(retries), int(replaced), *publish)


def _unescape(field: str) -> str:
    return unquote(field, errors="surrogatepass")
