"""The store and the wake-ups of a Cluster: its client finds the node of a key, and a renewal stays in one slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from .connect import derive
from .outage import Outage
from .store import LockStore
from .tokens import Token
from .wake_ups import MAX_WAITERS, TURN, WakeUps

T = TypeVar("T")


class ClusterStore(LockStore):
    """The locks of a Cluster, over the user's own client, which knows the nodes and follows a key that has moved.

    That client resends a command by itself and does not say so. A release whose first reply was lost therefore finds no
    key when it is sent again, and the lock counts as lost.
    """

    def __init__(self, client: RedisCluster, outage: Outage | None = None) -> None:
        self.outage = outage or Outage()
        self._cluster = client

    def renew(self, locks: Sequence[tuple[str, Token, float]]) -> list[bool]:
        """As `LockStore.renew`, in one round trip for each slot."""
        by_slot: dict[int, list[tuple[str, Token, float]]] = {}
        for lock in locks:
            by_slot.setdefault(self._cluster.keyslot(lock[0]), []).append(lock)  # type: ignore[no-untyped-call]
        renewed: dict[tuple[str, Token, float], bool] = {}
        for of_slot in by_slot.values():
            renewed |= zip(of_slot, super().renew(of_slot), strict=True)
        return [renewed[lock] for lock in locks]

    def _on_line(self, command: Callable[..., T], *args: Any) -> T:
        try:
            return command(self._cluster, *args)
        except RedisClusterException as error:  # redis-py does not derive it from RedisError
            raise RedisError(str(error)) from error


class ClusterWakeUps(WakeUps):
    """Where a waiter on a Cluster blocks: on the node that has the key."""

    def __init__(self, client: RedisCluster) -> None:
        self._cluster = client
        self._nodes: dict[str, WakeUps] = {}

    def wait(self, key: str, timeout: float, poll: float) -> None:
        """As `WakeUps.wait`."""
        cluster: Any = self._cluster
        node = cluster.get_node_from_key(key)
        if node.name not in self._nodes:
            client = derive(cluster.get_redis_connection(node), MAX_WAITERS, wait_for_reply=TURN)
            self._nodes.setdefault(node.name, WakeUps(client))
        self._nodes[node.name].wait(key, timeout, poll)
