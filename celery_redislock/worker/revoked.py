"""Ends messages that are revoked or expire while they wait, in the main process, without a slot or a rate token."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import state
from celery.worker.request import Request

from celery_redislock.info import fields, run_named

from .waiting_message import WaitingMessage

logger = logging.getLogger(__name__)

#: Seconds between two checks for revoked messages: Celery has no hook for a revoke.
LOOK_EVERY = 0.5
#: One check ends at most this many messages, because each costs a call to the result backend. Another check follows at
#: once.
MOST_AT_ONCE = 100


class RevokedMessages:
    """Checks regularly, as long as any message waits, for messages that were revoked while waiting.

    Args:
        waiting: Returns the waiting messages, in any order.
        end: Ends a revoked message.
        timing: Held while a thread uses Celery's timer, in a worker without an event loop.
    """

    def __init__(
        self,
        waiting: Callable[[], list[WaitingMessage]],
        end: Callable[[WaitingMessage], object],
        timing: threading.Lock,
    ) -> None:
        self._waiting = waiting
        self._end = end
        self._timing = timing
        self._entry: Any = None

    def look_later(self, consumer: Any) -> None:
        """Schedule a check, unless one is scheduled already. Thread-safe."""
        if self._entry is None and consumer.hub is None:
            self._set(consumer.timer)
        elif self._entry is None:
            consumer.hub.call_soon(self._set, consumer.timer)

    def stop(self) -> None:
        """Stop checking: no message waits any longer."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.cancel()

    def _set(self, timer: Any, seconds: float = LOOK_EVERY) -> None:
        with self._timing:
            if self._entry is None:
                self._entry = timer.call_after(seconds, self._look, (timer,))

    def _look(self, timer: Any) -> None:
        self._entry = None
        revoked = self._revoked()
        try:
            for one in revoked[:MOST_AT_ONCE]:
                self._end(one)
        finally:
            if self._waiting():
                self._set(timer, 0.0 if len(revoked) > MOST_AT_ONCE else LOOK_EVERY)

    def _revoked(self) -> list[WaitingMessage]:
        if not state.revoked and not state.revoked_stamps:
            return []
        return [one for one in self._waiting() if one.request.id in state.revoked or _is_revoked_by_stamp(one.request)]


def _is_revoked_by_stamp(request: Request) -> bool:
    """Whether a stamp of the request is revoked. Celery's own check, `Request.revoked`, would also end the message."""
    headers: list[str] = request.stamped_headers or [] if state.revoked_stamps else []
    for header in headers:
        revoked = maybe_list(state.revoked_stamps.get(header)) or ()
        if any(stamp in revoked for stamp in maybe_list(request.stamps.get(header)) or ()):
            return True
    return False


def has_ended(request: Request) -> bool:
    """Whether the message of `request` is revoked or has expired. If so, the result is stored and the message acked."""
    try:
        return bool(request.revoked())
    except Exception:  # from the result backend: the event loop could mistake it for a lost connection
        name = request.task.name
        logger.exception(
            "%s: could not be ended as revoked; its message is delivered again when this worker ends",
            run_named(name, request.id),
            extra=fields("not_stored", task=name, task_id=request.id),
        )
        return True
