"""The app as a worker of a chaos run loads it: ``celery -A chaos.worker worker``."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery.signals import task_postrun, task_prerun, task_received

from chaos.tasks import PUBLISH, define_tasks, write_down_publishing
from chaos.witness import write_down_waiting
from tests.lab.ledger import Ledger
from tests.lab.worker import app, config

# By this signal a post asks a worker that hangs to write its stacks into its log.
faulthandler.register(signal.SIGUSR2)
#: The worker's main process, which is this one: its children are forked later.
MAIN = os.getpid()
ledger = Ledger(Path(config.ledger))
define_tasks(app, ledger)
write_down_publishing(ledger)
write_down_waiting(ledger)


#: When each run of this process has begun.
_begun: dict[str, float] = {}


@task_prerun.connect
def _note_the_beginning(task_id: str, **_: object) -> None:
    _begun[task_id] = time.monotonic()


@task_postrun.connect
def _write_down_the_end(task_id: str, **_: object) -> None:
    """A run ends, also one without its body: its slot is free."""
    since = _begun.pop(task_id, time.monotonic())
    ledger.write({"event": "ended", "worker": MAIN, "since": since, "at": time.monotonic()})


@task_received.connect
def _write_down_the_receipt(request: Any, **_: object) -> None:
    line = {"event": "received", "task_id": request.id, "publish": request.message.headers.get(PUBLISH)}
    ledger.write({**line, "worker": os.getpid(), "at": time.monotonic()})
