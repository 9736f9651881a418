"""The app's lock server is a Cluster, named by its URL; the three nodes of a real one are in other modules here."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from celery_redislock import Lock, LockUnavailable
from celery_redislock.connection.connect import address, connect
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol.names import Demand
from celery_redislock.worker.server_check import try_lock_server
from tests.lab.proxy import Proxy
from tests.lab.renewals import renew
from tests.lab.servers import free_port, wait_until
from tests.lab.topologies import cluster


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as port:
        yield port


@pytest.fixture
def client(port):
    client = connect(f"redis+cluster://127.0.0.1:{port}", {})
    yield client
    with redis.Redis(port=port) as node:
        node.flushall()
    LockServer.behind(client).stop()
    client.close()


def test_a_lock_works_over_its_url(client):
    with Lock(client, "stock", timeout=30, renew=True) as held:
        assert held.owned()
        renew(held)
        assert not Lock(client, "stock").acquire(blocking_timeout=0.2)
        held.check()
    assert Lock(client, "stock", timeout=10).acquire(blocking_timeout=10)


def test_the_client_connects_with_its_first_command_and_again_where_that_has_failed(port):
    with Proxy(f"redis://127.0.0.1:{port}").serve() as proxy:
        proxy.refuse()
        client = connect(f"redis+cluster://127.0.0.1:{proxy.port}", {"socket_timeout": 0.5})
        lock = Lock(client, "stock", timeout=10)
        with pytest.raises(LockUnavailable, match=r"no node of the Cluster .* answers"):
            lock.acquire()
        proxy.mend()
        wait_until(lambda: acquired(lock), "the Cluster answers")
        lock.release()
        client.close()


def test_no_more_connections_to_a_node_are_used_than_the_user_allows(port):
    client = connect(f"redis+cluster://127.0.0.1:{port}", {"max_connections": 2, "socket_timeout": 10.0})
    server = LockServer(client)
    server.store.inspect(Demand("stock"))  # the script is known from here on
    with redis.Redis(port=port) as node, ThreadPoolExecutor(6) as threads:
        node.client_pause(10_000, all=False)  # scripts count as writes
        looks = [threads.submit(server.store.inspect, Demand("stock")) for _ in range(6)]
        wait_until(lambda: node.info("clients")["blocked_clients"] >= 2, "two are sent")
        time.sleep(0.5)  # for the others
        blocked = node.info("clients")["blocked_clients"]
        node.client_unpause()
        assert [look.result() for look in looks] == [None] * 6
    assert blocked == 2
    server.stop()
    client.close()


def acquired(lock):
    try:
        return lock.acquire()
    except LockUnavailable:
        return False


def test_some_of_the_nodes_in_the_url_may_be_away(port):
    client = connect(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{port}", {})
    with Lock(client, "stock", timeout=10) as lock:
        assert lock.owned()
    client.close()


def test_it_is_shown_without_its_password(port):
    client = connect(f"redis+cluster://user:hunter2@127.0.0.1:{port},other:7001", {})
    assert address(client) == f"redis+cluster://user@127.0.0.1:{port},other:7001"
    assert "hunter2" not in repr(client)


@pytest.fixture
def config(config, port):
    config.locks = f"redis+cluster://127.0.0.1:{port}"
    # A command that fails may take the time-outs of the node, and those of each node that is asked for the hash slots.
    config.settings["redislock_client_options"] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
    config.settings["task_annotations"] = {"*": {"lock_lease": 30.0}}
    yield config
    with redis.Redis(port=port) as client:
        client.flushall()


def test_a_worker_that_starts_leaves_no_connection(config, app, port):
    with redis.Redis(port=port) as node:

        def connections():
            return {one["id"] for one in node.client_list()}

        before = connections()
        gc.disable()
        try:
            try_lock_server(app)
            wait_until(lambda: connections() <= before, "the server has seen that it is closed")
        finally:
            gc.enable()


def test_tasks_run_one_after_the_other_and_wait_in_line(config, tasks, start_worker, ledger):
    worker = start_worker(2)
    assert "lock server" not in worker.output()
    results = [tasks.work.delay("k", number, 0.1) for number in range(3)]
    assert [result.get(timeout=20) for result in results] == [0, 1, 2]
    assert ledger.most_at_once() == 1
