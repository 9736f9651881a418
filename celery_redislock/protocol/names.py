"""The names of the Redis keys of a lock. Only this module builds them."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple, Self

#: How many may hold one lock at once at most, as in lua/prelude.lua.
MAX_LIMIT = 50
#: NOTE stands between the lock's key and an attempt, GONE between the lock's key and a claim.
NOTE, GONE = ":note:", ":gone:"
#: The longest key for which a room that does not know it heeds a hint, in characters.
LONGEST_KEY = 10_000
_LIMITS = frozenset(map(str, range(1, MAX_LIMIT + 1)))


class LimitedKey(str):
    """The key of a lock that more than one may hold at once.

    Attributes:
        limit: How many, 2 to `MAX_LIMIT`. An acquire takes a permit up to that number; who looks
            for a holder finds it above that number too.
    """

    __slots__ = ("limit",)

    limit: int

    def __new__(cls, key: str, limit: int) -> Self:  # noqa: D102
        self = super().__new__(cls, key)
        self.limit = limit
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[str, int]]:
        return type(self), (str(self), self.limit)


def limited(key: str, limit: int) -> str:
    """`key` as the key of a lock that `limit` may hold at once; a plain string where that is one."""
    return LimitedKey(key, limit) if limit > 1 else key


def line_of(key: str) -> str:
    """What hints call the line of `key` for those with the same limit: ``<limit> <key>``."""
    return f"{limit_of(key)} {key}"


def key_of(line: str) -> str:
    """The key of a line, as `line_of` has named it.

    Raises:
        ValueError: `line` names no line.
    """
    limit, _, key = line.partition(" ")
    return limited(key, int(limit))


def is_line(text: str) -> bool:
    """Whether `line_of` may have made `text`: anybody may send a hint, and no script must be run for any limit."""
    limit, _, key = text.partition(" ")
    if limit not in _LIMITS or not 0 < len(key) <= LONGEST_KEY:
        return False
    return key.isascii() or not any("\ud800" <= character <= "\udfff" for character in key)  # bytes that are no text


def limit_of(key: str) -> int:
    """How many may hold the lock of `key` at once."""
    return key.limit if isinstance(key, LimitedKey) else 1


class LockKeys:
    """The Redis keys of one lock, all in one hash slot of a Cluster.

    The part of a key between braces, its hash tag, decides the hash slot. Where the lock's key has a hash tag, the
    other keys have the same; else the whole of the lock's key becomes the hash tag of the others. (A key with a closing
    brace but no hash tag cannot become one: the keys of such a lock are in different hash slots.)

    Attributes:
        lock: The key that the lock's holder owns.
        queued: The place of the one message that may wait in the queue, in scope ``queue``.
        line: The rooms that wait for the lock, each with the rank of its first waiter.
        fence: The last fencing number.
    """

    __slots__ = ("_stem", "fence", "line", "lock", "queued")

    def __init__(self, lock: str) -> None:
        start = lock.find("{")
        end = lock.find("}", start + 1)
        tagged = end >= 0 if start < 0 else end > start + 1  # an empty tag is none
        self.lock = str(lock)
        self._stem = stem = lock if tagged else f"{{{lock}}}"
        self.queued, self.fence, self.line = f"{stem}:queued", f"{stem}:fence", f"{stem}:line"

    def permit(self, number: int) -> str:
        """The key that the holder `number`, from 1 on, of a lock with a limit owns."""
        return self.lock if number == 1 else f"{self._stem}:permit:{number}"

    def note(self, attempt: object) -> str:
        """The key of the note that `attempt` is over, for copies of its message."""
        return f"{self._stem}{NOTE}{attempt}"

    def gone(self, claim: str) -> str:
        """The key of the note that nobody comes for the lock with `claim`."""
        return f"{self._stem}{GONE}{claim}"


#: The `LockKeys` of a lock; kept for those asked for last, because one run asks for those of its lock several times.
keys_of = functools.lru_cache(1024)(LockKeys)


class LockPart(NamedTuple):
    """A key in Redis that somebody may hold, as a part of its lock."""

    key: str
    """The key in Redis."""
    lock: str
    """The key of the lock; the same as `key`, unless that is one of its permits, or the place in its queue."""
    kind: str = "lock"
    """``"lock"``, ``"permit"`` or ``"queued"``."""

    @classmethod
    def of(cls, key: str) -> Self | None:
        """What `key` is to which lock; None where it holds no token: a line, a fencing number, a note."""
        found = _PART(key)
        if found is None:
            return cls(key, key)
        stem, kind = found["stem"], found["kind"].split(":")[1]
        if kind not in {"permit", "queued"}:
            return None
        # Where the whole of it is a hash tag, it was made of a lock's name without one.
        whole_is_tag = stem.startswith("{") and stem.find("}") == len(stem) - 1
        return cls(key, stem[1:-1] if whole_is_tag else stem, kind)


_PART = re.compile(rf"(?P<stem>.*\}})(?P<kind>:queued|:line|:fence|:permit:\d+|{NOTE}.*|{GONE}.*)", re.DOTALL).fullmatch


def redis_key(prefix: str, name: str) -> str:
    """The Redis key of the lock `name`, which a `KeyMaker` has made. The name, between the braces, is its hash tag."""
    return f"{prefix}:{{{name}}}"


def channel_of(room: str, keyprefix: str = "") -> str:
    """The channel of a room; `room` is the nonce of its token, and `keyprefix` precedes all names on its server.

    lua/prelude.lua makes the same.

    A message is ``offer <line>``, where the key is offered to the room for who waits in that line, which `line_of` has
    named; ``soon <line>``, where it is offered to the room before; or ``look <line>``, where it holds another token.
    """
    return f"{keyprefix}redislock:room:{room}"
