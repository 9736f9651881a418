"""What the tests of pools and brokers share."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.lab.servers import need_pool
from tests.lab.workers import Worker

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")
GREEN_POOLS = ("gevent", "eventlet")
#: Each pool is tested on Redis; by `make matrix` on the other brokers too.
BROKERS = ("redis", "rabbitmq", "rabbitmq 4", "quorum") if os.environ.get("LAB_EVERY_BROKER") == "1" else ("redis",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a pool runs in every pool, unless it names those for which it holds."""
    named = {name for mark in metafunc.definition.iter_markers("parametrize") for name in mark.args[0].split(",")}
    if "pool" in metafunc.fixturenames and "pool" not in named:
        metafunc.parametrize("pool", POOLS)
    if "pool" in metafunc.fixturenames and "broker" not in named and "broker_proxy" not in metafunc.fixturenames:
        metafunc.parametrize("broker", BROKERS, indirect=True)


@pytest.fixture
def start(start_worker: Callable[..., Worker], pool: str) -> Callable[..., Worker]:
    """Starts workers of the test's pool: ``start(slots)``. A worker of the pool ``solo`` has one slot."""
    need_pool(pool)
    return lambda slots=4, *options: start_worker(slots, "-P", pool, *options)


@pytest.fixture
def start_both(start: Callable[..., Worker]) -> Callable[[], list[Worker]]:
    """Starts two workers, so that one message can meet another in every pool."""
    return lambda: [start(2), start(2)]
