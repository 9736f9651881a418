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

from .worker_port import bucket_of, give_rate_token_back, insert_into, requests_in

#: A message is called to its key if it gets a token within so many seconds. The key is kept for it for longer.
SOON = 2.0


def limits(consumer: Any, name: str) -> bool:
    """Whether the task `name` has a limit. For any thread."""
    return bucket_of(consumer, name) is not None


def called(consumer: Any, name: str) -> int:
    """How many messages of the task `name` that have waited stand in front in its bucket. For any thread."""
    bucket = bucket_of(consumer, name)
    return 0 if bucket is None else _called(bucket)


def has_rate_token(consumer: Any, name: str, before: int) -> bool:
    """Whether a message of the task `name` would soon have a token, after `before` others. For any thread."""
    bucket = bucket_of(consumer, name)
    if bucket is None:
        return True
    seconds: float = copy.copy(bucket).expected_time(before + 1)  # the bucket itself would be changed
    return seconds <= SOON


def run(consumer: Any, request: Request) -> None:
    """Have the pool run `request`, which has waited, with the next token of its task: before all that have not."""
    task: Any = request.task
    bucket = bucket_of(consumer, task.name)  # the request's own name may be its shadow's
    if bucket is None:
        state.task_reserved(request)
        consumer.on_task_request(request)
    else:
        insert_into(consumer, bucket, _called(bucket), request)


def give_back(consumer: Any, name: str) -> None:
    """Give a token of the task `name` back, and let the next message have it."""
    bucket = bucket_of(consumer, name)
    if bucket is not None:
        give_rate_token_back(consumer, bucket)


def _called(bucket: Any) -> int:
    count = 0
    for request in requests_in(bucket):
        if not Header.read(request.request_dict.get(HEADER)).times:
            break
        count += 1
    return count
