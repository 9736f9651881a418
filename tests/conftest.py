"""Fixtures: real servers, shared by the session; apps and workers, made for each test."""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

# Else its plugin imports it at the end of a failed session, amid results that outlived their server.
import hypothesis  # noqa: F401
import pytest
from celery import Celery
from kombu import pools

from celery_redislock.lock.lock_server import servers_of
from tests.lab.app import QUORUM, Config, make_app
from tests.lab.distributions import read_once
from tests.lab.gate import Gate
from tests.lab.ledger import Ledger
from tests.lab.lock_servers import behind_proxy, lock_server_in
from tests.lab.one_rabbitmq import OneRabbitMQ, url_of
from tests.lab.proxy import Proxy
from tests.lab.results import look_once_more
from tests.lab.servers import Valkey, need_rabbitmq, rabbitmq, wait_until
from tests.lab.tasks import tasks_for
from tests.lab.workers import Worker, beat, worker

#: Whether `make matrix` runs: only there does a test hold a time against a bound.
IS_MATRIX = os.environ.get("LAB_EVERY_BROKER") == "1"
#: The brokers of `on_every_queue` that are queues of RabbitMQ, and the settings that make them so.
ON_RABBITMQ = {"rabbitmq": {}, "rabbitmq 4": {"lab_rabbitmq_4": True}, "quorum": QUORUM}
ONE_RABBITMQ = pytest.StashKey[OneRabbitMQ]()
#: Of a worker's log, where a test has failed.
LAST_LINES = 60

look_once_more()
read_once()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread the tests as `tests.lab.spread` says."""
    from tests.lab.spread import Spread  # xdist may not be there

    return Spread(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the main process of xdist: one RabbitMQ for all the others."""
    one = node.config.stash.get(ONE_RABBITMQ, None) or OneRabbitMQ()
    node.config.stash[ONE_RABBITMQ] = one
    one.hosts.append(node.gateway.id)
    node.workerinput["rabbitmq"] = one.door


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the main process has started for the others."""
    one = config.stash.get(ONE_RABBITMQ, None)
    if one is not None:
        one.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what runs on RabbitMQ, for `make rabbitmq`."""
    broker = item.callspec.params.get("broker") if hasattr(item, "callspec") else None
    if broker in [*ON_RABBITMQ] or "rabbitmq_url" in getattr(item, "fixturenames", ()):
        item.add_marker("rabbitmq")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests that xdist spreads, the same in each process."""
    if hasattr(config, "workerinput"):
        from tests.lab.spread import place_of

        items.sort(key=lambda item: place_of(item.nodeid))


def pytest_collection_finish() -> None:
    """What has been imported by now stays to the end: the collection after each test need not look at it."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """So does what is left when a module's tests are over: what they have imported, and pytest's own notes."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the workers said last where a test has failed: on another machine that may be its only trace."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(folder.glob("worker*.log")):
            last = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            report.sections.append((f"the end of {log.name}", "\n".join(last)))
    return report


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def lock_server(session_folder: Path) -> Iterator[Valkey]:
    with lock_server_in(session_folder / "locks") as server:
        yield server


@pytest.fixture(scope="session")
def broker_server(session_folder: Path) -> Iterator[Valkey]:
    folder = session_folder / "broker"
    folder.mkdir()
    with Valkey(folder).serve() as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq_url(request: pytest.FixtureRequest, session_folder: Path) -> Iterator[str]:
    if hasattr(request.config, "workerinput"):
        need_rabbitmq()
        yield url_of(request.config.workerinput["rabbitmq"], request.config.workerinput["workerid"])
        return
    folder = session_folder / "rabbitmq"
    folder.mkdir()
    with rabbitmq(folder) as url:
        yield url


@pytest.fixture
def private_locks(tmp_path: Path) -> Iterator[Valkey]:
    """A lock server of the test's own, instead of the shared one: it may kill, pause and restart it."""
    with lock_server_in(tmp_path / "locks") as server:
        yield server


@pytest.fixture
def locks(request: pytest.FixtureRequest) -> Valkey:
    """The lock server, empty; it is never the broker, so that its commands can be counted."""
    name = "private_locks" if "private_locks" in request.fixturenames else "lock_server"
    server: Valkey = request.getfixturevalue(name)
    server.client.flushall()
    return server


@pytest.fixture
def lock_proxy(locks: Valkey) -> Iterator[Proxy]:
    """A proxy between the app and its lock server; `locks` still reaches the server itself."""
    with behind_proxy(locks) as proxy:
        yield proxy


@pytest.fixture
def broker(request: pytest.FixtureRequest, broker_server: Valkey) -> str:
    """The broker's URL: Redis, or what `on_every_broker` asks for."""
    broker_server.client.flushall()
    if getattr(request, "param", "redis") in ON_RABBITMQ:
        return str(request.getfixturevalue("rabbitmq_url"))
    return broker_server.celery_url(0)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def broker_proxy(broker: str) -> Iterator[Proxy]:
    """A proxy between the app and its broker, whichever that is; the results do not pass it."""
    with Proxy(broker).serve() as proxy:
        yield proxy


@pytest.fixture
def config(request: pytest.FixtureRequest, broker: str, broker_server: Valkey, locks: Valkey, ledger: Ledger) -> Config:
    """What the app and its workers need to know; a test may still change it."""
    pools.reset()  # kombu's are global: a connection that an earlier test has left idle may have been closed meanwhile

    callspec = getattr(request.node, "callspec", None)
    kind = None if callspec is None else callspec.params.get("broker")

    def url(server: str, proxy: str) -> str:
        return str(request.getfixturevalue(proxy).url) if proxy in request.fixturenames else server

    return Config(
        url(broker, "broker_proxy"),
        broker_server.celery_url(1),
        url(locks.url(), "lock_proxy"),
        str(ledger.path),
        queue=f"lab-{uuid4().hex[:8]}",
        settings=dict(ON_RABBITMQ.get(kind, {})),
        tasks=tasks_for(request.function.__name__, request.path, *helpers_of(request.path.parent)),
    )


@functools.cache
def helpers_of(folder: Path) -> list[Path]:
    """The modules that the tests in a folder share."""
    return sorted(set(folder.glob("*.py")) - set(folder.glob("test_*.py")))


@pytest.fixture
def app(config: Config) -> Iterator[Celery]:
    """The app in the test's own process."""
    app = make_app(config)
    # Kombu reads a reply that it has asked for as it closes a channel; if that was lost, the next test would hang.
    app.conf.broker_transport_options = {**app.conf.broker_transport_options, "socket_timeout": 30.0}
    yield app
    app.close()
    for server in servers_of(app).values():
        server.stop()  # else its threads would keep it, and the app's clients, to the end of the session
    gc.collect()  # results unsubscribe when they are collected: now, while their server is still there


@pytest.fixture
def start_worker(config: Config, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers: ``start_worker(concurrency, *options)``, with another config if one is given."""
    with ExitStack() as stack:

        def start(concurrency: int = 4, *options: str, config: Config = config) -> Worker:
            return stack.enter_context(worker(config, tmp_path, concurrency, *options))

        yield start
    for log in tmp_path.glob("worker*.log"):
        lines = log.read_text(errors="replace")
        assert "the keeper failed" not in lines
        assert "the locks of dead children could not be released" not in lines


@pytest.fixture
def start_beat(config: Config, tmp_path: Path) -> Iterator[Callable[[], Callable[[], str]]]:
    """Starts beat; what it returns shows beat's log."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(beat(config, tmp_path))


@pytest.fixture
def tasks(app: Celery) -> Any:
    """The app's tasks by their short names: ``tasks.work``."""

    class Tasks:
        def __getattr__(self, name: str) -> Any:
            return app.tasks[f"lab.{name}"]

    return Tasks()


on_every_broker = pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
#: On RabbitMQ 4 and on quorum queues too, where the prefetch count of a consumer cannot grow.
on_every_queue = pytest.mark.parametrize("broker", ["redis", *ON_RABBITMQ], indirect=True)


def every(names: str, *values: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize with every combination of the values where `make matrix` runs, else with the first of each."""
    rows = list(itertools.product(*values)) if IS_MATRIX else [tuple(one[0] for one in values)]
    return pytest.mark.parametrize(names.split(", "), rows, indirect=["broker"])


def in_pools(*names: str, others: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize with these pools, and where `make matrix` runs with the others too: each is like one of these.

    Threads and a solo pool run bodies in the process itself, and so do both pools of greenlets.
    """
    return pytest.mark.parametrize("pool", [*names, *(others if IS_MATRIX else ())])


@pytest.fixture
def running(ledger: Ledger) -> Callable[..., int]:
    """Waits until a run of this item has begun; returns the child's pid."""

    def wait(item: object = "") -> int:
        wait_until(lambda: str(item) in ledger.items(), f"{item} runs")
        return [run.pid for run in ledger.runs() if run.item == str(item)][-1]

    return wait


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Given to a task as its `seconds`, it keeps the body running until ``gate.open()``."""
    return Gate(tmp_path / "gate")


@pytest.fixture
def nothing_is_left(locks: Valkey) -> Callable[[], None]:
    """Waits until Redis is empty. A lease is 30 s if nothing else is said, and a message keeps its key for an hour."""
    return lambda: wait_until(lambda: locks.held() == [], "nothing is left", 15)
