"""Broker: what an app's broker does with messages, as far as a lock must know it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery import Celery

#: For brokers that redeliver what is not acked in time; theirs is longer than this unless configured. Seconds.
DEFAULT_VISIBILITY_TIMEOUT = 1800.0
#: Of the visibility timeout: a message held for longer is taken to wait in the queue once more. Not the whole: the
#: broker began to count before the worker did, and gets the ack later than the key is free.
OVERDUE = 0.9
#: How long a note lives besides, in seconds: for as long as a copy may wait in the queue.
NOTE_TTL = 24 * 3600.0
SHORT_NOTE_TTL = 3600.0


class Broker:
    """The broker of one app; asked once.

    Args:
        app: The app.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app

    @cached_property
    def visibility_timeout(self) -> float:
        """How long the broker waits for an ack until it delivers a message again, in seconds."""
        options = self._app.conf.broker_transport_options or {}
        configured = options.get("visibility_timeout")
        return float(configured) if configured else DEFAULT_VISIBILITY_TIMEOUT

    def is_overdue(self, held: float) -> bool:
        """Whether the broker takes a message for lost, or is about to, that a worker has held for `held` seconds."""
        return held > OVERDUE * self.visibility_timeout

    @cached_property
    def delays_natively(self) -> bool:
        """Whether the broker delays messages, not the worker; then it takes no countdown below one second."""
        try:
            from celery.utils.quorum_queues import detect_quorum_queues
        except ImportError:
            return False
        with self._app.connection_for_write() as connection:
            return bool(detect_quorum_queues(self._app, connection.transport.driver_type)[0])

    def countdown(self, delay: float) -> float:
        """`delay`, changed to what the broker takes, in seconds. A message that waits for long is delivered twice."""
        return max(min(delay, self.visibility_timeout / 2), 1.0 if self.delays_natively else 0.0)

    def note_ttl(self, *, is_sent_back_only: bool) -> float:
        """How long a note lives, in seconds: for as long as a copy of its message may still come.

        A copy is given after one visibility timeout, and may wait in another worker for one more.

        Args:
            is_sent_back_only: The message has come back, and only kombu may have sent it twice: the two are queued
                together. There are many such notes, one for each run that had to wait.
        """
        return (SHORT_NOTE_TTL if is_sent_back_only else NOTE_TTL) + 2 * self.visibility_timeout
