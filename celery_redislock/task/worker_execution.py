"""WorkerExecution: a run in a worker. Where it must wait, its message is sent back to the broker."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery_redislock import signals
from celery_redislock.errors import LockConflict, LockUnavailable
from celery_redislock.info import LockInfo
from celery_redislock.message.facts import Facts
from celery_redislock.server.answers import Conflict, Finished, Granted
from celery_redislock.server.held import HeldLock

from . import decisions
from .decisions import ComeBack, Decision, Fail, Refuse, RunWithout, Skip, TakeTurn, Wait
from .endings import CameBack, CameBackInOutage, SentBack, drop, revoke, show_as_retry
from .execution import Execution

logger = logging.getLogger(__name__)

#: The first pause of a copy, a successor or begun work, in seconds: what it waits for mostly ends in a moment.
SOON = 0.05


class WorkerExecution(Execution):
    """Carries out what `decisions` says of a conflict or an outage."""

    __slots__ = ("_wait_end", "_waits")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waits: bool | None = None  # True while the release is to wake this run, False when it no longer is
        self._wait_end = 0.0

    def _take(self, lock: HeldLock) -> None:
        while self.lock is None:
            try:
                answer = self._ask(lock, self._waits)
            except LockUnavailable as error:
                self._asked_for = None
                if self._runs_without(error):
                    self._give_up_claim()
                    return
                lock.token = self._mint()  # a release of the last one may still be on its way
                continue
            if isinstance(answer, Granted):
                self._claim = None
                lock.granted(answer)
                self._taken(lock)
                return
            self._asked_for = None
            if isinstance(answer, Finished):
                drop(self.message)
            self._conflict(answer)

    # Where it is held.

    def _conflict(self, conflict: Conflict) -> None:
        """End the run, or return to ask for the key again."""
        holder, message = conflict.holder.info(self.key, conflict.ttl), self.message.facts
        decision = self._decide(message, conflict, holder)
        policy = "come back" if isinstance(decision, ComeBack) else decisions.policy_for(holder, self.plan.options)
        if self._waits is None or policy == "come back":  # else it is the conflict that has been announced
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
        # Before it is sent: stored after it, as Celery's own Retry is, it could overwrite the outcome of its run.
        show_as_retry(self.task, self.request, self.message, error)
        if self.message.send_back(pause, joins=decision.joins):
            raise SentBack(str(error))

    @property
    def _turn(self) -> str:
        return "join" if self.plan.options.on_conflict == "join" else "retry"

    def _pause(self, shortest: float, holder: LockInfo | None) -> float:
        """Seconds until the message should be tried again; not before the key of `holder` has cooled down."""
        cools_for = holder.ttl or 0.0 if holder is not None and holder.state == "cooling" else 0.0
        return self.message.pause(shortest, self.plan.options.retry_max_delay, at_least=cools_for)

    def _wait_for_release(self, holder: LockInfo) -> bool:
        """Block for a while, in this run's `lock_wait`.

        Returns:
            Whether to ask for the key again: True at first, to say that this run waits, and at last, to say that it
            waits no longer; False from then on.
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
        """What an outage does: True to run without the lock, False where the key must be asked for again."""
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
