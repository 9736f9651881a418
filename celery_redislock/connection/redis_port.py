"""Redis port: what the package needs of redis-py that it does not promise to keep.

Each function says what it needs and why. tests/contracts has a test of each with the installed releases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.sentinel import SentinelConnectionPool
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    import hiredis

# A connection. A command is sent and its answer is read at different times, and no command is sent twice unseen.


#: Makes what is sent of a command's words. redis-py's own `pack_command` first asks each word for its type, which takes
#: three times as long as hiredis does for the rest; ours are all text. None where redis-py does not use hiredis.
_pack: Any = hiredis.pack_command if HIREDIS_AVAILABLE else None


def connection_of(client: redis.Redis) -> Any:
    """The one connection of a client that was made by ``client()`` of another, and has it to itself."""
    return client.connection


def send(connection: Any, words: Sequence[Any], *, checks_health: bool) -> None:
    """Send a command on an open or a closed connection, and read nothing but what a check of its health needs."""
    packed = connection.pack_command(*words) if _pack is None else [_pack(words)]
    connection.send_packed_command(packed, check_health=checks_health)


def answer_on(connection: Any) -> Any:
    """Read the next answer on a connection.

    Raises:
        RedisError: The server has refused the command, or the connection is lost.
    """
    return connection.read_response()


def is_answered(connection: Any) -> bool:
    """Whether an answer can be read without waiting for it."""
    return bool(connection.can_read(timeout=0))


# A pool, and where its connections go.

#: Matches the options that a redis-py pool puts among those of its connections for its own use.
_OF_POOL = re.compile("maint_|oss_|orig_|himport_|cache|event_dispatcher$|connection_pool$").match


def options_of(pool: Any) -> dict[str, Any]:
    """The options of a pool's connections, as a user has given them, or as redis-py has read them in a URL."""
    given: Mapping[str, Any] = pool.connection_kwargs
    return {name: value for name, value in given.items() if not _OF_POOL(name)}


def connections_of(pool: Any, *, unused_only: bool) -> list[Any]:
    """The connections of a pool that lets callers wait; None stands for one that was not made yet."""
    return [*(pool.pool.queue if unused_only else pool._connections)]


def try_to_connect(pool: redis.ConnectionPool) -> None:
    """Make a connection, which is not opened; redis-py refuses an option that it does not know only then."""
    pool.connection_class(**pool.connection_kwargs)


def sentinel_options_of(pool: SentinelConnectionPool) -> dict[str, Any]:
    """The options of a pool that asks Sentinels: of what, whom, and whether for the primary."""
    return {name: getattr(pool, name) for name in ("service_name", "is_master", "sentinel_manager")}


def is_behind_sentinels(client: redis.Redis) -> bool:
    """Whether Sentinels tell the client where its server is."""
    return isinstance(client.connection_pool, SentinelConnectionPool)


def sentinels_of(client: redis.Redis) -> list[redis.Redis]:
    """The clients by which a client asks its Sentinels; none where it has no Sentinels."""
    if not is_behind_sentinels(client):
        return []
    pool: Any = client.connection_pool
    return [*pool.sentinel_manager.sentinels]


# A Cluster, as redis-py's own client for it knows it. Ours replaces that client and takes over what it was told.


def nodes_of(client: RedisCluster) -> list[ClusterNode]:
    """The nodes that the client knows, each with a client of its own."""
    return [*client.nodes_manager.nodes_cache.values()]


def remap_of(client: RedisCluster) -> Callable[[tuple[str, int]], tuple[str, int]] | None:
    """How the client reaches a node whose address is another from here; None where it is the same."""
    remap: Callable[[tuple[str, int]], tuple[str, int]] | None = client.nodes_manager.address_remap
    return remap


def called_at_connect(client: RedisCluster) -> Any:
    """What a user has called for each new connection: redis-py puts a method of the client around it."""
    return client.user_on_connect_func
