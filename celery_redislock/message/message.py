"""Message: what is known of a delivered message, and how it comes back."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.server import tokens
from celery_redislock.server.tokens import Attempt
from celery_redislock.shown import shown

from .comeback import HEADER, Return, publish_again
from .delivery import DELIVERY, Delivery

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

    from celery_redislock.task.plan import LockPlan

logger = logging.getLogger(__name__)

#: Of the broker's visibility timeout: a message held for longer is taken to wait in the queue once more. Not the whole:
#: the broker began to count before the worker did, and gets the ack later than the key is free.
OVERDUE = 0.9
_FIRST = Return()


class Message:
    """The message of one request.

    Attributes:
        attempt: What it is about.
        nonce: Of this delivery.
        returned: How often it has come back.
        was_sent_back: It goes on as another message, or in another delivery.
    """

    __slots__ = (
        "_headers",
        "_plan",
        "_received_at",
        "_request",
        "_serializer",
        "_task",
        "attempt",
        "nonce",
        "returned",
        "was_sent_back",
    )

    def __init__(self, task: Task[..., Any], plan: LockPlan, request: Context) -> None:
        self._task = task
        self._plan = plan
        self._request = request
        self.was_sent_back = False
        header = getattr(request, HEADER, None)
        self.returned = _FIRST if header is None else Return.read(header)
        self.attempt = Attempt(
            str(request.id), request.retries or 0, request.replaced_task_nesting or 0, self.returned.publish
        )
        delivery = getattr(request, DELIVERY, None)
        if not isinstance(delivery, Delivery):
            delivery = Delivery(tokens.mint_nonce(), time.monotonic())
        self.nonce, self._received_at, self._serializer, self._headers = delivery

    @property
    def name(self) -> str:
        """For log lines."""
        return f"task {self._task.name}[{shown(str(self._request.id))}]"

    @property
    def may_be_a_copy(self) -> bool:
        """Whether another delivery of this message may have begun before, or be still to come.

        Also of a message that has come back: kombu sends again what the broker has not confirmed, so there may be two.
        """
        return bool(self.returned.times) or self.is_delivered_again

    @property
    def is_delivered_again(self) -> bool:
        """Whether the broker has given it to more than one worker, or is about to.

        The broker says so of the later one. It puts a message into the queue once more that was not acked in time:
        then the earlier one knows by its own clock.
        """
        overdue = time.monotonic() - self._received_at > OVERDUE * self._plan.visibility_timeout
        return overdue or self.returned.begun or self._is_redelivered

    @property
    def has_begun(self) -> bool:
        """Whether a process that ran it may have died in the midst, so that no policy may drop it.

        An early ack is sent before the body begins: what the broker delivers again after it has not begun. Nor has what
        is merely old.
        """
        return self.returned.begun or (bool(self._task.acks_late) and self._is_redelivered)

    @property
    def _is_redelivered(self) -> bool:
        return bool((self._request.delivery_info or {}).get("redelivered"))

    @property
    def has_expired(self) -> bool:
        """Whether Celery would not begin it any more."""
        header: Any = self._request.expires
        expires = maybe_iso8601(header)
        return expires is not None and datetime.now(UTC) >= maybe_make_aware(expires, UTC)

    def countdown(self, delay: float) -> float:
        """`delay`, changed to what the broker takes; in seconds."""
        return max(min(delay, self._plan.longest_countdown), self._plan.shortest_countdown)

    def send_back(self, delay: float, *, begun: bool = False, joins: str | None = None) -> bool:
        """Publish the message again, to be tried after about `delay` seconds.

        Args:
            delay: Seconds, as `countdown` allows.
            begun: It has met its own attempt: also when it comes back, it is no duplicate.
            joins: The task id whose outcome it waits for.

        Returns:
            Whether it was sent. Else the broker is away too and the message has been acked, so that it must be held
            here: then this call has slept.

        Raises:
            Reject: The broker is away, and will deliver the message again by itself.
            LockUnavailable: It has been held here for `lock_retry_for`; the run is lost.
        """
        self.returned = self.returned.next(begun=begun or self.has_begun, joins=joins)
        try:
            publish_again(
                *(self._task, self._request, self.returned, delay),
                headers=self._headers,
                serializer=self._serializer,
                natively=self._plan.delays_natively,
            )
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            if self._task.acks_late:
                self.was_sent_back = True
                logger.warning(
                    "%s cannot be sent again (%s): it goes back to the broker, which delivers it again",
                    *(self.name, describe(error)),
                )
                time.sleep(min(delay, 1.0))  # the broker may give it back at once
                raise Reject(describe(error), requeue=True) from error
            self._hold_here(error, delay)
            return False
        self.was_sent_back = True
        return True

    def _hold_here(self, error: Exception, pause: float) -> None:
        """Wait with an acked message that cannot be sent again: only this process still has it."""
        retry_for = self._plan.options.retry_for
        if retry_for is not None and time.time() - self.returned.since >= retry_for:
            raise LockUnavailable(
                self._plan.task,
                f"its lock was not free and its message, already acked, could not be sent again ({describe(error)}) "
                f"for {retry_for} s: this run is lost",
            ) from error
        logger.warning("%s cannot be sent again (%s): it is held and tried here", self.name, describe(error))
        time.sleep(pause)
