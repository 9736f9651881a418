"""The app as a worker process loads it: ``celery -A tests.lab.worker worker``."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import Any

from billiard.pool import Pool, TimeoutHandler
from celery.concurrency.asynpool import AsynPool
from celery.signals import worker_process_init, worker_ready
from celery.worker.control import control_command
from kombu import Connection
from kombu.transport import pyamqp

from celery_redislock import LockInfo
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.line import room
from celery_redislock.policy import wait
from celery_redislock.signals import lock_conflict, lock_lost
from celery_redislock.worker import early_acks, remote_control, waiting
from celery_redislock.worker.waiting import WaitingRoom
from tests.lab import offers
from tests.lab.app import Config, make_app
from tests.lab.gate import wait_for_file
from tests.lab.ledger import Ledger
from tests.lab.paces import note_tokens
from tests.lab.readiness import announce
from tests.lab.receivers import break_receivers

faulthandler.register(signal.SIGUSR2)
announce()
config = Config.from_env()
app = make_app(config)
remote_control.REMIND_EVERY = config.settings.get("lab_reminder", remote_control.REMIND_EVERY)
wait.LOOK_AGAIN = config.settings.get("lab_look_again", wait.LOOK_AGAIN)
room.STARVES_AFTER = config.settings.get("lab_starves_after", room.STARVES_AFTER)
if config.settings.get("lab_long_offers"):
    offers.lengthen()
if config.settings.get("lab_no_waitid"):  # as on macOS before Python 3.13
    del os.waitid
if config.settings.get("lab_rabbitmq_4"):  # kombu asks it for a prefetch count of each consumer; older ones do as asked
    pyamqp.Transport.qos_semantics_matches_spec = lambda *_: True
if config.settings.get("lab_broken_receivers"):
    break_receivers(Ledger(Path(config.ledger)))
if config.settings.get("lab_tokens"):
    note_tokens(Ledger(Path(config.ledger)))
if config.settings.get("lab_metrics"):
    from celery_redislock import metrics

    metrics.connect()
if config.settings.get("lab_metrics_port"):  # as docs/monitoring.md serves them
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector

    from celery_redislock.metrics import WorkerGauges

    registry = CollectorRegistry()
    MultiProcessCollector(registry, os.environ["PROMETHEUS_MULTIPROC_DIR"])
    registry.register(WorkerGauges())
    port = config.settings["lab_metrics_port"]
    worker_ready.connect(lambda **_: start_http_server(port, "127.0.0.1", registry=registry), weak=False)
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


if config.settings.get("lab_begins_late"):  # who is called begins when the file is there; the worker may do much before
    give_to_pool = WaitingRoom.give_to_pool

    def _give_late(*args: Any) -> None:
        wait_for_file(config.settings["lab_begins_late"])
        give_to_pool(*args)

    WaitingRoom.give_to_pool = _give_late  # type: ignore[method-assign]


if config.settings.get("lab_hesitates"):  # the room asks about the next message while the event loop has one in hand
    in_hand, asked = threading.Event(), threading.Event()
    has_ended, unavailable = waiting.has_ended, waiting.WaitingMessage.unavailable

    def _hesitate(request: Any) -> bool:
        in_hand.set()
        assert asked.wait(10)
        return has_ended(request)

    def _ask_meanwhile(*args: Any) -> None:
        is_next = in_hand.is_set()
        unavailable(*args)
        assert in_hand.wait(10)
        if is_next:
            asked.set()

    waiting.has_ended = _hesitate
    waiting.WaitingMessage.unavailable = _ask_meanwhile  # type: ignore[method-assign]


if config.settings.get("lab_misses_deaths"):  # Celery itself never notices that an idle child has died
    AsynPool.timers = {}
    AsynPool._track_child_process = lambda *_: None


if config.settings.get("lab_slow_acks"):  # what children say is heard late: the results come first, as they may
    early_acks.HEARD_AFTER = 0.2
    early_acks.has_more_to_come = lambda: True


if config.settings.get("lab_blocks"):  # the remote command `lab_block` keeps the main process until the file is there

    @control_command()
    def lab_block(_: object) -> None:
        print("the main process is busy", flush=True)
        wait_for_file(config.settings["lab_blocks"])


if config.settings.get("lab_quits_when_cut"):  # SIGQUIT comes while Celery handles the loss of its connection
    collect = Connection.collect

    def _quit(*args: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGQUIT)
        collect(*args, **more)

    Connection.collect = _quit  # type: ignore[method-assign]


@worker_ready.connect
def _hold_up_the_pool(**_: object) -> None:
    """At a hard time limit the pool reports the end of the run, then kills its child, and later makes another."""
    kills, replaces = (config.settings.get(f"lab_{what}_late") for what in ("kills", "replaces"))
    kill, join = TimeoutHandler._trywaitkill, Pool._join_exited_workers
    if kills:
        TimeoutHandler._trywaitkill = lambda *args: (wait_for_file(kills), kill(*args))
    if replaces:
        Pool._join_exited_workers = lambda *args, **more: join(*args, **more) if Path(replaces).exists() else []
