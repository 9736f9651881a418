"""Publish decisions: what becomes of a publish that finds its key, or its place in the queue, held. Pure functions.

`Publication` carries out what they return. The model in tests/model imports them too.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from celery_redislock.info import LockInfo
from celery_redislock.server.tokens import is_whole

from .decisions import HasEnded, follows


class Published(NamedTuple):
    """What is known of a message that is to be published."""

    task: str
    """The task's name."""
    is_bare: bool
    """Nobody but the caller knows of the message, so that the caller may be given another job's result instead."""
    causes: frozenset[str]
    """The ids of the tasks that cause it, shortened as they are in tokens."""


class Publishing(Enum):
    """What becomes of a publish whose key is held."""

    SEND = auto()
    """The message is sent, and meets its policy when it starts."""
    ANSWER = auto()
    """The message is not sent: the caller is given the holder's result."""
    OUTLIVE = auto()
    """The caller may have seen the holder's run end, so that it wants a new one: the message is sent with the key as
    soon as that is released, or else with the place in the queue, to run after the holder."""


def on_publish(message: Published, holder: LockInfo, has_ended: HasEnded) -> Publishing:
    """What becomes of a publish in the scopes ``job`` and ``queue`` whose key, or whose place in the queue, is held.

    `has_ended` is called only where the caller would be given the holder's result.
    """
    # An eager run, of `apply()`, has no result that others can read. Its host is not named as a worker is, with an "@".
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    is_known = holder.task_id is not None and is_whole(holder.task_id)
    is_job = holder.task == message.task and has_a_result and is_known
    if not (is_job and message.is_bare) or follows(message.causes, holder):
        return Publishing.SEND
    return Publishing.OUTLIVE if has_ended(holder) else Publishing.ANSWER
