"""The line on quorum queues of RabbitMQ, where the prefetch count of a consumer cannot grow."""

from __future__ import annotations

import re
import time

import pytest
from amqp import NotFound
from kombu import Exchange, Queue

from celery_redislock.message import republish
from tests.lab.servers import wait_until
from tests.lab.workers import consume_from, kept, waiting_in

pytestmark = pytest.mark.parametrize("broker", ["quorum"], indirect=True)


def test_a_worker_of_classic_and_quorum_queues_keeps_the_messages_of_both_waiting(config, tasks, app, start_worker):
    name = f"{config.queue}-classic"
    arguments = {"x-queue-type": "classic"}
    classic = Queue(name, Exchange(name), name, queue_arguments=arguments)
    worker = start_worker(1)
    consume_from(app, name, routing_key=name, options={"queue_arguments": arguments})
    with tasks.work.lock_for("k"):
        waiting = [
            tasks.work.apply_async(("k", number), **({"queue": classic} if number % 2 else {})) for number in range(20)
        ]
        wait_until(lambda: kept(app) == 20, "all wait")
        strangers = [tasks.plain.delay(), tasks.plain.apply_async(queue=classic)]
        assert [stranger.get(timeout=10) for stranger in strangers] == ["plain"] * 2
    assert [result.get(timeout=20) for result in waiting] == list(range(20))
    assert "; trying again in" not in worker.output()


def test_a_queue_that_the_worker_was_told_to_leave_is_left_though_its_messages_wait_and_run(
    config, tasks, app, start_worker
):
    other = f"{config.queue}-other"
    worker = start_worker(1, "-Q", f"{config.queue},{other}")
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.apply_async(("k", number), queue=other) for number in range(5)]
        wait_until(lambda: kept(app) == 5, "all wait")
        assert app.control.cancel_consumer(other, reply=True, limit=1, timeout=10)
        wait_until(lambda: f"Canceling queue {other}" in worker.output(), "it leaves: it has answered before that")
        assert app.control.ping(timeout=10, limit=1), "it has left"
        stranger = tasks.plain.apply_async(queue=other)
        waiting += [tasks.work.delay("k", number) for number in range(5, 10)]
        wait_until(lambda: kept(app) == 10, "those of the other queue wait too")
        assert tasks.plain.delay().get(timeout=10) == "plain"
    assert [result.get(timeout=20) for result in waiting] == list(range(10))
    assert f"[{stranger.id}] received" not in worker.output()
    with tasks.work.lock_for("k"):
        app.control.add_consumer(other, exchange_type="topic", routing_key=other, reply=True, limit=1, timeout=10)
        assert stranger.get(timeout=10) == "plain"
        waiting = [tasks.work.apply_async(("k", number), queue=other) for number in range(5)]
        wait_until(lambda: kept(app) == 5, "all wait")
    assert [result.get(timeout=20) for result in waiting] == list(range(5))


def test_a_message_that_was_delivered_often_is_published_anew_before_rabbitmq_drops_it(
    app, config, tasks, start_worker, ledger
):
    """RabbitMQ 4 drops a message of a quorum queue that it has delivered twenty times."""
    result = tasks.work.delay("k", "often")
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for _ in range(11):
            got = []
            wait_until(lambda got=got: got.append(channel.basic_get(config.queue)) or got[-1], "it is there again")
            channel.basic_reject(got[-1].delivery_tag, requeue=True)
    with tasks.work.lock_for("k"):
        worker = start_worker(1)
        wait_until(lambda: waiting_in(worker) == 2, "it was published anew, without a pause", 5)
        wait_until(lambda: "waited in this worker: 1" in worker.output(), "it says so: after it has published")
        later = tasks.work.delay("k", "later")
        wait_until(lambda: kept(app) == 2, "both wait")
        assert waiting_in(worker) == 3
    assert [one.get(timeout=10) for one in (result, later)] == ["often", "later"]
    assert ledger.items() == ["often", "later"]


def test_messages_that_were_delayed_are_handed_over_when_their_worker_stops(app, tasks, start_worker, ledger):
    """RabbitMQ names the exchange where the last delay has ended: another one for odd and for even seconds."""
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.apply_async(("k", seconds), countdown=seconds) for seconds in (1, 2, 4)]
        wait_until(lambda: kept(app) == 3, "all wait", 20)
        worker.stop()
    assert not re.search("could not (re)?publish", worker.output())
    start_worker(1)
    assert [result.get(timeout=20) for result in waiting] == [1, 2, 4]
    assert ledger.items() == ["1", "2", "4"]


def test_what_joins_a_task_whose_key_cools_down_ends_with_its_result_a_second_later(tasks, start_worker, ledger):
    """RabbitMQ itself delays no message for less. On other queues the countdown is about 0.05 s."""
    start_worker(1)
    assert tasks.cools_join.delay("k", "first").get(timeout=10) == "first"
    wait_until(lambda: tasks.cools_join.lock_info("k").state == "cooling", "its key cools down")
    began = time.monotonic()
    assert tasks.cools_join.delay("k", "second").get(timeout=10) == "first"
    assert time.monotonic() - began >= 0.9
    assert ledger.items() == ["first"]


def test_a_message_of_a_queue_that_is_bound_by_a_pattern_goes_back_to_it_and_no_other_queue_is_made(
    app, config, tasks, start_worker
):
    name = f"{config.queue}-shop"
    options = {"queue_arguments": {"x-queue-type": "quorum"}}
    queue = {"queue": name, "exchange": name, "exchange_type": "topic", "routing_key": f"{name}.#", "options": options}
    worker = start_worker(1)
    consume_from(app, **queue)
    with tasks.work.lock_for("k"):
        route = {"exchange": name, "exchange_type": "topic", "routing_key": f"{name}.created"}
        waiting = [tasks.work.apply_async(("k", number), **route) for number in range(3)]
        wait_until(lambda: kept(app) == 3, "all wait")
        worker.stop()
    assert not re.search("could not (re)?publish", worker.output())
    start_worker(1)
    consume_from(app, **queue)
    assert [result.get(timeout=20) for result in waiting] == [0, 1, 2]
    with app.connection_for_write() as connection, pytest.raises(NotFound):
        connection.default_channel.queue_declare(f"{name}.created", passive=True)


@pytest.mark.parametrize("kind", ["topic", "direct"])  # ``celery control add_consumer <queue>`` makes a direct one
def test_what_is_sent_back_to_a_queue_that_was_added_at_runtime_comes_again(app, config, tasks, start_worker, kind):
    config.settings["redislock_waiting_limit"] = 0
    worker, name = start_worker(1), f"{config.queue}-added"
    route = {"exchange": name, "exchange_type": kind, "routing_key": f"{name}.created"}
    consume_from(app, name, **route, options={"queue_arguments": {"x-queue-type": "quorum"}, "durable": True})
    with tasks.work.lock_for("k"):
        result = tasks.work.apply_async(("k", "sent back"), **route)
        wait_until(lambda: "no room for more" in worker.output(), "it is sent back")
    wait_until(result.ready, "it has come again")
    assert result.get() == "sent back"


def test_what_was_handed_over_to_a_queue_that_was_added_at_runtime_is_retried(app, config, tasks, start_worker):
    """The child does not know how that queue was declared, and the message has come straight from the queue."""
    worker, name = start_worker(1), f"{config.queue}-added"
    route = {"exchange": name, "exchange_type": "topic", "routing_key": f"{name}.created"}
    arguments = {"x-queue-type": "quorum", "x-max-length": 1000}
    queue = {**route, "queue": name, "options": {"queue_arguments": arguments, "durable": True}}
    consume_from(app, **queue)
    with tasks.tells.lock_for("k"):
        result = tasks.tells.apply_async(("k", "retried", 1), **route)
        wait_until(lambda: kept(app) == 1, "it waits")
        worker.stop()
    start_worker(1)
    consume_from(app, **queue)
    wait_until(result.ready, "its retry has run")
    assert (result.state, result.result) == ("SUCCESS", "told")


def test_what_is_sent_back_with_a_pause_goes_to_its_own_queue_alone(app, config, tasks, start_worker):
    """Another queue is bound to the same exchange."""
    config.settings["redislock_waiting_limit"] = 0
    worker = start_worker(1)
    with app.connection_for_write() as connection:
        channel, other = connection.default_channel, f"{config.queue}-audit"
        channel.queue_declare(other, auto_delete=False, durable=True, arguments={"x-queue-type": "quorum"})
        queue = app.amqp.queues[config.queue]
        channel.queue_bind(other, queue.exchange.name, "#")
        with tasks.work.lock_for("k"):
            result = tasks.work.delay("k", "sent back")
            wait_until(lambda: worker.output().count("no room for more") >= 2, "it is sent back twice")
        assert result.get(timeout=30) == "sent back"
        assert channel.queue_declare(other, passive=True).message_count == 1


def test_what_is_sent_back_with_a_pause_goes_to_no_queue_with_a_similar_name(app, config, tasks, start_worker):
    """The name of its queue ends with that of another one, and is nearly as long as RabbitMQ allows."""
    config.settings["redislock_waiting_limit"] = 0
    worker, name = start_worker(1), f"{'n' * 180}.{config.queue}"
    route = {"exchange": name, "exchange_type": "topic", "routing_key": name}
    consume_from(app, name, **route, options={"queue_arguments": {"x-queue-type": "quorum"}, "durable": True})
    with tasks.work.lock_for("k"):
        first = tasks.work.delay("k", "first")
        wait_until(lambda: "no room for more" in worker.output(), "it is sent back: the other queue is bound too")
    assert first.get(timeout=15) == "first"
    with app.connection_for_write() as connection:
        app.control.cancel_consumer(config.queue, reply=True, limit=1, timeout=10)
        with tasks.work.lock_for("k"):
            result = tasks.work.apply_async(("k", "sent back"), **route)
            wait_until(lambda: worker.output().count("no room for more") >= 2, "it is sent back")
        assert result.get(timeout=15) == "sent back"
        assert connection.default_channel.queue_declare(config.queue, passive=True).message_count == 0
    assert not re.search("could not be (re)?published", worker.output())


def test_a_broker_that_is_silent_when_a_queue_is_bound_does_not_hold_up_what_is_sent_back(
    tasks, broker_proxy, monkeypatch
):
    monkeypatch.setattr(republish, "STORED_WITHIN", 0.5)
    with pytest.raises(TimeoutError), republish.confirmed(tasks.work, set()) as producer:  # noqa: PT012 - both
        broker_proxy.blackhole()
        producer.channel.queue_bind("celery", "celery_delayed_delivery", "#.k")


def test_a_message_that_cannot_be_published_anew_is_not_given_back_until_rabbitmq_drops_it(
    app, config, tasks, start_worker, ledger
):
    """As where the user may not bind to the exchange for delays. RabbitMQ 4 has a limit of twenty, older ones none."""
    config.settings["redislock_waiting_limit"] = 0
    worker, name = start_worker(1), f"{config.queue}-limited"
    route = {"exchange": name, "exchange_type": "topic", "routing_key": name}
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": 12}
    consume_from(app, name, **route, options={"queue_arguments": arguments, "durable": True})
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.exchange_delete("celery_delayed_delivery")  # the next worker makes it again
        with tasks.work.lock_for("k"):
            result = tasks.work.apply_async(("k", "kept"), **route)
            wait_until(lambda: "this process keeps trying" in worker.output(), "it is given back no more")
        assert result.get(timeout=30) == "kept"
        worker.stop()
        assert channel.queue_declare(name, passive=True).message_count == 0
    assert ledger.items() == ["kept"]
