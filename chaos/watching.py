"""What a worker writes down of its messages and runs, for the check."""

from __future__ import annotations

import os
import time
from typing import Any

from celery.signals import task_postrun, task_prerun, task_received

from celery_redislock import signals
from chaos.tasks import PUBLISH, write_down_publishing
from chaos.witness import write_down_waiting
from tests.lab.ledger import Ledger


def watch(ledger: Ledger) -> None:
    """In a worker's main process: write down what it and its children receive, publish, run and keep waiting."""
    main, begun = os.getpid(), dict[str, float]()
    write_down_publishing(ledger)
    write_down_waiting(ledger)

    def begins(task_id: str, **_: object) -> None:
        begun[task_id] = time.monotonic()

    def ends(task_id: str, **_: object) -> None:
        """A run ends, also one without its body: its slot is free."""
        since = begun.pop(task_id, time.monotonic())
        ledger.write({"event": "ended", "worker": main, "since": since, "at": time.monotonic()})

    def comes(request: Any, **_: object) -> None:
        line = {"event": "received", "task_id": request.id, "publish": request.message.headers.get(PUBLISH)}
        ledger.write({**line, "worker": os.getpid(), "at": time.monotonic()})

    def is_unavailable(sender: Any, **_: object) -> None:
        """A run could not reach the lock server, so its message is sent back, or its retry is sent without the key."""
        if sender.request.id:
            ledger.write({"event": "unavailable", "task_id": sender.request.id, "at": time.monotonic()})

    signals.lock_unavailable.connect(is_unavailable, weak=False)
    task_prerun.connect(begins, weak=False)
    task_postrun.connect(ends, weak=False)
    task_received.connect(comes, weak=False)
