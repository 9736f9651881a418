"""What is known of a delivered message, as values: decisions are made of it."""

from __future__ import annotations

from typing import NamedTuple

from celery_redislock.server.tokens import Attempt


class Delivered(NamedTuple):
    """How a message has come to its worker."""

    acks_late: bool
    """The broker hears only at the end of the run that it has been received."""
    is_redelivered: bool
    """The broker says that it has delivered it before."""
    is_overdue: bool
    """It has been here for about the visibility timeout: the broker takes it for lost, and delivers it again."""
    is_marked_begun: bool
    """Its header says that it has begun."""
    has_come_back: bool
    """It has been sent back at least once."""


class Facts(NamedTuple):
    """What is known of a message that meets a conflict."""

    delivered: Delivered
    attempt: Attempt
    causes: frozenset[str]
    """The ids of its own task, of its parent and of its root, as tokens know them."""
    is_claimed: bool = False
    """It carries a claim: its key, or the place of the one that waits, was left to it."""
    joins: str | None = None
    """The task whose outcome it waits for."""
    has_expired: bool = False
    waited: float = 0.0
    """Seconds since it was sent back for the first time."""
