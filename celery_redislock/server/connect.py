"""From an app's URL and options to a redis-py client with sane time-outs."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_redislock.errors import LockConfigError, describe

#: redis-py's own defaults differ by constructor, up to 58 s for one command to a silent server.
DEFAULTS: Mapping[str, Any] = {"socket_timeout": 2.0, "socket_connect_timeout": 1.0, "max_connections": 50}
#: Options that users cannot set. The store resends by itself, so that it knows when an answer is ambiguous, and it
#: reads bytes. With RESP2, redis-py keeps a reply whole where an exception interrupts its reading. Publishers and
#: workers must encode a key alike.
_FIXED: Mapping[str, Any] = {
    "decode_responses": False,
    "encoding": "utf-8",
    "protocol": 2,
    "retry_on_error": (),
    "retry_on_timeout": False,
}
_NOT_FOR_USERS = frozenset({*_FIXED, "retry", "single_connection_client", "connection_pool"})
_SCHEMES = frozenset({"redis", "rediss", "unix", "redis+socket"})


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
        return _redis_py_url(configured)
    for urls in (broker, result_backend):
        one = urls[0] if isinstance(urls, list | tuple) and urls else urls
        first = one.split(";")[0] if isinstance(one, str) else ""
        if first.split(":", 1)[0] in _SCHEMES:
            return _redis_py_url(first)
    raise LockConfigError(
        "neither the broker nor the result backend is a Redis, so there is no server for the locks: set "
        'redislock_url, for instance "redis://localhost:6379/0"'
    )


def _redis_py_url(url: str) -> str:
    """`url` as redis-py spells it: kombu's ``redis+socket://`` is its ``unix://``, ``CERT_NONE`` its ``none``."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        shown = f"the scheme {scheme!r}" if separator and scheme.replace("+", "").isalnum() else "no scheme"
        raise LockConfigError(
            f"redislock_url has {shown} and cannot be used; allowed: redis://, rediss://, unix:// and redis+socket:// "
            "URLs"
        )
    if scheme != "redis+socket":
        return re.sub(r"(?<=ssl_cert_reqs=)CERT_\w+", lambda m: m[0].removeprefix("CERT_").lower(), url)
    parts = urlsplit(url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/")
    credentials, _, _ = parts.netloc.rpartition("@")
    return f"unix://{credentials + '@' if credentials else ''}{unquote(parts.path)}?db={database}"


def connect(url: str, options: Mapping[str, Any]) -> redis.Redis:
    """A client for `url`, which opens its first connection with its first command.

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
        pool = redis.BlockingConnectionPool(**_pool_options(url, options))  # type: ignore[no-untyped-call]
        pool.connection_class(**pool.connection_kwargs)  # only shows what redis-py refuses
    except ValueError:  # its text may show a part of the URL
        raise LockConfigError(
            "redislock_url or redislock_client_options cannot be parsed (not shown: they may hold a password)"
        ) from None
    except (TypeError, redis.RedisError) as error:
        raise LockConfigError(
            f"no Redis client can be made of redislock_url and redislock_client_options: {describe(error)}"
        ) from None
    client = redis.Redis(connection_pool=pool)
    pool.timeout = command_time(client)
    return client


def _pool_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which redis-py's `from_url` makes a pool, but `_FIXED` wins over options in the URL.

    All options must be there when the pool is made: redis-py 8 prepares a pool for RESP3 or for RESP2 only then.
    """
    from_url = parse_url(url)  # type: ignore[no-untyped-call]
    both = {"connection_class": redis.Connection, **DEFAULTS, **options, **from_url}
    if url.startswith("rediss:") and both.get("ssl_cert_reqs", "required") != "none":
        both.setdefault("ssl_check_hostname", True)  # redis-py before 6 leaves it off
    kind = options.get("connection_class", both["connection_class"])
    return {**both, **_FIXED, "connection_class": _whole(kind), "retry": Retry(NoBackoff(), 0)}


def derive(client: redis.Redis, max_connections: int = 50) -> redis.Redis:
    """A new client for the server of `client`, whatever the retries, encoding and protocol of `client`.

    Args:
        client: Any redis-py client with a connection pool; also that of a Sentinel.
        max_connections: The most connections of the new client; the maximum of `client` counts too.
    """
    pool = client.connection_pool
    options = {name: value for name, value in pool.connection_kwargs.items() if not _OF_POOL(name)}
    for name in ("socket_timeout", "socket_connect_timeout"):  # without them a silent server would hang the caller
        options[name] = options.get(name) or DEFAULTS[name]
    options |= {
        **_FIXED,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": min(pool.max_connections, max_connections),
    }
    kind: type[redis.ConnectionPool]
    if isinstance(pool, SentinelConnectionPool):
        kind = _SentinelPool
        options |= {name: getattr(pool, name) for name in ("service_name", "is_master")}
        options["sentinel_manager"] = _without_retries(pool.sentinel_manager)
    else:
        kind = redis.BlockingConnectionPool
        options["timeout"] = options["socket_timeout"] + options["socket_connect_timeout"]
    return redis.Redis(connection_pool=_discreet(kind)(connection_class=_whole(pool.connection_class), **options))


def address(client: redis.Redis) -> str:
    """The address of the server of a client from `connect`, as a URL without password, for people.

    It is made of what redis-py has parsed: in a URL that is slightly wrong, any part may be the password.
    """
    pool = client.connection_pool
    options = pool.connection_kwargs
    user, db = f"{options['username']}@" if options.get("username") else "", options.get("db") or 0
    if options.get("path"):
        return f"unix://{user}{options['path']}?db={db}"
    scheme = "rediss" if issubclass(pool.connection_class, redis.SSLConnection) else "redis"
    return f"{scheme}://{user}{options.get('host') or 'localhost'}:{options.get('port') or 6379}/{db}"


class _Whole:
    """Mixed into a connection class: closes a connection whose opening a time limit or a shutdown interrupts.

    redis-py returns a half opened connection to its pool, perhaps not logged in, or still in database 0.
    """

    def connect(self) -> None:
        connection: Any = super()
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise


@functools.cache
def _whole(kind: type[Any]) -> type[Any]:
    return kind if issubclass(kind, _Whole) else type(kind.__name__, (_Whole, kind), {})


class _Discreet:
    """Mixed into a pool class: hides the password that redis-py 6.4 and 7.0 show when a Sentinel knows no master."""

    def __repr__(self) -> str:
        pool: Any = self
        options = pool.connection_kwargs
        return f"<{type(self).__name__} {options.get('path') or options.get('host')}:{options.get('port')}>"


@functools.cache
def _discreet(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_Discreet, kind), {})


class _SentinelPool(SentinelConnectionPool):
    """A Sentinel's pool that counts its connections right.

    Before redis-py 8.1, each connection to a former primary, and each that failed, took a place of the pool.
    """

    def owns_connection(self, connection: Any) -> bool:
        if not super().owns_connection(connection):  # type: ignore[no-untyped-call]
            connection.disconnect()
        return bool(connection.pid == self.pid)


def _without_retries(sentinels: Sentinel) -> Sentinel:
    """A copy of `sentinels` that asks each Sentinel once. redis-py 8 asks a silent one eleven times before the next."""
    ours = copy.copy(sentinels)
    ours.sentinels = [derive(sentinel) for sentinel in sentinels.sentinels]
    return ours


#: Matches the options that a redis-py pool puts among those of its connections for its own use.
_OF_POOL = re.compile("maint_|oss_|orig_|himport_|cache|event_dispatcher$|connection_pool$").match


def command_time(client: redis.Redis) -> float:
    """The longest that one command of `client` may take until it fails, in seconds: connecting and reading.

    Before it connects, a Sentinel's client asks one Sentinel after the other.

    Raises:
        LockConfigError: A time-out is not a number of seconds.
    """
    total = 0.0
    for name in ("socket_connect_timeout", "socket_timeout"):
        value = client.connection_pool.connection_kwargs[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise LockConfigError(
                f"redislock_client_options: {name} = {value!r} is not allowed; allowed: seconds greater than 0: "
                "without a time-out a silent server would hang every task"
            )
        total += value
    if isinstance(client.connection_pool, SentinelConnectionPool):
        total += sum(command_time(sentinel) for sentinel in client.connection_pool.sentinel_manager.sentinels)
    return total
