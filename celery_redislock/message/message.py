"""Message: what is known of a delivered message, and how it comes back."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_redislock.errors import LockUnavailable, describe
from celery_redislock.server import tokens
from celery_redislock.server.tokens import Attempt
from celery_redislock.shown import shown

from .broker import Broker
from .comeback import publish_again
from .delivery import DELIVERY, Delivery
from .facts import Delivered, Facts
from .header import HEADER, Header

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

logger = logging.getLogger(__name__)

_FIRST = Header()


class Message:
    """The message of one request.

    Args:
        task: Its task.
        broker: Of the task's app.
        request: Celery's request.
        hold_for: Seconds that a message is held here which nobody else has any more; None for ever.

    Attributes:
        attempt: What it is about.
        nonce: Of this delivery.
        header: What it says of itself.
        was_sent_back: It goes on as another message, or in another delivery.
    """

    __slots__ = (
        "_broker",
        "_headers",
        "_hold_for",
        "_received_at",
        "_request",
        "_serializer",
        "_task",
        "attempt",
        "header",
        "nonce",
        "was_sent_back",
    )

    def __init__(self, task: Task[..., Any], broker: Broker, request: Context, hold_for: float | None) -> None:
        self._task = task
        self._broker = broker
        self._request = request
        self._hold_for = hold_for
        self.was_sent_back = False
        header = getattr(request, HEADER, None)
        self.header = _FIRST if header is None else Header.read(header)
        self.attempt = Attempt(
            str(request.id), request.retries or 0, request.replaced_task_nesting or 0, self.header.publish
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
    def delivered(self) -> Delivered:
        """How it has come here, as it is known at this moment."""
        return Delivered(
            acks_late=bool(self._task.acks_late),
            is_redelivered=bool((self._request.delivery_info or {}).get("redelivered")),
            is_overdue=self._broker.is_overdue(time.monotonic() - self._received_at),
            is_marked_begun=self.header.begun,
            has_come_back=self.header.times > 0,
        )

    @property
    def facts(self) -> Facts:
        """What is known of it at a conflict."""
        request = self._request
        causes = (request.id, request.parent_id, request.root_id)
        return Facts(
            delivered=self.delivered,
            attempt=self.attempt,
            causes=frozenset(tokens.known_as(str(one)) for one in causes if one),
            is_claimed=self.header.claim is not None,
            joins=self.header.joins,
            has_expired=self._has_expired,
            waited=self.waited,
        )

    @property
    def waited(self) -> float:
        """Seconds since it was sent back for the first time."""
        return time.time() - self.header.since if self.header.since else 0.0

    @property
    def _has_expired(self) -> bool:
        """Whether Celery would not begin it any more."""
        header: Any = self._request.expires
        expires = maybe_iso8601(header)
        return expires is not None and datetime.now(UTC) >= maybe_make_aware(expires, UTC)

    def pause(self, shortest: float, longest: float, *, at_least: float = 0.0) -> float:
        """Seconds until it is tried again, as the broker takes them: longer each time, with jitter."""
        return self._broker.countdown(max(at_least, self.header.delay(shortest, longest)))

    def send_back(self, delay: float, *, is_begun: bool = False, joins: str | None = None) -> bool:
        """Publish the message again, to be tried after about `delay` seconds.

        Args:
            delay: Seconds, as `pause` says.
            is_begun: No policy may drop it, also when it comes back.
            joins: The task id whose outcome it waits for.

        Returns:
            Whether it was sent. Else the broker is away too and the message has been acked, so that it must be held
            here: then this call has slept.

        Raises:
            Reject: The broker is away, and will deliver the message again by itself.
            LockUnavailable: It has been held here for `hold_for` seconds; the run is lost.
        """
        self.header = self.header.next(begun=is_begun, joins=joins)
        try:
            publish_again(
                *(self._task, self._request, self.header, delay),
                headers=self._headers,
                serializer=self._serializer,
                natively=self._broker.delays_natively,
            )
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - each broker has its own
            if self._task.acks_late:
                self._give_back(error, delay)
            self._hold_here(error, delay)
            return False
        self.was_sent_back = True
        return True

    def _give_back(self, error: Exception, pause: float) -> NoReturn:
        self.was_sent_back = True
        logger.warning(
            "%s cannot be sent again (%s): it goes back to the broker, which delivers it again",
            *(self.name, describe(error)),
        )
        time.sleep(min(pause, 1.0))  # the broker may give it back at once
        raise Reject(describe(error), requeue=True) from error

    def _hold_here(self, error: Exception, pause: float) -> None:
        """Wait with an acked message that cannot be sent again: only this process still has it."""
        if self._hold_for is not None and self.waited >= self._hold_for:
            raise LockUnavailable(
                self._task.name,
                f"its lock was not free and its message, already acked, could not be sent again ({describe(error)}) "
                f"for {self._hold_for} s: this run is lost",
            ) from error
        logger.warning("%s cannot be sent again (%s): it is held and tried here", self.name, describe(error))
        time.sleep(pause)
