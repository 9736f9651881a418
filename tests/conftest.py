"""Fixtures: real servers, shared by the session; apps and workers, made for each test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

# Else its plugin imports it at the end of a failed session, amid results that outlived their server.
import hypothesis  # noqa: F401
import pytest
from celery import Celery

from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger
from tests.lab.servers import Valkey, rabbitmq
from tests.lab.workers import Worker, worker


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


def _valkey(session_folder: Path, name: str) -> Iterator[Valkey]:
    folder = session_folder / name
    folder.mkdir()
    with Valkey(folder).serve() as server:
        yield server


@pytest.fixture(scope="session")
def lock_server(session_folder: Path) -> Iterator[Valkey]:
    yield from _valkey(session_folder, "locks")


@pytest.fixture(scope="session")
def broker_server(session_folder: Path) -> Iterator[Valkey]:
    yield from _valkey(session_folder, "broker")


@pytest.fixture(scope="session")
def rabbitmq_url(session_folder: Path) -> Iterator[str]:
    folder = session_folder / "rabbitmq"
    folder.mkdir()
    with rabbitmq(folder) as url:
        yield url


@pytest.fixture
def locks(lock_server: Valkey) -> Valkey:
    """The lock server, empty; it is never the broker, so that its commands can be counted."""
    lock_server.client.flushall()
    return lock_server


@pytest.fixture
def broker(request: pytest.FixtureRequest, broker_server: Valkey) -> str:
    """The broker's URL: Redis, or what `on_every_broker` asks for."""
    broker_server.client.flushall()
    if getattr(request, "param", "redis") == "rabbitmq":
        return str(request.getfixturevalue("rabbitmq_url"))
    return broker_server.celery_url(0)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def config(broker: str, broker_server: Valkey, locks: Valkey, ledger: Ledger) -> Config:
    """What the app and its workers need to know; a test may still change it."""
    return Config(broker, broker_server.celery_url(1), locks.url(), str(ledger.path), queue=f"lab-{uuid4().hex[:8]}")


@pytest.fixture
def app(config: Config) -> Iterator[Celery]:
    """The app in the test's own process."""
    app = make_app(config)
    yield app
    app.close()
    gc.collect()  # results unsubscribe when they are collected: now, while their server is still there


@pytest.fixture
def start_worker(config: Config, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers: ``start_worker(concurrency, *options)``."""
    with ExitStack() as stack:

        def start(concurrency: int = 4, *options: str) -> Worker:
            return stack.enter_context(worker(config, tmp_path, concurrency, *options))

        yield start


@pytest.fixture
def tasks(app: Celery) -> Any:
    """The app's tasks by their short names: ``tasks.work``."""

    class Tasks:
        def __getattr__(self, name: str) -> Any:
            return app.tasks[f"lab.{name}"]

    return Tasks()


on_every_broker = pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
