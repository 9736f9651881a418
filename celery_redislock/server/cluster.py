"""The store of a Cluster: its client finds the node of a key, and a renewal stays in one slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from .cluster_client import ClusterClient
from .lines import Late
from .outage import Outage
from .scripts import Command, evaluate
from .store import LockStore
from .tokens import Token


class ClusterStore(LockStore):
    """The locks of a Cluster, over the user's own client, which knows the nodes and follows a key that has moved.

    That client resends a command by itself and does not say so. A release whose first reply was lost therefore finds no
    key when it is sent again, and the lock counts as lost.
    """

    def __init__(self, client: RedisCluster | ClusterClient, outage: Outage | None = None) -> None:
        self.outage = outage or Outage()
        self.known = set()
        self._cluster = client

    def renew(self, locks: Sequence[tuple[str, Token, float]]) -> list[bool]:
        """As `LockStore.renew`, in one round trip for each slot."""
        by_slot: dict[int, list[tuple[str, Token, float]]] = {}
        for lock in locks:
            by_slot.setdefault(self._cluster.keyslot(lock[0]), []).append(lock)
        renewed: dict[tuple[str, Token, float], bool] = {}
        for of_slot in by_slot.values():
            renewed |= zip(of_slot, super().renew(of_slot), strict=True)
        return [renewed[lock] for lock in locks]

    def _on_line(self, command: Command) -> Any:
        try:
            return evaluate(self._cluster, command)
        except RedisClusterException as error:  # redis-py does not derive it from RedisError
            raise RedisError(str(error)) from error

    def _send_late(self, late: Late) -> None:
        """Read the answer at once: the client of a Cluster follows a key that has moved, and must see the answer."""
        late.told(self._on_line(late.command))

    def read_late(self, seconds: float, longest: float) -> bool:
        """There is nothing to read."""
        return False
