"""The kinds of `Execution`: a run in a worker, one that may join another task, and one in the caller's own process.

They carry out what `celery_redislock.policy.conflict` decides on a conflict or an outage.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from celery import states
from celery.exceptions import Ignore, TaskError, TaskRevokedError, TimeLimitExceeded, WorkerLostError

from celery_redislock import signals
from celery_redislock.app import WITHOUT_REDIS
from celery_redislock.errors import LockConflict, LockInfo, LockUnavailable, describe
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.lock.handle import check_fence, entry_of_context
from celery_redislock.message.delivery import ASKED_KEYS
from celery_redislock.message.message import Message
from celery_redislock.policy import Ended, Verdict, join
from celery_redislock.policy.conflict import POLICIES, WAITING, Decision, on_conflict, on_outage, policy_for
from celery_redislock.policy.raise_ import Fail
from celery_redislock.policy.replace import end_replaced
from celery_redislock.policy.skip import Skip, supersede
from celery_redislock.policy.wait import LONGEST_PAUSE, SHORTEST_PAUSE, ComeBack, Waiting, sleep_until_due
from celery_redislock.protocol.hold import IN_DOUBT
from celery_redislock.protocol.replies import Answer, Conflict, Finished, Granted, NotDue, Stopped, Superseded

from .execution import Execution, held_by_request

logger = logging.getLogger(__name__)

#: Errors on which Celery acts by their type: it would end this worker, store no outcome, or run the message again.
_ACTED_ON = (MemoryError, Ignore, WorkerLostError, TimeLimitExceeded)
#: How long an eager run waits for a key that is about to become free, in seconds.
MOMENT = 1.0


class WorkerExecution(Execution):
    """A run in a worker. If it has to wait for its key, it ends, and its message waits in line or is sent back."""

    _may_leave_retry = True

    def leave_no_retry(self) -> None:
        """Show IGNORED instead of the RETRY of the previous attempt, or of this one while it waited."""
        if self._may_leave_retry and (self.message.attempt.retries or self.message.header.times):
            self._may_leave_retry = False  # a later RETRY is the replacement's
            join.show_as_ignored(self.message)

    def _asked_at_once(self) -> Mapping[HeldLock, Answer]:
        """See `Execution`. A rate is asked last: what it has granted for nothing is missing for a while."""
        parts = [part for part in self.parts if not part.demand.spent]
        if len(parts) < 2:
            return {}
        for part in parts:
            ASKED_KEYS.asks(self.message.delivery.nonce, part.key)
        note = self._note(parts[0].key) if self.message.delivery.may_be_a_copy else None
        fenced = self.held if self.message.options.fence else None
        try:
            return dict(zip(parts, self._server.store.acquire_all(parts, parts[0].lease, note, fenced), strict=True))
        except LockUnavailable:
            return {}

    def acquire(self, lock: HeldLock, answer: Answer | None = None) -> None:
        """See `Execution.acquire`."""
        note = self._note(lock.key) if self.message.delivery.may_be_a_copy and lock is self.parts[0] else None
        fence, numbered = self.message.options.fence and lock is self.held, self._numbered()
        while True:
            if answer is None:
                # Note the key before sending the command, because this process may die as soon as the key is granted.
                ASKED_KEYS.asks(self.message.delivery.nonce, lock.key)
                while lock.hold.phase is IN_DOUBT:  # again only if the clock was set back by just that much
                    lock.hold = lock.hold.minted(self._mint(lock.hold.asks))
                try:
                    answer = self._server.store.acquire(lock, lock.lease, note, fence=fence, numbered=numbered)
                except LockUnavailable as error:
                    if not self._runs_without(error):
                        continue
                    self._give_up_reservation()
                    lock.hold = lock.hold.unclaimed()
                    return
            if isinstance(answer, Granted):
                lock.granted(answer)
                if answer.calls:
                    self._use_calls(lock, answer)
                self._taken(lock)
                return
            match answer:
                case Finished():
                    drop(self.message)
                case NotDue():
                    sleep_until_due(self.message, answer)
                case Superseded(newer):
                    if newer == self.message.attempt.task_id and join.has_ended_once(self.message):
                        drop(self.message)  # it has run, with later calls, and its ack was lost
                    if newer is not None:
                        signals.lock_superseded.send(sender=self.task, key=self.key, task_id=newer)
                    supersede(self.message, newer)
                case Stopped(newer):
                    end_replaced(self.message, newer, has_run=False)
                case Conflict():
                    self._conflict(answer)
            answer = None  # ask again

    # Conflicts: the key is held.

    def _conflict(self, conflict: Conflict) -> None:
        """End the run. Return only if it must ask for the key again, as its message can neither wait nor be sent."""
        holder = conflict.info(self.key)
        decision = _decide(self, conflict, holder)
        policy = "always waits" if isinstance(decision, ComeBack) else policy_for(holder, self.message.options)
        signals.lock_conflict.send(sender=self.task, key=holder.key, holder=holder, policy=policy)
        decision.end(self.message, holder, conflict)

    # Outages: Redis does not answer, or refuses the command.

    def _runs_without(self, error: LockUnavailable) -> bool:
        """End the run, or return whether it runs without the lock. If not, it must ask for the key again.

        That happens if the broker is down too and the message is already acked, so that no other process has the
        message.
        """
        signals.lock_unavailable.send(sender=self.task, key=error.key, error=error)
        about = self.message.fields("unavailable", key=error.key, reason=error.reason)
        decision = on_outage(self.message.delivery, self.message.waited, self.message.options)
        if decision == "raise":
            raise error
        if decision == "run":
            logger.warning('%s runs without its lock (lock_on_outage="run"): %s', self.message.name, error, extra=about)
            return True
        pause = self.message.pause(SHORTEST_PAUSE, LONGEST_PAUSE)
        logger.info("%s: %s; trying again in %.2f s", self.message.name, error, pause, extra=about)
        if self.message.send_back(pause, begun=decision.is_begun):
            raise Ended(Verdict("lock_on_outage", Waiting.OUTAGE, Waiting.OUTAGE.text))
        return False


class JoiningExecution(WorkerExecution):
    """Ends with the outcome of the task that its message met, or runs if that task died without an outcome.

    A joined task that is in state RETRY counts as dead once this run's message has waited for `lock_queue_ttl`.
    """

    def acquire(self, lock: HeldLock, answer: Answer | None = None) -> None:
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
        is_copy = self.message.delivery.is_delivered_again
        if is_copy and join.outcome_of(self.message, self.message.attempt.task_id).is_ready:
            drop(self.message)
        while True:
            outcome = join.outcome_of(self.message, joins)
            match join.on_joining(outcome, self.message.options, self.message.waited, has_key=self.lock is not None):
                case join.Joining.END:
                    if outcome.state == states.REVOKED:
                        join.revoke_like(self.message, joins)
                    self.joined = outcome
                    join.note_joined(self.task.app, self.request, joins)
                    # A result may be an exception too: a body can return one, which pickle stores.
                    if isinstance(error := outcome.value, BaseException) and outcome.state != states.SUCCESS:
                        raise TaskError(describe(error)) if isinstance(error, _ACTED_ON) else error
                    return
                case join.Joining.ASK:
                    super().acquire(lock)
                    if self.lock is None:  # in an outage, with lock_on_outage="run": the body runs without the lock
                        return
                case join.Joining.COME_BACK:
                    self._release_without_note(lock)
                    join.come_back(self.message, joins)
                case join.Joining.RUN:
                    return

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


class EagerExecution(Execution):
    """A run in the caller's process. It blocks while it waits for its key. It has no message, so it leaves no note.

    A run inside a run or block that holds the key shares that lock and does not release it.
    """

    def _note_after(self, lock: HeldLock, state: str | None) -> None:
        """Leave no note: there is no message, so there can be no copy."""

    def take_several(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See `Execution`.

        Raises:
            LockLost: A key was lost while the run waited for another one.
        """
        super().take_several(args, kwargs)
        for part in self.parts:
            if part.was_lost:
                part.check()

    def acquire(self, lock: HeldLock, answer: Answer | None = None) -> None:
        """Take the key.

        Raises:
            TaskRevokedError: The key is held, and the policy is ``skip``.
            LockConflict: The key is held and the policy is ``raise``, or is still held after `lock_block_for`.
            LockUnavailable: Redis did not answer, or refused the command, and `lock_on_outage` is not ``run``.
            LockConfigError: The run would have to wait, which would block the caller's event loop; or it would share a
                lock that has no fence, and `lock_fence` is True.
        """
        if self._share_lock(lock):
            return
        try:
            fence = self.message.options.fence and lock is self.held
            conflict = self._server.take(lock, 0.0, fence=fence)
            if conflict is not None:
                self._wait_or_end(lock, conflict, fence)
        except LockUnavailable as error:
            if on_outage(self.message.delivery, 0.0, self.message.options) == "run":
                return
            raise LockUnavailable(error.key, f"{error.reason}; {WITHOUT_REDIS}") from error
        self._taken(lock)

    def _wait_or_end(self, lock: HeldLock, conflict: Conflict, fence: bool) -> None:
        """Block until `lock` is granted, or raise."""
        message, options = self.message.facts, self.message.options
        holder = conflict.info(lock.key)
        policy = policy_for(holder, options)
        decision = _decide(self, conflict, holder)
        if not isinstance(decision, Skip | Fail):
            is_for_a_moment = isinstance(decision, ComeBack) and policy not in WAITING
            left = self._server.take(lock, MOMENT if is_for_a_moment else options.block_for, fence=fence)
            if left is None:
                return
            holder = left.info(lock.key)
            decision = POLICIES[policy](message, holder, options)
        signals.lock_conflict.send(sender=self.task, key=holder.key, holder=holder, policy=policy)
        if isinstance(decision, Skip):
            self.message.tell(holder, "raised TaskRevokedError (skip)")
            raise TaskRevokedError(decision.text)
        self.message.tell(holder, f"raised LockConflict ({policy})")
        raise decision.error(self.message, holder) if isinstance(decision, Fail) else LockConflict(lock.key, holder)

    def _share_lock(self, lock: HeldLock) -> bool:
        """Use the lock of the run that calls `apply()`, or of a block around it. Return whether there is one."""
        entry = entry_of_context(self._server, lock.key)
        outer = entry.held if entry else held_by_request(self._server.store, lock.key)
        if outer is None:
            return False
        if lock is self.held:
            check_fence(outer, self.message.options.fence)
            self.held = outer
        elif self.held in self.parts:
            self.held.stand_for(outer if part is lock else part for part in self.held.parts[1:])
        self.parts = tuple(part for part in self.parts if part is not lock)  # so that its end does not release this one
        self._announce_grant()
        return True


def _decide(run: Execution, conflict: Conflict, holder: LockInfo) -> Decision:
    return on_conflict(
        *(run.message.facts, holder, run.message.options),
        is_own_copy=any(str(one.attempt) == str(run.message.attempt) for one in conflict.holders),
        has_ended=partial(join.has_ended, run.task, cools_down=run.plan.cools_down(run.message.options)),
    )


def drop(message: Message) -> NoReturn:
    """End the run of a copy: the attempt ended in another delivery of the message, and that outcome stands.

    Raises:
        Ignore: Always.
    """
    about = message.fields("dropped")
    logger.info("%s: dropped: it already finished in another delivery of its message", message.name, extra=about)
    raise Ignore("already finished in another delivery of its message")
