"""The policy ``skip``: the duplicate is the same work and is not needed."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, NoReturn

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import TaskRevokedError

from celery_redislock.errors import LockInfo, shown
from celery_redislock.message.delivery import Facts
from celery_redislock.message.message import Message
from celery_redislock.message.republish import ignores_result
from celery_redislock.options import LockOptions
from celery_redislock.policy import Ended, Reason, Verdict, waiting_policy

logger = logging.getLogger(__name__)


class Skipped(Reason):
    """Why a run is skipped."""

    DUPLICATE = states.REVOKED, "duplicate of {}"
    COOLING = states.REVOKED, "cooling down after {}"
    SPENT = states.REVOKED, "the rate is used up"
    EXPIRED = states.REVOKED, "expired"
    SUPERSEDED = states.REVOKED, "superseded by {}"
    DROPPED = states.REVOKED, "dropped from the line by an operator (locks drop)"


class Skip(NamedTuple):
    """The run ends as REVOKED. The rest of its chain and its chord fail too, so that no caller waits for them."""

    reason: Skipped
    whom: str = ""
    """The holder, as the reason names it."""

    @property
    def text(self) -> str:
        """The reason in words."""
        return self.reason.text.format(self.whom)

    def end(self, message: Message, holder: LockInfo, _: object = None) -> NoReturn:
        """End the run.

        Raises:
            Ended: Always.
        """
        policy, what = "skip", "skipped: its result is REVOKED (skip)"
        if self.reason is Skipped.EXPIRED:
            policy = waiting_policy(message.options)
            what = f"expired: its result is REVOKED ({policy})"
        message.tell(holder, what)
        revoke(message, Verdict(policy, self.reason, self.text, holder_id=holder.task_id))


def skip(message: Facts, holder: LockInfo, options: LockOptions) -> Skip:
    """Skip the run."""
    if holder.state == "cooling":
        return Skip(Skipped.COOLING, shown(str(holder.task_id)))
    if holder.state == "spent":
        return Skip(Skipped.SPENT)
    return Skip(Skipped.DUPLICATE, shown(holder.task_id) if holder.task_id else holder.who)


def supersede(message: Message, newer: str | None) -> NoReturn:
    """End a run as REVOKED because its merged calls are out of date.

    Args:
        message: The run's message.
        newer: The id of the task whose run, with a newer call, has begun; None if the merged calls have expired.

    Raises:
        Ended: Always.
    """
    reason = Skipped.EXPIRED if newer is None else Skipped.SUPERSEDED
    text = reason.text.format(shown(newer or ""))
    about = message.fields("superseded" if newer else "expired", key=message.demand.key, holder_id=newer)
    logger.info("%s: %s; its result is REVOKED (lock_arguments)", message.name, text, extra=about)
    revoke(message, Verdict("lock_arguments", reason, text, holder_id=newer))


def is_skipped(text: str) -> bool:
    """Whether `text`, the reason that is stored with a REVOKED, tells that the policy has skipped a duplicate."""
    return any(one.is_told_by(text) for one in (Skipped.DUPLICATE, Skipped.COOLING, Skipped.SPENT))


def revoke(message: Message, verdict: Verdict) -> NoReturn:
    """End the run as REVOKED: `get()` raises TaskRevokedError with the verdict's text.

    Raises:
        Ended: Always.
    """
    store_revoked(message.task, message.request, verdict.text)
    raise Ended(verdict)


def store_revoked(task: Task[..., Any], request: Context, text: str) -> None:
    """Store REVOKED for the task of `request`, for the rest of its chain and for its chord.

    A bare `Ignore` would leave callers waiting. Celery's `mark_as_revoked` would leave the rest of a chain waiting. Its
    `mark_as_failure` leaves only a group that ends the chain.
    """
    is_stored = not ignores_result(task, request) or bool(task.store_errors_even_if_ignored)
    error = TaskRevokedError(text)
    task.backend.mark_as_failure(
        str(request.id), error, request=request, store_result=is_stored, call_errbacks=False, state=states.REVOKED
    )
