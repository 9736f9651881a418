"""The app as a worker of a chaos run loads it: ``celery -A chaos.worker worker``."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

from chaos.tasks import define_tasks
from chaos.watching import watch
from tests.lab.ledger import Ledger
from tests.lab.worker import app, config

__all__ = ["app"]

# By this signal a post asks a worker that hangs to write its stacks into its log.
faulthandler.register(signal.SIGUSR2)
ledger = Ledger(Path(config.ledger))
define_tasks(app, ledger)
watch(ledger)
