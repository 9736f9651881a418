"""Windows: a worker goes on fetching while messages wait in it, where the prefetch count of a consumer cannot grow."""

from __future__ import annotations

from typing import Any

from celery.utils.quorum_queues import detect_quorum_queues
from celery.worker import state
from kombu.common import QoS

from .worker_port import forget_tag, most_prefetched, tags_of


class Windows(QoS):
    """Takes the place of the QoS of a worker that consumes from quorum queues of RabbitMQ.

    There a prefetch count holds for each consumer of a queue by itself, and only for consumers that begin after it was
    set. Messages that wait would fill the consumer's window, and nothing else would be delivered. So the worker then
    consumes anew: the new consumer has a window of its own, and what the old one has received stays unacked and does
    not count any more.

    Args:
        consumer: Celery's consumer, with a QoS of Celery's own.
    """

    def __init__(self, consumer: Any) -> None:
        super().__init__(consumer.qos.callback, consumer.qos.value, most_prefetched(consumer))
        self._consumer = consumer
        #: The prefetch count that the next consumer of a queue is given.
        self._count: int = consumer.initial_prefetch_count
        #: For the tag of each consumer: its prefetch count, and the delivery tags of its messages that wait.
        self._counts: dict[str, int] = {}
        self._waiting: dict[str, set[Any]] = {}

    def keep(self, message: Any) -> None:
        """Count `message` as one that waits."""
        info = message.delivery_info
        self._waiting.setdefault(info["consumer_tag"], set()).add(info["delivery_tag"])
        self.prev = None  # the event loop calls `update`

    def let_go(self, message: Any) -> None:
        """Count `message`, which has waited, as one that runs."""
        info = message.delivery_info
        self._waiting.get(info["consumer_tag"], set()).discard(info["delivery_tag"])

    def update(self) -> int:
        """Consume anew where too many of a consumer's messages wait. Called by the event loop while `prev` has changed.

        The messages that do not wait must have as many places in the window as the pool has slots. While fewer are left
        but all slots are taken, that can wait: this worker would fetch more and more that another one could run.
        """
        self.prev = self.value
        consumer = self._consumer
        tags = tags_of(consumer.task_consumer)
        self._counts = {tag: self._counts.get(tag, self._count) for tag in tags.values()}
        for tag in self._waiting.keys() - self._counts.keys():
            del self._waiting[tag]
        slots = slots_of(consumer.pool)
        for queue, tag in tags.items():
            waiting = len(self._waiting.get(tag, ()))
            places = self._counts[tag] - waiting
            if not waiting or places >= slots:
                continue
            if places <= 0 or len(state.reserved_requests) < slots:
                self._consume_anew(queue)
            else:
                self.prev = None  # look again
        return self.value

    def _consume_anew(self, queue: str) -> None:
        consumer, tasks = self._consumer, self._consumer.task_consumer
        self._count = consumer.initial_prefetch_count
        self.callback(prefetch_count=self._count)
        # While an answer is awaited, other messages are received, also one that tells this worker to leave the queue.
        tag = forget_tag(tasks, queue)
        if tag is None:
            return
        tasks.consume()
        tasks.channel.basic_cancel(tag)
        if consumer.hub is not None:  # over TLS, messages may have been read along with the answers
            transport, connection = consumer.connection.transport, consumer.connection.connection
            consumer.hub.call_soon(transport.on_readable, connection, consumer.hub)


def open_windows(consumer: Any) -> None:
    """Give `consumer` a `Windows` if its prefetch count cannot grow, as Celery has decided when it began to consume."""
    app, connection = consumer.app, consumer.connection
    if connection.qos_semantics_matches_spec or not app.conf.worker_detect_quorum_queues:
        return
    # Where the prefetch count is 0, there is no window.
    if consumer.initial_prefetch_count and detect_quorum_queues(app, connection.transport.driver_type)[0]:
        consumer.qos = Windows(consumer)


def slots_of(pool: Any) -> int:
    """How many messages `pool` runs at a time; none before it has begun and after its end.

    In a cold shutdown the pool ends first, while messages still wait in its worker.
    """
    if not pool.active:
        return 0
    slots: int = pool.num_processes if pool.uses_semaphore else pool.limit
    return slots
