"""The app as a worker process loads it: ``celery -A tests.lab.worker worker``."""

from __future__ import annotations

import os
from pathlib import Path

from celery.signals import worker_ready

from celery_redislock import LockInfo
from celery_redislock.signals import lock_conflict
from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger

config = Config.from_env()
app = make_app(config)


@lock_conflict.connect
def _write_down(holder: LockInfo, policy: str, **_: object) -> None:
    Ledger(Path(config.ledger)).write({"event": "conflict", "holder": holder.task_id, "policy": policy})


@worker_ready.connect
def _announce(**_: object) -> None:
    Path(os.environ["LAB_READY"]).touch()
