"""Worker port: everything undocumented in Celery, kombu and billiard that the main process uses.

Each function says what it needs and why. Each has a test in tests/contracts against the installed releases.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import isgenerator
from itertools import takewhile
from typing import Any

from billiard import get_start_method
from celery.worker import state
from celery.worker.request import Request
from kombu.transport import virtual
from kombu.utils.json import loads

from celery_redislock.message.header import HEADER, Header

logger = logging.getLogger(__name__)

#: A message is called to its key only if it will get a rate token within this many seconds. The key is kept
#: longer than that.
SOON = 2.0
#: How long a consumer that stops waits for children to accept what they have been given, in seconds. They do so at once
#: unless the machine is busy.
HEARD_WITHIN = 1.0

# The pool and its semaphore.


def idle_children(pool: Any) -> set[int]:
    """The processes of a prefork pool that have no message, including dead ones; of other pools, none. Thread-safe.

    A child with a message in its pipe is not idle, even if it is dead: the message keeps the slot, and runs in the
    child that replaces this one.
    """
    inner = pool._pool if pool.uses_semaphore else None
    if inner is None:  # or a cold shutdown has stopped the pool
        return set()
    jobs = tuple(inner._cache.values())
    busy = {job._worker_pid or getattr(job._write_to or job._scheduled_for, "pid", None) for job in jobs}
    return {child.pid for child in tuple(inner._pool)} - busy - {None}  # without a pid until it starts


def spawns_children(worker: Any) -> bool:
    """Whether the children of the worker's pool begin empty, instead of as forks of the worker."""
    how = (getattr(worker, "pool_start_method", "fork"), get_start_method())  # an option since Celery 5.7
    return "prefork" in worker.pool_cls.__module__ and how != ("fork", "fork")


def before_close(consumer: Any, do: Callable[[], None]) -> None:
    """Call `do` each time that `consumer` is about to stop, before any of its steps does."""
    close = consumer.on_close

    def on_close() -> None:
        do()
        close()

    consumer.on_close = consumer.blueprint.on_close = on_close


def hear_children(consumer: Any) -> None:
    """Handle what the children of a prefork pool have written so far, as the event loop would.

    Wait up to `HEARD_WITHIN` for those that have been given a message and have not accepted it yet. As its consumer
    stops, Celery 5.7 forgets each message whose acceptance it has not read, although a child runs it: its result is not
    read, it is not acked, and a shutdown then waits half a minute for that child.
    """
    pool, readers, end = consumer.pool._pool, getattr(consumer.hub, "readers", {}), time.monotonic() + HEARD_WITHIN
    while True:
        for fd, child in tuple(getattr(pool, "_fileno_to_outq", {}).items()):
            try:
                while fd in readers and not child.outq._reader.closed and child.outq._reader.poll(0):
                    read, args = readers[fd]
                    if not isgenerator(read):
                        read(*args)
                        continue
                    next(read, None)  # half of a result has come: this reads on
                    if readers.get(fd, (None,))[0] is read:
                        break
            except Exception:  # the other children, and the steps of the consumer, must not miss it
                logger.exception("could not read what a child of the pool has written; the shutdown goes on")
        unheard = [job for job in tuple(getattr(pool, "_cache", {}).values()) if job._write_to and not job.accepted()]
        halves = [read for read, _ in tuple(readers.values()) if isgenerator(read)]
        if not readers or not (unheard or halves) or time.monotonic() > end:
            return
        time.sleep(0.005)


def is_behind_semaphore(consumer: Any) -> bool:
    """Whether fetched messages wait for a slot in Celery's semaphore."""
    return bool(consumer.on_task_request == consumer.controller._process_task_sem)


def run_in_acquired_slot(consumer: Any, request: Request) -> None:
    """Run `request` in the pool, in a slot that was already acquired from the semaphore."""
    consumer.controller._process_task(request)


# A task's `rate_limit`: a bucket of tokens, and the messages in it. A delivered message takes a token, or stays in the
# bucket until it gets one. If its run then finds that it must wait, the token was taken for nothing: it is given back,
# and the message takes another when its turn comes. Only the event loop may change a bucket: no lock guards it.


def bucket_of(consumer: Any, task: str) -> Any:
    """The bucket of a task; None if it has no rate limit."""
    return None if consumer.disable_rate_limits else consumer.task_buckets.get(task)


def limited_requests(consumer: Any) -> list[Request]:
    """The requests in all buckets."""
    return [request for bucket in list(consumer.task_buckets.values()) if bucket for request in requests_in(bucket)]


def requests_in(bucket: Any) -> list[Request]:
    """The requests in a bucket, in order."""
    return [request for request, _ in bucket.contents.copy()]


def insert_into(consumer: Any, bucket: Any, index: int, request: Request) -> None:
    """Put a request into a bucket at `index`; the bucket's `add` only appends."""
    bucket.contents.insert(index, (request, 1))
    consumer._schedule_bucket_request(bucket)


def called(consumer: Any, name: str) -> int:
    """How many messages that have waited are at the front of the bucket of the task `name`. Thread-safe."""
    bucket = bucket_of(consumer, name)
    requests = [] if bucket is None else requests_in(bucket)
    return sum(1 for _ in takewhile(lambda one: Header.read(one.request_dict.get(HEADER)).times, requests))


def has_rate_token(consumer: Any, name: str, before: int) -> bool:
    """Whether a message of the task `name` would soon get a rate token, after `before` others. Thread-safe."""
    bucket = bucket_of(consumer, name)  # `expected_time` changes it, so use a copy
    return bucket is None or bool(copy.copy(bucket).expected_time(before + 1) <= SOON)


def run_limited(consumer: Any, request: Request) -> None:
    """Run `request`, which has waited, with its task's next rate token, before messages that have not waited."""
    task: Any = request.task
    bucket = bucket_of(consumer, task.name)  # the request's own name may be its `shadow`
    if bucket is None:
        state.task_reserved(request)
        consumer.on_task_request(request)
    else:
        insert_into(consumer, bucket, called(consumer, task.name), request)


def give_rate_token_back(consumer: Any, name: str) -> None:
    """Give a rate token of the task `name` back, for which a bucket has no method, and run the next message with it."""
    bucket = bucket_of(consumer, name)
    if bucket is None:
        return
    missing = bucket.expected_time(bucket.capacity) * bucket.fill_rate
    bucket.can_consume(-min(1.0, missing))
    with suppress(IndexError):  # without an event loop, the timer's thread may take the last message meanwhile
        if bucket.can_consume(bucket.contents[0][1]):
            consumer._limit_move_to_pool(bucket.pop()[0])


# A request.


def context_of(request: Request) -> Any:
    """The request as a task sees it, from which the same message can be published again."""
    return request._context  # type: ignore[attr-defined]


def was_revoked(request: Request) -> bool:
    """Whether Celery has already announced that `request` was revoked or terminated; its message is acked then."""
    return bool(request._already_revoked)  # type: ignore[attr-defined]


def was_cancelled(request: Request) -> bool:
    """Whether Celery has cancelled the run of `request`, so that the broker delivers its message again."""
    return bool(request._already_cancelled)  # type: ignore[attr-defined]


def forget_run(request: Any) -> None:
    """Make `request` forget its last run: a terminate would kill a process that may be running another message."""
    request.time_start = request.worker_pid = request._apply_result = request._terminate_on_ack = None


# The connection to the broker.


def tags_of(task_consumer: Any) -> dict[str, str]:
    """The consumer tags of a worker, by the names of the queues that it consumes from."""
    return dict(task_consumer._active_tags)


def queue_that_fits(message: Any, queues: Sequence[Any]) -> str | None:
    """The first of `queues` that a message of kombu's virtual transports can have come from; None if none fits.

    Such a message does not name its queue, unless it was sent straight to it. A fanout exchange in Redis has no queues
    that a message could be put into.
    """
    exchange, key, channel = *map(message.delivery_info.get, ("exchange", "routing_key")), message.channel
    name: str | None = None if exchange else key
    if not exchange or not isinstance(channel, virtual.Channel) or channel.closed:
        return name
    kind = channel.typeof(exchange)
    bound = [one for one in queues if kind.type != "fanout" and one.exchange and one.exchange.name == exchange]
    table: Any = [kind.prepare_bind(one.name, exchange, one.routing_key, {}) for one in bound]
    found = kind.lookup(table, exchange, key, None)
    return next((one.name for one in bound if one.name in found), None)


def forget_tag(task_consumer: Any, queue: str) -> str | None:
    """Forget the tag of a queue's consumer, so that `consume` starts a new one; return the old tag, still active."""
    tag: str | None = task_consumer._active_tags.pop(queue, None)
    return tag


def most_prefetched(consumer: Any) -> int | None:
    """The maximum number of messages that a worker keeps, Celery's `worker_eta_task_limit`; None for no limit."""
    return getattr(consumer.qos, "max_prefetch", None) or None


def restore_prefetch_count(consumer: Any) -> None:
    """Restore the prefetch count that Celery has reduced after a lost connection.

    Celery would do so with each ack, and forget by how much waiting messages have raised it.
    """
    if not consumer._maximum_prefetch_restored:
        consumer._maximum_prefetch_restored = True
        consumer.qos.increment_eventually(consumer.max_prefetch_count - consumer.initial_prefetch_count)
        consumer.initial_prefetch_count = consumer.max_prefetch_count


def survive_lost_connections(consumer: Any, tell: Callable[[], None]) -> None:
    """Make `consumer` call `tell` when it has lost its connection, and reconnect even if kombu fails to close it.

    `tell` comes first: when kombu closes a connection to Redis, it puts what is unacked back into the queue, and other
    workers may run that at once.

    Kombu 5.7 closes it twice. If a message is unacked and the broker is a Redis that cannot be reached, the second
    close raises AttributeError, which would end the worker. So does Celery 5.7 where a signal for a cold shutdown
    stops the pool meanwhile; that shutdown goes on.

    Raises:
        WorkerTerminate: A cold shutdown has begun.
    """
    handle = consumer.on_connection_error_after_connected

    def survive(error: BaseException) -> None:
        tell()
        try:
            handle(error)
        except AttributeError as failure:
            state.maybe_shutdown()
            if failure.name != "hostname" or failure.obj is not None:
                raise
            logger.warning("kombu could not close the lost connection to the broker; the worker reconnects")
            handle(error)  # Celery has dropped that connection by now, and does the rest

    consumer.on_connection_error_after_connected = survive


def is_closing(channel: Any) -> bool:
    """Whether kombu is closing the channel to a Redis broker. It takes a last message then, and puts that back too."""
    return bool(getattr(channel, "_closing", False))


def restore(channel: Any, message: Any) -> None:
    """Make a Redis broker redeliver an unacked message at once, not after its visibility timeout.

    If kombu could, it has put back all that its channel had delivered, and has forgotten it. Another worker may have
    the message by now, under the same delivery tag, and it stays there. If kombu failed on the way, what it has put
    back is marked as redelivered. If the message was marked before, nothing tells the two apart, and it is delivered
    once more.

    Other brokers redeliver by themselves, and their channels have no such method.
    """
    qos: Any = getattr(channel, "qos", None)
    if hasattr(qos, "restore_by_tag") and message.delivery_tag in message.channel.qos._delivered:
        unacked = channel._create_client().hget(qos.unacked_key, message.delivery_tag)
        if unacked and loads(unacked)[0]["properties"]["delivery_info"] == message.delivery_info:
            qos.restore_by_tag(message.delivery_tag)


def last_answer(channel: Any, seconds: float) -> Any:
    """The answer to the BRPOP of a Redis broker's channel; None if none is due, or none comes within `seconds`.

    Kombu cannot take a BRPOP back. Once the answer is read here, kombu no longer expects it.
    """
    connection = getattr(channel, "_in_poll", None)
    if not connection or not connection.can_read(seconds):
        return None
    answer = channel.client.parse_response(connection, "BRPOP")
    channel._in_poll = None
    return answer


# The worker.


def wrap_soft_shutdown(worker: Any, wrap: Callable[[Callable[[], None]], None]) -> None:
    """Make a soft shutdown call `wrap(wait)` instead of the worker's own `wait`. Celery sends no signal for it."""
    wait = worker.wait_for_soft_shutdown
    worker.wait_for_soft_shutdown = lambda: wrap(wait)


def listed(requests: Any) -> list[Any]:
    """The requests in one of Celery's sets of them.

    These are WeakSets. To iterate over one fails if another thread adds a request meanwhile, but its set of references
    is copied in one step.
    """
    return [request for ref in requests.data.copy() if (request := ref()) is not None]


def task_ready(request: Request) -> None:
    """Celery's own `task_ready`, except that another request with the same id can still be found and terminated."""
    other = state.requests.get(request.id)
    state.task_ready(request)
    find_again(request, other)


def never_runs(request: Request) -> bool:
    """Whether `request` was terminated before its run began. Pools of threads and greenlets do not say that it ended.

    Celery notes a termination before the run, and carries it out when the pool accepts the request.
    """
    return bool(request.time_start and request._terminate_on_ack)  # type: ignore[attr-defined]


def find_again(ended: Request, other: Request | None) -> None:
    """Let Celery find another request with the id of `ended`, whose own entry is gone.

    Args:
        ended: The request that now waits, or has ended.
        other: The request that Celery found before. It may be `ended` itself, if that replaced a running one.
    """
    if other is None or other is ended:
        requests = listed(state.active_requests)
        other = next((one for one in requests if one is not ended and one.id == ended.id), None)
    if other is not None:
        state.requests.setdefault(ended.id, other)
