"""A Cluster of three primaries on loopback ports, with or without replicas; its hash slots move, and its nodes die."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from redis.cluster import RedisCluster
from redis.crc import key_slot

from tests.lab.servers import Valkey, free_port, wait_until

#: The hash slots of a Cluster.
HASH_SLOTS = 16384
#: A node that is silent for so many milliseconds is taken for dead by the others, and its replica asks to be elected.
NODE_TIMEOUT = 1000


class Nodes:
    """The nodes of a Cluster, each of which can be killed, paused and restarted by itself.

    Args:
        primaries: The nodes that have hash slots at first.
        replicas: Of the primary with the same index; or none.
    """

    def __init__(self, primaries: Sequence[Valkey], replicas: Sequence[Valkey] = ()) -> None:
        self.primaries = [*primaries]
        self.replicas = [*replicas]
        self._added: list[Valkey] = []

    @property
    def all(self) -> list[Valkey]:
        return [*self.primaries, *self.replicas, *self._added]

    def client(self, **options: Any) -> RedisCluster:
        """A client as a user makes it."""
        return RedisCluster(host="127.0.0.1", port=self.primaries[0].port, **options)

    def owner(self, key: str) -> Valkey:
        """The node that has the hash slot of `key`, as the first node that answers says."""
        hash_slot = key_slot(key.encode())
        for first, last, (_, port, *_), *_ in self._hash_slots():
            if first <= hash_slot <= last:
                return next(node for node in self.all if node.port == port)
        raise LookupError(f"no node has the hash slot of {key}")

    def key_of(self, node: Valkey, stem: str = "stock") -> str:
        """A key whose hash slot `node` has, and which begins with `stem`."""
        return next(key for key in (f"{stem}-{number}" for number in range(1000)) if self.owner(key) is node)

    def other(self, node: Valkey) -> Valkey:
        """A primary that is not `node`."""
        return next(one for one in self.primaries if one is not node)

    @contextmanager
    def moving(self, key: str, to: Valkey) -> Iterator[Valkey]:
        """Move the hash slot of `key` to another node, key by key; yields the node that had it.

        Inside of the block the hash slot is open: the old node answers ASK for a key that it has no more, and TRYAGAIN
        for several keys of which it has some. Nothing is moved there but by `move_keys`; all the rest moves at the end.
        """
        hash_slot, source = key_slot(key.encode()), self.owner(key)
        to.client.execute_command("CLUSTER", "SETSLOT", hash_slot, "IMPORTING", node_id(source))
        source.client.execute_command("CLUSTER", "SETSLOT", hash_slot, "MIGRATING", node_id(to))
        try:
            yield source
        finally:
            self.move_keys(key, source, to)
            for node in (to, source, *self.primaries):
                node.client.execute_command("CLUSTER", "SETSLOT", hash_slot, "NODE", node_id(to))

    @contextmanager
    def without_owner(self, *keys: str) -> Iterator[None]:
        """No node has the hash slots of `keys`, as when their node has died and the others were told to forget it."""
        owners = {key_slot(key.encode()): self.owner(key) for key in keys}
        for hash_slot in owners:
            wait_until(lambda lost=hash_slot: self._lose(lost), "all nodes know that none has it")
        try:
            yield
        finally:
            for hash_slot, owner in owners.items():
                owner.client.execute_command("CLUSTER", "ADDSLOTS", hash_slot)
            wait_until(self.is_up, "all nodes know who has them")

    def _lose(self, hash_slot: int) -> bool:
        """Have every node forget who has the hash slot; return whether none knew: what was under way tells it again."""
        knew = [view for view in self._views() if any(first <= hash_slot <= last for first, last, *_ in view)]
        for node in self.primaries if knew else ():
            with suppress(redis.ResponseError):  # it did not know
                node.client.execute_command("CLUSTER", "DELSLOTS", hash_slot)
        return not knew

    def move_keys(self, key: str, source: Valkey, to: Valkey) -> None:
        """Move all keys in the hash slot of `key`, while it is open."""
        hash_slot = key_slot(key.encode())
        while keys := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", hash_slot, 100):
            source.client.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)

    def move(self, key: str, to: Valkey) -> None:
        """Move the hash slot of `key` to another node, as a resharding does."""
        with self.moving(key, to):
            pass

    def move_at_once(self, key: str, to: Valkey) -> None:
        """Move the hash slot of `key` as a whole, as Valkey 9 can."""
        hash_slot, source = key_slot(key.encode()), self.owner(key)
        only = ("SLOTSRANGE", hash_slot, hash_slot)
        source.client.execute_command("CLUSTER", "MIGRATESLOTS", *only, "NODE", node_id(to))
        wait_until(lambda: self.owner(key) is to, "the hash slot has moved")

    @contextmanager
    def one_more(self, folder: Path) -> Iterator[Valkey]:
        """A primary without hash slots, which leaves the Cluster at the end of the block."""
        with _node(folder) as node:
            node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.primaries[0].port, _bus(self.primaries[0]))
            name = node_id(node)
            self.all_know(name)
            self._added.append(node)
            wait_until(lambda: "'cluster_state': 'ok'" in str(node.client.execute_command("CLUSTER INFO")), "it is in")
            yield node
            self._added.remove(node)
            with suppress(redis.ResponseError):  # it has been dismissed
                for other in self.primaries:
                    other.client.execute_command("CLUSTER", "FORGET", name)

    def dismiss(self, node: Valkey) -> None:
        """Have a primary without hash slots leave the Cluster, as `redis-cli --cluster del-node` does: it lives on."""
        for other in self.primaries:
            other.client.execute_command("CLUSTER", "FORGET", node_id(node))
        node.client.execute_command("CLUSTER", "RESET", "SOFT")

    def all_know(self, name: str) -> None:
        """Wait until all nodes know the one called `name`."""
        for node in self.all:
            wait_until(lambda node=node: name in str(node.client.execute_command("CLUSTER NODES")), "they have met")

    def replica_of(self, primary: Valkey) -> Valkey:
        return self.replicas[self.primaries.index(primary)]

    def fail_over(self, primary: Valkey) -> Valkey:
        """Have the replica of `primary` take its place, by hand and without loss; return the new primary."""
        replica = self.replica_of(primary)
        replica.client.execute_command("CLUSTER", "FAILOVER")
        self.wait_for_promotion(replica)
        return replica

    def wait_for_promotion(self, replica: Valkey) -> None:
        """Wait until all nodes that live take `replica` for a primary."""

        def is_promoted() -> bool:
            return all(any(entry[2][1] == replica.port for entry in hash_slots) for hash_slots in self._views())

        wait_until(is_promoted, "the replica is promoted")

    def flushall(self) -> None:
        for node in self.primaries:
            node.client.flushall()

    def tell(self, ports: Sequence[int]) -> bool:
        """Whether every node answers, and tells that the hash slots are at these ports."""
        return len(self._views()) == len(self.all) and all(
            {*ports} == {entry[2][1] for entry in view} for view in self._views()
        )

    def is_up(self) -> bool:
        """Whether every node knows all others, the hash slots are covered, and each replica is in step."""
        infos = [str(node.client.execute_command("CLUSTER INFO")) for node in self.all]
        hash_slots = [sum(last - first + 1 for first, last, *_ in view) for view in self._views()]
        is_known = all(f"'cluster_known_nodes': '{len(self.all)}'" in info for info in infos)
        links = [node.client.info("replication").get("master_link_status") for node in self.replicas]
        return (
            is_known
            and all("'cluster_state': 'ok'" in info for info in infos)
            and {*hash_slots} == {HASH_SLOTS}
            and all(link == "up" for link in links)
        )

    def _hash_slots(self) -> Any:
        return next(iter(self._views()))

    def _views(self) -> list[Any]:
        """What CLUSTER SLOTS says, of each node that answers."""
        views = []
        for node in self.all:
            pool = redis.ConnectionPool(port=node.port, socket_timeout=0.5)  # it does not try again
            with suppress(redis.ConnectionError, redis.TimeoutError), redis.Redis.from_pool(pool) as client:
                views.append(client.execute_command("CLUSTER SLOTS"))
        return views


def url_of(nodes: Nodes) -> str:
    """The URL of a Cluster, as `redislock_url` takes it."""
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes.primaries)


def node_id(node: Valkey) -> str:
    """The name of `node` in its Cluster."""
    return bytes(node.client.execute_command("CLUSTER", "MYID")).decode()


@contextmanager
def three_nodes(folder: Path, *, replicas: bool = False) -> Iterator[Nodes]:
    """Three primaries that share the hash slots; with one replica each, or none.

    Without replicas, the nodes that live answer for their hash slots while another is dead.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(_node(folder / f"node-{n}")) for n in range(6 if replicas else 3)]
        nodes = Nodes(servers[:3], servers[3:])
        for number, node in enumerate(servers):
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port, _bus(servers[0]))
        for number, node in enumerate(nodes.primaries):
            first, last = HASH_SLOTS * number // 3, HASH_SLOTS * (number + 1) // 3 - 1
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        for primary, replica in zip(nodes.primaries, nodes.replicas, strict=False):
            nodes.all_know(node_id(primary))
            replica.client.execute_command("CLUSTER", "REPLICATE", node_id(primary))
        wait_until(nodes.is_up, "the Cluster is up")
        yield nodes


def _bus(node: Valkey) -> int:
    return int(node.options[node.options.index("--cluster-port") + 1])


@contextmanager
def _node(folder: Path) -> Iterator[Valkey]:
    folder.mkdir(parents=True)
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    options += ["--cluster-node-timeout", str(NODE_TIMEOUT), "--cluster-require-full-coverage", "no"]
    options += ["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]
    options += ["--cluster-allow-replica-migration", "no"]  # a primary that has lost its last hash slot remains one
    with Valkey(folder, free_port(), options=options).serve() as server:
        yield server
