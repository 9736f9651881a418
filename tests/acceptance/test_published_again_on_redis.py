"""A message of a queue with a topic or a direct exchange in Redis goes back to that queue when it is published again.

A Redis broker does not know the types of exchanges: each connection knows those that it has declared itself.
"""

from __future__ import annotations

from uuid import uuid4

import pytest
from kombu import Exchange, Queue

from tests.lab.servers import wait_until
from tests.lab.workers import consume_from, kept


@pytest.fixture
def feeds(app, config):
    """A queue that a worker is told to consume from at runtime, bound by a pattern."""
    name = f"{config.queue}-feeds"
    return Queue(name, Exchange(name, "topic"), f"{name}.#")


def consume(app, queue):
    exchange = queue.exchange
    consume_from(app, queue.name, exchange=exchange.name, exchange_type=exchange.type, routing_key=queue.routing_key)


def messages_in(app, name):
    with app.connection_for_write() as connection:
        return connection.default_channel.client.llen(name)


def test_what_is_sent_back_to_a_queue_that_is_bound_by_a_pattern_comes_again(app, config, tasks, start_worker, feeds):
    """The child that sends it back has not declared the exchange."""
    config.settings["redislock_waiting_limit"] = 0
    worker = start_worker(1)
    consume(app, feeds)
    with tasks.work.lock_for("k"):
        result = tasks.work.apply_async(("k", "sent back"), queue=feeds, routing_key=f"{feeds.name}.created")
        wait_until(lambda: "no room for more" in worker.output(), "it is sent back")
    wait_until(result.ready, "it has come again")
    assert result.get(timeout=1) == "sent back"


def test_what_a_shutdown_hands_over_to_a_queue_that_is_bound_by_a_pattern_comes_again(app, tasks, start_worker, feeds):
    worker = start_worker(1)
    consume(app, feeds)
    with tasks.work.lock_for("k"):
        result = tasks.work.apply_async(("k", "handed over"), queue=feeds, routing_key=f"{feeds.name}.created")
        wait_until(lambda: kept(app) == 1, "it waits")
        worker.stop()
    start_worker(1)
    consume(app, feeds)
    wait_until(result.ready, "it has come again")
    assert result.get(timeout=1) == "handed over"


def test_what_is_sent_to_that_queue_afterwards_still_reaches_it(app, config, tasks, start_worker, feeds):
    """kombu must not believe that the queue is declared on a connection that has only sent a message straight to it."""
    config.settings |= {"redislock_waiting_limit": 0, "task_create_missing_queue_exchange_type": "topic"}
    worker, route = start_worker(1), {"queue": feeds.name, "routing_key": f"{feeds.name}.created"}
    consume(app, feeds)
    with tasks.work.lock_for("k"):
        sent_back = tasks.work.apply_async(("k", "sent back"), **route | {"queue": feeds})
        wait_until(lambda: "no room for more" in worker.output(), "it is sent back")
    wait_until(sent_back.ready, "it has come again")
    linked = tasks.work.si("another", "linked").set(task_id=str(uuid4()), **route)
    tasks.work.apply_async(("a third", "first"), **route | {"queue": feeds, "link": linked})
    wait_until(app.AsyncResult(linked.id).ready, "the child's own message has come")


@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_another_queue_of_the_same_exchange_gets_no_copy(app, config, tasks, start_worker, kind):
    config.settings["redislock_waiting_limit"] = 0
    name, worker = f"{config.queue}-events", start_worker(1)
    queue, other = (Queue(one, Exchange(name, kind), f"{name}.created") for one in (name, f"{name}-audit"))
    consume(app, queue)
    with app.connection_for_write() as connection:
        other(connection.default_channel).declare()
    with tasks.work.lock_for("k"):
        result = tasks.work.apply_async(("k", "sent back"), queue=queue, exchange=name, routing_key=queue.routing_key)
        wait_until(lambda: worker.output().count("no room for more") >= 2, "it is sent back twice")
    assert result.get(timeout=30) == "sent back"
    assert messages_in(app, other.name) == 1


def test_what_is_sent_back_to_a_queue_that_no_child_may_create_keeps_its_place(app, config, tasks, start_worker):
    """With `task_create_missing_queues` off, a child does not know the queue that its worker was told of later."""
    config.settings |= {"redislock_waiting_limit": 0, "task_create_missing_queues": False}
    name, worker = f"{config.queue}-added", start_worker(1)
    consume_from(app, name)
    with tasks.work.lock_for("k"):
        result = tasks.work.apply_async(("k", "sent back"), queue=Queue(name, Exchange(name), name))
        wait_until(lambda: worker.output().count("no room for more") >= 2, "it is sent back twice")
    assert result.get(timeout=30) == "sent back"
    assert "could not be republished" not in worker.output()
