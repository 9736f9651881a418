"""Broker advice: what a worker says at its start of a broker that may lose messages, or deliver them too early."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery_redislock.message.broker import DEFAULT_VISIBILITY_TIMEOUT, Broker

from .server_advice import locked_tasks

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: Kombu's transports that take a message out of its queue for good when they deliver it, and ack nothing.
FORGETFUL = frozenset(
    "memory filesystem sqlalchemy sqla mongodb zookeeper consul etcd pyro azurestoragequeues".split()  # noqa: SIM905
)


def warn(app: Celery) -> None:
    """Log what is wrong with the broker of `app`, if that costs its locked tasks anything. It opens no connection."""
    with app.connection_for_read() as connection:
        transport, is_redis = str(connection.transport_cls), connection.transport.driver_type == "redis"
        options = connection.transport_options or {}
    if is_redis:
        _warn_of_early_copies(app)
    for line in lines(transport, options):
        logger.warning(line)


def _warn_of_early_copies(app: Celery) -> None:
    """Warn where a Redis broker delivers messages of late-acked tasks again before a dead holder's lock has ended."""
    timeout = Broker(app).visibility_timeout
    late = [(task.name, lease) for task, lease in locked_tasks(app) if task.acks_late and lease > timeout]
    if late:
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        logger.warning(
            "the broker delivers a message again that is not acked after %g s (visibility_timeout), which is less than "
            "the lease of tasks that ack late: %s; copies come while their runs go on: set visibility_timeout in "
            "broker_transport_options to more than the longest run takes",
            *(timeout, ", ".join(f"{name} ({lease:g} s)" for name, lease in late[:3]) + more),
        )


def lines(transport: str, options: Mapping[str, Any]) -> list[str]:
    """What a worker says of what its broker cannot do."""
    said = []
    if transport in FORGETFUL:
        said.append(
            f"the broker {transport} forgets a message when it delivers it: what runs or waits in line in a worker is "
            "lost if that worker is killed, also with acks_late; use Redis or RabbitMQ where that must not happen"
        )
    if transport.lower() == "sqs" and not options.get("visibility_timeout"):
        said.append(
            "the visibility timeout of the SQS queues is not known: a message that waits in line is delivered twice if "
            f"it is shorter than {DEFAULT_VISIBILITY_TIMEOUT:g} s; set visibility_timeout in broker_transport_options "
            "to the shortest that a queue has"
        )
    return said
