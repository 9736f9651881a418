"""What a worker does at startup: warn about mistakes, try the lock server, and add steps to its consumer."""

from __future__ import annotations

import logging
from typing import Any

from celery.signals import celeryd_after_setup, worker_shutting_down

from celery_redislock.message.delivery import ASKED_KEYS, ON_BEGIN, STOPS
from celery_redislock.task.binding import warn_of_leftovers
from celery_redislock.task.check import unlocked_tasks
from celery_redislock.task.locked_task import LockedTask

from . import remote_control
from .early_acks import EARLY_ACKS, AckWhatHasBegun
from .lock_events import LockEvents
from .server_check import try_lock_server, warn_of_broker
from .waiting import WaitingRoom
from .worker_port import spawns_children

logger = logging.getLogger(__name__)


def begin(sender: Any = None, **_: Any) -> None:
    """Called by Celery's signal `worker_init`: prepare the worker, and connect to its later signals."""
    remote_control.connect()
    worker_shutting_down.connect(EARLY_ACKS.read, weak=False)  # the event loop may no longer do this
    celeryd_after_setup.connect(try_servers, weak=False)  # it logs, and Celery sets up its logging only then
    prepare(sender)


def prepare(sender: Any) -> None:
    """Add the steps to the worker's consumer and open the pipes, before the pool forks its children.

    Do nothing if the app has no locked task: every worker in the environment loads this package, because of the
    command ``celery locks``.
    """
    if not any(isinstance(task, LockedTask) for task in sender.app.tasks.values()):
        return
    sender.app.steps["consumer"].update({AckWhatHasBegun, LockEvents, WaitingRoom})
    EARLY_ACKS.open()
    ON_BEGIN[:] = [EARLY_ACKS.report_begin]
    ASKED_KEYS.open()
    STOPS.open()


def try_servers(instance: Any = None, **_: Any) -> None:
    """Try the lock server if a task needs it, and log its address and any problems. Called before the pool starts.

    Also log what the broker, or the pool, cannot do for locked tasks, and which options do nothing: lock options of a
    task that is not a `LockedTask`, and those of other plugins.
    """
    for _name, warning in unlocked_tasks(instance.app):
        logger.warning(warning)
    if spawns_children(instance):
        EARLY_ACKS.reader = None  # such children inherit no pipe
        logger.warning("worker_pool_start_method is spawn: set acks_late, or a lost connection loses waiting messages")
    tasks = [task for task in instance.app.tasks.values() if isinstance(task, LockedTask)]
    plans = [(type(task), task.lock_plan) for task in tasks if task.lock_plan is not None]
    for task_class, plan in plans:
        warn_of_leftovers(task_class, plan)
    for app in {plan.app for _, plan in plans if plan.enabled}:
        try_lock_server(app)
        warn_of_broker(app)
