"""Join: the outcome of another task, for a duplicate that ends with it instead of running."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from celery import states
from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock import signals
from celery_redislock.errors import LockConfigError, LockUnavailable, describe
from celery_redislock.info import LockInfo
from celery_redislock.server.held import HeldLock
from celery_redislock.shown import shown

from .execution import Execution
from .outcome import PRIVATE_BACKENDS, Outcome, backend_scheme, outcome_of
from .policies import retry, revoke

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)


class JoiningExecution(Execution):
    """Ends with the outcome of the task that its message has met, or runs in its place if it died without one.

    One that was to run again has died if it has not within `lock_queue_ttl`, as far as anybody can say.
    """

    __slots__ = ()

    def end(self, state: str | None) -> None:
        """As `Execution.end`; who joins an attempt that ends without an outcome does not wait for another one."""
        if state == states.IGNORED and self.lock is not None and self.message.attempt.retries:
            self._show_no_retry()
        super().end(state)

    def _show_no_retry(self) -> None:
        """The last attempt has left the state RETRY, but none comes any more: `Ignore` stores nothing."""
        task_id, backend = self.message.attempt.task_id, self.task.backend
        try:
            if backend.get_task_meta(task_id, cache=False)["status"] == states.RETRY:
                backend.store_result(task_id, None, states.IGNORED, request=self.request)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - each backend has its own
            logger.warning(
                "%s cannot be shown as IGNORED, who joins it waits in vain: %s", self.message.name, describe(error)
            )

    def _take(self, lock: HeldLock) -> None:
        """Join, or take the key.

        Raises:
            Exception: The error of the joined task.
            Ignore: It was revoked, and so is this run; or it is not done yet, and the message comes back; or another
                delivery of the message has joined it already.
        """
        joins = self.message.returned.joins
        if joins is None:
            super()._take(lock)
            return
        # That one took no key where it could leave a note.
        if self.message.is_delivered_again and outcome_of(self.task, self.message.attempt.task_id).is_ready:
            self._drop()
        while True:
            outcome = outcome_of(self.task, joins)
            if outcome.is_ready:
                self._end_with(outcome, joins)
                return
            if self.lock is None:
                super()._take(lock)
                if self.lock is None:  # an outage: by its policy the body runs without
                    return
            elif outcome.will_run_again and time.time() - self.message.returned.since < self.plan.options.queue_ttl:
                self._let_go(lock)
                retry(self, LockInfo(lock.key, joins, self.task.name, None, None, None), joins)
            else:
                return

    def _end_with(self, outcome: Outcome, joins: str) -> None:
        if outcome.state == states.REVOKED:
            whom = shown(joins)
            logger.info("%s: joined task %s, which was revoked: its result is REVOKED", self.message.name, whom)
            revoke(self, f"joined {whom}, which was revoked")
        self.joined = outcome
        if isinstance(outcome.value, BaseException):
            raise outcome.value

    def _let_go(self, lock: HeldLock) -> None:
        """Release without a note: the attempt is not over."""
        self._server.keeper.remove(lock)
        with suppress(LockUnavailable):  # then its lease ends it
            lock.store.release(lock.key, lock.token, exactly=True)
        self.lock = None  # only now, as in `end`
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
