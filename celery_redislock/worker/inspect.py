"""Inspect: the command ``celery inspect redislock_waiting``: which messages wait in line in each worker."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from .waiting import waiting_room_of


def connect() -> None:
    """Add the command to those of Celery's workers and of its command line."""
    inspect_command()(redislock_waiting)


def redislock_waiting(state: Any, **_: Any) -> list[dict[str, Any]]:
    """The messages that wait in line in a worker, in the order of their places.

    Returns:
        For each: ``id``, ``name`` of the task, ``lock``, and the seconds that it has ``waited``.
    """
    room = waiting_room_of(state.app)
    return [] if room is None else [one.told for one in room.waiting]
