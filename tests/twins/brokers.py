"""The brokers on which twins are played: whether they have messages, and how they lose them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from tests.lab.servers import Valkey, rabbitmq, wait_until


class Redis:
    """A broker beside the results: it tells which messages are not acked."""

    settings: dict[str, Any] = {}
    drops_expired = False
    """Whether it drops a message that expires in the queue, of whose end then nobody tells."""

    def __init__(self, results: Valkey) -> None:
        self.url = results.celery_url(0)
        self._queues = results.connect(0)

    def has_messages(self, app: Celery, workers: int) -> bool:
        """Whether a message is in the queue, or with one of so many workers, which has not acked it."""
        return bool(self._queues.llen(app.conf.task_default_queue) or self._queues.hlen("unacked"))

    def empty(self, app: Celery) -> None:
        """Forget all messages. No worker runs."""
        self._queues.flushdb()


class RabbitMQ:
    """It tells at once only of messages that no worker has; so the workers are asked for theirs."""

    #: Else a child may have ended before the queue has what that child has sent, and for a moment nothing is seen.
    settings: dict[str, Any] = {"broker_transport_options": {"confirm_publish": True}}
    drops_expired = True

    def __init__(self, url: str) -> None:
        self.url = url

    def has_messages(self, app: Celery, workers: int) -> bool:
        """As `Redis.has_messages`; also whether a run goes on."""
        if self._queue(app).message_count:
            return True
        replies = app.control.broadcast("unfinished", reply=True, limit=workers, timeout=5) or []
        told = [count for reply in replies for count in reply.values()]
        return len(told) < workers or any(told)

    def empty(self, app: Celery) -> None:
        """As `Redis.empty`. What the dead workers have not acked comes back first."""
        wait_until(lambda: not self._queue(app).consumer_count, "RabbitMQ has noticed that the workers are dead")
        with app.pool.acquire(block=True) as connection:
            connection.default_channel.queue_purge(app.conf.task_default_queue)

    def _queue(self, app: Celery) -> Any:
        with app.pool.acquire(block=True) as connection:
            return app.amqp.queues[app.conf.task_default_queue](connection.default_channel).queue_declare()


Broker = Redis | RabbitMQ


@contextmanager
def open_broker(name: str, folder: Path, results: Valkey) -> Iterator[Broker]:
    """A broker that ends with the block: ``redis`` or ``rabbitmq``."""
    if name == "redis":
        yield Redis(results)
        return
    folder.mkdir()
    with rabbitmq(folder) as url:
        yield RabbitMQ(url)
