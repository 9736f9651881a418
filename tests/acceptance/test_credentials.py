"""The credential provider of the lock server fails: that is an outage, and no task fails."""

from __future__ import annotations

from asyncio import run, sleep

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock import LockUnavailable, asyncio
from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol.names import Demand
from tests.lab.app import make_app
from tests.lab.kinds import OPTIONS, needs_one_server
from tests.lab.servers import wait_until
from tests.lab.vault import CLOSED, Vault


@pytest.fixture
def vault(tmp_path, monkeypatch):
    """While this file is there, the vault is closed."""
    file = tmp_path / "closed"
    monkeypatch.setenv(CLOSED, str(file))
    return file


@needs_one_server("its users are others")
def test_runs_wait_until_the_vault_is_open_again_and_locks_are_renewed_from_then_on(
    vault, config, private_locks, start_worker, ledger, gate
):
    config.settings["redislock_client_options"] = {**OPTIONS, "credential_provider": "tests.lab.vault:Vault"}
    app, worker = make_app(config), start_worker(2)
    long = app.tasks["lab.counted"].delay("long", "long", gate)
    wait_until(ledger.running, "it runs")
    vault.touch()
    private_locks.client.client_kill_filter(_type="normal", skipme=True)
    results = [app.tasks["lab.counted"].delay(number, number) for number in range(4)]
    wait_until(lambda: worker.output().count("trying again in") >= 4, "each has met the closed vault")
    vault.unlink()
    gate.open()
    assert [result.get(timeout=60) for result in [long, *results]] == [["long", 0], *([n, 0] for n in range(4))]
    assert "is unavailable: ConnectionError: the credential provider failed: LookupError: the vault is closed" in (
        worker.output()
    )
    assert "Traceback" not in worker.output()
    app.close()


@needs_one_server("its users are others")
def test_a_provider_that_fails_is_an_outage_and_the_next_connection_asks_it_again(vault, private_locks):
    store = LockStore.of(connect(private_locks.url(), {"credential_provider": Vault()}))
    vault.touch()
    with pytest.raises(LockUnavailable, match="the credential provider failed: LookupError: the vault is closed"):
        store.inspect(Demand("stock"))
    vault.unlink()
    assert store.inspect(Demand("stock")) is None
    store.close()


@needs_one_server("its users are others")
def test_a_provider_that_fails_is_an_outage_for_coroutines_too(vault, lock_proxy):
    """Over a socket file, redis-py makes a ConnectionError of it."""

    async def take_release_and_take_again() -> None:
        lock = asyncio.Lock(connect(lock_proxy.url, {"credential_provider": Vault()}), "stock", timeout=10)
        vault.touch()
        with pytest.raises(LockUnavailable, match="the credential provider failed: LookupError: the vault is closed"):
            await lock.acquire()
        vault.unlink()
        while not await taken(lock):  # one caller at a time asks whether the server can be reached
            await sleep(0.1)
        await lock.release()

    async def taken(lock: asyncio.Lock) -> bool:
        try:
            return await lock.acquire()
        except LockUnavailable:
            return False

    run(take_release_and_take_again())


@needs_one_server("its users are others")
def test_a_time_limit_amid_the_provider_is_no_outage(private_locks):
    class Slow(Vault):
        def get_credentials(self):
            raise SoftTimeLimitExceeded

    store = LockStore.of(connect(private_locks.url(), {"credential_provider": Slow()}))
    with pytest.raises(SoftTimeLimitExceeded):
        store.inspect(Demand("stock"))
    store.close()
