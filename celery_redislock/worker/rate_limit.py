"""Celery's `rate_limit`: a message that must wait gives its token back, and takes one at its turn.

Celery keeps a bucket of tokens for each task with a limit. A message takes a token when it is delivered, or stands in
the bucket until there is one. It has taken it in vain if its run finds that it must wait.

Only the event loop changes a bucket, for no lock guards it.
"""

from __future__ import annotations

import copy
from typing import Any

from celery.worker import state
from celery.worker.request import Request

from celery_redislock.message.header import HEADER, Header

#: A message is called to its key if it gets a token within so many seconds. The key is kept for it for longer.
SOON = 2.0


def limits(consumer: Any, name: str) -> bool:
    """Whether the task `name` has a limit. For any thread."""
    return _bucket(consumer, name) is not None


def called(consumer: Any, name: str) -> int:
    """How many messages of the task `name` that have waited stand in front in its bucket. For any thread."""
    bucket = _bucket(consumer, name)
    return 0 if bucket is None else _called(bucket)


def has_token(consumer: Any, name: str, before: int) -> bool:
    """Whether a message of the task `name` would soon have a token, after `before` others. For any thread."""
    bucket = _bucket(consumer, name)
    if bucket is None:
        return True
    seconds: float = copy.copy(bucket).expected_time(before + 1)  # the bucket itself would be changed
    return seconds <= SOON


def begin(consumer: Any, request: Request) -> None:
    """Have the pool run `request`, which has waited, with the next token of its task: before all that have not."""
    task: Any = request.task
    bucket = _bucket(consumer, task.name)  # the request's own name may be its shadow's
    if bucket is None:
        state.task_reserved(request)
        consumer.on_task_request(request)
        return
    bucket.contents.insert(_called(bucket), (request, 1))
    consumer._schedule_bucket_request(bucket)


def give_back(consumer: Any, name: str) -> None:
    """Give a token of the task `name` back, and let the next message have it."""
    bucket = _bucket(consumer, name)
    if bucket is None:
        return
    missing = bucket.expected_time(bucket.capacity) * bucket.fill_rate
    bucket.can_consume(-min(1.0, missing))
    if bucket.contents and bucket.can_consume(bucket.contents[0][1]):
        consumer._limit_move_to_pool(bucket.pop()[0])


def _bucket(consumer: Any, name: str) -> Any:
    """The bucket of the task `name`; None where it has no limit."""
    return None if consumer.disable_rate_limits else consumer.task_buckets.get(name)


def _called(bucket: Any) -> int:
    count = 0
    for request, _ in bucket.contents.copy():
        if not Header.read(request.request_dict.get(HEADER)).times:
            break
        count += 1
    return count
