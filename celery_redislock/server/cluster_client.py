"""ClusterClient: the client of a Cluster that a URL names, which connects with its first command."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from redis import BlockingConnectionPool
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException
from redis.retry import Retry


class ClusterClient:
    """What a lock server needs of redis-py's client for a Cluster.

    redis-py's own asks the nodes for their slots when it is made; an app is made where its servers may be away. It also
    has locks that must not be inherited by a fork. So this one makes one of redis-py's for each process, when it is
    first asked for, and again where that has failed.

    Args:
        nodes: Hosts and ports of some nodes of the Cluster.
        options: Of the connections to the nodes.

    Attributes:
        nodes, options: As given.
    """

    def __init__(self, nodes: Sequence[tuple[str, int]], options: Mapping[str, Any]) -> None:
        self.nodes = tuple(nodes)
        self.options = options
        self._clients: dict[int, RedisCluster] = {}

    @property
    def client(self) -> RedisCluster:
        """redis-py's client in this process, without retries of its own.

        Raises:
            RedisConnectionError: No node answers, or those that answer do not know where all slots are.
        """
        client = self._clients.get(os.getpid())
        if client is None:  # two threads may both come here: either client will do, and `setdefault` keeps one
            client = self._clients.setdefault(os.getpid(), self._make())
        return client

    def execute_command(self, *words: Any, **options: Any) -> Any:
        """As redis-py's."""
        return self.client.execute_command(*words, **options)  # type: ignore[no-untyped-call]

    def keyslot(self, key: str) -> int:
        """As redis-py's."""
        return int(self.client.keyslot(key))  # type: ignore[no-untyped-call]

    def pubsub(self) -> Any:
        """As redis-py's."""
        return self.client.pubsub()  # type: ignore[no-untyped-call]

    def info(self, section: str) -> list[dict[str, Any]]:
        """What each primary answers to INFO."""
        of_nodes: dict[str, Any] = self.client.execute_command("INFO", section, target_nodes=RedisCluster.PRIMARIES)  # type: ignore[no-untyped-call]
        return [of_nodes] if "maxmemory" in of_nodes else [*of_nodes.values()]

    def close(self) -> None:
        """Close the connections of this process, and forget where the slots are."""
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            # redis-py's `close` leaves the connections of pools that it was given.
            client.disconnect_connection_pools()  # type: ignore[no-untyped-call]
            client.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shown}>"

    @property
    def shown(self) -> str:
        """The nodes of the URL, for people."""
        return ",".join(f"{host}:{port}" for host, port in self.nodes)

    def _make(self) -> RedisCluster:
        (host, port), *rest = self.nodes
        url = f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}"
        # With a URL, redis-py makes the nodes' pools of the class that is given. Given directly, it would ignore some
        # options, such as `health_check_interval`.
        pool = functools.partial(BlockingConnectionPool, **self.options)
        others = [ClusterNode(*node) for node in rest]  # type: ignore[no-untyped-call]
        try:
            return RedisCluster(
                url=url, startup_nodes=others, retry=Retry(NoBackoff(), 0), protocol=2, connection_pool_class=pool
            )
        except RedisClusterException as error:  # redis-py does not derive it from RedisError
            raise RedisConnectionError(str(error)) from error
