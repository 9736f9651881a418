"""ClusterStore: the `LockStore` for a Cluster. Each command goes to the node that has the key's hash slot."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.cluster import RedisCluster
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.protocol.replies import Renewed
from celery_redislock.protocol.scripts import RENEW, Command, Reply

from .clients import derive
from .cluster_client import ClusterClient, Node
from .connections import Connections, Late
from .outage import Outage
from .redis_port import called_at_connect, known_nodes_of, nodes_of, options_of, remap_of
from .store import Lease, LockStore

#: How long a command is retried while its hash slot moves, in seconds. The move takes milliseconds. Meanwhile a lock's
#: keys may be split between two nodes, and both nodes refuse commands that use them.
OPEN_HASH_SLOT = 1.0
#: The pause before each of those retries, in seconds.
PAUSE = 0.02
#: How many redirections one command follows.
REDIRECTIONS = 16


def of_cluster(client: RedisCluster | AsyncRedisCluster | ClusterClient) -> ClusterClient:
    """Return our own client for the Cluster of `client`, with the same time-outs and credentials."""
    if isinstance(client, ClusterClient):
        return client.copy()
    if isinstance(client, AsyncRedisCluster):
        addresses, of_node, on_connect = *known_nodes_of(client), None
    else:
        nodes = nodes_of(client)
        addresses, of_node = [(node.host, node.port) for node in nodes], nodes[0].redis_connection
        on_connect = called_at_connect(client)
    like = derive(of_node).connection_pool
    options = {**options_of(like), "connection_class": like.connection_class, "redis_connect_func": on_connect}
    return ClusterClient(addresses, options, remap_of(client))


class NodeConnections:
    """The connections to the nodes of a Cluster; a `Transport`.

    Args:
        cluster: Shared by all stores of this process.
        max_connections: The maximum number of connections to each node; by default, that of the options.
    """

    def __init__(self, cluster: ClusterClient, max_connections: int | None) -> None:
        self._cluster = cluster
        self._max_connections = max_connections
        self._of_nodes: dict[Node, Connections] = {}

    def send_late(self, late: Late) -> bool:
        """Return False: the hash slot may have moved, so every command waits for its reply."""
        return False

    def read_late(self, seconds: float, longest: float) -> bool:
        """Return False: no reply is ever left to read."""
        return False

    def close(self) -> None:
        """Close all connections, including those used to look up the hash slots."""
        for connections in [*self._of_nodes.values()]:
            connections.close()
        self._cluster.close()

    def ask(self, command: Command) -> Reply:
        """Return the reply to `command` from the node that has its hash slot. All its keys are in one hash slot."""
        route = route_of(command, self._cluster)
        at, asking = next(route)
        while True:
            try:
                return self._connections_of(at).ask(command, asking=asking)
            except RedisError as error:
                at, asking = route.throw(error)

    def ask_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the replies to `commands`, one after the other: their keys are in different hash slots."""
        return [*map(self.ask, commands)]

    def _connections_of(self, address: Node) -> Connections:
        if (connections := self._of_nodes.get(address)) is None:
            for gone in [one for one in self._of_nodes if not self._cluster.is_known(one)]:
                self._of_nodes.pop(gone, None)
            client = self._cluster.connect(address, self._max_connections)
            connections = self._of_nodes.setdefault(address, Connections(client))
        return connections


def route_of(command: Command, cluster: ClusterClient) -> Generator[tuple[Node, bool], None, None]:
    """Yield the node that has the hash slot of `command`, and whether to send it ASKING first.

    If the node answers with an error, the sender throws it in here. It gets the next node to ask, or an error. While
    the hash slot is split between two nodes, the command is retried. A renewal is not, because the keeper sends it
    again. This blocks when it pauses, and when it looks up the hash slots.
    """
    patience = 0.0 if command.script is RENEW else OPEN_HASH_SLOT
    hash_slot, until = hash_slot_of(command.keys[0]), time.monotonic() + patience
    at, asking, redirections = cluster.owner(hash_slot), False, 0
    while True:
        try:
            yield at, asking
        except AskError as error:  # or its subclass MovedError
            redirections += 1
            if redirections > REDIRECTIONS:
                raise
            at, asking = cluster.reached(error.host, error.port, at), not isinstance(error, MovedError)
            if not asking:
                cluster.moved(hash_slot, at)
        except (RedisConnectionError, RedisTimeoutError):
            cluster.doubt(at)
            raise
        except ClusterDownError:  # the node may have left the Cluster, and has run nothing
            cluster.doubt(at)
            time.sleep(PAUSE)  # another thread may be looking the hash slots up
            redirections += 1
            if redirections > REDIRECTIONS or cluster.owner(hash_slot) == at:
                raise
            at, asking = cluster.owner(hash_slot), False
        except ResponseError as error:
            # Are its keys, or the permits that its script reads, split between two nodes just now?
            is_between_nodes = isinstance(error, TryAgainError) or "non local key" in str(error)
            if not is_between_nodes or time.monotonic() > until:
                raise
            time.sleep(PAUSE)
            at, asking, redirections = cluster.owner(hash_slot), False, 0


class ClusterStore(LockStore):
    """The locks of a Cluster. Each node has its own outage.

    Args:
        cluster: Shared by all stores of this process.
        max_connections: The maximum number of connections to each node; by default, that of the options.
    """

    def __init__(self, cluster: ClusterClient, max_connections: int | None = None) -> None:
        super().__init__(NodeConnections(cluster, max_connections), lambda key: cluster.outage_of(hash_slot_of(key)))
        self._cluster = cluster

    def renew(self, locks: Sequence[Lease]) -> list[Renewed | RedisError | None]:
        """Like `LockStore.renew`, but in one round trip per hash slot. Nodes known to be unreachable come last.

        A node that does not answer, or refuses all commands, gets only one; its other hash slots fail with the same
        error. Hash slots that no node has fail with one error too, because looking for their node may take as long.
        """
        by_hash_slot: dict[int, list[Lease]] = {}
        for lock in locks:
            by_hash_slot.setdefault(hash_slot_of(lock[0]), []).append(lock)
        answers: dict[Lease, Renewed | RedisError | None] = {}
        silent: dict[Outage, RedisError] = {}
        by_node = sorted(by_hash_slot.items(), key=lambda one: self._cluster.outage_of(one[0]).unreachable is not None)
        for hash_slot, its_locks in by_node:
            at = self._cluster.outage_of(hash_slot)  # before it is asked: then another node may have the hash slot
            try:
                if at in silent:
                    raise silent[at]
                answers |= zip(its_locks, self._renew_hash_slot(its_locks), strict=True)
            except RedisError as error:
                # A node for which "the cluster is down" refuses all commands. Of one hash slot, it says something else.
                if isinstance(error, RedisConnectionError | RedisTimeoutError) or "cluster is down" in str(error):
                    silent[at] = error
                elif not self._cluster.knows(hash_slot):
                    silent[self._cluster.outage_of(hash_slot)] = error  # by now that of all without a node
                answers |= dict.fromkeys(its_locks, error)
        return [answers[lock] for lock in locks]

    def _renew_hash_slot(self, locks: Sequence[Lease]) -> list[Renewed | RedisError | None]:
        try:
            return super().renew(locks)
        except TryAgainError:  # some of the keys have moved already; a command with one key is never refused like this
            return [answer for lock in locks for answer in super(ClusterStore, self).renew([lock])]


def hash_slot_of(key: str) -> int:
    """Return the hash slot of `key`."""
    return int(key_slot(key.encode()))
