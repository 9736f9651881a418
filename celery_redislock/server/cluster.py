"""The store of a Cluster: its client finds the node of a key, and a renewal stays in one slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from .outage import Outage
from .store import LockStore
from .tokens import Token

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
