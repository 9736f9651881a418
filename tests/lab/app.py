"""The Celery app of the tests: one function makes it, in the test's process and in every worker."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery

from tests.lab.files import write_whole
from tests.lab.kinds import OPTIONS
from tests.lab.ledger import Ledger
from tests.lab.tasks import define_tasks
from tests.lab.wake_ups import SETTINGS

#: RabbitMQ delays messages for quorum queues itself, behind a topic exchange.
QUORUM = {
    "task_default_queue_type": "quorum",
    "task_default_exchange_type": "topic",
    "task_create_missing_queue_type": "quorum",
    "task_create_missing_queue_exchange_type": "topic",
    "worker_detect_quorum_queues": True,
    "broker_transport_options": {"confirm_publish": True},
}


@dataclass
class Config:
    """Where the servers are, and what the test sets besides."""

    broker: str
    backend: str
    locks: str
    ledger: str
    queue: str = "lab"
    settings: dict[str, Any] = field(default_factory=dict)
    tasks: list[str] | None = None
    """The tasks of `tests.lab.tasks` that the app has; None for all."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_env(cls) -> Config:
        return cls(**json.loads(os.environ["LAB_CONFIG"]))


def make_app(config: Config) -> Celery:
    """A fresh app; its tasks write into the config's ledger."""
    if config.broker == "filesystem://":
        write_whole()
    app = Celery("lab", broker=config.broker, backend=config.backend, set_as_current=False)
    app.conf.update(
        redislock_url=config.locks,
        redislock_client_options=OPTIONS,
        task_default_queue=config.queue,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        task_publish_retry=False,
        broker_transport_options={"socket_keepalive": True},
    )
    app.conf.update(SETTINGS)
    app.conf.update(config.settings, lab_ledger=config.ledger)
    define_tasks(app, Ledger(Path(config.ledger)), config.tasks)
    return app
