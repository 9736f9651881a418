"""Coming back: the same attempt is published again, to be tried later.

The one way for copies, successors, begun work, outages and the policy ``retry``. ``request.retries`` stays as it is:
nothing of the task has run.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from celery import Task
from kombu import Exchange, Queue

from .tokens import is_claim

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

#: The message header of what the plugin must know of a message.
HEADER = "redislock"
#: For brokers that redeliver what is not acked in time; theirs is longer than this unless configured. Seconds.
DEFAULT_VISIBILITY_TIMEOUT = 1800.0
_MAX_DOUBLINGS = 16
#: What RabbitMQ puts before a routing key while it delays a message natively: a word for each bit of the delay.
_DELAY_WORDS = re.compile(r"^(?:[01]\.){28}")
_DELAY_EXCHANGE = "celery_delayed_delivery"
#: RabbitMQ's own record of the queues that a message has expired in. It drops a message that enters one of them again.
_DEATH_HEADERS = ("x-death", "x-first-death-", "x-last-death-")


class Return(NamedTuple):
    """How often a message has come back, since when, and what was left to it."""

    times: int = 0
    since: float = 0.0
    """When it was first sent back: seconds since the epoch; 0 before that."""
    begun: bool = False
    """It was a copy or was marked redelivered: work that has begun, which no policy may drop."""
    joins: str | None = None
    """The task whose outcome it waits for, by the policy ``join``."""
    claim: str | None = None
    """The nonce under which the key, or the place in the queue, was left to it."""

    @classmethod
    def read(cls, header: Any) -> Self:
        """From a message header; a malformed one counts as none."""
        if not isinstance(header, Mapping):
            return cls()
        times, since, begun, joins, claim = (header.get(name) for name in cls._fields)
        if type(times) is not int or times < 0 or type(begun) is not bool:
            return cls()
        if not isinstance(joins, str | None) or not (claim is None or is_claim(claim)):
            return cls()
        if not times:
            return cls(begun=begun, claim=claim)
        if (
            isinstance(since, bool) or not isinstance(since, int | float) or not 0 < since <= time.time() + 60
        ):  # NaN fails too
            return cls()
        return cls(times, float(since), begun, joins, claim)

    def next(self, *, begun: bool, joins: str | None = None) -> Self:
        """The header of the message when it is sent back once more."""
        since = self.since or time.time()
        return self._replace(times=self.times + 1, since=since, begun=self.begun or begun, joins=joins or self.joins)

    def delay(self, shortest: float, longest: float) -> float:
        """Seconds until it should be tried again: exponential, with jitter."""
        doubled = shortest * 2 ** min(self.times + 1, _MAX_DOUBLINGS)
        return min(random.uniform(shortest, doubled), longest)  # noqa: S311 - jitter, no secret


def visibility_timeout(app: Celery) -> float:
    """How long the broker waits for an ack until it delivers a message again, in seconds."""
    options = app.conf.broker_transport_options or {}
    configured = options.get("visibility_timeout")
    return float(configured) if configured else DEFAULT_VISIBILITY_TIMEOUT


def delays_natively(app: Celery) -> bool:
    """Whether the broker delays messages, not the worker; then it takes no countdown below one second."""
    try:
        from celery.utils.quorum_queues import detect_quorum_queues
    except ImportError:
        return False
    with app.connection_for_write() as connection:
        return bool(detect_quorum_queues(app, connection.transport.driver_type)[0])


def publish_again(
    task: Task[..., Any],
    request: Context,
    header: Return,
    countdown: float,
    *,
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
        serializer: Of the message; None for the task's.
        natively: The broker delays it, not the worker.

    Raises:
        Exception: The broker's, where the message could not be sent.
    """
    own = request.__dict__
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
        headers={**custom_headers(request), "parent_id": request.parent_id, HEADER: header._asdict()},
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


def custom_headers(request: Context) -> dict[str, Any]:
    """The user's own headers of a message."""
    headers = request.headers if isinstance(request.headers, dict) else {}
    return {name: value for name, value in headers.items() if not name.startswith(_DEATH_HEADERS)}


def ignores_result(task: Task[..., Any], request: Context) -> bool:
    """Whether the result of this request is not stored: the request's own word before the task's."""
    own = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if own is None else own)
