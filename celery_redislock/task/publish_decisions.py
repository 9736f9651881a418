"""Publish decisions: what becomes of a publish that finds its key, or its place in the queue, taken. Pure functions.

`Publication` carries out what they return. The model in tests/model imports them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from celery_redislock.info import LockInfo
from celery_redislock.protocol.answers import Passed
from celery_redislock.protocol.tokens import is_whole

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


def on_first(message: Published, taken: Iterable[LockInfo], has_ended: HasEnded) -> Answer | AskAgain:
    """What becomes of a publish that is told who has the key and the place in the queue.

    A job that the caller may have seen end is no answer, nor is one that has caused the message, for the message is to
    follow it. `has_ended` is called only where the caller would be given the job's result.
    """
    ended, preceding = set[str](), set[str]()
    for job in taken:
        if not is_job(message, job) or follows(message.causes, job):
            preceding.add(str(job.task_id))
        elif has_ended(job):
            ended.add(str(job.task_id))
        else:
            return Answer(job)
    return AskAgain(Passed(frozenset(ended), frozenset(preceding)))


def on_second(message: Published, taken: Iterable[LockInfo], passed: Passed) -> Answer | None:
    """What becomes of a publish that is told so once more, though it passes over some; None: it is sent as it is.

    A job that was not there at the first time is newer than the call, so the caller cannot have seen it end.
    """
    known = passed.ended | passed.preceding
    return next((Answer(job) for job in taken if is_job(message, job) and job.task_id not in known), None)


def is_job(message: Published, holder: LockInfo) -> bool:
    """Whether `holder` is a job of the message's task, with a result that the caller can be given."""
    # An eager run, of `apply()`, has no result that others can read. Its host is not named as a worker is, with an "@".
    has_a_result = holder.state == "queued" or "@" in (holder.hostname or "")
    return holder.task == message.task and has_a_result and holder.task_id is not None and is_whole(holder.task_id)
