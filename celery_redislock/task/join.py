"""Join: the outcome of another task, for a duplicate that ends with it instead of running."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from celery import states

from celery_redislock import signals
from celery_redislock.errors import LockConfigError, LockUnavailable
from celery_redislock.info import LockInfo
from celery_redislock.server.held import HeldLock
from celery_redislock.shown import shown

from .decisions import Joining, on_joining, take_turn
from .endings import drop, revoke, show_no_retry
from .outcome import PRIVATE_BACKENDS, Outcome, backend_scheme, outcome_of
from .worker_execution import WorkerExecution

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)


class JoiningExecution(WorkerExecution):
    """Ends with the outcome of the task that its message has met, or runs in its place if it died without one.

    One that was to run again has died if it has not within `lock_queue_ttl`, as far as anybody can say.
    """

    __slots__ = ()

    def end(self, state: str | None) -> None:
        """As `Execution.end`; who joins an attempt that ends without an outcome does not wait for another one."""
        if state == states.IGNORED and self.lock is not None and self.message.attempt.retries:
            show_no_retry(self.task, self.request, self.message)
        super().end(state)

    def _take(self, lock: HeldLock) -> None:
        """Join, or take the key.

        Raises:
            Exception: The error of the joined task.
            Ignore: It was revoked, and so is this run; or it is not done yet, and the message comes back; or another
                delivery of the message has joined it already.
        """
        joins = self.message.header.joins
        if joins is None:
            super()._take(lock)
            return
        # A delivery that joined took no key, at whose release it could have left a note.
        if self.message.delivered.is_delivered_again and outcome_of(self.task, self.message.attempt.task_id).is_ready:
            drop(self.message)
        while True:
            outcome = outcome_of(self.task, joins)
            match self._decide_with(outcome):
                case Joining.END:
                    self._end_with(outcome, joins)
                    return
                case Joining.ASK:
                    super()._take(lock)
                    if self.lock is None:  # an outage: by its policy the body runs without
                        return
                case Joining.COME_BACK:
                    self._let_go(lock)
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

    def _come_back(self, joins: str) -> None:
        """Wait for the next attempt of the task `joins`, which nobody holds a key for just now."""
        holder = LockInfo(self.key, joins, self.task.name, None, None, None)
        message = self.message.facts
        self._carry_out(take_turn(message, self.plan.options, joins), message, holder)

    def _end_with(self, outcome: Outcome, joins: str) -> None:
        if outcome.state == states.REVOKED:
            whom = shown(joins)
            logger.info("%s: joined task %s, which was revoked: its result is REVOKED", self.message.name, whom)
            revoke(self.task, self.request, f"joined {whom}, which was revoked")
        self.joined = outcome
        if isinstance(outcome.value, BaseException):
            raise outcome.value

    def _let_go(self, lock: HeldLock) -> None:
        """Release without a note: the attempt is not over."""
        self._server.keeper.remove(lock)
        with suppress(LockUnavailable):  # then its lease ends it
            lock.store.release(lock.key, lock.token, exactly=True)
        self._has_none()  # only now, as in `end`
        lock.token = self._mint()  # that release may still be on its way
        if signals.lock_released.receivers:
            signals.lock_released.send(sender=self.task, lock=lock)


def check_backend(app: Celery, task: str, option: str, ignores_result: bool) -> None:
    """Refuse what leaves no outcome to join.

    Args:
        app: The task's app.
        task: Its name, for the message.
        option: What `lock_on_conflict` is called where it was set, for the message.
        ignores_result: Whether its results are not stored.

    Raises:
        LockConfigError: Results are not stored, or nobody else can read them.
    """
    scheme = backend_scheme(app)
    if ignores_result or scheme in PRIVATE_BACKENDS:
        why = "its results are ignored" if ignores_result else f"result_backend = {scheme!r} cannot be read by others"
        raise LockConfigError(
            f"{task}: {option} = 'join' needs the holder's result, but {why}; use another policy, or a result "
            "backend such as Redis or a database"
        )
