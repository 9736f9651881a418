"""Gauges: the waiting messages and held locks of this worker at this moment, for Prometheus and OpenTelemetry."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, NamedTuple

from celery.worker import state
from redis.exceptions import RedisError, ResponseError

from celery_redislock.app import server_of
from celery_redislock.connection.connect import servers_behind
from celery_redislock.task.locked_task import LockedTask

from .children import run_of
from .remote_control import lines_in
from .waiting import waiting_rooms_of
from .worker_port import listed


class Gauges(NamedTuple):
    """What waits and what is held of one task in this worker."""

    waiting: int = 0
    """How many messages wait in line."""
    oldest_wait_seconds: float = 0.0
    """How long ago the first of these messages was published; 0 if none waits."""
    longest_hold_seconds: float = 0.0
    """How long the longest run that holds its lock has been running; 0 if none does."""
    overflow: int = 0
    """How many messages were sent back since the worker started, because they could not wait in it."""


def gauges_of(app: Any) -> dict[str, Gauges]:
    """The gauges of each locked task of `app`; empty if this is not the main process of a worker of `app`."""
    rooms = waiting_rooms_of(app)
    if not rooms:
        return {}
    now, found = time.time(), defaultdict[str, Gauges](Gauges)
    for _, task, number, first in lines_in({one for room in rooms for one in room.rooms}):
        one = found[task]
        oldest = max(one.oldest_wait_seconds, now - first / 1e6)
        found[task] = one._replace(waiting=one.waiting + number, oldest_wait_seconds=oldest)
    for request in listed(state.active_requests):
        if (run := run_of(request)) is not None and run.holds and run.options.rate is None and request.time_start:
            one = found[run.plan.task]
            longest = max(one.longest_hold_seconds, now - request.time_start)
            found[run.plan.task] = one._replace(longest_hold_seconds=longest)
    # Tasks without any are there with zeros: a series that has ended looks like a worker that is gone.
    names = [name for name, task in app.tasks.items() if isinstance(task, LockedTask)]
    return {name: found[name]._replace(overflow=sum(room.overflow[name] for room in rooms)) for name in names}


def is_up(app: Any) -> bool | None:
    """Whether the lock server of `app` answers, on a Cluster every primary; None where `gauges_of` is empty."""
    if not waiting_rooms_of(app):
        return None
    try:
        for node in servers_behind(server_of(app).client):
            node.time()
    except RedisError as error:
        return isinstance(error, ResponseError)  # it answers, but its user may not ask for the time
    return True
