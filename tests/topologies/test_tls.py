"""The app's lock server speaks TLS: Debian's Redis, a private authority, and a certificate of the client."""

from __future__ import annotations

import gc
import logging
import traceback

import pytest
from celery import Celery

from celery_redislock import Lock, LockUnavailable
from celery_redislock.app import client_of
from celery_redislock.connection.connect import connect, disconnect
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.worker.server_check import try_lock_server
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.tls import Certificates, tls_cluster, tls_sentinel, tls_server
from tests.lab.topologies import WATCHED
from tests.lab.workers import kept

PASSWORD = "hunter2"  # noqa: S105 - the test server's
#: redis-py leaves a socket whose handshake has failed to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def no_socket_is_left():
    """Not to the next test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates.for_server(tmp_path_factory.mktemp("tls") / "right")


@pytest.fixture(scope="module")
def port(tmp_path_factory, certificates):
    with tls_server(tmp_path_factory.mktemp("redis"), certificates) as port:
        yield port


@pytest.fixture(scope="module")
def misnamed(tmp_path_factory):
    """The port of a server whose certificate is for another name, and its certificates."""
    certificates = Certificates.for_server(tmp_path_factory.mktemp("tls") / "other", "other.example")
    with tls_server(tmp_path_factory.mktemp("misnamed"), certificates) as port:
        yield port, certificates


def take_a_lock(client):
    try:
        with Lock(client, "stock", timeout=10) as lock:
            return lock.owned()
    finally:
        LockServer.behind(client).stop()
        disconnect(client)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_a_lock_works_where_both_sides_show_certificates_of_a_private_authority(port, certificates, scheme):
    assert take_a_lock(connect(f"{scheme}://localhost:{port}", certificates.of_client))


def test_what_celery_knows_of_its_brokers_tls_is_taken_over(port, certificates):
    with Celery(broker=f"redis://localhost:{port}", set_as_current=False) as app:
        app.conf.broker_use_ssl = {"ssl_cert_reqs": "required", **certificates.of_client}
        assert take_a_lock(client_of(app))


def test_a_wrong_name_is_refused_unless_names_are_not_to_be_checked(misnamed):
    port, certificates = misnamed
    with pytest.raises(LockUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*not valid for 'localhost'"):
        take_a_lock(connect(f"rediss://localhost:{port}", certificates.of_client))
    assert take_a_lock(connect(f"rediss://localhost:{port}", {**certificates.of_client, "ssl_check_hostname": False}))


def test_an_untrusted_certificate_is_refused_unless_the_user_says_otherwise(port, misnamed, certificates):
    others = {**certificates.of_client, "ssl_ca_certs": misnamed[1].of_client["ssl_ca_certs"]}
    with pytest.raises(LockUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        take_a_lock(connect(f"rediss://localhost:{port}", others))
    assert take_a_lock(connect(f"rediss://localhost:{port}?ssl_cert_reqs=CERT_NONE", others))


def test_the_server_refuses_who_shows_no_certificate(port, certificates):
    with pytest.raises(LockUnavailable):
        take_a_lock(connect(f"rediss://localhost:{port}", {"ssl_ca_certs": certificates.of_client["ssl_ca_certs"]}))


def test_a_worker_says_what_is_wrong_with_the_certificate(config, misnamed, caplog):
    port, certificates = misnamed
    config.locks = f"rediss://:{PASSWORD}@localhost:{port}/0"
    short = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}  # the leases of the lab's tasks are as short
    config.settings["redislock_client_options"] = {**certificates.of_client, **short}
    caplog.set_level(logging.WARNING, "celery_redislock")
    try_lock_server(make_app(config))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"the lock server rediss://localhost:{port}/0 cannot be used" in record.getMessage()
    assert "check whether it speaks TLS (rediss://), and the ssl_ options" in record.getMessage()
    assert PASSWORD not in record.getMessage()


def test_sentinels_and_their_primary_speak_it_too(tmp_path, certificates):
    with tls_sentinel(tmp_path, certificates, WATCHED) as port:
        tls = {"ssl": True, **certificates.of_client}
        options = {"master_name": WATCHED, "sentinel_kwargs": tls, **tls}
        assert take_a_lock(connect(f"sentinel://localhost:{port}", options))
        with Celery(broker=f"sentinel://localhost:{port}", set_as_current=False) as app:
            app.conf.broker_transport_options = {"master_name": WATCHED, "sentinel_kwargs": tls}
            app.conf.broker_use_ssl = {"ssl_cert_reqs": "required", **certificates.of_client}
            assert take_a_lock(client_of(app))


def test_the_nodes_of_a_cluster_speak_it_too(tmp_path, certificates):
    with tls_cluster(tmp_path, certificates) as port:
        assert take_a_lock(connect(f"rediss+cluster://localhost:{port}", certificates.of_client))
        with pytest.raises(LockUnavailable) as refused:
            take_a_lock(connect(f"rediss+cluster://localhost:{port}", {}))
        assert "CERTIFICATE_VERIFY_FAILED" in "".join(traceback.format_exception(refused.value))


@pytest.fixture
def config(config, tmp_path, certificates):
    """Locks and messages are on one server with TLS; the app says so once."""
    user = ["--user", "shop", "on", f">{PASSWORD}", "~*", "&*", "+@all"]
    with tls_server(tmp_path / "broker", certificates, *user) as port:
        config.broker = f"rediss://shop:{PASSWORD}@localhost:{port}/0"
        config.locks = None
        config.settings["broker_use_ssl"] = {"ssl_cert_reqs": "required", **certificates.of_client}
        yield config


def test_tasks_lock_on_their_broker_with_tls_and_a_user(config, app, tasks, start_worker, ledger, gate):
    worker = start_worker(2)
    assert "lock server" not in worker.output()
    results = [tasks.work.delay("k", number, gate) for number in range(3)]
    wait_until(lambda: kept(app) > 0, "one waits")
    gate.open()
    assert [result.get(timeout=20) for result in results] == [0, 1, 2]
    assert ledger.overlaps() == []
    assert PASSWORD not in worker.output()
