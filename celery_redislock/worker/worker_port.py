"""Worker port: what the main process needs of Celery, kombu and billiard that none of them promises to keep.

Each function says what it needs and why. tests/contracts has a test of each with the installed releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.worker import state
from celery.worker.request import Request

# The pool and its semaphore.


def children_of(pool: Any) -> tuple[Any, ...]:
    """The processes of a prefork pool, the dead ones included until billiard replaces them: a dead one is no slot."""
    return tuple(pool._pool._pool)


def is_behind_semaphore(consumer: Any) -> bool:
    """Whether fetched messages wait for a slot in Celery's semaphore, where a waiting message can go first."""
    return bool(consumer.on_task_request == consumer.controller._process_task_sem)


def wait_in_front(semaphore: Any, call: Callable[[], None]) -> None:
    """Have a full semaphore call this when its next slot is free, before all that wait: its `acquire` only appends."""
    semaphore._waiting.appendleft((call, (), {}))


def waiting_behind(semaphore: Any) -> int:
    """How many wait for a slot of the semaphore: they are reserved, and not in the pool."""
    return len(semaphore._waiting)


def run_in_acquired_slot(consumer: Any, request: Request) -> None:
    """Have the pool run `request` in a slot that was acquired from the semaphore before."""
    consumer.controller._process_task(request)


# A task's `rate_limit`: a bucket of tokens, and the messages in it.


def bucket_of(consumer: Any, task: str) -> Any:
    """The bucket of a task; None where it has no limit."""
    return None if consumer.disable_rate_limits else consumer.task_buckets.get(task)


def limited_requests(consumer: Any) -> list[Request]:
    """The messages that stand in any bucket."""
    return [request for bucket in list(consumer.task_buckets.values()) if bucket for request in requests_in(bucket)]


def requests_in(bucket: Any) -> list[Request]:
    """The messages that stand in a bucket, in their order."""
    return [request for request, _ in bucket.contents.copy()]


def insert_into(consumer: Any, bucket: Any, index: int, request: Request) -> None:
    """Put a message into a bucket, in front of others: it has waited for longer than they. `add` only appends."""
    bucket.contents.insert(index, (request, 1))
    consumer._schedule_bucket_request(bucket)


def give_rate_token_back(consumer: Any, bucket: Any) -> None:
    """Give a token back to a bucket, which has no method for it, and run the message that can have it."""
    missing = bucket.expected_time(bucket.capacity) * bucket.fill_rate
    bucket.can_consume(-min(1.0, missing))
    if bucket.contents and bucket.can_consume(bucket.contents[0][1]):
        consumer._limit_move_to_pool(bucket.pop()[0])


# A request.


def context_of(request: Request) -> Any:
    """The request as a task sees it: what a publish of the same message is made of."""
    return request._context  # type: ignore[attr-defined]


def was_revoked(request: Request) -> bool:
    """Whether Celery has told already that `request` was revoked or terminated; its message is acked."""
    return bool(request._already_revoked)  # type: ignore[attr-defined]


def was_cancelled(request: Request) -> bool:
    """Whether Celery has cancelled the run of `request`, so that the broker is to deliver its message again."""
    return bool(request._already_cancelled)  # type: ignore[attr-defined]


def forget_run(request: Any) -> None:
    """Have `request` know nothing of its last run: a terminate would kill a process that may run another by now."""
    request.time_start = request.worker_pid = request._apply_result = request._terminate_on_ack = None


# The connection to the broker.


def tags_of(task_consumer: Any) -> dict[str, str]:
    """The tags under which a worker consumes from its queues, by the names of the queues."""
    return dict(task_consumer._active_tags)


def forget_tag(task_consumer: Any, queue: str) -> str | None:
    """Have `consume` begin anew for a queue from which the worker consumes; return the tag, which is still active."""
    tag: str | None = task_consumer._active_tags.pop(queue, None)
    return tag


def most_prefetched(consumer: Any) -> int | None:
    """The most messages that a worker keeps, Celery's `worker_eta_task_limit`; None where there is no maximum."""
    return getattr(consumer.qos, "max_prefetch", None) or None


def survive_lost_connections(consumer: Any, on_failure: Callable[[], None]) -> None:
    """Have `consumer` connect again where kombu fails while it closes a lost connection; `on_failure` is called then.

    Kombu 5.7 closes it twice, and the second time raises AttributeError if a message is not acked and Redis, as the
    broker, cannot be reached: the worker would end.
    """
    handle = consumer.on_connection_error_after_connected

    def survive(error: BaseException) -> None:
        try:
            handle(error)
        except AttributeError as failure:
            if failure.name != "hostname" or failure.obj is not None:
                raise
            on_failure()

    consumer.on_connection_error_after_connected = survive


def restore(channel: Any, tag: str) -> None:
    """Have a Redis broker deliver an unacked message again at once, not after its visibility timeout.

    Brokers that do so by themselves have no such method.
    """
    by_tag = getattr(getattr(channel, "qos", None), "restore_by_tag", None)
    if by_tag is not None:
        by_tag(tag)


def last_answer(channel: Any, seconds: float) -> Any:
    """The answer to the BRPOP of a channel to a Redis broker, within so many seconds; None where none comes or is due.

    Kombu cannot take a BRPOP back, and expects its answer no longer once it was read here.
    """
    connection = getattr(channel, "_in_poll", None)
    if not connection or not connection.can_read(seconds):
        return None
    answer = channel.client.parse_response(connection, "BRPOP")
    channel._in_poll = None
    return answer


# The worker.


def wrap_soft_shutdown(worker: Any, wrap: Callable[[Callable[[], None]], None]) -> None:
    """Have `wrap` called instead of the worker's wait in a soft shutdown, with that wait. No signal tells of it."""
    wait = worker.wait_for_soft_shutdown
    worker.wait_for_soft_shutdown = lambda: wrap(wait)


def task_ready(request: Request) -> None:
    """As Celery's own, but another request of the same id can still be found, and terminated."""
    other = state.requests.get(request.id)
    state.task_ready(request)
    find_again(request, other)


def find_again(ended: Request, other: Request | None) -> None:
    """Have Celery find another request of the id of `ended`, for which it knows none any more.

    Args:
        ended: It waits, or has ended.
        other: The request that Celery found before; `ended` may have replaced a run when it was delivered.
    """
    if other is None or other is ended:
        active: Any = state.active_requests
        # Not the WeakSet itself, which threads of the pool may change while it is read, but its set of references.
        requests = [ref() for ref in tuple(active.data)]
        other = next((one for one in requests if one is not None and one is not ended and one.id == ended.id), None)
    if other is not None:
        state.requests.setdefault(ended.id, other)
