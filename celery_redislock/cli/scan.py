"""Scan: the holders of all locks of a server, page by page, so that no command keeps the server busy for long."""

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

#: How many entries of its table of keys the server looks at for one SCAN: 0.3 ms of its time. It serves others between
#: two pages, and also between the commands of a page, of which it reads some at a time.
PAGE = 500
#: Instead of the token of a lock that nobody holds.
FREE = Token.of("")


class Waits(NamedTuple):
    """Those who wait for a lock."""

    number: int = 0
    rank: float = math.inf
    """When the first of them was published, in microseconds since the epoch."""

    def __add__(self, other: Waits) -> Waits:  # type: ignore[override]
        return Waits(self.number + other.number, min(self.rank, other.rank))

    @property
    def oldest(self) -> float:
        """How long ago the first of them was published, in seconds; 0 where there is none."""
        return max(0.0, time.time() - self.rank / 1e6)


class Row(NamedTuple):
    """Somebody who holds a lock, a permit of it, or the place in its queue; or for whom one of these is kept."""

    part: LockPart
    token: Token
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""
    rooms: Mapping[str, float] = {}
    """The ranks of the rooms that stand in line for the lock, one for each process; without those that have told how
    many messages wait in them."""
    messages: Mapping[str, Waits] = {}
    """The messages that wait for the lock, by their tasks, as those rooms have told."""

    @property
    def info(self) -> LockInfo:
        """The same in the words of `LockInfo`."""
        return self.token.info(self.part.key, self.ttl)._replace(state=self.state)

    @property
    def state(self) -> str:
        """As `LockInfo.state`, or ``free``."""
        return "free" if self.token is FREE else self.token.state

    @property
    def waits(self) -> dict[str, Waits]:
        """Those who wait, by their tasks: a room that has not told of its messages is one more for the holder's."""
        found = dict(self.messages)
        if self.rooms:
            holder = self.token.task or ""
            found[holder] = found.get(holder, Waits()) + Waits(len(self.rooms), min(self.rooms.values()))
        return found

    @property
    def waiting(self) -> int:
        """How many messages wait for the lock: those that were told, and one for each other room in line."""
        return len(self.rooms) + sum(waits.number for waits in self.messages.values())


Look = Callable[[LockPart], Row | None]
"""Asks for one part, wherever in a Cluster its key is now."""


def nodes_of(client: redis.Redis | ClusterClient) -> list[redis.Redis]:
    """The servers that together have all keys: the primaries of a Cluster, or the one server.

    Nothing else here knows that there are Clusters.
    """
    return client.primaries() if isinstance(client, ClusterClient) else [client]


def scan(node: redis.Redis, pattern: str, look: Look) -> Iterator[Row]:
    """What the keys of one server hold that match `pattern`, in no order; hardly ever one of them twice.

    Args:
        node: The server.
        pattern: As Redis' SCAN takes it.
        look: Is asked for a key that has moved to another server meanwhile.

    Raises:
        RedisError: Redis did not answer or refused.
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
    """The ranks of the rooms that stand in line for `lock`, by their names.

    Raises:
        RedisError: Redis did not answer or refused; in a Cluster, the lock may be on another node.
    """
    return _rooms(node.zrange(_bytes(keys_of(lock).line), 0, -1, withscores=True))


def _rooms(line: Any) -> dict[str, float]:
    return {Token.of(room).nonce: rank for room, rank in line}


def _ask(node: redis.Redis, parts: Sequence[LockPart], *, importing: bool = False) -> list[tuple[Any, ...]]:
    """What each key holds, its milliseconds, and its line, in one round trip.

    Where the node is `importing` their hash slot it may lack one of them, and is asked with ASKING.
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
    if _has_moved(reply):  # to this node, which has not all of its hash slot yet
        (reply,) = _ask(node, [part], importing=True)
    if _has_moved(reply):  # to another node, since its key was read here
        return look(part)
    value, left, line = reply
    if isinstance(line, AskError):  # there is no line, or it is at another node for a moment
        line = ()
    for one in (value, left, line):
        if isinstance(one, ResponseError) and str(one).startswith("WRONGTYPE"):
            return None
        if isinstance(one, Exception):
            raise one
    if value is None:  # it was released meanwhile
        return None
    return Row(part, Token.of(value), left / 1000 if left >= 0 else None, _rooms(line))


def _has_moved(reply: Sequence[Any]) -> bool:
    """Whether the key of a lock is at another node of the Cluster: ASK, or MOVED, which redis-py derives from it."""
    return any(isinstance(one, AskError) for one in reply[:2])


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
