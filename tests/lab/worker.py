"""The app as a worker process loads it: ``celery -A tests.lab.worker worker``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery.signals import worker_process_init, worker_ready
from kombu.asynchronous import get_event_loop

from celery_redislock import LockInfo
from celery_redislock.message.early_acks import EARLY_ACKS
from celery_redislock.server.held import HeldLock
from celery_redislock.signals import lock_conflict, lock_lost
from celery_redislock.worker import reminder
from tests.lab.app import Config, make_app
from tests.lab.ledger import Ledger
from tests.lab.receivers import break_receivers

config = Config.from_env()
app = make_app(config)
reminder.EVERY = config.settings.get("lab_reminder", reminder.EVERY)
if config.settings.get("lab_broken_receivers"):
    break_receivers(Ledger(Path(config.ledger)))
if config.settings.get("lab_metrics"):
    from celery_redislock import metrics

    metrics.connect()
if config.settings.get("lab_gauge"):
    from prometheus_client import Gauge

    living = Gauge("lab_living", "A child that lives.", multiprocess_mode="liveall")
    worker_process_init.connect(lambda **_: living.set(1), weak=False)


@lock_conflict.connect
def _write_down(holder: LockInfo, policy: str, **_: object) -> None:
    holders = [one.task_id for one in holder.holders]
    line = {"event": "conflict", "holder": holder.task_id, "holders": holders, "policy": policy}
    Ledger(Path(config.ledger)).write(line)


@lock_lost.connect
def _write_down_the_loss(lock: HeldLock, reason: str, **_: object) -> None:
    attempt = lock.token.attempt
    Ledger(Path(config.ledger)).lost(lock.key, attempt.task_id if attempt else "", reason)


@worker_ready.connect
def _announce(sender: Any, **_: object) -> None:
    if config.settings.get("lab_slow_acks"):
        _read_acks_slowly()
    ready, hub = Path(os.environ["LAB_READY"]).touch, sender.hub
    if hub is None:
        ready()
    else:  # on Redis a worker hears what is broadcast, such as a revoke, once its event loop has gone round
        hub.call_soon(lambda: hub.call_later(0.001, ready))


def _read_acks_slowly() -> None:
    """Have the event loop hear late which runs have begun: their results come first, as they may at any time."""
    hub: Any = get_event_loop()
    hub.remove_reader(EARLY_ACKS.reader)
    hub.call_repeatedly(0.2, EARLY_ACKS.read)
