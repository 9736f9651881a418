"""What a worker does at its start: it warns, asks the lock server, and adds a step to its consumer."""

from __future__ import annotations

import logging
from typing import Any

from celery.signals import celeryd_after_setup, worker_init, worker_shutting_down

from celery_redislock.message.asked_keys import ASKED_KEYS
from celery_redislock.message.early_acks import EARLY_ACKS
from celery_redislock.options import ATTRIBUTES
from celery_redislock.task.locked_task import LockedTask

from . import broker_advice, cut_short, inspect
from .acking import ack_what_has_begun
from .trial import try_lock_server

logger = logging.getLogger(__name__)

CONSUMER_STEPS = "acking:AckWhatHasBegun", "acking:ExpectCopies", "waiting:WaitingRoom"


def connect() -> None:
    """Have Celery call the functions of this module when a worker starts in this process."""
    worker_init.connect(prepare, weak=False)
    worker_shutting_down.connect(lambda **_: ack_what_has_begun(), weak=False)
    inspect.connect()
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
    steps = sender.app.steps["consumer"]
    steps.update({f"{__package__}.{step}" for step in CONSUMER_STEPS})
    EARLY_ACKS.open()
    ASKED_KEYS.open()
    cut_short.connect()


def try_servers(instance: Any = None, **_: Any) -> None:
    """Try the lock server, if a task needs it, and log where it is and what is wrong: once, before the pool starts.

    What the broker cannot do for a locked task is logged too.
    """
    plans = [task.lock_plan for task in instance.app.tasks.values() if isinstance(task, LockedTask)]
    for app in {plan.app for plan in plans if plan is not None and plan.enabled}:
        try_lock_server(app)
        broker_advice.warn(app)
