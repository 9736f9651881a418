"""The app as a worker of a life loads it: ``celery -A fuzz.worker worker``."""

from __future__ import annotations

from pathlib import Path

from chaos.watching import watch
from fuzz.tasks import define_tasks
from tests.lab.ledger import Ledger
from tests.lab.worker import app, config

__all__ = ["app"]

define_tasks(app)
watch(Ledger(Path(config.ledger)))
