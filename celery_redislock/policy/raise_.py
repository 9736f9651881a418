"""The policy ``raise``: the run fails, and its caller decides what to do."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from celery_redislock.errors import LockConflict, LockInfo
from celery_redislock.message.delivery import Facts
from celery_redislock.message.message import Message
from celery_redislock.options import LockOptions
from celery_redislock.policy import waiting_policy


class Fail(NamedTuple):
    """The run ends as FAILURE, with LockConflict."""

    is_late: bool = False
    """The message has waited longer than `lock_wait_for`."""

    def end(self, message: Message, holder: LockInfo, _: object = None) -> NoReturn:
        """End the run.

        Raises:
            LockConflict: Always.
        """
        what = "failed with LockConflict (raise)"
        if self.is_late:
            policy, waited = waiting_policy(message.options), message.options.wait_for
            what = f"failed with LockConflict: waited longer than lock_wait_for = {waited:g} s ({policy})"
        message.tell(holder, what)
        raise LockConflict(holder.key, holder)


def refuse(message: Facts, holder: LockInfo, options: LockOptions) -> Fail:
    """Have the run fail."""
    return Fail()
