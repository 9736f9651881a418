"""Locks on a real server, without a worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from celery import Celery, states
from celery._state import _set_task_join_will_block
from celery.app.trace import trace_task

from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.hold.keeper import Keeper
from celery_redislock.message.delivery import DELIVERY
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand, keys_of
from celery_redislock.protocol.scripts import Note
from celery_redislock.protocol.tokens import Attempt
from tests.lab import offers
from tests.lab.app import Config
from tests.lab.arrivals import arrived
from tests.lab.asking import acquire
from tests.lab.servers import Valkey, wait_until

KEY = "redislock:{shop.bill:7}"
ONE = Demand(KEY)


@pytest.fixture
def client(locks: Valkey) -> Iterator[redis.Redis]:
    """Patient: on a busy machine a short time-out would be an outage."""
    client = connect(locks.url(), {"socket_timeout": 15.0, "socket_connect_timeout": 15.0})
    yield client
    client.close()


@pytest.fixture
def store(client: redis.Redis) -> LockStore:
    return LockStore.of(client)


@pytest.fixture
def keeper(store: LockStore) -> Iterator[Keeper]:
    keeper = Keeper(store, command_time=1.0, sends_late=store)
    yield keeper
    keeper.stop()  # it must not look for this test's keys


def look_all_at_once(store: LockStore, server: redis.Redis, count: int) -> None:
    """So many look at a key at the same time, each on its own connection; `server` is reached without the proxy."""
    server.client_pause(10_000, all=False)  # scripts count as writes
    with ThreadPoolExecutor(count) as threads:
        looks = [threads.submit(store.inspect, ONE) for _ in range(count)]
        try:
            wait_until(lambda: server.info("clients")["blocked_clients"] == count, "all of them look")
        finally:
            server.client_unpause()
        assert [look.result() for look in looks] == [None] * count


class Holder:
    """One execution's token and note."""

    def __init__(self, store: LockStore, attempt: Attempt | None) -> None:
        self.store = store
        self.attempt = attempt
        origin = tokens.origin("w@host", "shop.bill" if attempt else None)
        self.token = tokens.mint(tokens.mint_nonce(), attempt, origin)
        self.note = keys_of(KEY).note(attempt)

    def acquire(self, lease: float = 10.0, *, may_be_copy: bool = False) -> object:
        return acquire(self.store, ONE, self.token, lease, self.note if may_be_copy else None)

    def release(self, *, over: bool = True, copy_may_wait: bool = False) -> bool:
        return self.store.release(ONE, self.token, Note(self.note, in_any_case=copy_may_wait) if over else None)


@pytest.fixture
def holder(store: LockStore) -> Callable[..., Holder]:
    """Makes executions: ``holder(task_id, retries)``; without a task id, a lock outside tasks."""

    def make(task_id: str | None = None, retries: int = 0) -> Holder:
        return Holder(store, Attempt(task_id, retries, 0) if task_id else None)

    return make


@pytest.fixture
def hold(store: LockStore, keeper: Keeper) -> Iterator[Callable[..., HeldLock]]:
    """Takes keys and gives them to the keeper: ``hold(key, lease)``."""
    kept: list[tuple[Keeper, HeldLock]] = []

    def make(
        key: str = KEY, lease: float = 30.0, store: LockStore = store, keeper: Keeper = keeper, **options: object
    ) -> HeldLock:
        token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
        lock = HeldLock(store, Hold(Demand(key), token), lease, **options)
        lock.granted(store.acquire(lock, lease))
        keeper.add(lock)
        kept.append((keeper, lock))
        return lock

    yield make
    for its_keeper, lock in kept:  # else a renewal on its way would tell the next test of the loss of this one's keys
        its_keeper.remove(lock)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease of 30 s is renewed every 0.3 s: a keeper goes by time, and no lock is lost while the machine pauses."""
    for module in ("held_lock", "keeper"):
        monkeypatch.setattr(f"celery_redislock.hold.{module}.INTERVAL", 0.01)


@pytest.fixture
def long_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is kept for a minute for a room to which it is offered, and for a waiter that was called."""
    offers.lengthen(monkeypatch.setattr)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "celery_redislock")
    return caplog


@pytest.fixture
def deliver(config: Config) -> Callable[..., tuple[str, Any]]:
    """Runs a message of a task as a pool child does; returns its state, and its result or error."""

    def run(app: Celery, name: str, *args: object, **request: Any) -> tuple[str, Any]:
        task = app.tasks[name]
        delivery_info = {"exchange": "", "routing_key": config.queue, "redelivered": request.pop("redelivered", False)}
        request = {"id": "id", "retries": 0, "delivery_info": delivery_info, "hostname": "w@host", **request}
        if getattr(task, "lock_plan", None) is not None:
            request.setdefault(DELIVERY, arrived(task, request))
        _set_task_join_will_block(True)
        try:
            traced = trace_task(task, request["id"], args, {}, request, app=app)
        finally:
            _set_task_join_will_block(False)
        return traced.info.state if traced.info else states.SUCCESS, traced.retval

    return run


@pytest.fixture
def queued(broker_server: Valkey, config: Config) -> Callable[[], list[Any]]:
    """The messages in the queue."""
    return lambda: [json.loads(message)["headers"] for message in broker_server.client.lrange(config.queue, 0, -1)]
