"""The stage: a lock server, a broker and a pair of workers, kept for all twins."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redislock.protocol.names import GONE
from tests.lab.app import Config, make_app
from tests.lab.servers import Valkey
from tests.lab.workers import worker
from tests.twins.brokers import Broker, open_broker
from tests.twins.tasks import define_tasks

#: Workers, and children of each.
WORKERS, CHILDREN = 2, 3


class Stage:
    """What the twins are played on. `open_stage` makes it."""

    def __init__(self, folder: Path, locks: Valkey, results: Valkey, broker: Broker) -> None:
        self.folder, self.locks, self.broker, self._results = folder, locks, broker, results
        urls = broker.url, results.celery_url(1), locks.url()
        self.config = Config(*urls, str(folder / "ledger"), "twins", broker.settings)
        self.app: Celery = make_app(self.config)
        self._workers = ExitStack()
        define_tasks(self.app)

    def start(self) -> None:
        """Start the workers, and forget all that is left of earlier ones."""
        self.stop()
        self.broker.empty(self.app)
        for server in (self._results, self.locks):
            server.client.flushall()
        for _ in range(WORKERS):
            self._workers.enter_context(worker(self.config, self.folder, CHILDREN, app="tests.twins.worker"))

    def stop(self) -> None:
        """Kill the workers."""
        self._workers.close()

    def is_quiet(self) -> bool:
        """Whether nothing is queued, waits or runs, as far as one look can tell."""
        return not self.has_messages() and not self._active() and not self.has_messages()

    def has_messages(self) -> bool:
        """Whether a message is in the queue, or with a worker that has not acked it."""
        return self.broker.has_messages(self.app, WORKERS)

    def kept(self, seconds: float) -> list[str]:
        """The keys that are left of all locks, after so many seconds at most."""
        end = time.monotonic() + seconds
        while True:
            kept = [key.decode() for key in self.locks.held() if GONE.encode() not in key]
            if not kept or time.monotonic() > end:
                return kept
            time.sleep(0.01)

    def _active(self) -> bool:
        replies = self.app.control.broadcast("active", reply=True, limit=WORKERS, timeout=5) or []
        told = [runs for reply in replies for runs in reply.values()]
        return len(told) < WORKERS or any(told)


@contextmanager
def open_stage(folder: Path, broker: str = "redis") -> Iterator[Stage]:
    """Servers and workers that end with the block."""
    with ExitStack() as stack:
        servers: list[Any] = []
        for name in ("locks", "results"):
            (folder / name).mkdir()
            servers.append(stack.enter_context(Valkey(folder / name).serve()))
        stage = Stage(folder, *servers, stack.enter_context(open_broker(broker, folder / broker, servers[1])))
        stack.callback(gc.collect)  # results unsubscribe when they are collected: while their server is still there
        stack.callback(stage.app.close)
        stack.callback(stage.stop)
        stage.start()
        yield stage
