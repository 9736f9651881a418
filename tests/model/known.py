"""Known: what the real rules are told of the model's messages and holders. A mistake changes what they are told.

The rules are the functions of `celery_redislock.policy.conflict` and the properties of `Delivery`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from functools import cache

from celery_redislock import policy
from celery_redislock.errors import LockInfo
from celery_redislock.message.delivery import Delivery, Facts
from celery_redislock.options import LockOptions, resolve_options
from celery_redislock.policy import conflict
from celery_redislock.policy.wait import ComeBack

from .executions import Execution
from .rules import Mistake
from .server import Key


@cache
def options(policy: str) -> LockOptions:
    """The options of a task with `policy`, which hands its key over to its retries."""
    return resolve_options("model", {"on_conflict": policy, "hold_on_retry": True}, {})


def delivered(one: Execution) -> Delivery:
    """How the execution's message has come to it."""
    message = one.header
    return Delivery(
        "nonce",
        _overdue(one.overdue),
        acks_late=message.acks_late,
        is_redelivered=message.redelivered,
        is_marked_begun=message.begun,
        is_republished=message.returned,
    )


def _overdue(is_overdue: bool) -> float:
    return -math.inf if is_overdue else math.inf


def facts(one: Execution, mistakes: Set[Mistake]) -> Facts:
    """What the execution knows of its message at a conflict."""
    message, known = one.message, delivered(one)
    causes = frozenset({message.attempt.task_id, message.parent} - {""})
    if Mistake.SUCCESSOR_MEETS_THE_POLICY in mistakes:
        causes = frozenset()
    if Mistake.BEGUN_WORK_MEETS_THE_POLICY in mistakes:
        known = known._replace(acks_late=False, is_marked_begun=False)
    if Mistake.OLD_IS_BEGUN in mistakes:
        known = known._replace(is_marked_begun=known.is_delivered_again)
    is_owed = bool(message.claim) and not message.queued and Mistake.CLAIMED_MESSAGE_MEETS_THE_POLICY not in mistakes
    return Facts(known, message.attempt, causes, is_owed)


def holder(key: Key, mistakes: Set[Mistake] = frozenset()) -> LockInfo:
    """Who holds the key, as a conflict tells."""
    if key.room:
        state = "held" if Mistake.OFFER_IS_A_HOLDER in mistakes else "offered"
        return LockInfo("key", None, None, "w@host", None, None, state)
    state = "held"
    if key.is_reserved:
        unheeded = {Mistake.UNSENT_IS_AN_ANSWER, Mistake.UNSENT_IS_A_HOLDER}
        state = "sending" if key.sending and not unheeded & mistakes else "queued"
    return LockInfo("key", key.attempt.task_id, "task", "w@host", None, None, state)


def on_conflict(
    one: Execution,
    keys: Sequence[Key],
    mistakes: Set[Mistake],
    *,
    is_own_copy: bool,
    has_ended: Callable[[LockInfo], bool],
) -> conflict.Decision:
    """What becomes of an execution that meets those who have the `keys`."""
    message, holders = facts(one, mistakes), [holder(key, mistakes) for key in keys]
    return conflict.on_conflict(
        *(message, holders[0]._replace(others=tuple(holders[1:])), options(one.message.policy)),
        is_own_copy=is_own_copy,
        has_ended=has_ended,
    )


def reads_note(one: Execution, mistakes: Set[Mistake]) -> bool:
    """Whether the execution's acquire looks for the note of its attempt."""
    known = delivered(one)
    if Mistake.FIRST_DELIVERY_IGNORES_ITS_COPY in mistakes:
        known = known._replace(overdue_at=_overdue(False))
    return known.may_be_a_copy


def copy_may_wait(one: Execution, mistakes: Set[Mistake]) -> bool:
    """Whether the execution's release leaves the note even if no copy was seen."""
    known = delivered(one)
    if Mistake.COMEBACK_LEAVES_NO_NOTE in mistakes:
        known = known._replace(is_republished=False)
    if Mistake.RESENT_IN_VAIN_LEAVES_NO_NOTE in mistakes:
        known = known._replace(is_republished=one.message.returned)
    if Mistake.REDELIVERED_LEAVES_NO_NOTE in mistakes:
        known = known._replace(is_redelivered=False)
    if Mistake.OVERDUE_LEAVES_NO_NOTE in mistakes:
        known = known._replace(overdue_at=_overdue(False))
    if Mistake.FIRST_DELIVERY_IGNORES_ITS_COPY in mistakes:
        return one.overdue
    return known.may_be_a_copy


def comes_back_begun(one: Execution, mistakes: Set[Mistake]) -> bool:
    """Whether a message that comes back from an outage is marked as work that has begun."""
    decision = conflict.on_outage(delivered(one), 0.0, options(one.message.policy))
    assert isinstance(decision, ComeBack)
    return decision.is_begun and Mistake.OUTAGE_FORGETS_BEGUN_WORK not in mistakes


def is_over(state: str, mistakes: Set[Mistake]) -> bool:
    """Whether the release of an attempt that ended with `state` may leave a note."""
    mistaken = {
        "SystemExit": Mistake.NOTE_ON_SYSTEM_EXIT,
        "REJECTED": Mistake.NOTE_ON_REQUEUE,
    }
    return policy.leaves_note(state) or mistaken.get(state) in mistakes


def may_be_handed_a_key(retries: int) -> bool:
    """Whether the attempt before this one hands its key over to it."""
    return policy.may_be_handed_a_key(retries, options("wait"))
