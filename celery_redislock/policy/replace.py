"""The policy ``replace``: the newest call asks the run that holds the key to stop, and its own run waits for that."""

from __future__ import annotations

import logging
from typing import NoReturn

from celery import states

from celery_redislock import signals
from celery_redislock.errors import shown
from celery_redislock.message.message import Message
from celery_redislock.policy import Reason, Verdict

from .skip import revoke
from .wait import wait

logger = logging.getLogger(__name__)


class Replaced(Reason):
    """How a run ends that a newer call has replaced."""

    STOPPED = states.REVOKED, "replaced by {}", False, True
    NOT_BEGUN = states.REVOKED, "replaced by {}"


#: The newest call waits in line. It is the publisher, or the acquire of its run, that asks the holder to stop.
replace = wait


def end_replaced(message: Message, newer: str, *, has_run: bool) -> NoReturn:
    """End a run as REVOKED because a newer call has replaced it.

    Args:
        message: The run's message.
        newer: The id of the task that replaces it.
        has_run: Whether its body has begun. If not, an earlier run of its job was asked to stop.

    Raises:
        Ended: Always.
    """
    reason = Replaced.STOPPED if has_run else Replaced.NOT_BEGUN
    text = reason.text.format(shown(newer))
    about = message.fields("replaced", key=message.demand.key, holder_id=newer)
    logger.info("%s: %s; its result is REVOKED (replace)", message.name, text, extra=about)
    signals.lock_replaced.send(sender=message.task, key=message.demand.key, task_id=newer)
    revoke(message, Verdict("replace", reason, text, holder_id=newer))
