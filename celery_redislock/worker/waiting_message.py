"""WaitingMessage: one message that waits in line in its worker, how long it may wait, and what happens after that.

`RevokedMessages` ends those that are revoked while they wait, without a slot or a rate token.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.utils.functional import maybe_list
from celery.utils.time import maybe_make_aware
from celery.worker import state
from celery.worker.request import Request

from celery_redislock.app import server_of
from celery_redislock.errors import LockUnavailable
from celery_redislock.info import fields, run_named
from celery_redislock.line.waiters import Waiter
from celery_redislock.message.header import HEADER, Header
from celery_redislock.policy import Place
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import RESERVED, Token, known_by
from celery_redislock.task.plan import LockPlan

logger = logging.getLogger(__name__)

#: The type of `LockedRequest.prepare_run`, which prepares the request for its next execution.
Prepare = Callable[[bytes | None], None]

#: A message waits here for at most this share of the broker's visibility timeout, and is then published again: once the
#: whole timeout has passed, the broker delivers an unacked message to another worker.
LONGEST_WAIT = 0.5
#: A message is ended this many seconds after it expires: Celery checks again by another clock, which may be behind.
EXPIRED_FOR = 0.01
#: A message that a quorum queue has redelivered this many times stops waiting and is published again. RabbitMQ 4 drops
#: it after twenty redeliveries, one for each worker that ends or loses its connection while the message waits there.
GIVEN_BACK_OFTEN = 10
#: Seconds between two checks for revoked messages: Celery has no hook for a revoke.
LOOK_EVERY = 0.5
#: One check ends at most this many messages, because each costs a call to the result backend. Another check follows at
#: once.
MOST_AT_ONCE = 100


class WaitingMessage(Waiter):
    """One message that waits for its key.

    Args:
        request, place, plan: Celery's request for the message, its place in line, and the lock of its task.
        prepare: Prepares the request for its next execution. Its argument is what the key holds until then, or None if
            the key is not kept for the message.
        is_ready: Returns whether the worker would run the message soon.
        is_coming: Returns whether the request is on its way to a child of the pool.
        run: Gives the message to the pool, or makes it leave the worker. The second argument: whether it was called.
    """

    # Thousands of messages may wait, so each keeps as little as possible.
    __slots__ = (
        "_is_coming",
        "_is_ready",
        "_room",
        "_run",
        "_runs_in_outage",
        "_since",
        "claim",
        "deadline",
        "demand",
        "joins",
        "number",
        "prepare",
        "rank",
        "request",
        "watches",
    )

    look_every = 1.0

    def __init__(
        self,
        request: Request,
        place: Place,
        plan: LockPlan,
        prepare: Prepare,
        is_ready: Callable[[WaitingMessage], bool],
        is_coming: Callable[[Request], bool],
        run: Callable[[WaitingMessage, bool], None],
    ) -> None:
        # All messages that wait for a key share one string.
        self.demand = Demand(sys.intern(place.demand.key), place.demand.capacity)
        self.rank, self.number = place.rank, 0
        self.request = request
        self.prepare = prepare
        self._room = server_of(plan.app).room
        header = place.header
        self.claim = None if header.claim is None else known_by(header.claim, RESERVED).owner
        self.joins = header.joins
        self.watches = self.claim is not None or self.joins is not None
        self.deadline = _deadline(request, header, plan)
        self._since = time.monotonic()
        self._is_ready, self._is_coming, self._run = is_ready, is_coming, run
        self._runs_in_outage = plan.options.on_outage != "retry"

    @property
    def call(self) -> bytes:
        """What the key holds from the moment the message is called until its run acquires the key."""
        return self._room.call_of(self)

    @property
    def to_json(self) -> dict[str, Any]:
        """What ``celery inspect redislock_waiting`` shows about the message; the task's arguments are left out."""
        return {
            "id": str(self.request.id),
            "name": self.request.task.name,
            "lock": self.key,
            "waited": round(time.monotonic() - self._since, 3),
            "rank": self.rank,
        }

    @property
    def must_leave(self) -> bool:
        """Whether the wait here ends only because of the broker. If so, the message waits again when redelivered."""
        now, task = time.monotonic(), self.request.task
        plan: LockPlan = task.lock_plan  # type: ignore[attr-defined] # it is a `LockedTask`
        header = Header.read(self.request.request_dict[HEADER])
        ends = _policy_deadlines(self.request, header, plan, self._since)
        must_leave = now >= must_leave_at(self.request, plan) or was_given_back_often(self.request)
        return must_leave and now < min(ends, default=math.inf)

    @property
    def began_at(self) -> datetime:
        """When it began to wait in this worker."""
        return datetime.now(UTC) - timedelta(seconds=time.monotonic() - self._since)

    @property
    def group(self) -> str:
        """The name of the task. All messages of a task need a slot, and a rate token if the task has a `rate_limit`."""
        name: str = self.request.task.name
        return name

    @property
    def is_out(self) -> bool:
        """Whether the room last found the lock server unreachable."""
        return self._room.is_out(self.key)

    def is_ready(self) -> bool:
        """Whether the worker would run it soon: it has a slot, and a rate token if the task has a `rate_limit`."""
        return self._is_ready(self)

    def is_coming(self) -> bool:
        """Whether it was called but no child has accepted it yet."""
        return self._is_coming(self.request)

    def need_not_wait(self, holders: Sequence[Token]) -> bool:
        """Whether the key was handed over to this message, or the task it has joined no longer holds the key."""
        if any(one.state == "queued" and one.owner == self.claim for one in holders):
            return True
        return self.joins is not None and not any(self._may_be_joined(one) for one in holders)

    def _may_be_joined(self, holder: Token) -> bool:
        """Whether `holder` is the task that the message has joined, or a reservation that may belong to that task."""
        return holder.state == "queued" or (holder.state == "held" and holder.info("", None).task_id == self.joins)

    def take_turn(self, *, called: bool) -> None:
        """Run the message again in the pool, because it was called to its key or has stopped waiting."""
        if called:
            waited, name = time.monotonic() - self._since, self.request.task.name
            logger.info(
                "%s: its turn has come after %.3f s; %d messages wait in this worker",
                *(run_named(name, self.request.id), waited, len(self._room)),
                extra=fields("turn", task=name, task_id=self.request.id, key=self.key),
            )
        self._run(self, called)

    def pass_on(self) -> None:
        """Make the room pass the key on: the message was called to the key, but will not use it."""
        self._room.leave(self)

    def look_for_next(self) -> bool:
        """Make the room check the message's line after its run has ended; return whether the line has a waiter."""
        return self._room.look(self.line)

    def withdraw(self) -> bool:
        """Stop waiting. Return whether it still waited; if not, it was called and is on its way to the pool."""
        return self._room.withdraw(self)

    def wait_on(self) -> None:
        """Return to the line with the same rank, although the message was called; the room passes the key on."""
        self.pass_on()
        self._room.enter(self)

    def unavailable(self, error: LockUnavailable) -> None:
        """Run the message in the pool, unless `lock_on_outage` makes it wait until the lock server answers again."""
        if self._runs_in_outage and self.is_ready():
            self._room.leave(self)
            self.take_turn(called=False)


def _deadline(request: Request, header: Header, plan: LockPlan) -> float:
    """When the message can wait no longer, by `time.monotonic()`."""
    now = time.monotonic()
    return max(now, min([must_leave_at(request, plan), *_policy_deadlines(request, header, plan, now)]))


def _policy_deadlines(request: Request, header: Header, plan: LockPlan, since: float) -> list[float]:
    """The times at which the message stops waiting in any worker, and its run decides what happens next.

    `since` is when it began to wait in this worker. All times are by `time.monotonic()`.
    """
    now, ends = time.monotonic(), []
    if header.claim is not None:  # its run asks for the key, which extends its reservation
        ends.append(since + plan.options.queue_ttl / 2)
    if plan.options.wait_for is not None:
        ends.append(now + plan.options.wait_for - (time.time() - header.since))
    if request.expires:
        ends.append(now + (maybe_make_aware(request.expires, UTC) - datetime.now(UTC)).total_seconds() + EXPIRED_FOR)
    return ends


def must_leave_at(request: Request, plan: LockPlan) -> float:
    """When the message must be published again, by `time.monotonic()`."""
    received_at: float = request.received_at  # type: ignore[attr-defined] # it is a `LockedRequest`
    return received_at + LONGEST_WAIT * plan.broker.visibility_timeout


def was_given_back_often(request: Request) -> bool:
    """Whether the message of `request` came from a quorum queue that may soon drop it."""
    count = (request.message.headers or {}).get("x-delivery-count")
    return isinstance(count, int) and count >= GIVEN_BACK_OFTEN


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
