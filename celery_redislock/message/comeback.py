"""Coming back: the same attempt is published again, to be tried later.

The one way for copies, successors, begun work, outages and the policy ``retry``. ``request.retries`` stays as it is:
nothing of the task has run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.app.task import Context
from kombu import Exchange, Queue

from .header import HEADER, Header

if TYPE_CHECKING:
    from celery import Celery

#: What RabbitMQ puts before a routing key while it delays a message natively: a word for each bit of the delay.
_DELAY_WORDS = re.compile(r"^(?:[01]\.){28}")
_DELAY_EXCHANGE = "celery_delayed_delivery"
#: RabbitMQ's own record of the queues that a message has expired in. It drops a message that enters one of them again.
_DEATH_HEADERS = ("x-death", "x-first-death-", "x-last-death-")
#: Celery's own headers of a message, as Celery itself tells them from the user's.
_CELERYS = {*vars(Context), "lang", "task", "argsrepr", "kwargsrepr", "compression"} - {"headers"}


def publish_again(
    task: Task[..., Any],
    request: Context,
    header: Header,
    countdown: float,
    *,
    headers: Mapping[str, Any] | None = None,
    serializer: str | None = None,
    natively: bool = False,
) -> None:
    """Send `request`'s message again as it is: id, arguments, canvas, headers, priority, queue, expiry.

    Celery's `signature_from_request` brings most of it, and what it leaves out is added here.

    Args:
        task: Its task.
        request: Of the message.
        header: What it carries from now on.
        countdown: Seconds.
        headers: The user's own; None for those that Celery shows.
        serializer: Of the message; None for the task's.
        natively: The broker delays it, not the worker.

    Raises:
        Exception: The broker's, where the message could not be sent.
    """
    own = request.__dict__
    own_headers = custom_headers(request.headers if headers is None else headers)
    options: dict[str, Any] = {
        "serializer": serializer,
        "compression": own.get("compression"),
        "delivery_mode": (request.properties or {}).get("delivery_mode"),
        "argsrepr": own.get("argsrepr"),  # made by the caller, perhaps to hide what the arguments hold
        "kwargsrepr": own.get("kwargsrepr"),
        "queue": queue_of(task.app, request) if natively else None,
    }
    signature = task.signature_from_request(
        request,
        countdown=countdown,
        retries=request.retries,
        # Celery takes the running task, which is this one, for the parent of what has none.
        headers={**own_headers, "parent_id": request.parent_id, HEADER: header.wire},
        # Celery before 5.7 takes it from the task, not from the request.
        ignore_result=ignores_result(task, request),
        **{name: value for name, value in options.items() if value is not None},
    )
    # Celery's own, not the task's: this is no publish, and what its class does at one was done when it was published.
    Task.apply_async(task, tuple(signature.args), signature.kwargs, **signature.options, add_to_parent=False)


def queue_of(app: Celery, request: Context) -> Queue | None:
    """The queue that a message came from, for a broker that delays natively: Celery needs no more than its binding.

    Left to itself, Celery would take the binding of the default queue.
    """
    info = request.delivery_info or {}
    exchange, routing_key = info.get("exchange"), _DELAY_WORDS.sub("", info.get("routing_key") or "")
    if not exchange or not routing_key:
        return None
    for queue in app.amqp.queues.values():
        if queue.routing_key == routing_key and exchange in {queue.exchange.name, _DELAY_EXCHANGE}:
            return queue
    return Queue(routing_key, Exchange(exchange, "topic"), routing_key)  # it was bound by a pattern


def custom_headers(headers: Any) -> dict[str, Any]:
    """The user's own among the headers of a message."""
    if not isinstance(headers, dict):
        return {}
    return {
        name: value for name, value in headers.items() if name not in _CELERYS and not name.startswith(_DEATH_HEADERS)
    }


def ignores_result(task: Task[..., Any], request: Context) -> bool:
    """Whether the result of this request is not stored: the request's own word before the task's."""
    own = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if own is None else own)
