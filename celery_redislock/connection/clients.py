"""What every redis-py client here has in common: time-outs, no retries, and no half-open connections."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_redislock.errors import LockConfigError

from .cluster_client import ClusterClient
from .pool import FreeConnections
from .redis_port import connections_of, options_of, sentinel_options_of, sentinels_of

#: Set explicitly, because redis-py's own defaults vary with the constructor, and with some of them one command to a
#: silent server can take up to 58 s.
DEFAULTS: Mapping[str, Any] = {"socket_timeout": 2.0, "socket_connect_timeout": 1.0, "max_connections": 50}
#: Options that users cannot set. The store retries commands itself, so that it knows when a reply is ambiguous, and it
#: expects bytes. With RESP2, redis-py loses no part of a reply when an exception interrupts the read. The encoding is
#: fixed because publishers and workers must encode a key the same way.
FIXED: Mapping[str, Any] = {
    "decode_responses": False,
    "encoding": "utf-8",
    "protocol": 2,
    "retry_on_error": (),
    "retry_on_timeout": False,
}


def derive(client: redis.Redis, max_connections: int = 50) -> redis.Redis:
    """Return a new client for the same server as `client`, but with our own retries, encoding and protocol.

    Args:
        client: Any redis-py client with a connection pool, including a Sentinel client.
        max_connections: Upper limit for the new client's pool. The limit of the pool of `client` applies as well.
    """
    pool = client.connection_pool
    options = options_of(pool)
    for name in ("socket_timeout", "socket_connect_timeout"):  # without them a silent server would hang the caller
        options[name] = options.get(name) or DEFAULTS[name]
    options |= {
        **FIXED,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": min(pool.max_connections, max_connections),
    }
    options["timeout"] = options["socket_timeout"] + options["socket_connect_timeout"]
    options["queue_class"] = FreeConnections
    kind: type[redis.ConnectionPool] = redis.BlockingConnectionPool
    if isinstance(pool, SentinelConnectionPool):
        kind = _SentinelPool
        options |= sentinel_options_of(pool)
        options["sentinel_manager"] = _without_retries(options["sentinel_manager"])
    return redis.Redis(connection_pool=_discreet(kind)(connection_class=whole(pool.connection_class), **options))


class _Whole:
    """Connection mixin: closes a connection if a time limit or a shutdown interrupts `connect`.

    redis-py returns such a half-open connection to its pool, perhaps not logged in or still on database 0.
    """

    def connect(self) -> None:
        connection: Any = super()
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise


@functools.cache
def whole(kind: type[Any]) -> type[Any]:
    """Return a subclass of the connection class `kind` whose connections are open or closed, never half open."""
    return kind if issubclass(kind, _Whole) else type(kind.__name__, (_Whole, kind), {})


class _Discreet:
    """Pool mixin: hides the password that redis-py 6.4 and 7.0 print when no Sentinel knows the primary."""

    def __repr__(self) -> str:
        options = options_of(self)
        return f"<{type(self).__name__} {options.get('path') or options.get('host')}:{options.get('port')}>"


@functools.cache
def _discreet(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_Discreet, kind), {})


class _SentinelPool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """A Sentinel pool that makes callers wait for a free connection, and counts its connections correctly.

    Before redis-py 8.1, connections to a former primary and failed connections kept counting toward the maximum.
    """

    def owns_connection(self, connection: Any) -> bool:
        if not super().owns_connection(connection):  # type: ignore[no-untyped-call]
            connection.disconnect()
        return bool(connection.pid == self.pid)

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections; only the unused ones if `inuse_connections` is false.

        When the primary changes, redis-py's Sentinel code closes only the unused ones. Before redis-py 7, a blocking
        pool cannot do that.
        """
        for connection in connections_of(self, unused_only=not inuse_connections):
            if connection is not None:  # None stands for a connection not made yet
                connection.disconnect()


def _without_retries(sentinels: Sentinel) -> Sentinel:
    """Return a copy of `sentinels` that asks each Sentinel once. redis-py 8 asks a silent one eleven times."""
    ours = copy.copy(sentinels)
    ours.sentinels = [derive(sentinel) for sentinel in sentinels.sentinels]
    return ours


def command_time(client: redis.Redis | ClusterClient) -> float:
    """Return how long one command of `client`, including connecting, can take before it fails, in seconds.

    A Sentinel client may ask every Sentinel before it connects. A Cluster client whose node does not answer then looks
    up the hash slots on one other node.

    Raises:
        LockConfigError: A time-out is not a number of seconds.
    """
    if isinstance(client, ClusterClient):
        return 2 * _time_outs(client.options)
    return _time_outs(options_of(client.connection_pool)) + sum(map(command_time, sentinels_of(client)))


def _time_outs(options: Mapping[str, Any]) -> float:
    total = 0.0
    for name in ("socket_connect_timeout", "socket_timeout"):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise LockConfigError(
                f"redislock_client_options: {name} = {value!r} is not allowed; allowed: seconds greater than 0: "
                "without a time-out a silent server would hang every task"
            )
        total += value
    return total
