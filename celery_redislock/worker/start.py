"""What a worker does at its start: it warns, asks the lock server, and adds a step to its consumer."""

from __future__ import annotations

import logging
import sys
from typing import Any

from celery.signals import celeryd_after_setup, task_postrun, worker_init, worker_shutting_down
from celery.worker import state

from celery_redislock.message.delivery import ASKED_KEYS, ON_BEGIN
from celery_redislock.options import ATTRIBUTES
from celery_redislock.task.locked_task import LockedTask

from . import advice, remote_control
from .early_acks import EARLY_ACKS, AckWhatHasBegun, ExpectCopies, ack_what_has_begun
from .request import locked_request
from .server_check import try_lock_server
from .waiting import WaitingRoom

logger = logging.getLogger(__name__)


def connect() -> None:
    """Have Celery call the functions of this module when a worker starts in this process."""
    LockedTask.request_class = staticmethod(locked_request)
    worker_init.connect(prepare, weak=False)
    worker_shutting_down.connect(lambda **_: ack_what_has_begun(), weak=False)
    remote_control.connect()
    # Not at worker_init: Celery sets up its logging after that.
    celeryd_after_setup.connect(warn_of_unlocked_tasks, weak=False)
    celeryd_after_setup.connect(try_servers, weak=False)


def warn_of_unlocked_tasks(instance: Any = None, **_: Any) -> None:
    """Warn of tasks with lock options that are no `LockedTask`: their options do nothing."""
    for name, task in sorted(instance.app.tasks.items()):
        options = sorted(option for option in ATTRIBUTES if hasattr(task, option))
        if options and not isinstance(task, LockedTask):
            logger.warning("task %s has %s but no lock: add base=LockedTask", name, ", ".join(options))


def prepare(sender: Any = None, **_: Any) -> None:
    """Have the worker's consumer ack what has begun, keep what waits, and expect copies when it loses its connection.

    It is done before the pool forks its children; and only where there is a locked task, for the command ``celery
    locks`` makes every worker of an environment load this package.
    """
    if not any(isinstance(task, LockedTask) for task in sender.app.tasks.values()):
        return
    sender.app.steps["consumer"].update({AckWhatHasBegun, ExpectCopies, WaitingRoom})
    EARLY_ACKS.open()
    ON_BEGIN[:] = [EARLY_ACKS.report_begin]
    ASKED_KEYS.open()
    task_postrun.connect(forget, weak=False)


def try_servers(instance: Any = None, **_: Any) -> None:
    """Try the lock server, if a task needs it, and log where it is and what is wrong: once, before the pool starts.

    What the broker cannot do for a locked task is logged too.
    """
    plans = [task.lock_plan for task in instance.app.tasks.values() if isinstance(task, LockedTask)]
    for app in {plan.app for plan in plans if plan is not None and plan.enabled}:
        try_lock_server(app)
        advice.warn_of_broker(app)


def forget(task_id: str = "", **_: Any) -> None:
    """Have Celery forget the request of a run that has ended by SystemExit, or by another error that is no Exception.

    In the pools `threads`, `gevent` and `eventlet` Celery 5.7 fails amid its own handling of such a run: the request
    counts as running as long as the worker lives. Those who wait in line in this worker wait for a free slot, and that
    run would keep its slot for ever. In a child of `prefork` there is nothing to forget.
    """
    error = sys.exception()
    if error is None or isinstance(error, Exception):
        return
    request = state.requests.get(task_id)
    if request is not None:
        state.task_ready(request)
