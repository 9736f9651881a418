"""What every redis-py client here has in common: time-outs, no retries, and no half-open connections."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_redislock.errors import STRIKES, LockConfigError, describe

from .pool import FreeConnections
from .redis_port import blocking_kind, connections_of, is_behind_sentinels, options_of, sentinel_options_of

#: Set explicitly, because redis-py's own defaults vary with the constructor, and with some of them one command to a
#: silent server can take up to 58 s.
DEFAULTS: Mapping[str, Any] = {"socket_timeout": 2.0, "socket_connect_timeout": 1.0, "max_connections": 50}
#: Each of them must be set.
TIME_OUTS = ("socket_timeout", "socket_connect_timeout")
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


def derive(client: Any, max_connections: int = 50, kind: type[Pool] | None = None) -> redis.Redis:
    """Return a new client for the same server as `client`, but with our own retries, encoding and protocol.

    Args:
        client: Any redis-py client with a connection pool, including a Sentinel client and an asyncio one.
        max_connections: Upper limit for the new client's pool. The limit of the pool of `client` applies as well.
        kind: The class of the new client's pool; `Pool` by default. Ignored behind Sentinels.
    """
    pool = client.connection_pool
    options = {**options_of(pool), **FIXED, "connection_class": blocking_kind(pool.connection_class)}
    options["max_connections"] = min(pool.max_connections, max_connections)
    for name in TIME_OUTS:  # without them a silent server would hang the caller
        options[name] = options.get(name) or DEFAULTS[name]
    if not is_behind_sentinels(client):
        return (_Sentinel if kind is _PoolOfSentinel else redis.Redis)(connection_pool=(kind or Pool)(**options))
    options |= sentinel_options_of(pool)
    options["sentinel_manager"] = _without_retries(options["sentinel_manager"])
    return redis.Redis(connection_pool=_SentinelPool(**options))  # type: ignore[no-untyped-call]


def raise_for_provider(connection: Any, error: BaseException) -> None:
    """Raise a ConnectionError if `error` came from the credential provider of `connection`."""
    has_provider = getattr(connection, "credential_provider", None) is not None
    if has_provider and isinstance(error, Exception) and not isinstance(error, (RedisError, *STRIKES)):
        raise RedisConnectionError(f"the credential provider failed: {describe(error)}") from error


class _Whole:
    """Connection mixin: closes a connection if a time limit or a shutdown interrupts `connect`.

    redis-py returns such a half-open connection to its pool, perhaps not logged in or still on database 0.

    If a credential provider fails, whatever its error, the server cannot be reached for now: a ConnectionError.
    """

    def connect(self) -> None:
        connection: Any = super()
        try:
            connection.connect()
        except BaseException as error:
            connection.disconnect()
            raise_for_provider(self, error)
            raise


@functools.cache
def _whole(kind: type[Any]) -> type[Any]:
    """Return a subclass of the connection class `kind` whose connections are open or closed, never half open."""
    return kind if issubclass(kind, _Whole) else type(kind.__name__, (_Whole, kind), {})


class Pool(redis.BlockingConnectionPool):
    """A pool of connections that do not retry. If none is free, callers wait for as long as one command may take."""

    def __init__(self, **options: Any) -> None:
        options |= {"connection_class": _whole(options["connection_class"]), "retry": Retry(NoBackoff(), 0)}
        super().__init__(**options, queue_class=FreeConnections, timeout=time_outs(options))  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        """Leave out the password, which redis-py 6.4 and 7.0 print when no Sentinel knows the primary."""
        options = options_of(self)
        return f"<{type(self).__name__} {options.get('path') or options.get('host')}:{options.get('port')}>"


class _PoolOfSentinel(Pool):
    """The pool for one Sentinel. It keeps nothing open: a gateway may forget connections that are idle for so long."""

    def release(self, connection: Any) -> None:
        connection.disconnect()
        super().release(connection)  # type: ignore[no-untyped-call]


class _Refused(RedisConnectionError):
    """A Sentinel has refused to answer. If no other one answers, redis-py shows the `repr`: redis-py 8's is no text."""

    __repr__ = RedisConnectionError.__str__


class _Sentinel(redis.Redis):
    """The client of one Sentinel. If that refuses to answer, redis-py asks the next one, as if it were down."""

    def sentinel_masters(self) -> Any:
        try:
            return super().sentinel_masters()
        except (AuthenticationError, ResponseError) as error:
            raise _Refused(describe(error)) from error


class _Sentinels(list[Any]):
    """Sentinels, of which redis-py swaps the one that answers with the first. Two threads at once would lose one."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])  # as they are when a search begins: others move them meanwhile

    def __setitem__(self, place: Any, one: Any) -> None:
        super().__setitem__(slice(None), sorted(self, key=lambda other: place == 0 and other is not one))


class _SentinelPool(SentinelConnectionPool, Pool):
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
    """Return a copy of `sentinels` that asks each Sentinel once. redis-py 8 asks a silent one eleven times.

    They may be asyncio's. The copy is not.
    """
    ours: Sentinel = copy.copy(sentinels) if isinstance(sentinels, Sentinel) else Sentinel([])
    vars(ours).update(vars(sentinels))
    ours.sentinels = _Sentinels(derive(sentinel, kind=_PoolOfSentinel) for sentinel in sentinels.sentinels)
    return ours


def time_outs(options: Mapping[str, Any]) -> float:
    """Return how long one command on a connection with these options can take, including connecting, in seconds.

    Raises:
        LockConfigError: A time-out is not a number of seconds.
    """
    total = 0.0
    for name in TIME_OUTS:
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise LockConfigError(
                f"redislock_client_options: {name} = {value!r} is not allowed; allowed: seconds greater than 0; "
                "without a time-out, a silent server would hang every task"
            )
        total += value
    return total
