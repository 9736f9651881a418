"""Redis port: everything undocumented that the package uses from redis-py.

tests/contracts tests each function against the installed releases.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import redis
from redis import asyncio as aio
from redis.asyncio import sentinel as aio_sentinel
from redis.cluster import ClusterNode, RedisCluster
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    import hiredis

#: Packs the words of a command; None if redis-py does not use hiredis. redis-py's own `pack_command` first checks each
#: word's type. That takes three times as long as the packing itself, and our words are all str or bytes.
_pack: Any = hiredis.pack_command if HIREDIS_AVAILABLE else None
#: Matches the options that a redis-py pool adds to its connections' options for its own use.
_OF_POOL = "maint_|oss_|orig_|himport_|cache|event_dispatcher$|connection_pool$"
#: The connection classes, with those of asyncio.
_KINDS: Mapping[type[Any], type[Any]] = {
    redis.Connection: aio.Connection,
    redis.SSLConnection: aio.SSLConnection,
    redis.UnixDomainSocketConnection: aio.UnixDomainSocketConnection,
    SentinelManagedConnection: aio_sentinel.SentinelManagedConnection,
    SentinelManagedSSLConnection: aio_sentinel.SentinelManagedSSLConnection,
}
_BLOCKING = {of_asyncio: kind for kind, of_asyncio in _KINDS.items()}
#: Options that connections of asyncio may not know, though they need not be told if nothing is set.
_ONLY_IF_SET = "ssl_(?!check_hostname|cert_reqs)"


# Connections: sending a command and reading its reply are two steps, and redis-py resends nothing behind our back.


def connection_of(client: redis.Redis) -> Any:
    """Return the connection that a client made by ``client()`` has to itself."""
    return client.connection


def send(
    connection: Any, how: str, script: str, keys: Sequence[str], values: Sequence[Any], *, checks_health: bool
) -> None:
    """Send a script, connecting first if needed. Reads nothing, apart from the reply to a health check.

    Args:
        connection: The connection.
        how: ``EVALSHA``, or ``EVAL`` if the server does not know the script.
        script: Its digest, or its text.
        keys: Its ``KEYS``.
        values: Its ``ARGV``.
        checks_health: Whether redis-py may check the connection first, if it was idle for long.
    """
    words = (how, script, str(len(keys)), *keys, *values)
    packed = connection.pack_command(*words) if _pack is None else [_pack(words)]
    connection.send_packed_command(packed, check_health=checks_health)


def answer_on(connection: Any) -> Any:
    """Read the next reply on a connection.

    Raises:
        RedisError: The server refused the command, or the connection is lost.
    """
    return connection.read_response()


def is_answered(connection: Any) -> bool:
    """Whether a reply can be read without waiting for it."""
    return bool(connection.can_read(timeout=0))


# Pools, and what they connect to.


def options_of(pool: Any) -> dict[str, Any]:
    """Return a pool's connection options, as given by the user or read from a URL."""
    given: Mapping[str, Any] = pool.connection_kwargs
    return {name: value for name, value in given.items() if not re.match(_OF_POOL, name)}


def connections_of(pool: Any, *, unused_only: bool) -> list[Any]:
    """Return the connections of a blocking pool; None for each one that has not been made yet."""
    return [*(pool.pool.queue if unused_only else pool._connections)]


def try_to_connect(pool: redis.ConnectionPool) -> None:
    """Make a connection without opening it: this is where redis-py rejects an unknown option."""
    pool.connection_class(**pool.connection_kwargs)


def sentinel_options_of(pool: SentinelConnectionPool) -> dict[str, Any]:
    """Return the additional options of a Sentinel pool: the service name, whether to use the primary, the Sentinels."""
    return {name: getattr(pool, name) for name in ("service_name", "is_master", "sentinel_manager")}


def is_behind_sentinels(client: redis.Redis) -> bool:
    """Whether the client asks Sentinels where its server is."""
    return isinstance(client.connection_pool, SentinelConnectionPool | aio_sentinel.SentinelConnectionPool)


def sentinels_of(client: redis.Redis) -> list[redis.Redis]:
    """Return the clients of the Sentinels that `client` asks; empty if it asks none."""
    pool: Any = client.connection_pool
    return [*pool.sentinel_manager.sentinels] if is_behind_sentinels(client) else []


# redis-py's Cluster client: our `ClusterClient` replaces it and takes over its settings.


def nodes_of(client: RedisCluster) -> list[ClusterNode]:
    """Return the nodes that the client knows, each with its own client."""
    return [*client.nodes_manager.nodes_cache.values()]


def remap_of(client: RedisCluster | aio.RedisCluster) -> Callable[[tuple[str, int]], tuple[str, int]] | None:
    """Return the client's mapping from a node's reported address to the one to connect to; None if it has none."""
    remap: Callable[[tuple[str, int]], tuple[str, int]] | None = client.nodes_manager.address_remap
    return remap


def called_at_connect(client: RedisCluster) -> Any:
    """Return the user's own callback for new connections, which redis-py wraps in a method of the client."""
    return client.user_on_connect_func


# asyncio: clients of `redis.asyncio`, and connections for an event loop.


def blocking_kind(kind: type[Any]) -> type[Any]:
    """Return the class of blocking connections for `kind`, which may be a class of asyncio's connections."""
    return next((_BLOCKING[base] for base in kind.__mro__ if base in _BLOCKING), kind)


def known_nodes_of(client: aio.RedisCluster) -> tuple[list[tuple[str, int]], aio.Redis]:
    """Return the addresses of the nodes that the client knows, and a client with the options of its connections."""
    nodes = {**client.nodes_manager.startup_nodes, **client.nodes_manager.nodes_cache}
    options: dict[str, Any] = {**client.get_connection_kwargs(), "redis_connect_func": None}  # it asks for replicas
    del options["response_callbacks"]
    pool = aio.ConnectionPool(**options)
    return [(one.host, int(one.port)) for one in nodes.values()], aio.Redis(connection_pool=pool)


def pool_for_asyncio(client: redis.Redis, **more: Any) -> Any:
    """Return an asyncio pool for the server of a client that does not retry; `more` are options of its connections.

    Raises:
        TypeError: An option of the client does not work with asyncio.
    """
    pool: Any = client.connection_pool
    options = {name: value for name, value in options_of(pool).items() if value or not re.match(_ONLY_IF_SET, name)}
    if options.get("redis_connect_func") is not None:
        raise TypeError("redis_connect_func works either with asyncio or without")
    kind = next(_KINDS[base] for base in pool.connection_class.__mro__ if base in _KINDS)
    options |= {"retry": None, "connection_class": kind, **more}
    if not is_behind_sentinels(client):
        return aio.ConnectionPool(**options)
    asked: Any = SimpleNamespace(discover_master=lambda _: _in_own_thread(pool.get_master_address))
    return aio_sentinel.SentinelConnectionPool(pool.service_name, asked, **options)  # type: ignore[no-untyped-call]


def _in_own_thread(ask: Callable[[], Any]) -> asyncio.Future[Any]:
    """Call `ask` in a thread that is not the loop's: a silent server would keep those from others, and the loop from
    ending."""
    answer = asyncio.get_running_loop().run_in_executor(thread := ThreadPoolExecutor(1, "redislock-sentinels"), ask)
    thread.shutdown(wait=False)  # it ends with the answer
    return answer


async def answer_in_loop(connection: Any, words: Sequence[Any]) -> Any:
    """Send a command on an asyncio connection, connecting first if needed, and return its reply.

    Raises:
        RedisError: The server refused the command, or the connection is lost.
    """
    if not connection.is_connected:
        if (context := getattr(connection, "ssl_context", None)) is not None:
            await asyncio.to_thread(context.get)  # it reads the certificates, which takes many milliseconds
        await connection.connect()
    await connection.send_packed_command(connection.pack_command(*words) if _pack is None else [_pack(words)])
    return await connection.read_response()
