"""An app whose worker may spawn its children: each of them imports this module anew, and finds its tasks there."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_redislock import LockedTask
from tests.lab.app import Config
from tests.lab.readiness import announce


def spawning_app(config: Config) -> Celery:
    """The app for a config, of which it takes the servers, the queue and the settings."""
    app = Celery(__name__, broker=config.broker, backend=config.backend, set_as_current=False)
    app.conf.update(config.settings, redislock_url=config.locks, task_default_queue=config.queue)

    @app.task(base=LockedTask, lock_args=["key"], name=f"{__name__}.work")
    def work(key: Any, item: Any) -> Any:
        return item

    return app


if "LAB_CONFIG" in os.environ:  # in a worker, or in a child of one
    announce()
    app = spawning_app(Config.from_env())
