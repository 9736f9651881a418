"""The policy ``raise``: the run fails, and its caller decides what to do."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from celery import Task

from celery_redislock.errors import LockConflict, LockInfo
from celery_redislock.message.delivery import Facts
from celery_redislock.message.message import Message
from celery_redislock.options import LockOptions
from celery_redislock.policy import waiting_policy


class _Marked(type):
    def __instancecheck__(cls, error: object) -> bool:
        return isinstance(error, LockConflict) and error.is_expected


class Expected(Exception, metaclass=_Marked):
    """Each LockConflict with which a run fails because its call asked for the policy ``raise``."""


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
        raise self.error(message, holder)

    def error(self, message: Message, holder: LockInfo) -> LockConflict:
        """The error of the run. The task expects it, unless the message has only waited for too long."""
        error = LockConflict(holder.key, holder, message.options.wait_for if self.is_late else None)
        if not self.is_late:
            error.is_expected = True
            expect(type(message.task), Expected)
        return error


def expect(task: type[Task[..., Any]], error: type[Exception]) -> None:
    """Add `error` to what a task class `throws`, so that Celery logs it in one line without a traceback."""
    throws = task.throws if isinstance(task.throws, tuple) else (task.throws,)  # Celery also accepts a single class
    if error not in throws and LockConflict not in throws:
        task.throws = (*throws, error)


def refuse(message: Facts, holder: LockInfo, options: LockOptions) -> Fail:
    """Have the run fail."""
    return Fail()
