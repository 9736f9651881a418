"""ClusterClient: the nodes of a Cluster, and which of them has which hash slot, as far as this process knows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from .outage import Outage
from .pool import FreeConnections

#: The host and the port of a node.
Node = tuple[str, int]
#: How many hash slots a Cluster has.
HASH_SLOTS = 16384
#: The nodes are not asked again where the hash slots are until so many seconds have passed since they were asked last.
LOOK_EVERY = 0.1
_random = random.SystemRandom()


class ClusterClient:
    """Knows where the hash slots of a Cluster are, and makes clients of its nodes; it asks with the first command.

    redis-py's own client for a Cluster is not used: one silent node delays with it the commands to all others, it sends
    a command again without saying so, and it follows no hash slot to a node that is new to it. What threads share here
    is replaced as a whole, and guarded by no lock: a time limit may strike anywhere.

    Args:
        nodes: Hosts and ports of some nodes.
        options: Of the connections to the nodes.
        remap: From the address by which the nodes know a node, to that by which it is reached from here; None where
            that is the same.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        options: Mapping[str, Any],
        remap: Callable[[Node], Node] | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        self.options = options
        self.remap = remap
        self._owners: list[Node | None] = [None] * HASH_SLOTS
        self._primaries: tuple[Node, ...] = ()
        self._asks: dict[Node, redis.Redis] = {}
        self._outages: dict[Node, Outage] = {}
        self._of_all = Outage()
        self._looked_at = -LOOK_EVERY

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shown}>"

    @property
    def shown(self) -> str:
        """The nodes that were given, for people."""
        return ",".join(f"{host}:{port}" for host, port in self.nodes)

    def copy(self) -> ClusterClient:
        """One with connections of its own, as for a process that was forked, which knows where the hash slots are."""
        new = ClusterClient(self.nodes, self.options, self.remap)
        new._owners, new._primaries = [*self._owners], self._primaries
        return new

    def connect(self, address: Node, max_connections: int) -> redis.Redis:
        """A client of one node, which connects with its first command. It makes a caller wait for a free connection."""
        host, port = address
        options = {**self.options, "host": host, "port": port, "max_connections": max_connections}
        options |= {"retry": Retry(NoBackoff(), 0), "queue_class": FreeConnections}
        options.setdefault("timeout", options["socket_timeout"] + options["socket_connect_timeout"])
        return redis.Redis(connection_pool=redis.BlockingConnectionPool(**options))  # type: ignore[no-untyped-call]

    def pubsub(self) -> Any:
        """A subscription on any node that answers, as far as is known: each of them hears what another publishes."""
        if not self._primaries:
            self.look()
        reached = [one for one in self._primaries if self.outage(one).unreachable is None] or self._primaries
        return self.connect(_random.choice(reached), 1).pubsub()  # type: ignore[no-untyped-call]

    def info(self, section: str) -> list[dict[str, Any]]:
        """What each primary answers to INFO."""
        return [node.info(section) for node in self.primaries()]

    def primaries(self) -> list[redis.Redis]:
        """Clients of all nodes that have hash slots, as the nodes tell now.

        Raises:
            RedisError: No node answers.
        """
        self.look()
        return [self._client(address) for address in self._primaries]

    def close(self) -> None:
        """Close the connections over which the nodes were asked where the hash slots are."""
        for client in [*self._asks.values()]:
            client.connection_pool.disconnect()

    def owner(self, hash_slot: int) -> Node:
        """The node that has `hash_slot`, as far as is known.

        Raises:
            RedisError: No node answers, or none has the hash slot.
        """
        address = self._owners[hash_slot]
        if address is None:
            self.look()
            address = self._owners[hash_slot]
        if address is None:
            raise ClusterDownError(f"CLUSTERDOWN no node of the Cluster {self.shown} has the hash slot {hash_slot}")
        return address

    def is_known(self, address: Node) -> bool:
        """Whether a node has hash slots, as far as is known."""
        return address in self._primaries

    def outage(self, address: Node) -> Outage:
        """The `Outage` of one node."""
        return self._outages.setdefault(address, Outage(f"node {address[0]}:{address[1]}"))

    def outage_of(self, hash_slot: int) -> Outage:
        """The `Outage` of the node that has `hash_slot`; that of the whole Cluster while no node has told."""
        address = self._owners[hash_slot]
        return self._of_all if address is None else self.outage(address)

    def address(self, redirection: AskError, told_by: Node) -> Node:
        """Where a node sends us with ASK or MOVED."""
        return self._reached(redirection.host, redirection.port, told_by)

    def moved(self, hash_slot: int, to: Node) -> None:
        """Note that `hash_slot` is at another node now."""
        self._owners[hash_slot] = to

    def doubt(self, address: Node) -> None:
        """Ask the other nodes, for as long as one command may take, whether another has this one's hash slots now."""
        if time.monotonic() - self._looked_at >= LOOK_EVERY:
            with suppress(RedisError):
                self.look(last=address)

    def look(self, last: Node | None = None) -> None:
        """Ask where the hash slots are: first the nodes that answer, as far as is known.

        Args:
            last: A node that has not answered, and is asked after all others. The caller has waited for it, and then
                waits for no more than one other silent node.

        Raises:
            RedisError: No node answers, or one that does is none of a Cluster.
        """
        self._looked_at = time.monotonic()
        error: Exception | None = None
        for address in sorted(dict.fromkeys([*self._primaries, *self.nodes]), key=lambda one: self._order(one, last)):
            try:
                found = self._client(address).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except AuthenticationError:
                raise
            except (RedisConnectionError, RedisTimeoutError) as failed:
                error = failed
                if last is not None and isinstance(failed, RedisTimeoutError):
                    break
                continue
            except ResponseError as failed:
                if "cluster support" not in str(failed):
                    raise
                text = "Cluster mode is not enabled on this node"
                raise RedisConnectionError(text) from RedisClusterException(text)
            self._learn(found, address)
            return
        raise RedisConnectionError(f"no node of the Cluster {self.shown} answers") from error

    def _order(self, address: Node, last: Node | None) -> tuple[bool, bool, float]:
        outage = self._outages.get(address)
        is_out = outage is not None and outage.unreachable is not None
        return address == last, is_out, _random.random()  # not always the same node is asked

    def _learn(self, found: Any, told_by: Node) -> None:
        owners: list[Node | None] = [None] * HASH_SLOTS
        for first, last, (host, port, *_), *_ in found:
            address = self._reached(host, port, told_by)
            owners[first : last + 1] = [address] * (last + 1 - first)
        primaries = tuple({address: None for address in owners if address is not None})
        for gone in self._outages.keys() - {*primaries}:
            self._outages.pop(gone).end(has_gone=True)
        self._of_all.end()
        self._owners, self._primaries = owners, primaries

    def _reached(self, host: str | bytes | None, port: int, told_by: Node) -> Node:
        name = host.decode() if isinstance(host, bytes) else host
        if not name or name == "?":  # a node that does not know its own address
            return told_by[0], int(port)
        return self.remap((name, int(port))) if self.remap else (name, int(port))

    def _client(self, address: Node) -> redis.Redis:
        return self._asks.setdefault(address, self.connect(address, 2))
