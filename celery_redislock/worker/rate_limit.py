"""Celery's `rate_limit`: a message that must wait gives its rate token back, and takes another when its turn comes.

Celery keeps a token bucket for each task with a rate limit. A delivered message takes a rate token, or stays in the
bucket until it gets one. If its run then finds that the message must wait, the rate token was taken for nothing.

Only the event loop may change a bucket, because no lock guards it.
"""

from __future__ import annotations

import copy
from typing import Any

from celery.worker import state
from celery.worker.request import Request

from celery_redislock.message.header import HEADER, Header

from .worker_port import bucket_of, give_rate_token_back, insert_into, requests_in

#: A message is called to its key only if it will get a rate token within this many seconds. The key is kept
#: longer than that.
SOON = 2.0


def limits(consumer: Any, name: str) -> bool:
    """Whether the task `name` has a rate limit. Thread-safe."""
    return bucket_of(consumer, name) is not None


def called(consumer: Any, name: str) -> int:
    """How many messages that have waited are at the front of the bucket of the task `name`. Thread-safe."""
    bucket = bucket_of(consumer, name)
    return 0 if bucket is None else _called(bucket)


def has_rate_token(consumer: Any, name: str, before: int) -> bool:
    """Whether a message of the task `name` would soon get a rate token, after `before` others. Thread-safe."""
    bucket = bucket_of(consumer, name)
    if bucket is None:
        return True
    seconds: float = copy.copy(bucket).expected_time(before + 1)  # this changes the bucket, so use a copy
    return seconds <= SOON


def run(consumer: Any, request: Request) -> None:
    """Run `request`, which has waited, with its task's next rate token, before messages that have not waited."""
    task: Any = request.task
    bucket = bucket_of(consumer, task.name)  # the request's own name may be its `shadow`
    if bucket is None:
        state.task_reserved(request)
        consumer.on_task_request(request)
    else:
        insert_into(consumer, bucket, _called(bucket), request)


def give_back(consumer: Any, name: str) -> None:
    """Give a rate token of the task `name` back, for the next message."""
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
