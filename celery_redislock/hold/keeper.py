"""Keeper: the thread that renews every lock a process holds on one server. LastWord: the reply to a release."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from redis.exceptions import RedisError

from celery_redislock.connection.pool import Wake
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.scripts import RENEW, Command

from .held_lock import HELD_TOO_LONG, INTERVAL, KEY_GONE, NOT_OURS, PAST_DEADLINE, HeldLock
from .put_off import PutOff, Unsent

logger = logging.getLogger(__name__)

#: Locks due within this share of the renewal interval are renewed together. A failed renewal is retried after at most
#: this share.
TICK = 1 / 10
#: For this many seconds after a lock was added, the thread wakes up by itself. After that, it sleeps until a renewal is
#: due or it is woken. Waking it for every short task would cost more than the task does.
LINGER = 1.0
#: If no other command has read a late answer this many seconds after its command was sent, the keeper reads it.
READ_LATE = 0.05
#: How long the thread of a keeper that was stopped goes on sending what Redis has not accepted, in seconds.
LAST_TRIES = 60.0
#: Locks per renewal command. More would block the server for milliseconds.
BATCH = 500


class Keeper:
    """Renews each lock that is added to it until the lock is removed or lost.

    The keeper has one thread, started with the first lock. It sleeps until the next renewal is due or, if no lock is
    held, until one is added. Adding or removing a lock costs one dict operation.

    Args:
        store: A store that shares its connection with nothing else, so that no other command delays a renewal.
        command_time: How long one renewal may take before it fails, in seconds.
        sends_late: A store whose late answers the keeper reads if nothing else does.

    Attributes:
        wake_at (float): When the thread next checks for due work, by `time.monotonic()`; infinite if it sleeps until it
            is woken.
    """

    def __init__(self, store: LockStore, command_time: float, sends_late: LockStore) -> None:
        self._store = store
        self._sends_late = sends_late
        self._linger_until = 0.0
        self._command_time = command_time
        self._held: dict[HeldLock, None] = {}
        self._put_off = PutOff(store.outage_of)
        self._wake = Wake()
        self.wake_at = math.inf
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._failures = 0
        self._added, self._ends_at = False, math.inf

    def stop(self) -> None:
        """Stop the thread once it has sent what was put off. Called when this process no longer uses the server."""
        self._ends_at = time.monotonic() + LAST_TRIES
        self._wake.set()

    def add(self, lock: HeldLock) -> None:
        """Start renewing `lock`."""
        self._held[lock] = None
        self._added = True
        self.look_at(lock)

    def look_at(self, lock: HeldLock) -> None:
        """Wake the thread if `lock` is due before the next round. A lock that was removed stays removed."""
        if lock.renew_at < self.wake_at:
            self._wake_up()

    def remove(self, lock: HeldLock) -> None:
        """Stop renewing `lock`. A renewal already under way has no effect once the key has another owner or none."""
        self._held.pop(lock, None)

    def expect_answers(self) -> None:
        """Read the answers of `sends_late` soon, unless something else reads them first."""
        self._added = True
        if self.wake_at > time.monotonic() + READ_LATE:
            with suppress(RuntimeError):  # no thread can start, as when Python ends: the next command reads them
                self._wake_up()

    def later(self, key: str, until: float, send: Callable[[LockStore], object]) -> None:
        """Release a key, or give up a reservation, in the keeper's thread as soon as Redis answers.

        Args:
            key: The key in Redis.
            until: When that stops being useful, by `time.monotonic()`.
            send: Sends the commands through the store it is called with.
        """
        self._put_off.add(Unsent(key, until, partial(send, self._store)))
        with suppress(RuntimeError):  # no thread can start: the caller has an error of its own to tell
            self._wake_up()

    def send(self, command: Command, until: float) -> None:
        """Send `command` in the keeper's thread as soon as Redis answers; see `later`."""
        self.later(command.keys[0], until, lambda store: store.send(command))

    def _wake_up(self) -> None:
        """Wake the thread, or start it."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="redislock-keeper", daemon=True)
                    thread.start()
                    self._thread = thread  # after start(): if no thread can start, the next lock tries again
        self._wake.set()

    def _run(self) -> None:
        while self._ends_at == math.inf or (self._put_off.next_at < math.inf and time.monotonic() < self._ends_at):
            try:
                pause = self._round()
            except BaseException:  # even sys.exit(), as in a log handler: the locks must still be renewed
                logger.exception("the keeper failed; it renews the locks again in a second")
                pause = 1.0
            self._wake.wait(pause)
        self._store.close()

    def _round(self) -> float:
        """Renew the locks that are due; return the seconds until the next round."""
        # From here on, every `add` wakes the thread, because the copy of `_held` below may miss the added lock.
        self.wake_at = math.inf
        now = time.monotonic()
        due = [lock for lock in self._held.copy() if self._is_due(lock, now)]
        for start in range(0, len(due), BATCH):
            self._renew(due[start : start + BATCH])
        if not self._held:
            self._failures = 0  # without locks, no renewal would show that Redis answers again
        self._put_off.send(self._watching)
        is_unread = self._sends_late.read_late(READ_LATE, self._command_time)
        if self._added:
            self._added, self._linger_until = False, now + LINGER
        answers_at = now + READ_LATE if is_unread or now < self._linger_until else math.inf
        renewals = (min(lock.renew_at, lock.deadline) for lock in self._held.copy())
        self.wake_at = min((answers_at, self._put_off.next_at, *renewals))
        return self.wake_at - time.monotonic()

    def _is_due(self, lock: HeldLock, now: float) -> bool:
        if lock.deadline <= now:
            self._lose(lock, HELD_TOO_LONG if lock.stop_at <= now else PAST_DEADLINE)
            return False
        if lock.stop_at <= now and lock.renew_at != math.inf:
            lock.renew_at = math.inf
            text = "%s is still running after lock_max_hold (%g s): its lock %s is no longer renewed; free in %.1f s"
            logger.warning(text, lock.name, lock.max_hold, lock.key, lock.remaining, extra=lock.fields("held_too_long"))
        return lock.renew_at <= now + lock.interval * TICK

    def _renew(self, due: Sequence[HeldLock]) -> None:
        sent = {lock: lock.renewing() for lock in due}
        try:
            with self._watching():
                answers = self._store.renew([(lock.permit, lock.token, one.ttl) for lock, one in sent.items()])
        except RedisError as error:
            answers = [error] * len(sent)
        except BaseException:
            for lock, one in sent.items():
                lock.unanswered(one)
            raise
        unanswered: dict[HeldLock, RedisError] = {}
        for (lock, renewal), answer in zip(sent.items(), answers, strict=True):
            if isinstance(answer, RedisError):  # of a Cluster, only some nodes may have failed
                lock.unanswered(renewal)
                unanswered[lock] = answer
            elif answer and lock.left > 0:
                lock.answered(renewal)
                if answer.asked_by and lock in self._held:
                    lock.ask_to_stop(answer.asked_by)
            else:  # if the key is still held, the answer came too late: the holder may already know of a loss
                self._lose(lock, PAST_DEADLINE if answer else KEY_GONE)
        if unanswered:
            self._try_again(unanswered)
        else:
            self._failures = 0

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Tell holders at their deadline that their lock is lost, even while the keeper waits for a silent Redis."""
        until = time.monotonic() + 2 * self._command_time  # a release may be sent twice
        at_risk = [lock for lock in self._held.copy() if lock.deadline < until]
        if not at_risk:
            yield
            return
        answered = threading.Event()
        threading.Thread(target=self._watch, args=(at_risk, answered), name="redislock-watch", daemon=True).start()
        try:
            yield
        finally:
            answered.set()

    def _watch(self, at_risk: Sequence[HeldLock], answered: threading.Event) -> None:
        for lock in sorted(at_risk, key=lambda lock: lock.deadline):
            if answered.wait(max(0.0, lock.deadline - time.monotonic())):
                return
            if lock.left <= 0:  # its holder may have extended it meanwhile
                self._lose(lock, PAST_DEADLINE)

    def _try_again(self, unanswered: Mapping[HeldLock, RedisError]) -> None:
        now = time.monotonic()
        for lock, error in unanswered.items():
            outage = self._store.outage_of(lock.key)
            self._put_off.pause(outage)  # renewals matter more than releases
            if self._failures:  # the first failure may just be a connection that a restarted server closed
                outage.failed(RENEW, error)
            lock.renew_at = now + min(0.05 * 2**self._failures, lock.lease * INTERVAL * TICK)
        self._failures = min(self._failures + 1, 10)

    def _lose(self, lock: HeldLock, reason: str) -> None:
        try:
            del self._held[lock]
        except KeyError:
            return  # another thread has recorded the loss, or the lock was released
        # A receiver of the signal may be slow, and the other locks must be renewed meanwhile.
        threading.Thread(target=lock.lose, args=(reason,), name="redislock-lost", daemon=True).start()


class LastWord(NamedTuple):
    """What the reply to a run's last command means. It keeps no request or arguments in memory."""

    lock: HeldLock
    hold: Hold
    """The hold that the command ends."""
    was_sent_before: bool
    """Whether an earlier command was sent before a time limit interrupted the hooks: the key may be free already."""
    keeper: Keeper
    """The keeper of the lock's server."""

    def on_reply(self, was_held: bool) -> None:
        """Mark the lock as lost if the reply says that the run no longer held the key."""
        if not was_held and self.lock.was_granted and not self.was_sent_before:
            self.lock.lose(NOT_OURS)

    def send_again(self, why: object = "Redis has not confirmed the release of its lock") -> None:
        """Have the keeper keep sending the command until Redis answers.

        Args:
            why: What happened to the first command, for the log; by default, its reply is an error or was never read.
        """
        soon = f"the release is sent again until Redis accepts it; the lock expires in at most {self.lock.lease:g} s"
        about = self.lock.fields("release_delayed")
        logger.warning("%s has ended, but %s; %s", self.lock.name, why, soon, extra=about)
        # The broker may be down too, with the ack unsent: write the note even if no copy was seen.
        command, until = self.hold.release(in_any_case=True), self.lock.ends_at
        if self.hold.note is not None:  # copies need it even after the lease has ended
            until = max(until, time.monotonic() + self.hold.note.ttl)
        self.keeper.send(command, until)
