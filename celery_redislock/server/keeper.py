"""Keeper: the thread that renews every lock a process holds on one server."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from redis.exceptions import RedisError

from celery_redislock.errors import LockUnavailable

from .held import HELD_TOO_LONG, INTERVAL, KEY_GONE, PAST_DEADLINE, HeldLock
from .scripts import RENEW
from .store import LockStore

logger = logging.getLogger(__name__)

#: What falls due within this share of the interval is renewed together, and a failed renewal is tried again
#: after at most so long.
TICK = 1 / 10
#: With nothing held any more the thread looks once again after so many seconds before it sleeps for ever: waking it
#: for every short task would cost more than the task.
LINGER = 1.0
#: What is given back later takes no longer than this at a time, in seconds: renewals may be due.
SHIFT = 0.05
#: Locks in one renewal call; more would keep the server from others for milliseconds.
BATCH = 500


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
        self._later: dict[Callable[[LockStore], object], None] = {}
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

    def later(self, give_back: Callable[[LockStore], object]) -> None:
        """Give a key back as soon as Redis answers, but not in the caller's time.

        Args:
            give_back: Sends one command by the store that it is given.
        """
        self._later[give_back] = None
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
        if not self._held:
            self._failures = 0  # no renewal will tell that Redis answers again
        # After a failure it is too early, and the next renewals matter more.
        goes_on = bool(self._later) and not self._failures and self._give_back()
        upcoming = (min(lock.renew_at, lock.deadline) for lock in self._held.copy().values())
        idle = now if goes_on else now + LINGER if self._added or self._later else math.inf
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
                lock.token.name,
                lock.max_hold,
                lock.key,
                lock.remaining,
            )
        return lock.renew_at <= now + lock.lease * INTERVAL * TICK

    def _renew(self, due: Sequence[HeldLock]) -> None:
        sent_at = time.monotonic()
        try:
            with self._watching():
                answers = self._store.renew([(lock.key, lock.token, lock.lease) for lock in due])
        except RedisError as error:
            self._try_again(due, error)
            return
        self._failures = 0
        for lock, still_held in zip(due, answers, strict=True):
            if still_held and lock.remaining > 0:
                lock.renewed(sent_at)
            else:  # still held but too late: its holder may have been told
                self._lose(lock, PAST_DEADLINE if still_held else KEY_GONE)

    def _give_back(self) -> bool:
        """Give keys back for a while; returns whether to go on after the next renewals."""
        until = time.monotonic() + SHIFT
        for give_back in self._later.copy():
            try:
                with self._watching():
                    give_back(self._store)
            except LockUnavailable:  # try again in `LINGER`; until then the others are renewed
                return False
            del self._later[give_back]
            if time.monotonic() > until:
                return True
        return False

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
