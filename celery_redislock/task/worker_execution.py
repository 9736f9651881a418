"""The `Execution` of a run in a worker, which carries out the decisions about the run.

If it has to wait for its key, the run ends and its message waits in line or is sent back. Under the policy ``join``, a
duplicate ends with another task's outcome instead of running.
"""

from __future__ import annotations

import logging
import time

from celery import states

from celery_redislock import signals
from celery_redislock.errors import LockConflict, LockUnavailable
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.info import LockInfo, shown
from celery_redislock.message.delivery import ASKED_KEYS
from celery_redislock.protocol.hold import Phase
from celery_redislock.protocol.replies import Conflict, Finished, Granted

from . import decisions
from .decisions import ComeBack, Decision, Fail, Joining, Refuse, RunWithout, Skip, Wait, on_joining, take_turn
from .ended_early import (
    CameBack,
    CameBackAsRetry,
    CameBackInOutage,
    WaitsInLine,
    drop,
    revoke,
    show_as_ignored,
    show_as_retry,
)
from .execution import Execution
from .outcome import Outcome, note_joined, outcome_of

logger = logging.getLogger(__name__)

#: The shortest and the longest pause of a message that is sent back, in seconds. While the worker's room is full, the
#: longest is higher: thousands of messages may then come back, and each costs a run and a few commands.
SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_WHILE_FULL = 1.0, 30.0, 300.0
#: The shortest pause of a run whose joined task is between two attempts, in seconds.
SHORTEST_LOOK = 0.05


class WorkerExecution(Execution):
    """A run in a worker. It carries out what `celery_redislock.task.decisions` decides on a conflict or an outage."""

    _may_leave_retry = True

    def end(self, state: str | None) -> None:
        """Release the key. If the task ends without an outcome, show that to the runs that have joined it."""
        try:
            if state == states.IGNORED and self.lock is not None:
                self.leave_no_retry()
        finally:  # otherwise a time limit that fires in the backend leaves the keeper renewing the key forever
            super().end(state)
            ASKED_KEYS.forget(self.message.delivery.nonce)  # no effect in a child

    def leave_no_retry(self) -> None:
        """Show IGNORED instead of the RETRY of the previous attempt, or of this one while it waited."""
        if self._may_leave_retry and (self.message.attempt.retries or self.message.header.times):
            self._may_leave_retry = False  # a later RETRY is the replacement's
            show_as_ignored(self.task, self.request, self.message)

    def acquire(self, lock: HeldLock) -> None:
        """See `Execution.acquire`."""
        note = self._note(lock.key) if self.message.delivered.may_be_a_copy else None
        while True:
            # Note the key before sending the command, because this process may die as soon as the key is granted.
            ASKED_KEYS.asks(self.message.delivery.nonce, lock.key)
            if lock.hold.phase is Phase.IN_DOUBT:
                lock.hold = lock.hold.minted(self._mint())
            try:
                answer = self._server.store.acquire(lock, lock.lease, note, fence=self.plan.options.fence)
            except LockUnavailable as error:
                if not self._runs_without(error):
                    continue
                self._give_up_reservation()
                lock.hold = lock.hold.unclaimed()
                return
            if isinstance(answer, Granted):
                lock.granted(answer)
                self._taken(lock)
                return
            if isinstance(answer, Finished):
                drop(self.message)
            self._conflict(answer)

    # Conflicts: the key is held.

    def _conflict(self, conflict: Conflict) -> None:
        """End the run. Return only if the run must ask for the key again, as `_wait` describes."""
        holder, message = conflict.info(self.key), self.message.facts
        decision = self._decide(message, conflict, holder)
        policy = "come back" if isinstance(decision, ComeBack) else decisions.policy_for(holder, self.plan.options)
        self._announce(holder, policy)
        self._carry_out(decision, holder, conflict)

    def _carry_out(self, decision: Decision, holder: LockInfo, conflict: Conflict) -> None:
        """Carry out a decision.

        Args:
            decision: What happens to the run.
            holder: The key's holder.
            conflict: The conflict as the lock server reported it.
        """
        match decision:
            case Skip():
                self._skip(decision, holder)
            case Fail():
                self._fail(decision, holder)
            case Wait():
                # Store RETRY before the message waits. If it were stored afterwards, as Celery does for its own
                # Retry, it could overwrite the outcome of the message's next run.
                show_as_retry(self.task, self.request, self.message, LockConflict(holder.key, holder))
                self._wait(holder, conflict, self._waiting_policy, is_shown=True, joins=decision.joins)
            case ComeBack():
                self._wait(holder, conflict, "come back", is_shown=False, is_begun=decision.is_begun)

    def _skip(self, decision: Skip, holder: LockInfo) -> None:
        expired = f"{self._waiting_policy}: it has expired: its result is REVOKED"
        self._tell(holder, expired if decision.reason == decisions.EXPIRED else "skip: its result is REVOKED")
        revoke(self.task, self.request, decision.reason)

    def _fail(self, decision: Fail, holder: LockInfo) -> None:
        waited = self.plan.options.wait_for or 0.0
        late = f"{self._waiting_policy}: after lock_wait_for ({waited:g} s) it fails with LockConflict"
        self._tell(holder, late if decision.is_late else "raise: it fails with LockConflict")
        raise LockConflict(holder.key, holder)

    def _wait(
        self,
        holder: LockInfo,
        conflict: Conflict,
        what: str,
        *,
        is_shown: bool,
        is_begun: bool = False,
        joins: str | None = None,
    ) -> None:
        """End the run. Its message waits in line, or is sent back if it cannot wait in this worker.

        Return only if the message cannot be sent back either: the broker is out of reach, and the message is acked.

        Args:
            holder: The key's holder.
            conflict: As for `_carry_out`.
            what: The policy as the log line names it.
            is_shown: Whether the run is shown as RETRY.
            is_begun: As for `Message.wait`.
            joins: As for `Message.wait`.
        """
        rank = self.message.header.rank_at(conflict.now or time.time_ns() // 1000)
        header = None if conflict.cannot_wait else self.message.wait(rank, is_begun=is_begun, joins=joins)
        if header is not None:
            self._tell(holder, f"{what}: it waits in line")
            reason = f"{LockConflict(holder.key, holder)}; it waits in line"
            raise WaitsInLine(reason, self.demand, rank, header, is_shown)
        is_full = not self.message.delivery.may_wait
        pause = self.message.pause(SHORTEST_PAUSE, LONGEST_PAUSE_WHILE_FULL if is_full else LONGEST_PAUSE)
        self._tell(holder, f"{what}: it comes back in {pause:.2f} s")
        if self.message.send_back(pause, self.key, is_begun=is_begun, joins=joins, rank=rank):
            ending = CameBackAsRetry if is_shown else CameBack
            raise ending(f"{LockConflict(holder.key, holder)}; it comes back")

    @property
    def _waiting_policy(self) -> str:
        """The policy that log lines name for a run that waits for its turn."""
        return "join" if self.plan.options.on_conflict == "join" else "wait"

    # Outages: Redis does not answer, or refuses the command.

    def _runs_without(self, error: LockUnavailable) -> bool:
        """End the run, or return whether it runs without the lock. If not, it must ask for the key again.

        That happens if the broker is down too and the message is already acked, so that no other process has the
        message.
        """
        signals.lock_unavailable.send(sender=self.task, key=error.key, error=error)
        about = self.message.fields("unavailable", key=error.key, reason=error.reason)
        decision = decisions.on_outage(self.message.delivered, self.message.waited, self.plan.options)
        match decision:
            case Refuse():
                raise error
            case RunWithout():
                logger.warning("%s runs without its lock, by lock_on_outage: %s", self.message.name, error, extra=about)
                return True
        pause = self.message.pause(SHORTEST_PAUSE, LONGEST_PAUSE)
        logger.info("%s: %s; it comes back in %.2f s", self.message.name, error, pause, extra=about)
        if self.message.send_back(pause, self.key, is_begun=decision.is_begun):
            raise CameBackInOutage("Redis could not be asked for the lock; the message comes back")
        return False


class JoiningExecution(WorkerExecution):
    """Ends with the outcome of the task that its message met, or runs if that task died without an outcome.

    A joined task that is in state RETRY counts as dead once this run's message has waited for `lock_queue_ttl`.
    """

    def acquire(self, lock: HeldLock) -> None:
        """Join the task that the message names, or take the key.

        Raises:
            Exception: The error of the joined task.
            Ignore: The joined task was revoked, so this run is revoked too; or the joined task is not done, so the
                message waits or is sent back; or another delivery of the message already has the outcome.
        """
        joins = self.message.header.joins
        if joins is None:
            super().acquire(lock)
            return
        # Another delivery of this message may have ended with the joined task's outcome. It took no key and so left no
        # note.
        if (
            self.message.delivered.is_delivered_again
            and outcome_of(self.task, self.message.attempt.task_id, self.message).is_ready
        ):
            drop(self.message)
        while True:
            outcome = outcome_of(self.task, joins, self.message)
            match self._decide_with(outcome):
                case Joining.END:
                    self._end_with(outcome, joins)
                    return
                case Joining.ASK:
                    super().acquire(lock)
                    if self.lock is None:  # in an outage, with lock_on_outage="run": the body runs without the lock
                        return
                case Joining.COME_BACK:
                    self._release_without_note(lock)
                    self._come_back(joins)
                case Joining.RUN:
                    return

    def _decide_with(self, outcome: Outcome) -> Joining:
        return on_joining(
            is_ready=outcome.is_ready,
            will_run_again=outcome.will_run_again,
            has_key=self.lock is not None,
            waited=self.message.waited,
            options=self.plan.options,
        )

    def _carry_out(self, decision: Decision, holder: LockInfo, conflict: Conflict) -> None:
        """Like `WorkerExecution`, but have the message wait in line only while the joined task holds the key."""
        joins = decision.joins if isinstance(decision, Wait) else None
        if joins is not None and not any(one.task_id == joins and one.state == "held" for one in holder.holders):
            self._come_back(joins)
        else:
            super()._carry_out(decision, holder, conflict)

    def _come_back(self, joins: str) -> None:
        """Send the message back to wait for the next attempt of the task `joins`, which holds no key now."""
        holder = LockInfo(self.key, joins, self.task.name, None, None, None)
        decision = take_turn(self.message.facts, self.plan.options, joins)
        match decision:
            case Skip():
                self._skip(decision, holder)
            case Fail():
                self._fail(decision, holder)
        error = LockConflict(self.key, holder)
        show_as_retry(self.task, self.request, self.message, error)
        pause = self.message.pause(SHORTEST_LOOK, LONGEST_PAUSE)
        self._tell(holder, f"join: it comes back in {pause:.2f} s")
        if self.message.send_back(pause, self.key, joins=joins):
            raise CameBackAsRetry(str(error))

    def _end_with(self, outcome: Outcome, joins: str) -> None:
        if outcome.state == states.REVOKED:
            whom = shown(joins)
            about = self.message.fields("joined", key=self.key, holder_id=joins)
            logger.info(
                "%s: joined task %s, which was revoked: its result is REVOKED", self.message.name, whom, extra=about
            )
            revoke(self.task, self.request, f"joined {whom}, which was revoked")
        self.joined = outcome
        note_joined(self.task.app, self.request, joins)
        if isinstance(outcome.value, BaseException):
            raise outcome.value

    def _release_without_note(self, lock: HeldLock) -> None:
        """Release the key but leave no note, because this attempt is not over."""
        self._server.keeper.remove(lock)
        lock.hold = lock.hold.ended()
        try:
            is_released = self._server.store.send(lock.hold.undo())
        except LockUnavailable:  # the lock ends with its lease
            is_released = False
        lock.hold = lock.hold.released_for_now()
        if is_released and signals.lock_released.receivers:
            signals.lock_released.send(sender=self.task, lock=lock)
