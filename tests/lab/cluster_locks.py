"""A Cluster of three nodes instead of the one lock server: with LAB_LOCKS=cluster, by `make matrix`.

What stands in for the one server, and for the proxy before it, does to all nodes what a test does to the one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis.cluster import RedisCluster

from tests.lab.nodes import Nodes, three_nodes
from tests.lab.proxy import Fault, Proxy
from tests.lab.servers import MAY_BE_LEFT, wait_until

#: What nodes and clients of a Cluster say to each other besides. A worker may meet a node only in the middle of a test.
_OF_CLUSTERS = {"cluster|slots", "cluster|nodes", "cluster|info", "cluster|myid", "command", "ping", "client|setinfo"}


class _Client(RedisCluster):
    def keys(self, pattern: str = "*", **_: Any) -> Any:
        """All keys; redis-py tells those of one node."""
        return list(self.scan_iter(match=pattern))

    def pubsub_channels(self, pattern: str = "*", **_: Any) -> Any:
        """The channels of all nodes; redis-py tells those of one."""
        return list(super().pubsub_channels(pattern, target_nodes=RedisCluster.PRIMARIES))


class ClusterLocks:
    """A Cluster instead of the one lock server, with as much of its interface as the tests need."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._at: dict[int, int] = {}
        self._announced = [node.port for node in nodes.primaries]
        self.client: Any = _Client(
            host="127.0.0.1",
            port=nodes.primaries[0].port,
            address_remap=lambda one: (one[0], self._at.get(one[1], one[1])),
        )

    def url(self) -> str:
        return _url(node.port for node in self.nodes.primaries)

    def each(self, do: Callable[[Any], object]) -> None:
        for node in self.nodes.primaries:
            do(node)

    def kill(self) -> None:
        self.each(lambda node: node.kill())

    def pause(self) -> None:
        self.each(lambda node: node.pause())

    def resume(self) -> None:
        self.each(lambda node: node.resume())

    def restart(self) -> None:
        self.kill()
        self.each(lambda node: node.restart())
        wait_until(self.nodes.is_up, "the Cluster is up again")

    def restart_one(self, number: int) -> None:
        """Kill one node, and start it again, empty, where it was."""
        node, announced = self.nodes.primaries[number], self._announced[number]
        node.restart()
        node.client.config_set("cluster-announce-port", announced)
        wait_until(lambda: self.nodes.tell(self._announced), "the nodes have heard of it")

    def held(self) -> list[bytes]:
        """As that of one server."""
        return [key for key in self.client.scan_iter() if not MAY_BE_LEFT(key)]

    def calls(self) -> dict[str, int]:
        """As that of one server, of all nodes together, but for what makes them a Cluster."""
        found: Counter[str] = Counter()
        for node in self.nodes.primaries:
            found.update(node.calls())
        return {name: count for name, count in found.items() if name not in _OF_CLUSTERS}

    @contextmanager
    def behind_proxy(self) -> Iterator[Proxies]:
        """A proxy before each node; the nodes tell its port instead of their own. `client` passes none of them."""
        with ExitStack() as stack:
            proxies = [stack.enter_context(Proxy(node.url()).serve()) for node in self.nodes.primaries]
            self._at.update((one.port, node.port) for one, node in zip(proxies, self.nodes.primaries, strict=True))
            try:
                self._announce([one.port for one in proxies])
                yield Proxies(proxies)
            finally:
                self._announce([node.port for node in self.nodes.primaries])

    def _announce(self, ports: list[int]) -> None:
        for node, port in zip(self.nodes.primaries, ports, strict=True):
            node.client.config_set("cluster-announce-port", port)
        self._announced = ports
        wait_until(lambda: self.nodes.tell(ports), "each node has told the others its port")
        self.client.nodes_manager.initialize()


class Proxies:
    """The proxies before all nodes, with as much of a `Proxy`'s interface as the tests need."""

    def __init__(self, proxies: list[Proxy]) -> None:
        self.all = proxies
        self.url = _url(one.port for one in proxies)
        for one in proxies:  # a fault strikes at whatever node its command comes first
            one._faults = proxies[0]._faults

    def drop_reply(self, *which: Any, **how: Any) -> Fault:
        return self.all[0].drop_reply(*which, **how)

    def drop_first_replies(self, *which: Any, **how: Any) -> Fault:
        return self.all[0].drop_first_replies(*which, **how)

    def drop_command(self, *which: Any, **how: Any) -> Fault:
        return self.all[0].drop_command(*which, **how)

    def delay(self, *which: Any, **how: Any) -> Fault:
        return self.all[0].delay(*which, **how)

    def hold(self, *which: Any, **how: Any) -> Fault:
        return self.all[0].hold(*which, **how)

    def cut(self) -> None:
        for one in self.all:
            one.cut()

    def refuse(self) -> None:
        for one in self.all:
            one.refuse()

    def blackhole(self) -> None:
        for one in self.all:
            one.blackhole()

    def mend(self) -> None:
        for one in self.all:
            one.mend()


@contextmanager
def cluster_locks(folder: Path) -> Iterator[ClusterLocks]:
    with three_nodes(folder) as nodes:
        locks = ClusterLocks(nodes)
        yield locks
        locks.client.close()


def _url(ports: Any) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
