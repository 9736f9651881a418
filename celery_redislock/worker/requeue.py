"""Requeue: publishes the messages that waited in a worker again, with updated headers, and acks the originals.

The broker's own copy lacks what was added to the message's header during the wait: its rank, when it began to wait, and
whether its work may have begun. If publishing fails, the broker delivers that copy again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from celery.worker.request import Request
from kombu.exceptions import OperationalError
from kombu.utils.encoding import bytes_to_str

from celery_redislock.errors import describe, fields, run_named
from celery_redislock.message.delivery import hide_headers
from celery_redislock.message.header import HEADER, Header
from celery_redislock.message.republish import REFUSED, confirmed, publish_again

from .worker_port import context_of, last_answer

logger = logging.getLogger(__name__)

#: How many messages are published before their originals are acked.
BATCH = 50
#: Maximum seconds to wait for a Redis broker's answer to the last command: at the end, and after each batch. The answer
#: may be a message that was just published.
LAST_ANSWER, AN_ANSWER = 5.0, 0.05


#: In a thread pool, several runs that end in a shutdown may settle messages at the same time.
_settling = threading.Lock()


def hand_over(requests: Sequence[Request], channel: Any, has_settled: Callable[[], None]) -> None:
    """Publish the messages of `requests` again, in this order, and ack the originals.

    This is for a worker that is shutting down, and no longer consumes or runs its event loop.

    Args:
        requests: The requests of the messages that wait.
        channel: The channel that the worker consumed on, if a message may still arrive on it.
        has_settled: Called after each message.
    """
    is_reachable = True
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        sent = publish(batch) if is_reachable else None
        is_reachable, published = sent is not None, set(map(id, sent or ()))
        put_back(channel, AN_ANSWER)  # before the acks: the answer may be a message just published
        for request in sorted(batch, key=lambda one: id(one) not in published):
            settle(request, has_settled, requeues=id(request) not in published)
    put_back(channel, LAST_ANSWER)


def settle(request: Request, has_settled: Callable[[], None], *, requeues: bool = False) -> None:
    """Ack the message of `request` without the event loop, or have the broker deliver it again if it `requeues`."""
    message = request.message
    if request.acknowledged or getattr(message.channel, "connection", message) is None:
        return  # it is acked, or its connection is lost and the broker delivers it again anyway
    try:
        with _settling:
            if requeues:
                message.reject(requeue=True)
            else:
                message.ack()
        request.acknowledged = True
        has_settled()
    except Exception as error:  # noqa: BLE001 - each broker raises its own errors
        which = run_named(request.task.name, request.id)
        about = fields("not_acked", task=request.task.name, task_id=request.id)
        text = "%s: its message could not be acked, and is delivered again: %s"
        logger.warning(text, which, describe(error), extra=about)


def publish(requests: Sequence[Request]) -> list[Request] | None:
    """Publish the messages of `requests` again as one batch.

    Returns:
        The requests whose messages the broker has stored; None if it is out of reach.
    """
    refused = set[str]()
    try:
        with confirmed(requests[0].task, refused) as producer:
            sent = [request for request in requests if _publish(request, producer)]
    except Exception as error:  # noqa: BLE001 - each broker raises its own errors
        logger.warning("could not republish the messages that wait in this worker: %s", describe(error))
        return None
    if refused:
        logger.warning("could not republish %d of the messages that wait in this worker: %s", len(refused), REFUSED)
    published = [request for request in sent if str(request.id) not in refused]
    logger.info("republished the messages that waited in this worker: %d", len(published))
    return published


def _publish(request: Request, producer: Any) -> bool:
    """Publish the message of `request` again; return whether it was sent.

    Raises:
        OSError, OperationalError: The broker cannot be reached.
    """
    task: Any = request.task
    context = context_of(request)
    hide_headers(context)
    pause, request.leaves_for = request.leaves_for, 0.0  # type: ignore[attr-defined] # it is a `LockedRequest`
    header = Header.read(request.request_dict[HEADER])._replace(republished=True)
    request.request_dict[HEADER] = header.wire  # if publishing seems to fail, it may be queued and run here as well
    try:
        publish_again(task, context, header, pause, request.delivery, producer)  # type: ignore[attr-defined] # as above
    except (OSError, OperationalError):
        raise
    except Exception as error:  # noqa: BLE001 - each serializer raises its own errors
        about, which = fields("not_sent_back", task=task.name, task_id=request.id), run_named(task.name, request.id)
        logger.warning("%s: could not publish its message again: %s", which, describe(error), extra=about)
        return False
    return True


def put_back(channel: Any, seconds: float) -> None:
    """Put back the message that a Redis broker sends in answer to this worker's last command, if it sends one.

    Kombu sends BRPOP and cannot take it back. The answer may come a second later, and a message in it would be lost
    with this process. That message may well be one that was just published.

    Args:
        channel: The channel that waits for the answer, or None.
        seconds: The maximum time to wait for the answer.
    """
    try:
        if popped := last_answer(channel, seconds):
            with channel.conn_or_acquire() as client:  # kombu would add its prefix to the text "b'celery'"
                client.rpush(bytes_to_str(popped[0]), popped[1])
    except Exception as error:  # noqa: BLE001 - the connection is lost
        logger.warning("could not receive the broker's last answer to this worker: %s", describe(error))
