"""Delivery: what the worker's main process tells the pool child about a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery.exceptions import Reject

from .header import HEADER

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

#: The request attribute that holds the `Delivery`.
DELIVERY = "redislock_delivery"


class Delivery(NamedTuple):
    """Minted for every delivery of a message. A header cannot imitate it."""

    nonce: str
    """Of the token, so that the main process can release the lock of a child that has died."""
    received_at: float
    """`time.monotonic()`, which processes of one host share."""
    serializer: str | None = None
    """Of the message's body; None for the task's."""
    headers: dict[str, Any] | None = None
    """The user's own, where one of them is named ``headers``: Celery shows only what that one holds."""


def is_given_back(task: Task[..., Any], outcome: Any) -> bool:
    """Whether the broker delivers the message again: an early ack has left it nothing to give back."""
    return task.acks_late and isinstance(outcome, Reject) and bool(outcome.requeue)  # type: ignore[attr-defined]


def hide_headers(request: Context) -> None:
    """Take our headers from those that go along when `request` is sent as a new attempt."""
    if isinstance(request.headers, dict):
        request.headers.pop(DELIVERY, None)
        request.headers.pop(HEADER, None)
