"""The worker's request for a message, made without a worker."""

from __future__ import annotations

import threading

import pytest
from celery.concurrency.thread import TaskPool
from celery.worker import state
from celery.worker.request import Request

from celery_redislock.worker.request import locked_request


@pytest.mark.parametrize("answer", [lambda one: one.acknowledge(), lambda one: one.reject(requeue=True)])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "tried to close"])
def test_nothing_is_answered_over_a_connection_that_kombu_has_closed(
    app, config, tasks, log, monkeypatch, answer, is_closed
):
    """Kombu has given the message back. An answer may raise in Celery's event loop, and end the worker."""
    tasks.late.delay("k")
    answers = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        message = app.amqp.queues[config.queue](channel).get()
        request = locked_request("lab.late", Request)(
            message,
            on_ack=lambda *_: answers.append("ack"),
            on_reject=lambda *_: answers.append("reject"),
            app=app,
            task=tasks.late,
            headers=message.headers,
        )
        with monkeypatch.context() as patch:
            if is_closed:
                channel.close()
            else:
                patch.setattr(channel, "closed", True)
            answer(request)
    assert answers == []
    assert [line.redislock_event for line in log.records] == ["not_acked"]


def test_a_run_that_a_thread_accepts_while_it_is_terminated_keeps_its_message(app, config, tasks, monkeypatch):
    """A thread cannot be terminated, and goes on. In that moment it sends the event about its begin."""
    tasks.late.delay("k")
    answers, pool = [], TaskPool(1, app=app)
    with app.connection_for_read() as connection, connection.channel() as channel:
        message = app.amqp.queues[config.queue](channel).get()
        request = locked_request("lab.late", Request)(
            message, on_ack=lambda *_: answers.append("ack"), app=app, task=tasks.late, headers=message.headers
        )

        def send_event(kind, **_):
            if kind == "task-started":
                with pytest.raises(NotImplementedError):
                    request.terminate(pool)

        monkeypatch.setattr(request, "send_event", send_event)
        state.task_reserved(request)
        request.on_accepted(threading.get_ident(), 0.0)
        assert request in state.active_requests
        state.task_ready(request)
    assert answers == []
