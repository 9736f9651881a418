"""WorkerExecution: a run in a worker. Where it has to wait for its key, its message is sent back to the broker."""

from __future__ import annotations

import logging
import time

from celery_redislock import signals
from celery_redislock.errors import LockConflict, LockUnavailable
from celery_redislock.info import LockInfo
from celery_redislock.message.facts import Facts
from celery_redislock.server.answers import Conflict, Finished, Granted
from celery_redislock.server.held import HeldLock

from . import decisions
from .decisions import ComeBack, Decision, Fail, Refuse, RunWithout, Skip, TakeTurn, Wait
from .endings import CameBack, CameBackAsRetry, CameBackInOutage, drop, revoke, show_as_retry
from .execution import Execution

logger = logging.getLogger(__name__)

#: The shortest pause of a message that comes back and met no policy, in seconds. It waits for its own copy or for the
#: task that caused it, and these mostly end in a moment.
SOON = 0.05


class WorkerExecution(Execution):
    """Carries out what `celery_redislock.task.decisions` says of a conflict or an outage."""

    #: Whether this run blocks until the key is released, by the policy ``wait``: None before it has blocked, False once
    #: it blocks no longer.
    _waits: bool | None = None
    #: When this run stops blocking, by `time.monotonic()`.
    _wait_end = 0.0

    def _take(self, lock: HeldLock) -> None:
        while self.lock is None:
            try:
                answer = self._ask(lock, self._waits)
            except LockUnavailable as error:
                self._unanswered = None
                if self._runs_without(error):
                    self._give_up_reservation()
                    return
                # The failed acquire was undone by a release of its token, which may arrive late: it must not release
                # what the next acquire is granted.
                lock.token = self._mint()
                continue
            if isinstance(answer, Granted):
                self._claim = None
                lock.granted(answer)
                self._taken(lock)
                return
            self._unanswered = None
            if isinstance(answer, Finished):
                drop(self.message)
            self._conflict(answer)

    # Where another holds the key.

    def _conflict(self, conflict: Conflict) -> None:
        """End the run, or return, so that the key is asked for again."""
        holder, message = conflict.holder.info(self.key, conflict.ttl), self.message.facts
        decision = self._decide(message, conflict, holder)
        policy = "come back" if isinstance(decision, ComeBack) else decisions.policy_for(holder, self.plan.options)
        if self._waits is None or policy == "come back":  # else the run waits, and has announced this conflict before
            self._announce(holder, policy)
        self._carry_out(decision, message, holder)

    def _carry_out(self, decision: Decision, message: Facts, holder: LockInfo) -> None:
        match decision:
            case Skip():
                self._skip(decision, holder)
            case Fail():
                self._fail(decision, holder)
            case Wait():
                if not self._wait_for_release(holder):
                    self._carry_out(decisions.take_turn(message, self.plan.options), message, holder)
            case TakeTurn():
                self._take_turn(decision, holder)
            case ComeBack():
                pause = self._pause(SOON, holder)
                self._tell(holder, f"come back: in {pause:.2f} s")
                if self.message.send_back(pause, is_begun=decision.is_begun):
                    raise CameBack(f"the lock is held by {holder.who}; the message comes back")

    def _skip(self, decision: Skip, holder: LockInfo) -> None:
        expired = decision.reason == decisions.EXPIRED
        self._tell(
            holder, f"{self._turn}: it has expired: its result is REVOKED" if expired else "skip: its result is REVOKED"
        )
        revoke(self.task, self.request, decision.reason)

    def _fail(self, decision: Fail, holder: LockInfo) -> None:
        waited = self.plan.options.retry_for or 0.0
        late = f"{self._turn}: after lock_retry_for ({waited:g} s) it fails with LockConflict"
        self._tell(holder, late if decision.is_late else "raise: it fails with LockConflict")
        raise LockConflict(holder.key, holder)

    def _take_turn(self, decision: TakeTurn, holder: LockInfo) -> None:
        error = LockConflict(holder.key, holder)
        pause = self._pause(self.plan.options.retry_delay, None if decision.joins else holder)
        self._tell(holder, f"{self._turn}: it comes back in {pause:.2f} s")
        # RETRY is stored before the message is sent. Stored after it, as Celery does for its own Retry, it could
        # overwrite the outcome of the message's next run.
        show_as_retry(self.task, self.request, self.message, error)
        if self.message.send_back(pause, joins=decision.joins):
            raise CameBackAsRetry(str(error))

    @property
    def _turn(self) -> str:
        """The policy that log lines name for a run that takes its turn; ``wait`` has become ``retry`` by then."""
        return "join" if self.plan.options.on_conflict == "join" else "retry"

    def _pause(self, shortest: float, holder: LockInfo | None) -> float:
        """Seconds until the message is tried again.

        Args:
            shortest: Seconds at least, before jitter and doubling.
            holder: Who holds the key. While it cools down, the message need not be tried.
        """
        cools_for = holder.ttl or 0.0 if holder is not None and holder.state == "cooling" else 0.0
        return self.message.pause(shortest, self.plan.options.retry_max_delay, at_least=cools_for)

    def _wait_for_release(self, holder: LockInfo) -> bool:
        """Block until the key may be free, in this run's `lock_wait`.

        The first call returns at once: the acquire that follows tells the server that this run waits, so that the
        release wakes it. When `lock_wait` is over, one more acquire tells the server that it waits no longer.

        Returns:
            Whether to ask for the key again; False once the server knows that this run waits no longer.
        """
        if self._waits is None:
            self._tell(holder, f"wait: it waits for up to {self.plan.options.wait:g} s in its worker slot")
            self._waits, self._wait_end = True, time.monotonic() + self.plan.options.wait
            return True
        left = self._wait_end - time.monotonic()
        if self._waits and left > 0:
            self._server.wait(holder, left)
            return True
        was_waiting, self._waits = self._waits, False
        return was_waiting

    # Where Redis cannot be asked.

    def _runs_without(self, error: LockUnavailable) -> bool:
        """End the run, or return True where it runs without the lock, or False where it must ask for the key again.

        The run must ask again where the broker is away too, so that only this process has the message.
        """
        signals.lock_unavailable.send(sender=self.task, key=error.key, error=error)
        decision = decisions.on_outage(self.message.delivered, self.plan.options)
        match decision:
            case Refuse():
                raise error
            case RunWithout():
                logger.warning("%s runs without its lock, by lock_on_outage: %s", self.message.name, error)
                return True
        pause = self._pause(self.plan.options.retry_delay, None)
        logger.info("%s: %s; it comes back in %.2f s", self.message.name, error, pause)
        if self.message.send_back(pause, is_begun=decision.is_begun):
            raise CameBackInOutage("Redis could not be asked for the lock; the message comes back")
        return False
