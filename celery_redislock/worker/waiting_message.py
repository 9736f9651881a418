"""WaitingMessage: one message that waits in line in its worker, how long it may wait, and what happens after that."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

from celery.utils.functional import maybe_list
from celery.utils.time import maybe_make_aware
from celery.worker import state
from celery.worker.request import Request

from celery_redislock.app import server_of
from celery_redislock.errors import LockUnavailable, fields, run_named
from celery_redislock.line.waiters import Waiter
from celery_redislock.message.delivery import given_back_often
from celery_redislock.message.header import HEADER, Header
from celery_redislock.policy import Place
from celery_redislock.policy.wait import LONGEST_PAUSE, LONGEST_PAUSE_WHILE_FULL, SHORTEST_PAUSE
from celery_redislock.protocol.names import FIRST_TURN
from celery_redislock.protocol.replies import info_of
from celery_redislock.protocol.tokens import RESERVED, Token, known_by
from celery_redislock.task.plan import LockPlan

logger = logging.getLogger(__name__)

#: A message waits here for at most this share of the broker's visibility timeout, and is then published again: once the
#: whole timeout has passed, the broker delivers an unacked message to another worker.
LONGEST_WAIT = 0.5
#: A message is ended this many seconds after it expires: Celery checks again by another clock, which may be behind.
EXPIRED_FOR = 0.01


class Drop(NamedTuple):
    """What an operator has dropped: the messages that wait for a key, and older ones that come to wait for it."""

    before: int
    """Only messages published before this time, in microseconds since the epoch."""
    until: float
    """Only messages that wait before this time, by `time.monotonic()`."""
    spared: Collection[str]
    """The ids of the key's holders, of whose messages there may be copies."""

    def ends(self, one: WaitingMessage) -> bool:
        """Whether a message that waits for the key is dropped. Work that may have begun is not."""
        if one.published > self.before or time.monotonic() >= self.until:  # looked at again and again
            return False
        return str(one.request.id) not in self.spared and not Header.read(one.request.request_dict[HEADER]).begun


class WorkerPort(Protocol):
    """The worker that a message waits in. The room's thread calls these methods."""

    def is_ready(self, waiting: WaitingMessage) -> bool:
        """Whether the worker would run the message soon."""

    def is_coming(self, request: Request) -> bool:
        """Whether `request`, which was called, is on its way to a child of the pool."""

    def end_wait(self, waiting: WaitingMessage) -> None:
        """Give the message to the pool, or make it leave the worker."""

    def send_away(self, waiting: WaitingMessage) -> None:
        """Make the message leave the worker."""


class WaitingMessage(Waiter):
    """One message that waits for its key.

    Args:
        request: Its `LockedRequest`.
        place: Its place in line.
        worker: The worker that it waits in.

    Attributes:
        called: Whether it was called to its key, and is to use it or to pass it on.
        has_slot: Whether it left its line because the worker has a slot for it, which it takes before fetched messages.
    """

    # Thousands of messages may wait, so each keeps as little as possible.
    __slots__ = (
        # Those of each `Waiter`.
        *("deadline", "demand", "is_asleep", "lost_at", "number", "published", "rank", "wants", "watches"),
        *("called", "claim", "has_slot", "joins", "request", "worker"),
        *("_asks_if_cooling", "_leaves_at", "_room", "_since"),
    )

    look_every = 1.0
    published: int

    def __init__(self, request: Any, place: Place, worker: WorkerPort) -> None:
        plan: LockPlan = request.task.lock_plan
        self.demand, self.wants, self.lost_at = place.demand, place.wants, None
        header = place.header
        self.rank, self.number = header.rank, 0
        self.request = request
        self._room = server_of(plan.app).message_room
        self.claim = None if header.claim is None else known_by(header.claim, RESERVED).owner
        self.joins = header.joins
        self._asks_if_cooling = place.asks_if_cooling
        self.watches = self.claim is not None or self.joins is not None or place.asks_if_cooling
        self.is_asleep = place.sleeps_for > 0
        now = time.monotonic()
        self.deadline = max(now, min([_must_leave_at(request), *_policy_deadlines(request, header, now)]))
        if self.is_asleep:
            self.deadline = min(self.deadline, now + place.sleeps_for)
        self._since = now
        self.published = self.rank if self.rank < FIRST_TURN else header.published or int(header.since * 1e6)
        self.worker = worker
        self.called = self.has_slot = False
        # If runs get an answer and the room does not, a message comes back each time. Its pauses here spare the slots.
        pause = header.delay(SHORTEST_PAUSE, LONGEST_PAUSE) if header.times > 1 else 0.0
        self._leaves_at = math.inf if plan.options.on_outage == "retry" else self._since + pause

    @property
    def call(self) -> bytes | None:
        """What the key holds from the moment the message is called until its run acquires the key; None if it is not
        called."""
        return self._room.call_of(self) if self.called else None

    @property
    def to_json(self) -> dict[str, Any]:
        """What ``celery inspect redislock_waiting`` shows about the message; the task's arguments are left out."""
        return {
            "id": str(self.request.id),
            "name": self.request.task.name,
            "lock": self.key,
            "waited": round(time.monotonic() - self._since, 3),
            "rank": self.rank,
            **({"group": self.demand.share.group} if self.demand.share else {}),
        }

    @property
    def must_leave(self) -> bool:
        """Whether the wait here ends only because of the broker. If so, the message waits again when redelivered."""
        ends = _policy_deadlines(self.request, Header.read(self.request.request_dict[HEADER]), self._since)
        return must_leave(self.request) and time.monotonic() < min(ends, default=math.inf)

    @property
    def began_at(self) -> datetime:
        """When it began to wait in this worker."""
        return datetime.now(UTC) - timedelta(seconds=time.monotonic() - self._since)

    @property
    def group(self) -> str:
        """The name of the task. All messages of a task need a slot, and a rate token if the task has a `rate_limit`."""
        return str(self.request.task.name)

    @property
    def may_be_displaced(self) -> bool:
        """Whether it is of a group that takes turns, and could be published again if it was displaced before."""
        return self.demand.share is not None and bool(self.request.may_leave)

    @property
    def is_out(self) -> bool:
        """Whether the room last found the lock server unreachable."""
        return self._room.is_out(self.key)

    def is_ready(self) -> bool:
        """Whether the worker would run it soon: it has a slot, and a rate token if the task has a `rate_limit`."""
        return self.worker.is_ready(self)

    def is_coming(self) -> bool:
        """Whether it was called but no child has accepted it yet."""
        return self.worker.is_coming(self.request)

    def need_not_wait(self, holders: Sequence[Token]) -> bool:
        """Whether the key was handed over to this message, the task it has joined no longer holds the key, or its
        policy applies because the key cools down."""
        is_duplicate = self._asks_if_cooling and any(one.state == "cooling" for one in holders)
        if is_duplicate or any(one.is_reserved and one.owner == self.claim for one in holders):
            return True
        running = [info_of(one, "", None).task_id for one in holders if one.is_running]
        # A reservation may belong to the joined task.
        return self.joins is not None and self.joins not in running and not any(one.is_reserved for one in holders)

    def take_turn(self, *, called: bool) -> None:
        """Run the message again in the pool, because it was called to its key or has stopped waiting."""
        if called:
            waited, name = time.monotonic() - self._since, self.request.task.name
            about = fields("turn", task=name, task_id=self.request.id, key=self.key)
            text = "%s: its turn came after %.3f s; messages that wait for locks in this worker: %d"
            logger.info(text, run_named(name, self.request.id), waited, len(self._room), extra=about)
        self.called = called
        self.has_slot |= called
        self.worker.end_wait(self)

    def pass_on(self) -> None:
        """Make the room pass the key on if the message was called to it, because the message will not use it."""
        if self.called:
            self.called = False
            self._room.leave(self)

    def look_for_next(self) -> bool:
        """Make the room check the message's line after its run has ended; return whether the line has a waiter."""
        looks = [self._room.look(one.line) for one in self.wants or (self.demand,)]
        return any(looks)

    def withdraw(self) -> bool:
        """Stop waiting. Return whether it still waited; if not, it was called and is on its way to the pool."""
        return self._room.withdraw(self)

    def wait_on(self) -> None:
        """Return to the line with the same rank, although the message was called; the room passes the key on."""
        self.pass_on()
        self.has_slot = False
        self._room.enter(self)

    def displaced(self) -> None:
        """Go back to the broker for a while; the pause grows each time."""
        header, broker = Header.read(self.request.request_dict[HEADER]), self.request.task.lock_plan.broker
        self.request.leaves_for = broker.countdown(header.delay(SHORTEST_PAUSE, LONGEST_PAUSE_WHILE_FULL))
        self.worker.send_away(self)

    def unavailable(self, error: LockUnavailable) -> None:
        """Run the message in the pool, unless `lock_on_outage` makes it wait until the lock server answers again."""
        if time.monotonic() >= self._leaves_at and self.is_ready() and self._room.withdraw(self):
            self.has_slot = True
            self.take_turn(called=False)


def _policy_deadlines(request: Any, header: Header, since: float) -> list[float]:
    """The times at which the message stops waiting in any worker, and its run decides what happens next.

    `since` is when it began to wait in this worker. All times are by `time.monotonic()`.
    """
    now, ends, options = time.monotonic(), [], request.task.lock_plan.options_for(header)
    if header.claim is not None:  # its run asks for the key, which extends its reservation
        ends.append(since + options.queue_ttl / 2)
    if options.wait_for is not None and header.since:  # it does not wait while it sleeps
        ends.append(now + options.wait_for - (time.time() - header.since))
    if request.expires:
        ends.append(now + (maybe_make_aware(request.expires, UTC) - datetime.now(UTC)).total_seconds() + EXPIRED_FOR)
    return ends


def _must_leave_at(request: Any) -> float:
    """When the message must be published again, by `time.monotonic()`."""
    return float(request.received_at + LONGEST_WAIT * request.task.lock_plan.broker.visibility_timeout)


def must_leave(request: Any) -> bool:
    """Whether the broker may soon deliver the message of `request` again, or a quorum queue may soon drop it."""
    return given_back_often(request.message.headers) or time.monotonic() >= _must_leave_at(request)


def revoked_among(messages: Callable[[], list[WaitingMessage]]) -> list[WaitingMessage]:
    """Those of the messages that `messages` returns that were revoked."""
    if not state.revoked and not state.revoked_stamps:
        return []
    return [one for one in messages() if one.request.id in state.revoked or _is_revoked_by_stamp(one.request)]


def _is_revoked_by_stamp(request: Request) -> bool:
    """Whether a stamp of the request is revoked. Celery's own check, `Request.revoked`, would also end the message."""
    return any(
        stamp in (maybe_list(revoked) or ())
        for header, revoked in tuple(state.revoked_stamps.items())  # another thread may add one
        for stamp in maybe_list(request.stamps.get(header)) or ()
    )


def has_ended(request: Request) -> bool:
    """Whether the message of `request` is revoked or has expired. If so, the result is stored and the message acked."""
    try:
        return bool(request.revoked())
    except Exception:  # from the result backend: the event loop could mistake it for a lost connection
        about = fields("not_stored", task=request.task.name, task_id=request.id)
        text = "%s: could not be marked as revoked; its message is delivered again when this worker stops"
        logger.exception(text, run_named(request.task.name, request.id), extra=about)
        return True
