"""A plugin of pytest that locks every task of Celery's integration suite, in each app that the suite makes.

All tasks have the options of `WaitingTask`: equal calls run one after the other, and none is skipped, so that each call
of the suite has a result of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import celery
import pytest
from celery.app.defaults import DEFAULTS

from celery_redislock import LockedTask


class WaitingTask(LockedTask):
    """As with ``redislock_on_conflict = "wait"`` in the settings, which belong to the suite's own apps."""

    abstract = True
    lock_on_conflict = "wait"


# Some apps of the suite have neither their broker nor their results on Redis.
DEFAULTS["redislock_url"] = os.environ["TEST_BACKEND"]
celery.Celery.task_cls = f"{__name__}:WaitingTask"
celery.Task = WaitingTask  # the base of the suite's class-based tasks, which are not imported yet


@pytest.fixture(scope="session", autouse=True)
def every_task_is_locked(celery_session_app: celery.Celery) -> Iterator[None]:
    """Look at the tasks of the app that the suite's worker runs, when the suite has ended."""
    yield
    unlocked = [
        name
        for name, task in celery_session_app.tasks.items()
        if not (name.startswith("celery.") or getattr(task, "lock_plan", None))
    ]
    assert not unlocked
