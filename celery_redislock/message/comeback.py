"""Coming back: the same attempt is published again, to be tried later.

The one way for copies, successors, begun work, outages and the policy ``retry``. ``request.retries`` stays as it is:
nothing of the task has run.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from celery import Task
from celery.app.task import Context
from kombu import Exchange, Queue

from celery_redislock.server.tokens import is_nonce, is_publish

if TYPE_CHECKING:
    from celery import Celery

#: The message header of what the plugin must know of a message.
HEADER = "redislock"
#: For brokers that redeliver what is not acked in time; theirs is longer than this unless configured. Seconds.
DEFAULT_VISIBILITY_TIMEOUT = 1800.0
_MAX_DOUBLINGS = 16
#: A longer name of a key is none of ours, in characters.
MAX_KEY = 1000
#: What RabbitMQ puts before a routing key while it delays a message natively: a word for each bit of the delay.
_DELAY_WORDS = re.compile(r"^(?:[01]\.){28}")
_DELAY_EXCHANGE = "celery_delayed_delivery"
#: RabbitMQ's own record of the queues that a message has expired in. It drops a message that enters one of them again.
_DEATH_HEADERS = ("x-death", "x-first-death-", "x-last-death-")
#: Celery's own headers of a message, as Celery itself tells them from the user's.
_CELERYS = {*vars(Context), "lang", "task", "argsrepr", "kwargsrepr", "compression"} - {"headers"}


class Return(NamedTuple):
    """What a message says of itself: its publish, what was left to it, and how often it has come back, since when."""

    publish: str = ""
    """The name of its publish, from `mint_publish`; it stays when the message comes back."""
    claim: str | None = None
    """The nonce under which a key, or the place in its queue, was left to it."""
    key: str | None = None
    """That key in Redis, as its publisher made it of the arguments."""
    times: int = 0
    since: float = 0.0
    """When it was first sent back: seconds since the epoch; 0 before that."""
    begun: bool = False
    """A process that ran it may have died: work that has begun, which no policy may drop."""
    joins: str | None = None
    """The task whose outcome it waits for, by the policy ``join``."""

    @classmethod
    def read(cls, header: Any) -> Self:
        """From a message header. A field that is odd counts as not there, and costs no other field."""
        if not isinstance(header, Mapping):
            return cls()
        said = cls(**{name: value for name, value in header.items() if name in _IS_SOUND and _IS_SOUND[name](value)})
        # By a clock that is ahead, it lies in the future.
        return said._replace(since=float(min(said.since, time.time()))) if said.since else said

    @property
    def wire(self) -> dict[str, Any]:
        """The message header: what is not said is left out."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}

    def next(self, *, begun: bool, joins: str | None = None) -> Self:
        """The header of the message when it is sent back once more."""
        since = self.since or time.time()
        return self._replace(times=self.times + 1, since=since, begun=self.begun or begun, joins=joins or self.joins)

    def delay(self, shortest: float, longest: float) -> float:
        """Seconds until it should be tried again: exponential, with jitter."""
        doubled = shortest * 2 ** min(self.times + 1, _MAX_DOUBLINGS)
        return min(random.uniform(shortest, doubled), longest)  # noqa: S311 - jitter, no secret


#: What each field of a message header may be.
_IS_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "publish": is_publish,
    "claim": is_nonce,
    "key": lambda value: isinstance(value, str) and 0 < len(value) <= MAX_KEY,
    "times": lambda value: type(value) is int and value >= 0,
    "since": lambda value: type(value) in {int, float} and 0 < value < math.inf,
    "begun": lambda value: type(value) is bool,
    "joins": lambda value: isinstance(value, str),
}


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
