"""Lock servers of more than one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis.cluster import RedisCluster

from tests.lab.ledger import Ledger
from tests.lab.nodes import Nodes, three_nodes
from tests.lab.servers import Valkey, wait_until


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with three_nodes(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def nodes(three: Nodes) -> Nodes:
    """Three primaries, empty. A test may move slots and pause nodes, and must leave all nodes alive."""
    three.flushall()
    return three


@pytest.fixture
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three primaries with a replica each, of the test's own."""
    with three_nodes(tmp_path_factory.mktemp("replicated"), replicas=True) as nodes:
        yield nodes


@pytest.fixture
def client(nodes: Nodes) -> Iterator[RedisCluster]:
    client = nodes.client(socket_timeout=0.5, socket_connect_timeout=0.5)
    yield client
    client.close()


@pytest.fixture
def running(ledger: Ledger) -> Callable[..., int]:
    """Waits until a run of this item has begun; returns the child's pid."""

    def wait(item: object = "") -> int:
        wait_until(lambda: str(item) in ledger.items(), f"{item} runs")
        return [run.pid for run in ledger.runs() if run.item == str(item)][-1]

    return wait


@pytest.fixture
def nothing_is_left(locks: Valkey) -> Callable[[], None]:
    """Waits until Redis is empty. A lease is 30 s if nothing else is said, and a message keeps its key for an hour."""
    return lambda: wait_until(lambda: locks.held() == [], "nothing is left", 10)
