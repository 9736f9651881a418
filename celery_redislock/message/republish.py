"""Publishing a message again, unchanged. Broker: when the broker delivers a message again, and how it delays one."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha1
from typing import Any

from celery import Celery, Task
from celery.app.task import Context
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Exchange, Queue

from celery_redislock.protocol.scripts import NOTE_TTL

from .header import HEADER, Header

#: The visibility timeout in seconds, if `broker_transport_options` sets none. No broker has a shorter default: kombu's
#: is one hour for Redis and half an hour for SQS, and RabbitMQ's `consumer_timeout` is half an hour.
DEFAULT_VISIBILITY_TIMEOUT = 1800.0
#: A worker that has had a message for more than this share of the visibility timeout expects a copy of it. The share is
#: below 1 because the broker counts longer: from the delivery, before the worker starts to count, to the ack, after the
#: worker has released the key.
OVERDUE = 0.9
#: How long the note of a message that was only republished lives, in addition to two visibility timeouts, in seconds.
SHORT_NOTE_TTL = 3600.0
#: Maximum seconds to wait until RabbitMQ has stored what was published again.
STORED_WITHIN = 10.0
#: For the log: why RabbitMQ has not stored a message.
REFUSED = "RabbitMQ has refused a message: its queue is full, or gone"
#: The exchange through which RabbitMQ delivers what it has delayed itself.
_DELAYED = "celery_delayed_delivery"
#: While RabbitMQ delays a message natively, its routing key begins with 28 words, one for each bit of the delay.
#: Source: `kombu.transport.native_delayed_delivery`.
_DELAY_WORDS = re.compile(r"^(?:[01]\.){28}")
#: Headers that RabbitMQ adds: the queues where a message has expired, and how many times it returned to a quorum queue.
#: RabbitMQ drops a message that enters one of those queues again, or that was returned too often, so a republished
#: message must not carry these headers.
_OF_RABBITMQ = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")
#: The headers that Celery itself writes. `Context`, Celery's request, has an attribute for most of them.
_OF_CELERY = {*vars(Context), "lang", "task", "argsrepr", "kwargsrepr", "compression"} - {"headers"}


class Broker:
    """The broker of one app. Its settings are read once."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    @cached_property
    def visibility_timeout(self) -> float:
        """Seconds without an ack after which the broker delivers a message again."""
        options = self._app.conf.broker_transport_options or {}
        return float(options.get("visibility_timeout") or DEFAULT_VISIBILITY_TIMEOUT)

    @property
    def overdue_after(self) -> float:
        """For how many seconds a worker may have a message before the broker redelivers it, or soon will."""
        return OVERDUE * self.visibility_timeout

    @cached_property
    def delays_natively(self) -> bool:
        """Whether the broker itself delays messages, as RabbitMQ does with quorum queues.

        The shortest native delay is one second. With any other broker, the worker keeps a message until its countdown
        ends.
        """
        return self.is_rabbitmq and bool(detect_quorum_queues(self._app, "amqp")[0])

    @cached_property
    def is_rabbitmq(self) -> bool:
        """Whether the broker is RabbitMQ, or another that speaks AMQP."""
        with self._app.connection_for_write() as connection:
            return bool(connection.transport.driver_name == "py-amqp")

    @cached_property
    def reaches_queues(self) -> bool:
        """Whether a message can be sent straight to the queue that it came from, which is on the broker for reading."""
        return bool(self._app.conf.broker_read_url == self._app.conf.broker_write_url)

    @property
    def shortest_delay(self) -> float:
        """The shortest delay in seconds for which a message can be sent; a shorter one must be 0."""
        return 1.0 if self.delays_natively else 0.0

    def countdown(self, delay: float) -> float:
        """`delay`, in seconds, within the broker's limits.

        A message left unacked for the visibility timeout is delivered twice, so the longest delay is half of it.
        """
        return max(min(delay, self.visibility_timeout / 2), self.shortest_delay)

    def note_ttl(self, *, is_sent_back_only: bool) -> float:
        """How long a note lives, in seconds: as long as a copy of its message may still arrive.

        The broker delivers a copy after one visibility timeout, and the copy may wait in another worker for one more.

        Args:
            is_sent_back_only: Whether a copy can only come from a worker that published the message again: kombu may
                send the message twice if the connection is lost before the broker confirms it. Both are then queued
                together, so a short life is enough. This saves memory, because there are many such notes when more
                messages wait than their workers can keep.
        """
        return (SHORT_NOTE_TTL if is_sent_back_only else NOTE_TTL) + 2 * self.visibility_timeout


@contextmanager
def confirmed(task: Any, refused: set[str]) -> Iterator[Any]:
    """A producer for messages of `task`. When the block ends, the broker has stored them all, except the `refused`.

    Without being asked, RabbitMQ does not say whether it has stored a message. Other brokers answer each publish.

    Args:
        task: The `LockedTask` of the messages.
        refused: The ids of messages that RabbitMQ refuses are added here: their queue is full, or gone.

    Raises:
        Exception: The broker may have stored only some of the messages, or none.
    """
    with task.app.producer_or_acquire() as pooled:
        if not task.lock_plan.broker.is_rabbitmq:
            yield pooled
            return
        connection, hosts = pooled.connection, max(1, len(pooled.connection.alt))
        sent, answered = list[str](), set[int]()

        def open_channel() -> Any:
            amqp = connection.ensure_connection(max_retries=hosts, interval_start=0).connection
            with amqp.transport.having_timeout(STORED_WITHIN):  # RabbitMQ is silent while it lacks memory
                channel = amqp.channel()
                channel.confirm_select()
            return channel

        def note_answer(number: int, multiple: bool) -> set[int]:
            new = {*range(1 if multiple else number, number + 1)} - answered
            answered.update(new)
            return new

        def refuse(number: int, multiple: bool) -> None:
            refused.update(sent[one - 1] for one in note_answer(number, multiple))

        def take_back(*returned: Any) -> None:  # an ack follows, which counts it
            refused.add(returned[-1].properties["correlation_id"])

        def count(message: Any, *args: Any, **kwargs: Any) -> None:
            # Not the channel's own: with the transport option `confirm_publish`, that waits for each answer.
            type(channel).basic_publish(channel, message, *args, **kwargs)
            sent.append(message.properties["correlation_id"])

        # The first command on a connection that has been idle shows whether it is dead. If so, connect again.
        channel = connection.ensure(connection, open_channel, max_retries=hosts, interval_start=0)()
        channel.basic_publish = count
        channel.events["basic_ack"].add(note_answer)
        channel.events["basic_nack"].add(refuse)
        channel.events["basic_return"].add(take_back)
        try:
            with channel.connection.transport.having_timeout(STORED_WITHIN):  # `publish_again` may bind a queue
                yield task.app.amqp.Producer(channel, auto_declare=False)
                end = time.monotonic() + STORED_WITHIN
                while len(answered) < len(sent):
                    channel.connection.blocking_read(max(0.001, end - time.monotonic()))
                channel.close()
        except BaseException:
            connection.collect()  # without a command, which might never be answered
            raise


def publish_again(task: Any, request: Context, header: Header, countdown: float, delivery: Any, producer: Any) -> None:
    """Publish the message of `request` again, to be tried after `countdown` seconds.

    Its id, arguments, canvas, headers, priority, queue and expiry stay the same. Celery's `signature_from_request`
    copies most of them, and this function adds the rest.

    Args:
        task: The `LockedTask` of the message.
        request: Celery's request for the message.
        header: The plugin's header that the message carries from now on.
        countdown: Seconds until the message is tried again.
        delivery: What the worker knows about the message, as a `Delivery`.
        producer: The producer to publish with, from `confirmed`.

    Raises:
        Exception: Any error from the broker; the message was not sent.
    """
    own_headers = custom_headers(request.headers if delivery.headers is None else delivery.headers)
    own, broker = request.__dict__, task.lock_plan.broker
    # What Celery's `signature_from_request` leaves out; None for what the message did not have.
    options: dict[str, Any] = {
        "compression": own.get("compression"),
        "delivery_mode": (request.properties or {}).get("delivery_mode"),
        "argsrepr": own.get("argsrepr"),  # the caller may have set it to hide the arguments
        "kwargsrepr": own.get("kwargsrepr"),
        "serializer": delivery.serializer,
    }
    if broker.is_rabbitmq:
        options["retry"] = False  # on another connection, nothing would be confirmed
    name, is_delayed = delivery.queue, broker.delays_natively and countdown
    if name is not None and is_delayed:
        # Celery binds a queue there only when a worker starts, and through the queue's exchange, from which other
        # queues would get a copy. A digest, because another queue's pattern could match a part of a name with dots, and
        # because a routing key has at most 255 bytes.
        key = f"redislock-{sha1(name.encode(), usedforsecurity=False).hexdigest()}"
        with producer.channel.connection.channel() as channel:  # an error closes only this one
            channel.queue_bind(name, _DELAYED, f"#.{key}")
        options["queue"] = Queue(name, Exchange(_DELAYED, "topic"), key, no_declare=True)
    elif name is not None:
        # Through the message's exchange, every other queue that is bound to it would get a copy; and none would if its
        # own queue is bound no longer, or if this connection takes a topic exchange in Redis that it has not declared
        # for a direct one.
        # Elsewhere, kombu may have to know the queue: it is kombu that lets a queue in Redis expire.
        options["queue"] = (not broker.is_rabbitmq and task.app.amqp.queues.get(name)) or undeclared(name)
        options |= {"exchange": "", "routing_key": name, "mandatory": True}
    elif is_delayed:
        options["queue"] = queue_of(task.app, request)
    signature = Task.signature_from_request(  # Celery's own: the header has the lock options of the message
        task,
        request,
        countdown=countdown,
        retries=request.retries,
        # Without a parent_id, Celery would name the running task as the parent: this task itself.
        headers={**own_headers, "parent_id": request.parent_id, HEADER: header.wire},
        # Celery before 5.7 copies the task's `ignore_result`, not the request's.
        ignore_result=ignores_result(task, request),
        **{name: value for name, value in options.items() if value is not None},
    )
    # Celery's own `apply_async`, not the task class's: what the class does on a publish (reserve the key, write to a
    # transaction's outbox) was already done when the message was first published.
    Task.apply_async(
        task, tuple(signature.args), signature.kwargs, **signature.options, producer=producer, add_to_parent=False
    )


def queue_of(app: Celery, request: Context) -> Queue | None:
    """The queue that the message of `request` came from; None if the message does not say.

    RabbitMQ delays the message, and then delivers it through this queue's exchange, to which Celery binds the queue. If
    no queue is given, Celery binds the default queue.
    """
    info = request.delivery_info or {}
    # A message that was delayed does not come from its own exchange, but from one of 29 for delays.
    exchange, (routing_key, was_delayed) = info.get("exchange"), _DELAY_WORDS.subn("", info.get("routing_key") or "")
    if not exchange or not routing_key:
        return None
    known = (one for one in app.amqp.queues.values() if was_delayed or exchange == one.exchange.name)
    # If no queue of the app has this routing key, the message's queue is bound by a pattern.
    made = Queue(routing_key, Exchange(exchange, "topic"), routing_key)
    return next((one for one in known if one.routing_key == routing_key), made)


def make_known(app: Celery, queue: str) -> None:
    """Tell `app` of a queue from which a message has come, unless it knows it, so that no publish declares it."""
    app.amqp.queues.setdefault(queue, undeclared(queue))


def undeclared(name: str) -> Queue:
    """A queue that no publish declares. With ``auto_delete``, kombu does not take it for one that it has declared."""
    return Queue(name, Exchange(""), name, no_declare=True, auto_delete=True)


def custom_headers(headers: Any) -> dict[str, Any]:
    """The headers that the user has set."""
    all_of_them = headers.items() if isinstance(headers, dict) else ()
    return {key: value for key, value in all_of_them if key not in _OF_CELERY and not key.startswith(_OF_RABBITMQ)}


def ignores_result(task: Task[..., Any], request: Context) -> bool:
    """Whether no result is stored for `request`. The request's own `ignore_result` overrides the task's."""
    own = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if own is None else own)
