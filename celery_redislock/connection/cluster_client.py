"""ClusterClient: the nodes of a Cluster, and which hash slots each has, as far as this process knows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, ClusterDownError, NoPermissionError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .clients import Pool
from .outage import REFUSALS, Outage

#: A node's host and port.
Node = tuple[str, int]
#: The number of hash slots in a Cluster.
HASH_SLOTS = 16384
#: The shortest time between lookups of the hash slots when nodes do not answer, in seconds.
LOOK_EVERY = 0.1
_random = random.SystemRandom()


def at(host: str, port: int) -> str:
    """Return where a server listens, as a URL spells it: with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ClusterClient:
    """Looks up, on first use, which node of a Cluster has which hash slot, and makes clients for the nodes.

    It replaces redis-py's own Cluster client, in which one silent node delays commands to the others too, commands are
    resent without telling the caller, and a hash slot is lost when it moves to a node that the client does not know.
    Shared state here is replaced as a whole, not guarded by a lock, since a time limit may fire at any point.

    Args:
        nodes: Hosts and ports of some of the nodes.
        options: Options for the connections to the nodes.
        remap: Turns the address that the nodes report for a node into one that this process can reach. None if they
            are the same.
    """

    def __init__(
        self, nodes: Sequence[Node], options: Mapping[str, Any], remap: Callable[[Node], Node] | None = None
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
        """The nodes given to the constructor, as text for messages."""
        return ",".join(at(*node) for node in self.nodes)

    def copy(self) -> ClusterClient:
        """Return a copy that knows the same hash slots but has its own connections, for instance after a fork."""
        new = ClusterClient(self.nodes, self.options, self.remap)
        new._owners, new._primaries = [*self._owners], self._primaries
        return new

    def connect(self, address: Node, max_connections: int | None = None) -> redis.Redis:
        """Return a client for one node. It connects on first use; its pool makes callers wait for a free connection.

        Without `max_connections`, it has as many as the options allow.
        """
        options = {"max_connections": 50, **self.options, "host": address[0], "port": address[1]}
        if max_connections is not None:
            options["max_connections"] = max_connections
        return redis.Redis(connection_pool=Pool(**options))

    def pubsub(self) -> Any:
        """Return a subscription on a node that is believed to answer: a message published on one node reaches all."""
        if not self._primaries:
            self.look()
        reached = [one for one in self._primaries if self.outage(one).unreachable is None] or self._primaries
        return self.connect(_random.choice(reached), 1).pubsub()  # type: ignore[no-untyped-call]

    def primaries(self, key: bytes = b"") -> list[redis.Redis]:
        """Look up the hash slots, and return a client for each node that has any, first for the one that has `key`.

        Raises:
            RedisError: No node answers.
        """
        self.look()
        owner = self._owners[key_slot(key)]
        return [self._client(one) for one in sorted(self._primaries, key=lambda one: one != owner)]

    def close(self) -> None:
        """Close the connections used to look up the hash slots."""
        for client in [*self._asks.values()]:
            client.connection_pool.disconnect()

    def owner(self, hash_slot: int) -> Node:
        """Return the node that is believed to have `hash_slot`.

        Raises:
            RedisError: No node answers, or none has the hash slot.
        """
        if self._owners[hash_slot] is None:
            self.look()
        if (address := self._owners[hash_slot]) is None:
            raise ClusterDownError(f"CLUSTERDOWN no node of the Cluster {self.shown} has the hash slot {hash_slot}")
        return address

    def knows(self, hash_slot: int) -> bool:
        """Whether `owner` returns at once."""
        return self._owners[hash_slot] is not None

    def is_known(self, address: Node) -> bool:
        """Whether a node is believed to have hash slots."""
        return address in self._primaries

    def outage(self, address: Node) -> Outage:
        """Return the `Outage` of one node."""
        return self._outages.setdefault(address, Outage(f"node {at(*address)}"))

    def outage_of(self, hash_slot: int) -> Outage:
        """Return the `Outage` of the node that has `hash_slot`; the whole Cluster's if the node is not known yet."""
        address = self._owners[hash_slot]
        return self._of_all if address is None else self.outage(address)

    def moved(self, hash_slot: int, to: Node) -> None:
        """Record that another node now has `hash_slot`."""
        self._owners[hash_slot] = to

    def doubt(self, address: Node) -> None:
        """Look up the hash slots again, because `address` did not answer. This takes no longer than one command."""
        if time.monotonic() - self._looked_at >= LOOK_EVERY:
            with suppress(RedisError):
                self.look(last=address)

    def look(self, last: Node | None = None) -> None:
        """Look up which node has which hash slot. The nodes believed to answer are asked first.

        Args:
            last: A node that has not answered; it is asked last. The caller has already waited for it, so the lookup
                waits for at most one other silent node.

        Raises:
            RedisError: No node answers, or none is a node of a Cluster.
        """
        self._looked_at = time.monotonic()
        error: Exception | None = None
        nodes = sorted(dict.fromkeys([*self._primaries, *self.nodes]), key=lambda one: self._order(one, last))
        for address in nodes:
            try:
                found = self._client(address).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except (AuthenticationError, NoPermissionError):  # all nodes have the same users
                raise
            except RedisError as failed:  # one in which a script runs refuses even this
                if error is None or isinstance(error, REFUSALS):  # a silent node counts for more
                    error = failed
                if last is not None and isinstance(failed, RedisTimeoutError):
                    break
            else:
                if found or address == nodes[-1]:  # one that has left the Cluster, or restarted empty, knows of none
                    self._learn(found, address)
                    return
        if isinstance(error, REFUSALS):
            raise error
        raise RedisConnectionError(f"no node of the Cluster {self.shown} answers") from error

    def _order(self, address: Node, last: Node | None) -> tuple[bool, bool, float]:
        is_out = self.outage(address).unreachable is not None
        return address == last, is_out, _random.random()  # random, to spread the lookups over the nodes

    def _learn(self, found: Any, told_by: Node) -> None:
        owners: list[Node | None] = [None] * HASH_SLOTS
        for first, last, (host, port, *_), *_ in found:
            owners[first : last + 1] = [self.reached(host, port, told_by)] * (last + 1 - first)
        primaries = tuple({address: None for address in owners if address is not None})
        if None not in owners:
            for gone in self._outages.keys() - {*primaries}:
                self._outages.pop(gone, Outage()).end(has_gone=True)  # another thread may have learned it too
            self._of_all.end()
        self._owners, self._primaries = owners, primaries

    def reached(self, host: str | bytes | None, port: int, told_by: Node) -> Node:
        """Return how this process reaches the node that another one, `told_by`, knows as `host` and `port`."""
        name = host.decode() if isinstance(host, bytes) else host
        if not name or name == "?":  # the node does not know its own address
            return told_by[0], int(port)
        return self.remap((name, int(port))) if self.remap else (name, int(port))

    def _client(self, address: Node) -> redis.Redis:
        return self._asks.setdefault(address, self.connect(address, 2))
