"""Lock servers of more than one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.cluster import RedisCluster

from tests.lab.nodes import Nodes, three_nodes


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with three_nodes(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def nodes(three: Nodes) -> Nodes:
    """Three primaries, empty. A test may move hash slots and pause nodes, and must leave all nodes alive."""
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
