"""Delivery: what the worker's main process tells the pool child about one delivery of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery.exceptions import Reject

from .header import HEADER

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

#: The name of the request's attribute, and of the entry in the request's dict, that holds the `Delivery`, as a tuple.
DELIVERY = "redislock_delivery"


class Delivery(NamedTuple):
    """One delivery of a message.

    The main process puts it into the request's dict, as a plain tuple: pickle takes four times as long for a class of
    ours. A message cannot bring one: no header is a tuple.
    """

    nonce: str
    """The nonce of the execution's token. The main process keeps it too, to release the lock of a child that died."""
    received_at: float
    """When the worker received the message, by `time.monotonic()`, which all processes of one host share; seconds."""
    serializer: str | None = None
    """The serializer of the message's body; None for the task's."""
    headers: dict[str, Any] | None = None
    """The user's headers, where one of them is itself named ``headers``: then `request.headers` shows only the content
    of that header. None where `request.headers` shows all headers."""
    may_wait: bool = False
    """The message may wait in the room of its worker's main process."""
    call: bytes | None = None
    """What the key holds until the execution acquires it, where the message was called: it has its turn in line."""
    acks_at_begin: bool = False
    """The message is acked early, and `message.early_acks` has to hear when its run begins."""

    @classmethod
    def of(cls, request: Context) -> Delivery | None:
        """What the main process tells of the message of `request`; None where there is no main process."""
        told = getattr(request, DELIVERY, None)
        return cls._make(told) if isinstance(told, tuple) else None


def is_requeued(task: Task[..., Any], outcome: Any) -> bool:
    """Whether a run that ended with `outcome` has put its message back into the queue, as `Reject(requeue=True)` does.

    A message that was acked early is gone from the broker, so nothing can be put back.
    """
    return task.acks_late and isinstance(outcome, Reject) and bool(outcome.requeue)  # type: ignore[attr-defined]


def hide_headers(request: Context) -> None:
    """Remove the plugin's entries from the headers that Celery copies into the next attempt of `request`."""
    if isinstance(request.headers, dict):
        request.headers.pop(DELIVERY, None)
        request.headers.pop(HEADER, None)
