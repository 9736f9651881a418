"""The policy ``wait``: the message is other work, so it waits in line, or is sent back if it cannot wait here."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery import states
from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock.errors import LockConflict, LockInfo, describe
from celery_redislock.message.delivery import Facts
from celery_redislock.message.message import Message
from celery_redislock.message.republish import ignores_result
from celery_redislock.options import LockOptions
from celery_redislock.policy import Ended, Place, Reason, Verdict, waiting_policy
from celery_redislock.protocol.replies import Conflict, NotDue

from .raise_ import Fail
from .skip import Skip, Skipped

logger = logging.getLogger(__name__)

#: The shortest and the longest pause of a message that is sent back, in seconds. While the worker's room is full, the
#: longest is higher: thousands of messages may then be sent back, and each costs a run and a few commands.
SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_WHILE_FULL = 1.0, 30.0, 300.0


#: How many times a message that collects calls looks, in one debounce, whether it has all that it can have; and after
#: how many seconds another debounced message looks again, unless the debounce is longer.
LOOKS_IN_A_DEBOUNCE, LOOK_AGAIN = 10, 60.0


class Waiting(Reason):
    """Why a message waits in line or is sent back."""

    HELD = (states.RETRY,)
    NO_DUPLICATE = (None,)
    #: The holder has ended, or the key is offered. Once the key cools down, the message is a duplicate after all.
    UNLESS_COOLING = None, "the key may be free in a moment"
    NOT_DUE = None, "not due yet", False
    OUTAGE = None, "the lock server is unavailable; the task is tried again later", False


class Wait(NamedTuple):
    """The message waits in line for its turn. The run is shown as RETRY."""

    def end(self, message: Message, holder: LockInfo, conflict: Conflict, joins: str | None = None) -> None:
        """End the run. Its message waits in line, or is sent back if it cannot wait in this worker.

        Return only if the message cannot be sent back either: the broker is out of reach, and the message is acked.

        Args:
            message: The run's message.
            holder: The key's holder.
            conflict: The conflict as the lock server reported it.
            joins: The id of the task that the run joins, if it joins one.
        """
        # Store RETRY before the message waits. If it were stored afterwards, as Celery does for its own Retry, it
        # could overwrite the outcome of the message's next run.
        show_as_retry(message, LockConflict(holder.key, holder))
        _end(message, holder, conflict, waiting_policy(message.options), Waiting.HELD, joins=joins)


class ComeBack(NamedTuple):
    """The message is not a duplicate, so no policy applies. It waits in line for its turn."""

    is_begun: bool
    """Mark the message as begun, so that no policy drops it in a later conflict."""
    reason: Waiting = Waiting.NO_DUPLICATE

    def end(self, message: Message, holder: LockInfo, conflict: Conflict) -> None:
        """End the run as `Wait` does, but do not show it as RETRY."""
        _end(message, holder, conflict, "always waits", self.reason, begun=self.is_begun)


def wait(message: Facts, holder: LockInfo, options: LockOptions) -> Skip | Fail | Wait:
    """Have the message wait in line, unless it has expired or has already waited for `lock_wait_for`.

    An expired message must not wait: it may be sent to the broker again, which may drop it silently.
    """
    if message.has_expired:
        return Skip(Skipped.EXPIRED)
    return Fail(is_late=True) if options.wait_for is not None and message.waited >= options.wait_for else Wait()


def _end(message: Message, holder: LockInfo, conflict: Conflict, policy: str, reason: Reason, **changes: Any) -> None:
    """See `Wait.end`. The `changes` of the message's header are as for `Message.wait`."""
    error = LockConflict(holder.key, holder)
    rank = conflict.rank or message.header.rank_at(conflict.now or time.time_ns() // 1000)
    header = None if conflict.cannot_wait else message.wait(rank=rank, **changes)
    if header is not None:
        message.tell(holder, f"waiting in line ({policy})")
        asks_if_cooling = reason is Waiting.UNLESS_COOLING
        place = Place(message.demand, header, asks_if_cooling=asks_if_cooling, wants=message.wants)
        raise Ended(Verdict(policy, reason, f"{error}; waiting in line", place, holder.task_id))
    why = "copies do not wait" if conflict.cannot_wait else "this worker has no room for more waiting messages"
    pause = message.pause(SHORTEST_PAUSE, LONGEST_PAUSE if message.delivery.may_wait else LONGEST_PAUSE_WHILE_FULL)
    message.tell(holder, f"{why}; trying again in {pause:.2f} s ({policy})")
    if message.send_back(pause, rank=rank, **changes):
        raise Ended(Verdict(policy, reason, f"{error}; trying again later", holder_id=holder.task_id))


def sleep_until_due(message: Message, due: NotDue) -> None:
    """End the run. Its message sleeps until it is due, or is sent back if it cannot wait in this worker.

    Return only if the message cannot be sent back either.
    """
    text = f"not due yet; it runs in {due.due_in:.2f} s unless another call is merged into it"
    verdict = Verdict("lock_debounce", Waiting.NOT_DUE, text)
    logger.info("%s: %s", message.name, text, extra=message.fields("not_due", key=message.demand.key))
    rank, debounce = message.header.rank_at(due.now), message.options.debounce
    # With its last call, a ticket that collects calls is full and due at once. The hint that tells its room so may be
    # lost. Another ticket that is not due within a debounce may be due sooner: a clock that was set back is put right.
    looks, least = (LOOKS_IN_A_DEBOUNCE, 1.0) if message.options.arguments == "all" else (1, LOOK_AGAIN)
    seconds = min(due.due_in, max(least, debounce / looks)) if debounce else due.due_in
    if (header := message.wait(rank=rank, sleeps=True)) is not None:
        raise Ended(verdict._replace(place=Place(message.demand, header, sleeps_for=seconds)))
    if message.send_back(seconds, rank=rank, sleeps=True):
        raise Ended(verdict)


def show_as_retry(message: Message, error: LockConflict) -> None:
    """Store the state RETRY. If the result backend cannot be reached, only log a warning."""
    if not ignores_result(message.task, message.request):
        with only_warns(message, "%s: could not store RETRY while it waits: %s", key=error.key):
            message.task.backend.mark_as_retry(str(message.request.id), error, request=message.request)


@contextmanager
def only_warns(message: Message, text: str, **about: str) -> Iterator[None]:
    """Log errors of the result backend with `text`, which has a place for the message's name and one for the error."""
    try:
        yield
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - each backend has its own errors
        logger.warning(text, message.name, describe(error), extra=message.fields("not_stored", **about))
