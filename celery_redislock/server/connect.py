"""From an app's URL and options to a redis-py client with sane time-outs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import cleanup_kwargs
from redis.retry import Retry
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from celery_redislock.errors import LockConfigError, describe

from . import urls
from .clients import DEFAULTS, FIXED, command_time, derive, whole
from .cluster_client import ClusterClient
from .urls import Address, Kind

_NOT_FOR_USERS = frozenset({*FIXED, "retry", "single_connection_client", "connection_pool", "connection_pool_class"})


def lock_url(configured: str | None, broker: Any, result_backend: Any) -> str:
    """The URL of the lock server: the configured one, else the broker's, else the result backend's.

    Args:
        configured: `redislock_url`.
        broker: In any form that Celery takes: a URL, several with ``;`` between them, a list of them.
        result_backend: In any of these forms; a value that is no URL counts as no Redis.

    Raises:
        LockConfigError: None of them is a Redis that this version can use.
    """
    if configured is not None:
        return configured
    for given in (broker, result_backend):
        url = ";".join(given) if isinstance(given, list | tuple) else given
        if urls.is_redis(url):
            return str(url).split(";")[0] if urls.kind_of(url) == "standalone" else str(url)
    raise LockConfigError(
        "neither the broker nor the result backend is a Redis, so there is no server for the locks: set "
        'redislock_url, for instance "redis://localhost:6379/0"'
    )


def connect(url: str, options: Mapping[str, Any]) -> Any:
    """A client for `url`, which opens its first connection with its first command.

    It is redis-py's own, but for a Cluster a `ClusterClient`.

    Where no connection is free, the client's pool makes a caller wait; redis-py's default pool would raise.

    Args:
        url: From `lock_url`.
        options: `redislock_client_options`.

    Raises:
        LockConfigError: redis-py cannot make a client of `url` and `options`, or a time-out is missing.
    """
    ours = sorted(_NOT_FOR_USERS & options.keys())
    if ours:
        raise LockConfigError(f"redislock_client_options: {', '.join(ours)} cannot be set: celery-redislock sets them")
    try:
        where = urls.read(url)
        return _MAKERS[where.kind](where, _options(where, options))
    except ValueError:  # its text may show a part of the URL
        raise LockConfigError(
            "redislock_url or redislock_client_options cannot be parsed (not shown: they may hold a password)"
        ) from None
    except (TypeError, redis.RedisError) as error:
        raise LockConfigError(
            f"no Redis client can be made of redislock_url and redislock_client_options: {describe(error)}"
        ) from None


def _options(where: Address, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a connection: those in the URL win over those of the user, as in redis-py's `from_url`.

    All must be there when the pool is made: redis-py 8 prepares a pool for RESP3 or for RESP2 only then.
    """
    both = {"connection_class": redis.Connection, **DEFAULTS, **options, **where.options}
    both["connection_class"] = options.get("connection_class", both["connection_class"])
    if both.pop("ssl", False) and both["connection_class"] is redis.Connection:
        both["connection_class"] = redis.SSLConnection
    if issubclass(both["connection_class"], redis.SSLConnection) and both.get("ssl_cert_reqs", "required") != "none":
        both.setdefault("ssl_check_hostname", True)  # redis-py before 6 leaves it off
    return {**both, **FIXED}


def _single(_: Address, options: dict[str, Any]) -> redis.Redis:
    kind = whole(options.pop("connection_class"))
    retry = Retry(NoBackoff(), 0)
    pool = redis.BlockingConnectionPool(**options, connection_class=kind, retry=retry)  # type: ignore[no-untyped-call]
    _show_what_is_refused(pool)
    client = redis.Redis(connection_pool=pool)
    pool.timeout = command_time(client)
    return client


def _behind_sentinels(where: Address, options: dict[str, Any]) -> redis.Redis:
    name = options.pop("master_name", None)
    if not name:
        raise LockConfigError(
            'redislock_url names Sentinels, but not their primary: set master_name, for instance "mymaster", in '
            "redislock_client_options"
        )
    is_tls = issubclass(options.pop("connection_class"), redis.SSLConnection)
    of_sentinels = {each: options[each] for each in ("socket_timeout", "socket_connect_timeout")}
    sentinels = Sentinel(
        where.nodes,
        options.pop("min_other_sentinels", 0),
        {**of_sentinels, **options.pop("sentinel_kwargs", {})},
    )  # type: ignore[no-untyped-call]
    kind = SentinelManagedSSLConnection if is_tls else SentinelManagedConnection
    client = sentinels.master_for(name, connection_class=kind, **options)  # type: ignore[no-untyped-call]
    _show_what_is_refused(client.connection_pool)
    command_time(client)
    return derive(client, options["max_connections"])


def _of_cluster(where: Address, options: dict[str, Any]) -> ClusterClient:
    options.pop("retry_on_error")  # redis-py knows neither of the two here, and has other retries
    options.pop("retry_on_timeout")
    unknown = sorted(options.keys() - _known_to_a_cluster(options))  # redis-py would ignore them
    if unknown:
        raise LockConfigError(f"redislock_client_options: {', '.join(unknown)} cannot be set for a Cluster")
    options["connection_class"] = whole(options["connection_class"])
    _show_what_is_refused(redis.ConnectionPool(**options))
    client = ClusterClient(where.nodes, options)
    options["timeout"] = command_time(client)
    options["connection_pool_class"] = redis.BlockingConnectionPool
    return client


def _known_to_a_cluster(options: dict[str, Any]) -> set[str]:
    return {*cleanup_kwargs(**options)}  # type: ignore[no-untyped-call]


_MAKERS: Mapping[Kind, Callable[[Address, dict[str, Any]], redis.Redis | ClusterClient]] = {
    "standalone": _single,
    "sentinel": _behind_sentinels,
    "cluster": _of_cluster,
}


def _show_what_is_refused(pool: redis.ConnectionPool) -> None:
    """Make a connection, which is not opened; redis-py refuses an option that it does not know only then."""
    pool.connection_class(**pool.connection_kwargs)


def address(client: redis.Redis | ClusterClient) -> str:
    """The address of the server of a client from `connect`, as a URL without password, for people.

    It is made of what redis-py has parsed: in a URL that is slightly wrong, any part may be the password.
    """
    options = client.options if isinstance(client, ClusterClient) else client.connection_pool.connection_kwargs
    user, db = f"{options['username']}@" if options.get("username") else "", options.get("db") or 0
    if isinstance(client, ClusterClient):
        is_tls = issubclass(client.options["connection_class"], redis.SSLConnection)
        return f"{'rediss' if is_tls else 'redis'}+cluster://{user}{client.shown}"
    pool = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        asked = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
        hosts = ",".join(f"{one['host']}:{one['port']}" for one in asked)
        return f"sentinel://{user}{hosts}/{db}?master_name={pool.service_name}"
    if options.get("path"):
        return f"unix://{user}{options['path']}?db={db}"
    scheme = "rediss" if issubclass(pool.connection_class, redis.SSLConnection) else "redis"
    return f"{scheme}://{user}{options.get('host') or 'localhost'}:{options.get('port') or 6379}/{db}"


def disconnect(client: redis.Redis | ClusterClient) -> None:
    """Close the connections of a client from `connect`."""
    if isinstance(client, ClusterClient):
        client.close()
    else:
        client.connection_pool.disconnect()
