"""What the app's broker cannot do, said once in the log of each worker that starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery_redislock.message.broker import DEFAULT_VISIBILITY_TIMEOUT

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: Kombu's transports that take a message out of its queue for good when they deliver it, and ack nothing.
FORGETFUL = frozenset(
    "memory filesystem sqlalchemy sqla mongodb zookeeper consul etcd pyro azurestoragequeues".split()  # noqa: SIM905
)


def warn(app: Celery) -> None:
    """Log what the broker of `app` cannot do, if that costs its locked tasks anything. It opens no connection."""
    with app.connection_for_read() as connection:
        transport = str(connection.transport_cls)
        options = connection.transport_options or {}
    for line in lines(transport, options):
        logger.warning(line)


def lines(transport: str, options: Mapping[str, Any]) -> list[str]:
    """What a worker says of its broker.

    Args:
        transport: Kombu's name of the transport, as in the broker's URL.
        options: The app's `broker_transport_options`.
    """
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
