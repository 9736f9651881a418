"""HeldLock: a lock from its grant to its release. Term: how long its holder may rely on it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from celery_redislock.connection.sender import Sender
from celery_redislock.errors import LockLost, LockReplaced, fields, run_named, shown
from celery_redislock.protocol import commands
from celery_redislock.protocol.hold import ENDING, OVER, Hold
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.replies import Granted, Renewed
from celery_redislock.protocol.tokens import Token

logger = logging.getLogger(__name__)

State = Literal["held", "at_risk", "lost"]
LostHandler = Callable[["HeldLock", str], Any]
StopHandler = Callable[["HeldLock"], Any]

PAST_DEADLINE = "not renewed by its deadline"
HELD_TOO_LONG = "held for longer than lock_max_hold"
KEY_GONE = "its key was deleted, expired or taken"
NOT_OURS = "its key was gone or taken at the release"

#: The longest time to live of a key, in seconds. With a longer one, Redis refuses the whole command.
LONGEST_TTL = 1_000_000_000
#: A renewal is due after this share of the lease.
INTERVAL = 1 / 3
#: A run that a newer call may replace renews its lock this often, in seconds. The reply tells it when it is to stop.
STOPS_WITHIN = 1.0
#: The share of the key's time to live that its holder relies on. The holder's own deadline is so much earlier than the
#: key's expiry in Redis because the clocks of the holder and the server may run at different speeds.
TRUSTED = 0.99


class Renewal:
    """A command that sets the key's time to live. The holder counts that time from the moment it sends the command.

    The keeper and each caller of `HeldLock.extend` use their own connections, so one renewal may overtake another.

    Attributes:
        sent_at (float): When the command is sent, by `time.monotonic()`.
        ttl (float): The time to live that the command sets, in seconds.
        counts (float): Once the renewal is answered, the holder may rely on the key for this many seconds from
            `sent_at`. This is the smallest `ttl` of all renewals under way at the same time, because any of them may
            reach the server last.
    """

    __slots__ = ("counts", "sent_at", "ttl")

    def __init__(self, ttl: float) -> None:
        self.sent_at = time.monotonic()
        self.ttl = self.counts = ttl


class Term:
    """How long the holder of a key may rely on it. Several threads may renew the key at the same time.

    Args:
        lease: The key's time to live when it is granted, in seconds.
        interval: How long the keeper may leave the key without a renewal, in seconds; at most a third of the lease.

    Attributes:
        lease (float): The `lease` argument.
        interval (float): The keeper renews the key about this often, in seconds.
        deadline (float): The holder may rely on the key until this time, by `time.monotonic()`. Whatever happens to
            the renewals sent so far, the key does not expire before then.
        renew_at (float): When the keeper should renew the key.
    """

    __slots__ = (
        *("_asked_until", "_guard", "_in_doubt", "_longest", "_under_way"),
        *("deadline", "interval", "lease", "renew_at"),
    )

    def __init__(self, lease: float, interval: float = math.inf) -> None:
        self.lease, self._longest, self.interval = lease, interval, min(interval, lease * INTERVAL)
        self.deadline = self.renew_at = -math.inf  # until the key is granted
        self._asked_until = -math.inf
        self._under_way: list[Renewal] = []
        self._in_doubt = math.inf  # the shortest `ttl` of the unanswered renewals, which may still arrive
        self._guard = threading.Lock()  # one per lock: a fork could leave a shared one locked for good in the child

    @property
    def was_granted(self) -> bool:
        """Whether the server has ever confirmed the grant."""
        return self.deadline > -math.inf

    @property
    def ends_at(self) -> float:
        """The latest time at which the key can expire if no more renewals are sent, by `time.monotonic()`."""
        now = time.monotonic()  # a renewal under way may reach the server as late as now
        return now + max(self.lease, self._asked_until - now) / TRUSTED

    def start_lease(self, sent_at: float) -> None:
        """Record that the server granted the key for one lease, at `sent_at` or later."""
        # No guard: until the keeper and others know the lock, only its owner's thread knows it.
        self.deadline, self.renew_at = sent_at + self.lease * TRUSTED, sent_at + self.interval

    def extending(self, ttl: float | None = None) -> Renewal:
        """Record that a renewal is about to be sent, for `ttl` seconds or, by default, one lease.

        Call `answered` or `unanswered` afterwards. If the renewal shortens the time that is left, the deadline moves at
        once, because the answer may be lost.

        Raises:
            ValueError: `ttl` is not a number of seconds that a key can live for. Nothing is recorded.
        """
        if ttl is not None and not (isinstance(ttl, int | float) and abs(ttl) <= LONGEST_TTL):
            raise ValueError(f"extend: {ttl!r} is not allowed; allowed: seconds, at most {LONGEST_TTL:,}")
        with self._guard:
            renewal = self._send(self.lease if ttl is None else ttl)
            self._asked_until = renewal.sent_at + renewal.ttl
            return renewal

    def renewing(self) -> Renewal:
        """Like `extending`, called by the keeper: for one lease, or longer if the last `extending` asked for more."""
        with self._guard:
            return self._send(max(self.lease, self._asked_until - time.monotonic()))

    def answered(self, renewal: Renewal, *, is_lost: bool = False) -> None:
        """Record that the server has renewed the key.

        `is_lost` says that the renewal was sent twice: what was sent first may still reach the server at any time.
        """
        with self._guard:
            if is_lost:
                self._in_doubt = min(self._in_doubt, renewal.ttl)
            self._under_way.remove(renewal)
            self._count(renewal.sent_at, renewal.counts, self.deadline)

    def unanswered(self, renewal: Renewal) -> None:
        """Record that nothing waits for the answer any more. The renewal may still reach the server at any time."""
        with self._guard:
            self._in_doubt = min(self._in_doubt, renewal.ttl)
            self._under_way.remove(renewal)

    def _send(self, ttl: float) -> Renewal:
        renewal = Renewal(ttl)
        for other in self._under_way:
            other.counts = min(other.counts, ttl)
            renewal.counts = min(renewal.counts, other.ttl)
        renewal.counts = min(renewal.counts, self._in_doubt)
        self._under_way.append(renewal)
        if renewal.sent_at + ttl * TRUSTED < self.deadline:
            self._count(renewal.sent_at, ttl)
        return renewal

    def _count(self, sent_at: float, ttl: float, at_least: float = -math.inf) -> None:
        self.deadline = max(sent_at + ttl * TRUSTED, at_least)
        # After a longer extension, wait until one lease is left, then another third of a lease.
        pause = ttl - self.lease * (1 - INTERVAL) if ttl > self.lease else ttl * INTERVAL
        self.renew_at = sent_at + min(pause, self._longest)


class HeldLock(Term):
    """A lock from its grant to its release. If a run holds several, the first of `lock_key` stands for all of them.

    Attributes:
        hold (Hold): Its owner's life with the key. Only the owner's thread changes it.
        demand (Demand): What the owner asked for.
        key (str): The key in Redis.
        permit (str): The key that holds the token: `key`, or the permit's key if the lock has a limit above 1.
        lease (float): How long the key outlives a dead holder, in seconds.
        fence (int | None): The fencing number, if the lock asked for one.
        replaced (str | None): The id of the task that asks the run to stop, with `lock_on_conflict="replace"`; None if
            none does. The lock is still held.
        calls (list[tuple[list, dict]]): The positional and the keyword arguments of each call that the run is for, in
            the order of the calls, if `lock_arguments` is ``"all"``.
    """

    __slots__ = (
        *("calls", "demand", "fence", "hold", "key", "max_hold", "on_asked", "on_lost", "permit", "replaced"),
        *("__weakref__", "_lost", "_others", "stop_at", "store"),
    )

    def __init__(
        self,
        store: Sender,
        hold: Hold,
        lease: float,
        max_hold: float | None = None,
        on_lost: LostHandler | None = None,
        on_asked: StopHandler | None = None,
    ) -> None:
        self.store, self.hold, self.demand = store, hold, hold.demand
        self.key = self.permit = hold.demand.key
        super().__init__(lease, math.inf if on_asked is None else STOPS_WITHIN)
        self.fence: int | None = None
        self.calls: list[tuple[list[Any], dict[str, Any]]] = []
        self.on_lost, self.on_asked = on_lost, on_asked
        self.replaced: str | None = None
        self.max_hold, self.stop_at = max_hold, math.inf
        self._lost: str | None = None
        self._others: tuple[HeldLock, ...] = ()

    def __repr__(self) -> str:
        return f"<HeldLock {self.key} {self.state}>"

    @property
    def name(self) -> str:
        """The holder, for log lines: ``task shop.bill[<id>]``."""
        attempt = self.token.attempt
        return run_named(shown(str(self.token.task)), attempt.task_id) if attempt else "a lock outside tasks"

    @property
    def token(self) -> Token:
        """What the key holds while the lock is held."""
        return self.hold.token

    def stand_for(self, others: Iterable[HeldLock]) -> None:
        """Have this lock stand for those of the same run too: it is lost if any of them is."""
        self._others = tuple(others)

    @property
    def parts(self) -> tuple[HeldLock, ...]:
        """The locks of all keys that the run holds, this one first. A rate is not among them: nothing of it is held."""
        return (self, *self._others)

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline, which each renewal moves; 0.0 once the lock is lost or released.

        With several locks, this is the least of theirs.
        """
        return min(self.left, *(one.left for one in self._others)) if self._others else self.left

    @property
    def left(self) -> float:
        """`remaining`, of this key alone."""
        return 0.0 if self._lost or self.hold.phase in {ENDING, OVER} else max(0.0, self.deadline - time.monotonic())

    @property
    def state(self) -> State:
        """``"held"``, ``"at_risk"`` (renewals are late: less than half of the lease is left) or ``"lost"``."""
        remaining = self.remaining
        if remaining <= 0:
            return "lost"
        return "held" if remaining >= self.lease / 2 else "at_risk"

    def check(self) -> None:
        """Raise if the lock is lost, or the run is to stop. Call this right before a step that must not happen twice.

        Raises:
            LockLost: The key was lost, or was not renewed by the holder's deadline.
            LockReplaced: The run is asked to stop, because a newer call waits. The lock is still held.
        """
        for part in self.parts:
            part.check_held()
        if self.replaced is not None:
            raise LockReplaced(self.key, self.replaced)

    def check_held(self) -> None:
        """Raise LockLost if this key is lost, even if the others of `parts` are held, or was released by its run."""
        if self.left <= 0:
            ended = "its run has ended" if self.hold.phase in {ENDING, OVER} else "its lease has ended"
            raise LockLost(self.key, self._lost or ended)

    def extend(self, ttl: float | None = None) -> None:
        """Renew the key now, or the keys of all `parts`. A lock that a keeper renews does not need this.

        Args:
            ttl: Seconds from now; None for a whole lease.

        Raises:
            LockLost: The key is no longer held.
            LockUnavailable: Redis did not answer, or refused the command; the lock is still held until its deadline.
            ValueError: `ttl` is not a number of seconds, at most a billion.
        """
        for part in self.parts:
            part._extend(ttl)

    def _extend(self, ttl: float | None) -> None:
        self.check_held()
        renewal = self.extending(ttl)
        try:
            reply, _, is_lost = self.store.ask(commands.renew([(self.permit, self.token, renewal.ttl)]))
        except BaseException:
            self.unanswered(renewal)
            raise
        self.extended(renewal, Renewed.of(reply[0]), is_lost=is_lost)

    def extended(self, renewal: Renewal, renewed: Renewed | None, *, is_lost: bool) -> None:
        """Record what the server has answered to a `renewal` from `extending`. `is_lost` is as for `answered`.

        Raises:
            LockLost: The key is no longer held, or the answer came too late.
        """
        if renewed is None:
            self.lose(KEY_GONE)
        self.check_held()
        self.answered(renewal, is_lost=is_lost)
        if renewed is not None and renewed.asked_by:
            self.ask_to_stop(renewed.asked_by)

    def granted(self, grant: Granted) -> None:
        """Record that the server has granted the key."""
        self.fence = grant.fence
        if self.demand.capacity > 1:
            self.permit = keys_of(self.key).permit(grant.permit)
        self.start_lease(grant.sent_at)
        if self.max_hold is not None:
            self.stop_at = grant.sent_at + self.max_hold

    def fields(self, event: str, **about: object) -> dict[str, str]:
        """The fields of a log line about this lock; see `celery_redislock.errors.fields`."""
        attempt = self.token.attempt
        return fields(event, task=self.token.task, task_id=attempt and attempt.task_id, key=self.key, **about)

    def ask_to_stop(self, task_id: str) -> None:
        """Record that the task `task_id` asks the run to stop. The first call calls `on_asked`."""
        with self._guard:
            on_asked = self.on_asked if self.replaced is None else None
            if on_asked is not None:
                self.replaced = task_id
        if on_asked is not None:
            on_asked(self)

    @property
    def was_lost(self) -> bool:
        """Whether `lose` has recorded a loss."""
        return self._lost is not None

    def lose(self, reason: str) -> None:
        """Record for good that the lock is lost. The first call logs the loss and calls `on_lost`."""
        with self._guard:  # the keeper and the thread that releases the lock may both notice the loss
            if self._lost is not None:
                return
            self._lost = reason
        about = self.fields("lost", reason=reason)
        logger.warning("%s: %s", self.name, LockLost(self.key, reason), extra=about)
        if self.on_lost:
            self.on_lost(self, reason)
