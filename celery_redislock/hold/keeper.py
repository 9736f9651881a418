"""Keeper: the thread that renews every lock a process holds on one server."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from redis.exceptions import RedisError

from celery_redislock.connection.store import LockStore
from celery_redislock.protocol.scripts import RENEW

from .held_lock import HELD_TOO_LONG, INTERVAL, KEY_GONE, PAST_DEADLINE, HeldLock, Renewal
from .put_off import PutOff, Unsent

logger = logging.getLogger(__name__)

#: Locks whose renewals fall due within this share of the renewal interval are renewed together. A failed renewal is
#: tried again after no more than this share.
TICK = 1 / 10
#: When no lock is held any more, the thread looks again after so many seconds, and only then sleeps until it is woken:
#: to wake the thread for every short task would cost more than the task.
LINGER = 1.0
#: An answer that nobody has read for so many seconds is read here: the process has nothing else to ask.
READ_LATE = 0.05
#: Locks in one renewal command; more would keep the server from other clients for milliseconds.
BATCH = 500


class Keeper:
    """Renews the locks that are added to it until they are removed or lost.

    The keeper has one thread, which starts with the first lock. The thread sleeps until the next renewal is due and,
    once no lock is held, until one is added. To add and to remove a lock costs a dict entry.

    Args:
        store: A store with a connection that nobody else uses, so that no other command can delay a renewal.
        command_time: The longest that one renewal may take until it fails, in seconds.
        sends_late: A store of which the keeper reads the late answers that nobody else reads.

    Attributes:
        wake_at (float): When its thread looks again what is due, by `time.monotonic()`; infinite until it is woken.
    """

    def __init__(self, store: LockStore, command_time: float, sends_late: LockStore | None = None) -> None:
        self._store = store
        self._sends_late = sends_late
        self._linger_until = 0.0
        self._command_time = command_time
        self._held: dict[HeldLock, None] = {}
        self._put_off = PutOff(store)
        self._wake = threading.Event()
        self.wake_at = math.inf
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._failures = 0
        self._added = False
        self._stopped = False

    def stop(self) -> None:
        """End the thread, which closes the store: nobody in this process can reach the keeper's server any more."""
        self._stopped = True
        self._wake.set()

    def add(self, lock: HeldLock) -> None:
        """Renew `lock` from now on."""
        self._held[lock] = None
        self._added = True
        self.look_at(lock)

    def look_at(self, lock: HeldLock) -> None:
        """Note that `lock` may be due sooner than before. Where it was removed meanwhile, it is not renewed again."""
        if lock.renew_at < self.wake_at:
            self._start()
            self._wake.set()

    def remove(self, lock: HeldLock) -> None:
        """Renew `lock` no more. A renewal may be on its way; it renews the key only while the lock's token owns it."""
        self._held.pop(lock, None)

    def expect_answers(self) -> None:
        """Read the answers of the store that sends late soon, if nobody else does."""
        self._added = True
        if self.wake_at > time.monotonic() + READ_LATE:
            self._start()
            self._wake.set()

    def later(self, key: str, until: float, send: Callable[[LockStore], object]) -> None:
        """Release a key, or give up a reservation, in the keeper's thread as soon as Redis answers.

        Args:
            key: The key in Redis.
            until: When that is of no use any more, by `time.monotonic()`.
            send: Sends one such command by the store that it is called with.
        """
        self._put_off.add(Unsent(key, until, send))
        self._start()
        self._wake.set()

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="redislock-keeper", daemon=True)
                thread.start()
                self._thread = thread  # after the start: where no thread can start, the next lock tries again

    def _run(self) -> None:
        while not self._stopped:
            try:
                pause = self._round()
            except BaseException:  # even a sys.exit(), as in a log handler: the locks must still be renewed
                logger.exception("the keeper failed; it goes on in a second")
                pause = 1.0
            self._wake.wait(None if pause == math.inf else max(0.0, pause))
        self._store.close()

    def _round(self) -> float:
        """Renew what is due; return the seconds until something is due again."""
        # From here on every `add` wakes the thread: the lock that it adds may be missing in the copy of `_held` below.
        self.wake_at = math.inf
        self._wake.clear()
        now = time.monotonic()
        due = [lock for lock in self._held.copy() if self._is_due(lock, now)]
        for start in range(0, len(due), BATCH):
            self._renew(due[start : start + BATCH])
        if not self._held:
            self._failures = 0  # without a lock, no renewal will show that Redis answers again
        self._put_off.send(self._watching)
        is_unread = self._sends_late is not None and self._sends_late.read_late(READ_LATE, self._command_time)
        if self._added:
            self._added, self._linger_until = False, now + LINGER
        renewals = (min(lock.renew_at, lock.deadline) for lock in self._held.copy())
        self.wake_at = min((self._other_work_at(now, is_unread), self._put_off.next_at, *renewals))
        return self.wake_at - time.monotonic()

    def _other_work_at(self, now: float, is_unread: bool) -> float:
        """When there may be something to do besides renewals, by `time.monotonic()`.

        Args:
            now: When this round began.
            is_unread: Whether an answer has not been read.
        """
        lingers = now < self._linger_until
        if is_unread or (lingers and self._sends_late is not None):
            return now + READ_LATE
        if lingers:
            return self._linger_until
        return math.inf

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
                extra=lock.fields("held_too_long"),
            )
        return lock.renew_at <= now + lock.lease * INTERVAL * TICK

    def _renew(self, due: Sequence[HeldLock]) -> None:
        sent = {lock: lock.renewing() for lock in due}
        try:
            with self._watching():
                answers = self._store.renew([(lock.permit, lock.token, one.ttl) for lock, one in sent.items()])
        except BaseException as error:
            for lock, one in sent.items():
                lock.unanswered(one)
            if not isinstance(error, RedisError):
                raise
            self._try_again(dict.fromkeys(due, error))
            return
        self._note(sent, answers)

    def _note(self, sent: Mapping[HeldLock, Renewal], answers: Sequence[bool | RedisError]) -> None:
        unanswered: dict[HeldLock, RedisError] = {}
        for (lock, renewal), still_held in zip(sent.items(), answers, strict=True):
            if isinstance(still_held, RedisError):  # a node of a Cluster
                lock.unanswered(renewal)
                unanswered[lock] = still_held
            elif still_held and lock.remaining > 0:
                lock.answered(renewal)
            else:  # where the key is still held, the answer is too late: the holder may have been told of the loss
                self._lose(lock, PAST_DEADLINE if still_held else KEY_GONE)
        if unanswered:
            self._try_again(unanswered)
        else:
            self._failures = 0

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Tell holders of their loss at their deadline, although the keeper's thread may wait for a silent Redis."""
        until = time.monotonic() + 2 * self._command_time  # a release may be sent twice
        at_risk = [lock for lock in self._held.copy() if lock.deadline < until]
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

    def _try_again(self, unanswered: Mapping[HeldLock, RedisError]) -> None:
        now = time.monotonic()
        for lock, error in unanswered.items():
            outage = self._store.outage_of(lock.key)
            self._put_off.pause(outage)  # the next renewals there matter more
            if self._failures:  # the first failure may be of a connection that a restarted server has closed
                outage.failed(RENEW, error)
            lock.renew_at = now + min(0.05 * 2**self._failures, lock.lease * INTERVAL * TICK)
        self._failures = min(self._failures + 1, 10)

    def _lose(self, lock: HeldLock, reason: str) -> None:
        try:
            del self._held[lock]
        except KeyError:
            return  # the keeper or a watching thread has noted the loss, or the lock was released
        # A receiver of the signal may take its time; the other locks must be renewed meanwhile.
        threading.Thread(target=lock.lose, args=(reason,), name="redislock-lost", daemon=True).start()
