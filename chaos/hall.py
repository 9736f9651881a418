"""The hall: where one drill takes place: a queue, a key, and workers that no fault strikes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from celery import states
from celery.result import AsyncResult

from chaos.posts import CHILDREN
from chaos.stage import Stage
from chaos.tasks import define_tasks
from tests.lab.app import make_app
from tests.lab.proxy import Proxy
from tests.lab.workers import Worker, worker

#: Keys of drills begin so.
DRILL = "drill"
#: Seconds until what a drill is about has come about, and until its messages have come to their end after that.
BEGUN, END = 15.0, 20.0
#: On Redis the messages of drills are in a database of their own: none of them is delivered again after `VISIBILITY`.
DATABASE = 2
#: A worker fetches all messages of a drill. A worker that has connected again fetches fewer at first, unless told not
#: to: Celery 5.7 then sets the count from a thread of the pool, while its main thread does so, and the worker hangs.
SETTINGS = {"worker_prefetch_multiplier": 100, "worker_enable_prefetch_count_reduction": False}
TRANSPORT: dict[str, dict[str, Any]] = {"redis": {}, "rabbitmq": {"confirm_publish": True}}


class Hall:
    """One drill's queue, its key and its workers, which end with the block."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.key = f"{DRILL}-{name}"
        self._ledger = stage.ledger
        self._folder = stage.folder / self.key
        self._folder.mkdir()
        broker = stage.broker_server.celery_url(DATABASE) if stage.kind == "redis" else stage.direct.broker
        settings = {**SETTINGS, "task_publish_retry": True, "broker_transport_options": TRANSPORT[stage.kind]}
        self.config = replace(
            stage.direct, broker=broker, locks=stage.drill_locks.url(), queue=self.key, settings=settings
        )
        self.app = make_app(self.config)
        define_tasks(self.app, stage.ledger)
        self.results: list[AsyncResult[Any]] = []
        self._end = ExitStack()

    def __enter__(self) -> Hall:
        return self

    def __exit__(self, *_: object) -> None:
        with self._end:
            for result in self.results:
                self._ledger.write({"event": "final", "task_id": result.id, "state": result.state})
        self.app.close()

    def start_worker(self, *options: str, broker: str = "", queue: str = "") -> Worker:
        """Start a worker, of as many slots as those of the faults."""
        config = replace(self.config, broker=broker or self.config.broker, queue=queue or self.config.queue)
        name = f"{self.key}-{time.monotonic_ns()}@chaos"
        context = worker(config, self._folder, CHILDREN, "-n", name, *options, app="chaos.worker")
        return self._end.enter_context(context)

    def behind_proxy(self) -> Proxy:
        """A proxy before the drill's broker, for its workers."""
        return self._end.enter_context(Proxy(self.config.broker).serve())

    def send(self, name: str, seconds: float, times: int = 1, queue: str = "") -> None:
        """Send messages of a task, each of which runs for so long, under the drill's key if it has a lock."""
        for _ in range(times):
            item = f"{self.key}-{len(self.results)}"
            key = item if name == "slow" else self.key
            sent = self.app.tasks[f"chaos.{name}"].apply_async((key, item, seconds), queue=queue or self.config.queue)
            self._ledger.write({"event": "sent", "task_id": sent.id, "kind": name, "after": ""})
            self.results.append(sent)

    @contextmanager
    def holding_the_key(self) -> Iterator[None]:
        """Hold the drill's key in this process."""
        late: Any = self.app.tasks["chaos.late"]
        with late.lock_for(self.key, "", 0.0), self._ledger.run(self.key, f"the lock of {self.key}"):
            yield

    def write(self, event: str, **facts: Any) -> None:
        """Write a line that tells when it was written."""
        self._ledger.write({"event": event, "at": time.monotonic(), **facts})

    def wait_for_waiters(self, where: Worker, count: int) -> None:
        """Wait until so many messages wait in a worker."""
        self.wait_until(lambda: where.output().count("; waiting in line (") >= count, f"{count} messages wait")

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = BEGUN) -> None:
        """Wait until the drill has come about; a complaint, if it does not."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                self._ledger.write({"event": "complaint", "text": f"{self.key} did not come about: {what}"})
                return
            time.sleep(0.05)

    def wait_for_the_end(self) -> None:
        """Wait until all messages have succeeded. What has not in time is lost: the check finds it."""
        end = time.monotonic() + END
        while time.monotonic() < end and not all(result.state == states.SUCCESS for result in self.results):
            time.sleep(0.2)
