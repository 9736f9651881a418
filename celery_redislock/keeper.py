"""Keeper: the thread that renews every lock a process holds on one server."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisError

from .errors import LockLost, LockUnavailable, describe
from .options import DEADLINE_MARGIN
from .store import RENEW, Granted, LockStore, Text
from .tokens import parse

logger = logging.getLogger(__name__)

#: Renewal is due after this share of the lease.
INTERVAL = 1 / 3
#: What falls due within this share of the interval is renewed together, and a failed renewal is tried again
#: after at most so long.
TICK = 1 / 10
#: With nothing held any more the thread looks once again after so many seconds before it sleeps for ever: waking it
#: for every short task would cost more than the task.
LINGER = 1.0
#: Locks in one renewal call; more would keep the server from others for milliseconds.
BATCH = 500

PAST_DEADLINE = "it was not renewed until its deadline"
HELD_TOO_LONG = "it was held for longer than lock_max_hold"
KEY_GONE = "its key was deleted, expired or taken"

#: Two threads may see a loss at the same time: the keeper's and the one that releases.
_losing = threading.Lock()

LostHandler = Callable[["HeldLock", str], Any]


class HeldLock:
    """A lock that is held, from its grant to its release.

    Attributes:
        key: The key in Redis.
        token: What the key holds while it is ours.
        lease: Seconds.
        fence: The fencing number of this hold, where it was asked for.
    """

    __slots__ = (
        "_lost",
        "deadline",
        "fence",
        "key",
        "lease",
        "max_hold",
        "nonce",
        "on_lost",
        "renew_at",
        "stop_at",
        "store",
        "token",
    )

    def __init__(
        self,
        store: LockStore,
        key: str,
        token: Text,
        nonce: Text,
        lease: float,
        max_hold: float | None = None,
        on_lost: LostHandler | None = None,
    ) -> None:
        self.store = store
        self.key = key
        self.token = token
        self.nonce = nonce
        self.lease = lease
        self.fence: int | None = None
        self.on_lost = on_lost
        self.max_hold = max_hold
        self.stop_at = math.inf
        self.deadline = self.renew_at = -math.inf  # until it is granted
        self._lost: str | None = None

    def __repr__(self) -> str:
        return f"<HeldLock {self.key} {self.state}>"

    @property
    def remaining(self) -> float:
        """Seconds until the holder's own deadline; it is moved by every renewal. 0.0 once the lock is lost."""
        return 0.0 if self._lost else max(0.0, self.deadline - time.monotonic())

    @property
    def state(self) -> str:
        """``"held"``, ``"at_risk"`` (renewals are late: less than half of the lease is left) or ``"lost"``."""
        remaining = self.remaining
        if remaining <= 0:
            return "lost"
        return "held" if remaining >= self.lease / 2 else "at_risk"

    def check(self) -> None:
        """Raise if the lock is lost. Call it before what must not happen twice.

        Raises:
            LockLost: The key was lost, or could not be renewed until the holder's deadline.
        """
        if self.remaining <= 0:
            raise LockLost(self.key, self._lost or "its lease has ended")

    def extend(self, ttl: float | None = None) -> None:
        """Renew now. Without a keeper's failure nobody needs it.

        Args:
            ttl: Seconds from now; None for a whole lease.

        Raises:
            LockLost: The key is not held any more.
            LockUnavailable: Redis did not answer or refused; the lock is still held until its deadline.
        """
        self.check()
        sent_at = time.monotonic()
        try:
            (still_held,) = self.store.renew([(self.key, self.nonce, self.lease if ttl is None else ttl)])
        except RedisError as error:
            raise LockUnavailable(self.key, describe(error)) from error
        if not still_held:
            self.lose(KEY_GONE)
        self.check()
        self.renewed(sent_at, ttl)

    def granted(self, grant: Granted) -> None:
        """The server gave the key."""
        self.fence = grant.fence
        self.renewed(grant.sent_at)
        if self.max_hold is not None:
            self.stop_at = grant.sent_at + self.max_hold

    @property
    def owner(self) -> str:
        """Whose it is, for log lines: the task and its id."""
        return parse(self.token if isinstance(self.token, str) else self.token.decode("utf-8", "replace")).owner

    @property
    def was_granted(self) -> bool:
        """Whether the key has ever been ours, as far as we were told."""
        return self.deadline > -math.inf

    def renewed(self, sent_at: float, ttl: float | None = None) -> None:
        """The server gave the whole lease again, or `ttl` seconds, no earlier than at `sent_at`."""
        self.deadline = sent_at + (self.lease if ttl is None else ttl) * (1 - DEADLINE_MARGIN)
        self.renew_at = sent_at + self.lease * INTERVAL
        if ttl is not None:  # where more was given, a renewal must not take it away
            self.renew_at += ttl - self.lease

    def lose(self, reason: str) -> None:
        """Note, for good, that the lock is lost; tell its owner once."""
        with _losing:
            if self._lost is not None:
                return
            self._lost = reason
        logger.warning("%s: %s", self.owner, LockLost(self.key, reason))
        if self.on_lost:
            self.on_lost(self, reason)


class Keeper:
    """Renews the locks that are added to it until they are removed or lost.

    One thread, started with the first lock, on the store's own connection. It sleeps until the next renewal is due
    and, once nothing is held, for ever; adding and removing a lock costs a dict entry.

    Args:
        store: On a connection that nobody else uses, so that waiters cannot starve renewals.
        command_time: The longest that one renewal may take until it fails, in seconds.
    """

    def __init__(self, store: LockStore, command_time: float) -> None:
        self._store = store
        self._command_time = command_time
        self._held: dict[int, HeldLock] = {}
        self._leaving: dict[int, tuple[HeldLock, str | None, bool]] = {}
        self._wake = threading.Event()
        self._wake_at = math.inf
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._failures = 0
        self._added = False
        self._stopped = False

    def stop(self) -> None:
        """End the thread: nobody can reach this server any more."""
        self._stopped = True
        self._wake.set()

    def add(self, lock: HeldLock) -> None:
        """Renew `lock` from now on."""
        self._held[id(lock)] = lock
        self._added = True
        if lock.renew_at < self._wake_at:
            self._start()
            self._wake.set()

    def remove(self, lock: HeldLock) -> None:
        """Renew `lock` no more. A renewal that is on its way may still arrive; it renews only a key still ours."""
        self._held.pop(id(lock), None)

    def release_later(self, lock: HeldLock, note: str | None, *, copy_may_wait: bool) -> None:
        """Release `lock`, and leave its note, as soon as Redis answers again; arguments as `LockStore.release`."""
        self._leaving[id(lock)] = (lock, note, copy_may_wait)
        self._start()
        self._wake.set()

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="redislock-keeper", daemon=True)
                thread.start()
                self._thread = thread  # only now: where no thread could be started, the next lock tries again

    def _run(self) -> None:
        while not self._stopped:
            try:
                pause = self._turn()
            except BaseException:  # a receiver's sys.exit() too: the other locks must still be renewed
                logger.exception("the keeper failed; it goes on in a second")
                pause = 1.0
            self._wake.wait(None if pause == math.inf else max(0.0, pause))

    def _turn(self) -> float:
        """Renew what is due; return the seconds until something is due again."""
        # From here on every add wakes the thread: what it adds may not be in the copy that is looked at.
        self._wake_at = math.inf
        self._wake.clear()
        now = time.monotonic()
        due = [lock for lock in self._held.copy().values() if self._is_due(lock, now)]
        for start in range(0, len(due), BATCH):
            self._renew(due[start : start + BATCH])
        if self._leaving and not self._failures:  # else it is too early, and the next renewals matter more
            self._release_leaving()
        upcoming = (min(lock.renew_at, lock.deadline) for lock in self._held.copy().values())
        idle = now + LINGER if self._added or self._leaving else math.inf
        self._added = False
        self._wake_at = min((idle, *upcoming))
        return self._wake_at - time.monotonic()

    def _is_due(self, lock: HeldLock, now: float) -> bool:
        if lock.deadline <= now:
            self._lose(lock, HELD_TOO_LONG if lock.stop_at <= now else PAST_DEADLINE)
            return False
        if lock.stop_at <= now and lock.renew_at != math.inf:
            lock.renew_at = math.inf
            logger.warning(
                "%s still runs after lock_max_hold (%g s): its lock %s is not renewed any more; in %.1f s another run "
                "may take it",
                lock.owner,
                lock.max_hold,
                lock.key,
                lock.remaining,
            )
        return lock.renew_at <= now + lock.lease * INTERVAL * TICK

    def _renew(self, due: Sequence[HeldLock]) -> None:
        sent_at = time.monotonic()
        try:
            with self._watching():
                answers = self._store.renew([(lock.key, lock.nonce, lock.lease) for lock in due])
        except RedisError as error:
            self._try_again(due, error)
            return
        self._failures = 0
        for lock, still_held in zip(due, answers, strict=True):
            if still_held and lock.remaining > 0:
                lock.renewed(sent_at)
            else:  # still held but too late: its holder may have been told
                self._lose(lock, PAST_DEADLINE if still_held else KEY_GONE)

    def _release_leaving(self) -> None:
        for name, (lock, note, copy_may_wait) in self._leaving.copy().items():
            try:
                with self._watching():
                    self._store.release(lock.key, lock.nonce, note, copy_may_wait=copy_may_wait)
            except LockUnavailable:  # try again in `LINGER`; until then the others are renewed
                return
            del self._leaving[name]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Tell holders at their deadline, also while Redis is silent and this thread waits for it."""
        until = time.monotonic() + 2 * self._command_time  # a release is sent twice
        at_risk = [lock for lock in self._held.copy().values() if lock.deadline < until]
        if not at_risk:
            yield
            return
        answered = threading.Event()
        watch = threading.Thread(target=self._watch, args=(at_risk, answered), name="redislock-watch", daemon=True)
        watch.start()
        try:
            yield
        finally:
            answered.set()

    def _watch(self, at_risk: Sequence[HeldLock], answered: threading.Event) -> None:
        for lock in sorted(at_risk, key=lambda lock: lock.deadline):
            if answered.wait(max(0.0, lock.deadline - time.monotonic())):
                return
            self._lose(lock, PAST_DEADLINE)

    def _try_again(self, due: Sequence[HeldLock], error: RedisError) -> None:
        if self._failures:  # the first may have met a connection that a restarted server had closed
            self._store.outage.begin(RENEW, error)
        now = time.monotonic()
        for lock in due:
            lock.renew_at = now + min(0.05 * 2**self._failures, lock.lease * INTERVAL * TICK)
        self._failures = min(self._failures + 1, 10)

    def _lose(self, lock: HeldLock, reason: str) -> None:
        if self._held.pop(id(lock), None) is None:
            return  # told by the other thread, or released meanwhile
        # A receiver of the signal may take its time; the other locks must be renewed meanwhile.
        threading.Thread(target=lock.lose, args=(reason,), name="redislock-lost", daemon=True).start()
