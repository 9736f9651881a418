"""The app as a worker of the twins loads it: ``celery -A tests.twins.worker worker``."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command, scheduled
from celery.worker.state import active_requests, reserved_requests

from celery_redislock.worker.remote_control import redislock_waiting
from tests.lab.worker import app
from tests.twins.tasks import define_tasks, write_down_events

__all__ = ["app"]

define_tasks(app)
write_down_events()


@inspect_command()
def unfinished(state: Any) -> int:
    """How many messages the worker has that are not finished: for now or later, running, or waiting for a lock."""
    return len({*reserved_requests, *active_requests}) + len(scheduled(state)) + len(redislock_waiting(state))
