"""Scan: the holders of all locks of a server, page by page, so that no command keeps the server busy for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import redis
from redis.exceptions import AskError, ResponseError

from celery_redislock.info import LockInfo
from celery_redislock.server.cluster_client import ClusterClient
from celery_redislock.server.names import Place, keys_of
from celery_redislock.server.tokens import Token

#: How many places of its table of keys the server looks at for one SCAN: 0.3 ms of its time. It serves others between
#: two pages, and also between the commands of a page, of which it reads some at a time.
PAGE = 500


class Row(NamedTuple):
    """Somebody who holds a lock, a slot of it, or the place in its queue; or for whom one of these is kept."""

    place: Place
    token: Token
    ttl: float | None
    """Seconds until the key ends unless it is renewed; None for a key without expiry."""
    waiting: int = 0
    """How many rooms stand in line for the lock."""
    oldest: float | None = None
    """How long ago the first who waits for the lock was published, in seconds; None where nobody waits."""

    @property
    def info(self) -> LockInfo:
        """The same in the words of `LockInfo`."""
        return self.token.info(self.place.key, self.ttl)._replace(waiting=self.waiting)


Look = Callable[[Place], Row | None]
"""Asks for one place, wherever in a Cluster its key is now."""


def nodes_of(client: redis.Redis | ClusterClient) -> list[redis.Redis]:
    """The servers that together have all keys: the primaries of a Cluster, or the one server.

    Nothing else here knows that there are Clusters.
    """
    return client.primaries() if isinstance(client, ClusterClient) else [client]


def scan(node: redis.Redis, pattern: str, prefix: str, look: Look) -> Iterator[Row]:
    """Who holds the locks of one server whose keys match `pattern`, in no order; hardly ever one of them twice.

    Args:
        node: The server.
        pattern: As Redis' SCAN takes it.
        prefix: What the keys of the app's locks begin with. Of other keys, only those that hold a token of ours are
            locks: any string may be stored there.
        look: Is asked for a key that has moved to another server meanwhile.

    Raises:
        RedisError: Redis did not answer or refused.
    """
    for places in _pages(node, pattern):
        replies = _ask(node, places)
        rows = [row for place, *reply in zip(places, *replies, strict=True) if (row := _row(node, place, reply, look))]
        yield from _with_oldest(node, [row for row in rows if row.place.key.startswith(prefix) or row.token.since])


def _pages(node: redis.Redis, pattern: str) -> Iterator[list[Place]]:
    cursor: Any = 0
    while True:
        answer: Any = node.scan(cursor, match=_bytes(pattern), count=PAGE, _type="string")
        cursor, keys = answer
        places = [place for key in keys if (place := Place.of(_text(key))) is not None]
        if places:
            yield places
        if not cursor:
            return


def _ask(node: redis.Redis, places: Sequence[Place]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """What the keys hold, their milliseconds, and the lengths of their lines, in one round trip."""
    pipeline = node.pipeline(transaction=False)
    for place in places:
        key = _bytes(place.key)
        pipeline.get(key)
        pipeline.pttl(key)
        pipeline.zcard(_bytes(keys_of(place.lock).line))
    replies = pipeline.execute(raise_on_error=False)
    return replies[0::3], replies[1::3], replies[2::3]


def _row(node: redis.Redis, place: Place, reply: Sequence[Any], look: Look) -> Row | None:
    if _has_moved(reply):  # to this node, which has not all of its slot yet
        reply = _ask_importing(node, place)
    if _has_moved(reply):  # to another node, since its key was read here
        return look(place)
    value, left, waiting = reply
    if isinstance(waiting, AskError):  # there is no line, or it is at another node for a moment
        waiting = 0
    for one in (value, left, waiting):
        if isinstance(one, ResponseError) and str(one).startswith("WRONGTYPE"):
            return None
        if isinstance(one, Exception):
            raise one
    if value is None:  # it was released meanwhile
        return None
    return Row(place, Token.of(value), left / 1000 if left >= 0 else None, waiting)


def _has_moved(reply: Sequence[Any]) -> bool:
    """Whether the key of a lock is at another node of the Cluster: ASK, or MOVED, which redis-py derives from it."""
    return any(isinstance(one, AskError) for one in reply[:2])


def _ask_importing(node: redis.Redis, place: Place) -> Sequence[Any]:
    """As `_ask`, for one place, of a node to which its slot is moved now: by single keys, for it may lack the line."""
    pipeline: Any = node.pipeline(transaction=False)
    key = _bytes(place.key)
    for question in (("GET", key), ("PTTL", key), ("ZCARD", _bytes(keys_of(place.lock).line))):
        pipeline.execute_command("ASKING")
        pipeline.execute_command(*question)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies[1::2]


def _with_oldest(node: redis.Redis, rows: Sequence[Row]) -> Iterator[Row]:
    """The same rows; those for whose lock somebody waits are told since when."""
    waited = [row for row in rows if row.waiting]
    oldest: dict[str, float] = {}
    if waited:
        pipeline = node.pipeline(transaction=False)
        for row in waited:
            pipeline.zrange(_bytes(keys_of(row.place.lock).line), 0, 0, withscores=True)
        now = time.time()
        for row, first in zip(waited, pipeline.execute(raise_on_error=False), strict=True):
            if isinstance(first, list) and first:
                oldest[row.place.lock] = max(0.0, now - first[0][1] / 1e6)
    for row in rows:
        yield row._replace(oldest=oldest.get(row.place.lock)) if row.waiting else row


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "surrogateescape")


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
