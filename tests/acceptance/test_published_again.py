"""What a worker publishes again on RabbitMQ is neither lost nor multiplied."""

from __future__ import annotations

import re

import pytest

from tests.lab.servers import wait_until
from tests.lab.workers import consume_from, kept

LEFT = re.compile(r"waited in this worker: (\d+)")

pytestmark = pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)


@pytest.fixture
def writes_by_proxy(config, broker, broker_proxy):
    """A worker's producers connect by a proxy, and its consumer does not. Celery sends again what it cannot send."""
    config.settings |= {"broker_read_url": broker, "task_publish_retry": True}
    return broker_proxy


def consume_from_topic(app, name, **arguments):
    """Have the worker consume from a queue with an exchange of its own; return how to send a message there."""
    route = {"exchange": name, "exchange_type": "topic", "routing_key": f"{name}.created"}
    consume_from(app, name, **route, options={"queue_arguments": arguments, "durable": True})
    return route


@pytest.fixture
def channel(app):
    with app.connection_for_write() as connection:
        yield connection.default_channel


def test_what_waits_survives_a_connection_that_is_dead_and_does_not_know(
    app, config, tasks, start_worker, ledger, writes_by_proxy
):
    config.settings["broker_transport_options"] = {"visibility_timeout": 8}
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.delay("k", number) for number in range(6)]
        wait_until(lambda: kept(app) == 6, "all wait")
        wait_until(lambda: sum(map(int, LEFT.findall(worker.output()))) >= 6, "they have left it once, in good time")
        wait_until(lambda: kept(app) == 6, "all wait again")
        writes_by_proxy.forget_all()
        worker.stop()
        second = start_worker(1)
        # Otherwise the key may become free between the first two.
        wait_until(lambda: second.output().count("] ignored") == 6, "all wait in the next worker")
    assert [result.get(timeout=20) for result in waiting] == [*range(6)]
    assert ledger.items() == [str(number) for number in range(6)]


def test_what_a_process_sends_back_survives_a_connection_that_is_dead_and_does_not_know(
    app, config, tasks, start_worker, ledger, writes_by_proxy
):
    def back():
        return worker.output().count("no room for more")

    config.settings["redislock_waiting_limit"] = 0
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        result = tasks.work.delay("k", "back and forth")
        wait_until(lambda: 0 < back() < worker.output().count("received"), "it was sent back, and is here again")
        writes_by_proxy.forget_all()
        seen = back()
        wait_until(lambda: back() > seen, "it is sent back again")
    assert result.get(timeout=30) == "back and forth"
    assert ledger.items() == ["back and forth"]


def test_what_waits_is_not_lost_when_its_queue_is_full(app, config, channel, tasks, start_worker):
    name, worker = f"{config.queue}-full", start_worker(1)
    full = {"x-max-length": 3, "x-overflow": "reject-publish"}
    route = consume_from_topic(app, name, **full)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.apply_async(("k", number), **route) for number in range(3)]
        wait_until(lambda: kept(app) == 3, "all wait")
        app.control.cancel_consumer(name, reply=True, limit=1, timeout=10)
        wait_until(lambda: channel.queue_declare(name, passive=True).consumer_count == 0, "the worker has left it")
        others = [tasks.work.apply_async(("other", number), **route) for number in range(3)]
        wait_until(lambda: channel.queue_declare(name, passive=True).message_count == 3, "the queue is full")
        worker.stop()
    assert "RabbitMQ has refused a message" in worker.output()
    start_worker(1)
    consume_from_topic(app, name, **full)
    assert [result.get(timeout=20) for result in waiting + others] == [0, 1, 2, 0, 1, 2]


def test_what_waits_goes_back_to_its_own_queue_and_to_no_other(app, config, channel, tasks, start_worker):
    """Another queue is bound to the same exchange. The message's own is bound no longer."""
    name, worker = f"{config.queue}-events", start_worker(1)
    route = consume_from_topic(app, name)
    channel.queue_declare(f"{name}-audit", auto_delete=False)
    channel.queue_bind(f"{name}-audit", name, "#")
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.apply_async(("k", number), **route) for number in range(3)]
        wait_until(lambda: kept(app) == 3, "all wait")
        channel.queue_unbind(name, name, f"{name}.created")
        worker.stop()
    assert channel.queue_declare(f"{name}-audit", passive=True).message_count == 3
    assert channel.queue_declare(name, passive=True).message_count == 3
    start_worker(1)
    consume_from_topic(app, name)
    assert [result.get(timeout=20) for result in waiting] == [0, 1, 2]


@pytest.mark.parametrize("count", [3, 60])
def test_a_full_queue_neither_doubles_nor_gives_back_what_waits_from_another(
    app, config, channel, tasks, start_worker, count
):
    """What is only given back loses its rank, and begins its `lock_wait_for` anew."""
    name, worker = f"{config.queue}-full", start_worker(1)
    route = consume_from_topic(app, name, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    with tasks.work.lock_for("k"):
        for number in range(count):
            tasks.work.delay("k", number)
        wait_until(lambda: kept(app) == count, "they wait")
        tasks.work.apply_async(("k", "refused"), **route)
        wait_until(lambda: kept(app) == count + 1, "all wait")
        app.control.cancel_consumer(name, reply=True, limit=1, timeout=10)
        wait_until(lambda: channel.queue_declare(name, passive=True).consumer_count == 0, "the worker has left it")
        tasks.work.apply_async(("other", "filler"), **route)
        wait_until(lambda: channel.queue_declare(name, passive=True).message_count == 1, "the queue is full")
        worker.stop()
    left = [channel.basic_get(config.queue, no_ack=True) for _ in range(count + 1)]
    assert [message and message.headers["redislock"].get("times") for message in left] == [1] * count + [None]
    assert channel.queue_declare(name, passive=True).message_count == 2
