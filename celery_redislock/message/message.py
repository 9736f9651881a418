"""Message: one delivered message, what its worker knows about it, how it waits and how it is sent back."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any, NoReturn

from celery import Task
from celery.app.task import Context
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError

from celery_redislock.errors import LockInfo, LockUnavailable, describe, fields, run_named
from celery_redislock.options import LockOptions
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Attempt, mint_nonce

from .delivery import STOPS, Delivery, Facts, given_back_often
from .header import HEADER, NO_HEADER, Header
from .republish import REFUSED, Broker, confirmed, publish_again

logger = logging.getLogger(__name__)


class Message:
    """The delivered message of one request.

    Attributes:
        task: Its task.
        request: Celery's request for it.
        options: Its lock options: its task's, except for those that its call has set.
        attempt: The attempt that the message represents.
        demand: What its run asks for; the key is empty until the run has made it.
        wants: If its run may need several keys: what it asks for in all, in that order.
        delivery: What the worker's main process recorded about this delivery. `send_back` replaces it.
        header: What the message carries for the plugin. `send_back` and `wait` replace it.
        was_sent_back: Whether the work continues without this execution: the message waits in line, was published again
            or was requeued.
    """

    demand = Demand("")
    wants: tuple[Demand, ...] = ()
    was_sent_back = False

    def __init__(self, task: Task[..., Any], broker: Broker, request: Context, options: LockOptions) -> None:
        self.task = task
        self._broker = broker
        self.request = request
        self.options = options
        header = getattr(request, HEADER, None)
        self.header = NO_HEADER if header is None else Header.read(header)
        replaced = request.replaced_task_nesting or 0
        self.attempt = Attempt(str(request.id), request.retries or 0, replaced, self.header.publish)
        given = Delivery.of(request)
        self.delivery = given or Delivery(mint_nonce(), acks_late=bool(task.acks_late), stops=STOPS.count[0])

    @property
    def name(self) -> str:
        """The message's task and id, for log lines: ``task shop.bill[<id>]``."""
        return run_named(self.task.name, self.request.id)

    def fields(self, event: str, **about: object) -> dict[str, str]:
        """The fields of a log line about the message; see `celery_redislock.errors.fields`."""
        return fields(event, task=self.task.name, task_id=self.request.id, **about)

    def tell(self, holder: LockInfo, what: str) -> None:
        """Log a conflict, because Celery's own line only says that the run was ignored.

        Args:
            holder: The key's holder.
            what: What happens to the run, and the policy, such as ``waiting in line (wait)``.
        """
        about = self.fields("conflict", key=holder.key, holder=holder.who, holder_id=holder.task_id)
        logger.info("%s: lock %s is held by %s; %s", self.name, holder.key, holder.who, what, extra=about)

    @property
    def facts(self) -> Facts:
        """The facts about the message at this moment, while another execution holds its key."""
        return Facts(
            delivery=self.delivery,
            attempt=self.attempt,
            causes=self.causes,
            is_owed_its_key=self.header.claim is not None and not self.header.queued,
            joins=self.header.joins,
            has_expired=self.has_expired,
            waited=self.waited,
        )

    @property
    def causes(self) -> frozenset[str]:
        """The ids of the task itself, its parent and its root, as tokens spell them."""
        ids = (self.request.id, self.request.parent_id, self.request.root_id)
        return frozenset(tokens.known_as(str(one)) for one in ids if one)

    @property
    def waited(self) -> float:
        """Seconds since the message first had to wait; 0 before that."""
        return time.time() - self.header.since if self.header.since else 0.0

    @property
    def has_expired(self) -> bool:
        """Whether the message's `expires` has passed, so that Celery would no longer run it."""
        text: Any = self.request.expires
        expires = maybe_iso8601(text)
        return expires is not None and datetime.now(UTC) >= maybe_make_aware(expires, UTC)

    def pause(self, shortest: float, longest: float) -> float:
        """Seconds until the message is tried again: `Header.delay`, within the broker's limits."""
        return self._broker.countdown(self.header.delay(shortest, longest))

    def wait(self, **changes: Any) -> Header | None:
        """Have the message wait, unacked, in the room of this worker's main process.

        Args:
            changes: Changes of its header, as for `Header.next`.

        Returns:
            The header that the message carries from now on. None if the message cannot wait there: the room is full,
            the broker would soon deliver the message to another worker, or there is no room.
        """
        if not self.delivery.may_wait:
            return None
        self.header = self.header.next(**changes)
        self.was_sent_back = True
        return self.header

    def send_back(self, delay: float, **changes: Any) -> bool:
        """Publish the message again, to be tried after about `delay` seconds.

        Args:
            delay: Seconds, which are kept within the broker's limits.
            changes: Changes of its header, as for `Header.next`.

        Returns:
            Whether the message was sent. False if the broker does not take it, and it was acked early, so that only
            this process has it, or a quorum queue has got it back often, and would soon drop it. The call has then
            slept for `delay`, and the caller must retry the run here.

        Raises:
            Reject: The broker does not take the message, which is not acked yet and goes back to the queue.
            LockUnavailable: This process kept the message for `lock_wait_for` seconds and never reached the broker; the
                run is lost.
        """
        self.header = self.header.next(**changes)._replace(republished=True)
        self.delivery = self.delivery._replace(is_marked_begun=self.header.begun, is_republished=True)
        refused = set[str]()
        try:
            with confirmed(self.task, refused) as producer:
                delay = self._broker.countdown(delay)
                publish_again(self.task, self.request, self.header, delay, self.delivery, producer)
            if refused:
                raise OperationalError(REFUSED)  # noqa: TRY301 - handled like any error
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - each broker has its own errors
            if (self.delivery.acks_late or self.delivery.acks_at_begin) and not given_back_often(self.request.headers):
                self._requeue(error, delay)
            self._keep_here(error, delay)
            return False
        self.was_sent_back = True
        return True

    def _requeue(self, error: Exception, pause: float) -> NoReturn:
        """Have Celery put the unacked message back into the queue."""
        self.was_sent_back = True
        text = "%s: must wait, but its message could not be republished (%s); the broker delivers it again"
        logger.warning(text, self.name, describe(error), extra=self.fields("not_sent_back"))
        time.sleep(min(pause, 1.0))  # otherwise the broker may redeliver the message at once, over and over
        raise Reject(describe(error), requeue=True) from None  # Celery logs it, with a traceback

    def _keep_here(self, error: Exception, pause: float) -> None:
        """Sleep for `pause` seconds. The message cannot be sent, and must stay here: it was acked, or its queue would
        soon drop it."""
        if (keep_for := self.options.wait_for) is not None and self.waited >= keep_for:
            raise LockUnavailable(
                self.demand.key,
                f"this run is lost: its message could not be published again for {keep_for:g} s ({describe(error)})",
            ) from error
        text = "%s: must wait, but its message could not be republished (%s); this process keeps trying"
        logger.warning(text, self.name, describe(error), extra=self.fields("not_sent_back"))
        time.sleep(pause)
