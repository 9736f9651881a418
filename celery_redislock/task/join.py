"""Join: the policy ``join``. A duplicate ends with another task's outcome instead of running."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery import states

from celery_redislock import signals
from celery_redislock.errors import LockConfigError, LockConflict, LockUnavailable
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.info import LockInfo, shown
from celery_redislock.protocol.scripts import Conflict

from .decisions import Decision, Fail, Joining, Skip, Wait, on_joining, take_turn
from .ended_early import CameBackAsRetry, drop, revoke, show_as_retry
from .outcome import PRIVATE_BACKENDS, Outcome, backend_scheme, note_joined, outcome_of
from .worker_execution import LONGEST_PAUSE, WorkerExecution

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: The shortest pause of a run whose joined task is between two attempts, in seconds.
SHORTEST_LOOK = 0.05


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
            is_released = lock.store.send(lock.hold.undo())
        except LockUnavailable:  # the lock ends with its lease
            is_released = False
        lock.hold = lock.hold.released_for_now()
        if is_released and signals.lock_released.receivers:
            signals.lock_released.send(sender=self.task, lock=lock)


def check_backend(app: Celery, task: str, option: str, ignores_result: bool) -> None:
    """Refuse the policy ``join`` if other processes cannot read the task's outcome.

    Raises:
        LockConfigError: The task's results are not stored, or only one process can read them.
    """
    scheme = backend_scheme(app)
    if ignores_result or scheme in PRIVATE_BACKENDS:
        why = "its results are ignored" if ignores_result else f"result_backend = {scheme!r} cannot be read by others"
        raise LockConfigError(
            f"{task}: {option} = 'join' needs the holder's result, but {why}; use another policy, or a result "
            "backend such as Redis or a database"
        )
