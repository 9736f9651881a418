"""Scan: reads all locks on a server, page by page, so that no command keeps the server busy for long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import redis
from redis.exceptions import AskError, ResponseError

from celery_redislock.connection.cluster_client import ClusterClient
from celery_redislock.info import LockInfo
from celery_redislock.protocol.names import LockPart, keys_of
from celery_redislock.protocol.tokens import Token

#: How many entries of its key table the server examines per SCAN, which takes about 0.3 ms. It serves other clients
#: between two pages, and also while it answers a page's pipeline, because it reads the commands a few at a time.
PAGE = 500
#: The token in the `Row` of a free lock.
FREE = Token.of("")


class Waits(NamedTuple):
    """How many messages wait for a lock, and since when."""

    number: int = 0
    rank: float = math.inf
    """When the first of these messages was published, in microseconds since the epoch."""

    def __add__(self, other: Waits) -> Waits:  # type: ignore[override]
        return Waits(self.number + other.number, min(self.rank, other.rank))

    @property
    def oldest(self) -> float:
        """How long ago the first of these messages was published, in seconds; 0 if no message waits."""
        return max(0.0, time.time() - self.rank / 1e6)


class Row(NamedTuple):
    """A lock, one of its permits, or the place in its queue, with its holder or the task that it is kept for."""

    part: LockPart
    token: Token
    ttl: float | None
    """Seconds until the key expires unless it is renewed; None for a key without expiry."""
    rooms: Mapping[str, float] = {}
    """The ranks of the rooms in line for the lock, one room per process, except the rooms whose messages are in
    `messages`."""
    messages: Mapping[str, Waits] = {}
    """The messages that wait for the lock, by task, as the workers report them."""

    @property
    def info(self) -> LockInfo:
        """The row as a `LockInfo`."""
        return self.token.info(self.part.key, self.ttl)._replace(state=self.state)

    @property
    def state(self) -> str:
        """The state, as in `LockInfo.state`, or ``free``."""
        return "free" if self.token is FREE else self.token.state

    @property
    def waits(self) -> dict[str, Waits]:
        """The waiting messages, by task. A room in `rooms` counts as one message of the holder's task."""
        found = dict(self.messages)
        if self.rooms:
            holder = self.token.task or ""
            found[holder] = found.get(holder, Waits()) + Waits(len(self.rooms), min(self.rooms.values()))
        return found

    @property
    def waiting(self) -> int:
        """How many messages wait for the lock: those in `messages`, and one for each room in `rooms`."""
        return len(self.rooms) + sum(waits.number for waits in self.messages.values())


Look = Callable[[LockPart], Row | None]
"""Reads one part of a lock, on whichever node of a Cluster has its key now."""


def nodes_of(client: redis.Redis | ClusterClient) -> list[redis.Redis]:
    """The servers that together have all keys: the primaries of a Cluster, or the one server."""
    return client.primaries() if isinstance(client, ClusterClient) else [client]


def scan(node: redis.Redis, pattern: str, look: Look) -> Iterator[Row]:
    """The locks of one server whose keys match `pattern`, in no particular order.

    In rare cases the same lock is returned twice.

    Args:
        node: The server.
        pattern: A pattern of keys, as for Redis' SCAN.
        look: Reads a key that has since moved to another node.

    Raises:
        RedisError: Redis did not answer, or refused the command.
    """
    for parts in _pages(node, pattern):
        replies = zip(parts, _ask(node, parts), strict=True)
        rows = (_row(node, part, reply, look) for part, reply in replies)
        yield from (row for row in rows if row is not None)


def _pages(node: redis.Redis, pattern: str) -> Iterator[list[LockPart]]:
    cursor: Any = 0
    while True:
        answer: Any = node.scan(cursor, match=_bytes(pattern), count=PAGE, _type="string")
        cursor, keys = answer
        parts = [part for key in keys if (part := LockPart.of(_text(key))) is not None]
        if parts:
            yield parts
        if not cursor:
            return


def rooms_of(node: redis.Redis, lock: str) -> dict[str, float]:
    """The ranks of the rooms in line for `lock`, by the rooms' names.

    Raises:
        RedisError: Redis did not answer, or refused the command; in a Cluster, the lock may be on another node.
    """
    return _rooms(node.zrange(_bytes(keys_of(lock).line), 0, -1, withscores=True))


def _rooms(line: Any) -> dict[str, float]:
    return {Token.of(room).nonce: rank for room, rank in line}


def _ask(node: redis.Redis, parts: Sequence[LockPart], *, importing: bool = False) -> list[tuple[Any, ...]]:
    """Read the value of each key, its time to live in milliseconds, and its lock's line, in one round trip.

    A node that is still `importing` the keys' hash slot answers only after ASKING.
    """
    pipeline: Any = node.pipeline(transaction=False)
    for part in parts:
        key, line = _bytes(part.key), _bytes(keys_of(part.lock).line)
        for command, *arguments in (("get", key), ("pttl", key), ("zrange", line, 0, -1, False, True)):
            if importing:
                pipeline.execute_command("ASKING")
            getattr(pipeline, command)(*arguments)
    replies = pipeline.execute(raise_on_error=False)[1 if importing else 0 :: 2 if importing else 1]
    return [*zip(replies[0::3], replies[1::3], replies[2::3], strict=True)]


def _row(node: redis.Redis, part: LockPart, reply: Sequence[Any], look: Look) -> Row | None:
    if _has_moved(reply):  # to this node, which is still importing the hash slot
        (reply,) = _ask(node, [part], importing=True)
    if _has_moved(reply):  # to another node, since SCAN returned it here
        return look(part)
    value, left, line = reply
    if isinstance(line, AskError):  # the line does not exist, or is briefly on another node
        line = ()
    for one in (value, left, line):
        if isinstance(one, ResponseError) and str(one).startswith("WRONGTYPE"):
            return None
        if isinstance(one, Exception):
            raise one
    if value is None:  # released in the meantime
        return None
    return Row(part, Token.of(value), left / 1000 if left >= 0 else None, _rooms(line))


def _has_moved(reply: Sequence[Any]) -> bool:
    """Whether the key is on another node of the Cluster. redis-py's MOVED error is a subclass of its ASK error."""
    return any(isinstance(one, AskError) for one in reply[:2])


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
