"""Facts: what is known of a delivered message, as values. `celery_redislock.task.decisions` decides by them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from celery.utils.time import maybe_make_aware

from celery_redislock.protocol.tokens import Attempt


class Delivered(NamedTuple):
    """How a message has come to its worker: what tells whether it may be a copy, and whether its work has begun."""

    acks_late: bool
    """The worker acks the message at the end of the run, not before its begin."""
    is_redelivered: bool
    """The broker says that it has delivered the message before."""
    is_overdue: bool
    """The worker has had the message for about the visibility timeout, so the broker delivers it to another worker."""
    is_marked_begun: bool
    """The message's header says that a process may have begun to run it."""
    is_republished: bool
    """A worker has published the message again, or has tried to, instead of running it."""

    @property
    def is_delivered_again(self) -> bool:
        """Whether the broker has delivered the message to more than one worker, or is about to."""
        return self.is_overdue or self.is_redelivered or self.is_marked_begun

    @property
    def may_be_a_copy(self) -> bool:
        """Whether there may be two of the message: another delivery of it has begun before, or is still to come.

        The execution of such a message reads the note of its attempt, and leaves one. What a worker publishes again may
        be in the queue twice, for kombu sends once more what the broker has not confirmed; and the message that the
        worker had may go on, too. What only waits in line in one worker is there once.
        """
        return self.is_republished or self.is_delivered_again

    @property
    def has_begun(self) -> bool:
        """Whether a process may have died in the midst of running the message, so that no policy may drop it.

        A redelivered message that is acked late may have begun: nobody can know. A message that is acked early counts
        as not begun: it is acked in the moment in which its body begins, and after the ack the broker does not deliver
        it again. A message that is only overdue has not begun either.
        """
        return self.is_marked_begun or (self.acks_late and self.is_redelivered)


class Facts(NamedTuple):
    """What is known of a message whose key is held by another execution."""

    delivered: Delivered
    attempt: Attempt
    causes: frozenset[str]
    """The ids of the message's own task, of its parent and of its root, shortened as they are in tokens."""
    is_owed_its_key: bool = False
    """The key was reserved for the message: the reservation has ended before the message began."""
    joins: str | None = None
    """The id of the task whose outcome the message waits for, by the policy ``join``."""
    has_expired: bool = False
    """The message's `expires` is over: Celery would not begin it any more."""
    waited: float = 0.0
    """Seconds since the message first had to wait; 0 before that."""


_last = 0


def publish_time(options: Mapping[str, Any]) -> int:
    """When a message that is published now is due, in microseconds since the epoch, by this host's clock.

    Of two publishes in one process, the later has the greater number. Options that Celery will refuse count as not
    given.
    """
    global _last
    now = time.time_ns() // 1000
    _last = now = max(now, _last + 1)
    countdown, eta = options.get("countdown"), options.get("eta")
    try:
        if countdown:
            return now + int(countdown * 1_000_000)
        if isinstance(eta, datetime):
            return int(maybe_make_aware(eta, UTC).timestamp() * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        pass
    return now
