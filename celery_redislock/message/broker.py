"""Broker: when an app's broker delivers a message again, and how it delays one."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from celery.utils.quorum_queues import detect_quorum_queues

from celery_redislock.protocol.answers import NOTE_TTL

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

#: The visibility timeout where `broker_transport_options` has none, in seconds. No broker has a shorter default: kombu
#: has an hour for Redis and half an hour for SQS, and RabbitMQ's `consumer_timeout` is half an hour.
DEFAULT_VISIBILITY_TIMEOUT = 1800.0
#: A worker that has had a message for longer than this share of the visibility timeout expects a copy of it. The share
#: is below 1 because the broker counts from the delivery, which is before the worker counts, until the ack, which is
#: after the worker has released the key.
OVERDUE = 0.9
#: How long the note of a message that was published again lives, besides the visibility timeouts, in seconds.
SHORT_NOTE_TTL = 3600.0


class Broker:
    """The broker of one app. Its settings are read once."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    @cached_property
    def visibility_timeout(self) -> float:
        """Seconds without an ack after which the broker delivers a message again."""
        options = self._app.conf.broker_transport_options or {}
        configured = options.get("visibility_timeout")
        return float(configured) if configured else DEFAULT_VISIBILITY_TIMEOUT

    def is_overdue(self, held: float) -> bool:
        """Whether the broker delivers a message again, now or soon, that one worker has had for `held` seconds."""
        return held > OVERDUE * self.visibility_timeout

    @cached_property
    def delays_natively(self) -> bool:
        """Whether the broker itself delays messages: RabbitMQ with quorum queues. Its shortest delay is one second.

        On any other broker the worker keeps a message until its countdown is over.
        """
        with self._app.connection_for_write() as connection:
            return bool(detect_quorum_queues(self._app, connection.transport.driver_type)[0])

    def countdown(self, delay: float) -> float:
        """`delay`, in seconds, within what the broker can do.

        A message that waits unacked for the visibility timeout is delivered twice, so half of that is the longest.
        """
        return max(min(delay, self.visibility_timeout / 2), 1.0 if self.delays_natively else 0.0)

    def note_ttl(self, *, is_sent_back_only: bool) -> float:
        """How long a note lives, in seconds: for as long as a copy of its message may still arrive.

        The broker delivers a copy after one visibility timeout, and the copy may wait in another worker for one more.

        Args:
            is_sent_back_only: The only reason for a copy is that a worker has published the message again: kombu may
                have done so twice, when the connection was lost before the broker confirmed. Both are then queued
                together, so the note may be short. Where more wait than their worker keeps, such notes are many.
        """
        return (SHORT_NOTE_TTL if is_sent_back_only else NOTE_TTL) + 2 * self.visibility_timeout


def was_delivered_before(request: Context) -> bool:
    """Whether the broker says that it has delivered the message of `request` before.

    AMQP and kombu's Redis transport mark such a message as redelivered. SQS counts how often a message was received,
    and kombu asks it for that number.

    Source: `kombu.transport.SQS`, `Channel.get_message_attributes`.
    """
    if (request.delivery_info or {}).get("redelivered"):
        return True
    info = (request.properties or {}).get("delivery_info")
    if not isinstance(info, dict) or "sqs_message" not in info:
        return False
    try:
        return int(info["sqs_message"]["Attributes"]["ApproximateReceiveCount"]) > 1
    except (KeyError, TypeError, ValueError):
        return False
