"""The app's lock server is behind Sentinels, which its URL names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery import Celery

from celery_redislock import Lock, LockUnavailable
from celery_redislock.app import client_of
from celery_redislock.connection.connect import address, connect
from celery_redislock.lock.lock_server import LockServer
from tests.lab.renewals import renew
from tests.lab.servers import free_port, wait_until
from tests.lab.topologies import WATCHED, pair, sentinel
from tests.lab.workers import kept

PASSWORD = "hunter2"  # noqa: S105 - the Sentinel's own
#: A command that fails may take the time-outs of the primary, and those of each Sentinel in the URL.
SHORT = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
SHORTER = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Of a Sentinel with a password of its own."""
    with sentinel(tmp_path_factory.mktemp("sentinel"), WATCHED, f"requirepass {PASSWORD}") as port:
        yield port


def hosts(*ports):
    return ";".join(f"sentinel://127.0.0.1:{port}/0" for port in ports)


def locks_over(client):
    """Hold a lock, have it renewed, and let another wait for it: each of the three asks over connections of its own."""
    held, other = (Lock(client, "stock", timeout=30, renew=True, thread_local=False) for _ in range(2))
    try:
        with ThreadPoolExecutor() as threads, held:
            assert held.owned()
            waits = threads.submit(other.acquire, blocking_timeout=30)
            wait_until(lambda: client.exists("{stock}:line"), "it stands in line")
            renew(held)
            assert not waits.done()
        assert waits.result()
        other.release()
    finally:
        LockServer.behind(client).stop()
        client.connection_pool.disconnect()


@pytest.mark.parametrize("separator", [";sentinel://127.0.0.1:", ",127.0.0.1:"])
def test_a_lock_works_over_a_url_where_the_first_sentinel_is_dead(port, separator):
    url = f"sentinel://127.0.0.1:{free_port()}{separator}{port}"
    client = connect(url, {"master_name": WATCHED, "sentinel_kwargs": {"password": PASSWORD}})
    locks_over(client)


@pytest.mark.parametrize("where", ["broker", "result backend"])
def test_what_celery_knows_of_its_sentinels_is_taken_over(port, where):
    options = {"master_name": WATCHED, "sentinel_kwargs": {"password": PASSWORD, **SHORT}}
    with Celery(set_as_current=False) as app:
        if where == "broker":
            app.conf.update(broker_url=hosts(free_port(), port), broker_transport_options=options)
        else:
            app.conf.update(
                broker_url="memory://", result_backend=hosts(port), result_backend_transport_options=options
            )
        locks_over(client_of(app))


def test_a_wrong_password_of_the_sentinels_is_in_no_error(port):
    client = connect(hosts(port), {"master_name": WATCHED, "sentinel_kwargs": {"password": "wrong-secret"}})
    with pytest.raises(LockUnavailable, match=f"No master found for '{WATCHED}'") as refused:
        Lock(client, "stock", timeout=10).acquire()
    assert "wrong-secret" not in str(refused.value) + repr(client)


def test_it_is_shown_without_its_passwords():
    options = {"master_name": WATCHED, "sentinel_kwargs": {"password": PASSWORD}}
    client = connect("sentinel://shop:hunter3@one:26379/3;sentinel://two", options)
    assert address(client) == f"sentinel://shop@one:26379,two:26379/3?master_name={WATCHED}"
    assert "hunter" not in repr(client)


def test_more_callers_than_connections_wait_for_one(port):
    options = {"master_name": WATCHED, "sentinel_kwargs": {"password": PASSWORD}, "max_connections": 2}
    client = connect(hosts(port), options)
    pool = client.connection_pool
    taken = [pool.get_connection() for _ in range(2)]
    pool.timeout = 0.05
    with pytest.raises(redis.ConnectionError, match="No connection available"):
        pool.get_connection()
    for connection in taken:
        pool.release(connection)
    assert pool.get_connection() in taken
    pool.disconnect()


class TestFailover:
    @pytest.fixture
    def servers(self, tmp_path):
        with pair(tmp_path / "pair") as servers:
            yield servers

    @pytest.fixture
    def config(self, config, servers):
        config.locks = hosts(free_port(), *servers.ports[:2])
        options = {"master_name": WATCHED, "sentinel_kwargs": SHORTER, **SHORT}
        config.settings["redislock_client_options"] = options
        config.settings["task_annotations"] = {"*": {"lock_lease": 30.0}}
        return config

    def test_in_the_middle_of_runs_and_waits_all_tasks_finish_one_after_the_other(
        self, config, servers, app, tasks, start_worker, ledger, running, gate
    ):
        worker = start_worker(2)
        assert "lock server" not in worker.output()
        results = [tasks.work.delay("k", 0, gate)]
        running(0)
        results += [tasks.work.delay("k", number, 0.1) for number in (1, 2)]
        wait_until(lambda: kept(app) == 2, "two wait")
        key = tasks.work.lock_for("k").key
        wait_until(lambda: servers.replica.client.exists(key), "the key has been replicated")
        # A replica that sees its link broken is asked for its state so seldom that these quick Sentinels distrust it.
        servers.link.blackhole()
        servers.primary.kill()
        servers.wait_for_failover()
        gate.open()
        results += [tasks.work.delay(number, number) for number in (3, 4)]
        assert [result.get(timeout=30) for result in results] == [0, 1, 2, 3, 4]
        assert ledger.overlaps() == []
        assert ledger.losses() == []
