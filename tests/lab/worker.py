"""The app as a worker process loads it: ``celery -A tests.lab.worker worker``."""

from __future__ import annotations

import os
from pathlib import Path

from celery.signals import worker_ready

from tests.lab.app import Config, make_app

config = Config.from_env()
app = make_app(config)


@worker_ready.connect
def _announce(**_: object) -> None:
    Path(os.environ["LAB_READY"]).touch()
