"""The lock servers with which `make matrix` runs the acceptance tests do what those tests do to one Valkey."""

from __future__ import annotations

from contextlib import suppress

import pytest

from celery_redislock import Lock, LockUnavailable
from celery_redislock.connection.connect import connect, disconnect
from celery_redislock.lock.lock_server import LockServer
from tests.lab.lock_servers import AclLocks, SentinelLocks, TlsLocks, behind_proxy
from tests.lab.servers import wait_until


@pytest.fixture(params=[AclLocks, SentinelLocks, TlsLocks], ids=["acl", "sentinel", "tls"])
def server(request, tmp_path):
    (tmp_path / "locks").mkdir()
    with request.param(tmp_path / "locks").serve() as server:
        yield server


@pytest.fixture
def proxy(server):
    with behind_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def app_client(proxy):
    """Connected as the app is."""
    client = connect(proxy.url, {"socket_timeout": 2.0, "socket_connect_timeout": 2.0})
    yield client
    LockServer.behind(client).stop()
    disconnect(client)


def take_a_lock(client):
    with Lock(client, "redislock:{stock}", timeout=10) as lock:
        return lock.owned()


def test_a_lock_passes_the_proxy_and_meets_its_faults(server, proxy, app_client):
    assert take_a_lock(app_client)
    server.calls()
    fault = proxy.drop_reply(where=b"stock")
    assert take_a_lock(app_client)
    assert fault.struck
    assert "ping" not in server.calls(), "nobody but the app asks"
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        take_a_lock(app_client)
    proxy.mend()
    wait_until(lambda: answers(app_client), "it answers again")


def answers(client):
    with suppress(LockUnavailable):
        return take_a_lock(client)


@pytest.mark.usefixtures("proxy")
def test_it_is_empty_at_the_same_address_after_a_restart(server, app_client):
    with Lock(app_client, "redislock:{stock}", timeout=10):
        assert server.held() == [b"redislock:{stock}"]
        server.restart()
        assert server.held() == []
    assert take_a_lock(app_client)
