"""A lock server that is wrong from the start: one line for each way, with the setting, the remedy and no password."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import redis

from celery_redislock.worker.server_check import try_lock_server
from tests.lab.app import make_app
from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey, free_port, wait_until
from tests.lab.topologies import WATCHED, cluster, sentinel

SECRET = "hunter2"  # noqa: S105 - nobody's
MASTER = {"master_name": WATCHED, "sentinel_kwargs": {"password": SECRET}}


SHORT = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
#: All leases must outlast one command, which may ask several Sentinels or nodes.
LEASES = {"*": {"lock_lease": 30.0}}


def users(server):
    """The connections of clients; replicas and Sentinels have others."""
    return len(server.client_list(_type="normal"))


@pytest.fixture
def config(config):
    """Of an app with a task that has a lock, whatever else a test names."""
    return replace(config, tasks=["once", *config.tasks])


@pytest.fixture
def said(config, caplog):
    """Asks for an app with these settings, and returns the level and the text of the one line that it logs."""

    def ask_and_look(**settings):
        caplog.set_level(logging.WARNING, "celery_redislock")
        config.settings.update({"redislock_url": None, "task_annotations": LEASES, **settings})
        config.settings["redislock_client_options"] = {**SHORT, **settings.get("redislock_client_options", {})}
        try_lock_server(make_app(config))
        (record,) = caplog.records
        assert SECRET not in record.getMessage()
        assert "\n" not in record.getMessage()
        return record.levelno, record.getMessage()

    return ask_and_look


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The port of a single server."""
    with Valkey(tmp_path_factory.mktemp("plain"), free_port()).serve() as server:
        yield server.port


@pytest.fixture(scope="module")
def watching(tmp_path_factory):
    """The port of a Sentinel."""
    with sentinel(tmp_path_factory.mktemp("sentinel"), WATCHED) as port:
        yield port


def test_the_setting_that_names_the_server_is_named(said):
    level, line = said(broker_url=f"redis://:{SECRET}@127.0.0.1:{free_port()}/0")
    assert (level, line.count("check broker_url")) == (logging.WARNING, 1)


@pytest.mark.parametrize("command", ["EVALSHA", "TIME"])
def test_a_command_that_is_renamed_is_one_of_the_remedies(said, tmp_path, command):
    with Valkey(tmp_path, options=["--rename-command", command, "secret"]).serve() as server:
        level, line = said(redislock_url=server.url())
    assert level == logging.ERROR
    assert "nknown command" in line
    assert "must not rename commands" in line


@pytest.mark.parametrize("is_local", [True, False])
def test_a_server_with_too_many_clients_is_not_taken_for_a_wrong_address(said, tmp_path, is_local):
    """On a unix socket it has often closed the connection before anything is written, and nobody reads what it said."""
    with Valkey(tmp_path, None if is_local else free_port()).serve() as server, server.connect() as other:
        other.ping()
        server.client.config_set("maxclients", 2)
        level, line = said(redislock_url=server.url())
    assert level == logging.WARNING
    expected = ["max number of clients reached; its maxclients is reached: raise it"]
    expected += ["Broken pipe; it has closed the connection: its maxclients may be reached"] * is_local
    assert any(words in line for words in expected)
    assert "rediss" not in line


class TestSentinels:
    def test_right_ones_are_left_without_a_connection(self, config, watching, caplog):
        config.locks = f"sentinel://127.0.0.1:{watching}"
        config.settings.update(redislock_client_options={"master_name": WATCHED, **SHORT}, task_annotations=LEASES)
        with redis.Redis(port=watching, protocol=2) as sentinel:
            primary = sentinel.sentinel_masters()[WATCHED]["port"]
            with redis.Redis(port=primary) as server:
                before = users(sentinel), users(server)
                try_lock_server(make_app(config))
                assert caplog.records == []
                wait_until(lambda: (users(sentinel), users(server)) == before, "both have seen that it is closed")

    def test_none_is_there(self, said):
        urls = ";".join(f"sentinel://shop:{SECRET}@127.0.0.1:{free_port()}/0" for _ in range(2))
        level, line = said(broker_url=urls, broker_transport_options=MASTER)
        assert level == logging.ERROR
        assert f"?master_name={WATCHED} cannot be used: MasterNotFoundError: No master found" in line
        assert "check master_name and the Sentinels' own sentinel_kwargs in broker_transport_options" in line

    def test_they_do_not_know_the_primary(self, said, watching):
        options = {"master_name": "nobody"}
        level, line = said(redislock_url=f"sentinel://127.0.0.1:{watching}", redislock_client_options=options)
        assert level == logging.ERROR
        assert "No master found for 'nobody'; no Sentinel names a primary: check master_name and" in line
        assert "in redislock_client_options" in line

    def test_what_answers_is_no_sentinel(self, said, plain):
        level, line = said(redislock_url=f"sentinel://127.0.0.1:{plain}", redislock_client_options=MASTER)
        assert level == logging.ERROR
        assert "check " in line
        assert "redislock_url" in line

    def test_what_answers_is_a_sentinel_and_not_a_server(self, said, watching):
        level, line = said(redislock_url=f"redis://127.0.0.1:{watching}")
        assert level == logging.ERROR
        assert "check redislock_url: its scheme must match the server" in line


class TestCluster:
    def test_a_right_one_is_left_without_a_connection(self, config, tmp_path, caplog):
        with cluster(tmp_path) as port, redis.Redis(port=port) as node:
            config.locks = f"redis+cluster://127.0.0.1:{port}"
            config.settings.update(redislock_client_options=SHORT, task_annotations=LEASES)
            before = users(node)
            try_lock_server(make_app(config))
            assert caplog.records == []
            wait_until(lambda: users(node) == before, "it has seen that it is closed")

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_no_node_is_there(self, said, nodes):
        hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(nodes))
        level, line = said(redislock_url=f"redis+cluster://shop:{SECRET}@{hosts}")
        assert level == logging.WARNING
        assert f"the lock server redis+cluster://shop@{hosts} cannot be used" in line
        assert "; nothing listens there: check redislock_url" in line

    def test_what_answers_is_no_cluster(self, said, plain):
        level, line = said(redislock_url=f"redis+cluster://127.0.0.1:{plain}")
        assert level == logging.ERROR
        assert "cluster support disabled; check redislock_url: its scheme must match the server" in line

    def test_some_of_its_hash_slots_are_served_by_nobody(self, said, tmp_path):
        with cluster(tmp_path) as port, redis.Redis(port=port) as node:
            node.execute_command("CLUSTER", "DELSLOTSRANGE", 0, 8191)
            _, line = said(redislock_url=f"redis+cluster://127.0.0.1:{port}")
        assert "CLUSTER INFO" in line

    def test_a_wrong_password(self, said, tmp_path):
        with cluster(tmp_path) as port, redis.Redis(port=port) as node:
            node.config_set("requirepass", "right")
            level, line = said(redislock_url=f"redis+cluster://:{SECRET}@127.0.0.1:{port}")
        assert level == logging.ERROR
        assert "; check the user and the password in redislock_url" in line


class TestWhatIsSentMeanwhile:
    """The worker starts all the same, and what is sent runs as soon as the server can be used."""

    def test_runs_once_the_sentinels_know_the_primary(self, config, start_worker, tmp_path, app, tasks):
        with sentinel(tmp_path, WATCHED) as port, redis.Redis(port=port, protocol=2) as watcher:
            primary = watcher.sentinel_masters()[WATCHED]["port"]
            watcher.sentinel_remove(WATCHED)
            config.locks = f"sentinel://127.0.0.1:{port}"
            options = {"master_name": WATCHED, **SHORT}
            config.settings.update(redislock_client_options=options, task_annotations=LEASES)
            app.conf.update(redislock_url=config.locks, redislock_client_options=options, task_annotations=LEASES)
            worker = start_worker(1)
            assert worker.output().count("no Sentinel names a primary: check master_name") == 1
            result = tasks.work.delay("k", "item")
            wait_until(lambda: "is unavailable: MasterNotFoundError" in worker.output(), "it has tried to run")
            watcher.sentinel_monitor(WATCHED, "127.0.0.1", primary, 1)
            assert result.get(timeout=30) == "item"

    def test_runs_once_a_node_of_the_cluster_answers(self, config, start_worker, tmp_path, app, tasks):
        with cluster(tmp_path) as port, Proxy(f"redis://127.0.0.1:{port}").serve() as proxy:
            proxy.refuse()
            config.locks = f"redis+cluster://127.0.0.1:{proxy.port}"
            options = SHORT
            config.settings.update(redislock_client_options=options, task_annotations=LEASES)
            app.conf.update(redislock_url=config.locks, redislock_client_options=options, task_annotations=LEASES)
            worker = start_worker(1)
            assert worker.output().count("cannot be used: ConnectionError: no node of the Cluster") == 1
            result = tasks.work.delay("k", "item")
            wait_until(lambda: "the lock server is unavailable:" in worker.output(), "it has tried to run")
            proxy.mend()
            assert result.get(timeout=30) == "item"
