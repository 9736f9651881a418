"""Publish decisions: what becomes of a publish that finds its key, or its place in the queue, taken. Pure functions.

`Publication` carries out what they return. The model in tests/model imports them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from celery_redislock.info import LockInfo
from celery_redislock.server.answers import Passed
from celery_redislock.server.tokens import is_whole

from .decisions import HasEnded, follows


class Published(NamedTuple):
    """What is known of a message that is to be published, where nobody but the caller knows of it."""

    task: str
    """The task's name."""
    causes: frozenset[str]
    """The ids of the tasks that cause it, shortened as they are in tokens."""


class Answer(NamedTuple):
    """The message is not sent: the caller is given the result of this job, which is outstanding."""

    job: LockInfo


class AskAgain(NamedTuple):
    """The key, or the place in the queue, is asked for once more, and these jobs are passed over."""

    passed: Passed


def on_first(message: Published, taken: Mapping[str, LockInfo], has_ended: HasEnded) -> Answer | AskAgain:
    """What becomes of a publish that is told who has the key and the place in the queue, by the nonces of their tokens.

    A job that the caller may have seen end is no answer, nor is one that has caused the message, for the message is to
    follow it. `has_ended` is called only where the caller would be given the job's result.
    """
    ended, preceding = set[str](), set[str]()
    for nonce, job in taken.items():
        if not is_job(message, job) or follows(message.causes, job):
            preceding.add(nonce)
        elif has_ended(job):
            ended.add(nonce)
        else:
            return Answer(job)
    return AskAgain(Passed(frozenset(ended), frozenset(preceding)))


def on_second(message: Published, taken: Mapping[str, LockInfo], passed: Mapping[str, LockInfo]) -> Answer | None:
    """What becomes of a publish that was told so once more, having `passed` over some; None: it is sent as it is.

    A job that was not there at the first time is newer than the call, so the caller cannot have seen it end. But a copy
    of a job that has ended may run by now.
    """
    known = {job.task_id for job in passed.values()}
    jobs = (job for job in taken.values() if is_job(message, job) and job.task_id not in known)
    return next(map(Answer, jobs), None)


def is_job(message: Published, holder: LockInfo) -> bool:
    """Whether `holder` is a job of the message's task, with a result that the caller can be given."""
    # An eager run, of `apply()`, has no result that others can read. Its host is not named as a worker is, with an "@".
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    return holder.task == message.task and has_a_result and holder.task_id is not None and is_whole(holder.task_id)
