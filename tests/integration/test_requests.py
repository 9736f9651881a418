"""The worker's request for a message, made without a worker."""

from __future__ import annotations

from celery.worker.request import Request

from celery_redislock.worker.request import locked_request


def test_no_ack_is_tried_over_a_connection_that_kombu_has_closed(app, config, tasks, log):
    """Kombu has given the message back to the broker. An ack may raise in Celery's event loop, and end the worker."""
    tasks.late.delay("k")
    acks = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        message = app.amqp.queues[config.queue](channel).get()
        request = locked_request("lab.late", Request)(
            message, on_ack=lambda *_: acks.append(message), app=app, task=tasks.late, headers=message.headers
        )
        channel.close()
        request.acknowledge()
    assert acks == []
    assert [line.redislock_event for line in log.records] == ["not_acked"]
