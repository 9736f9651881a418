"""What waits in a worker that ends, or can wait there no longer, is handed over at once and in order."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager

import pytest

from tests.acceptance.test_line_ways_out import patient
from tests.acceptance.test_outages import consumes_again
from tests.conftest import IS_MATRIX, every
from tests.lab.app import make_app
from tests.lab.servers import need_pool, wait_until
from tests.lab.versions import BEFORE_5_7
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept, waiting_in

#: Seconds in which ten messages run once their key is free.
SOON = 3.0
#: A worker of these looks every two seconds whether it must stop, and, on Redis with its window full,
#: whether it may fetch more.
GREEN = {"gevent", "eventlet"}
POOLS = ("prefork", "threads", *sorted(GREEN))
QUEUES = ("redis", "rabbitmq", "quorum")


@pytest.fixture
def unrelated(tasks, running, gate):
    """Keeps a worker busy with another task, from the call to the end of the test."""

    def begin():
        tasks.work.delay("unrelated", "unrelated", gate)
        running("unrelated")

    yield begin
    gate.open()


@pytest.fixture
def each_ran_once(ledger):
    """Holds that messages run once each, while the first worker is busy, one by one and in the order of publishing."""

    def wait(results):
        begin = time.monotonic()
        assert [result.get(timeout=30) for result in results] == list(range(len(results)))
        took = time.monotonic() - begin
        assert [run.item for run in ledger.runs() if run.key == "k"] == [str(number) for number in range(len(results))]
        assert ledger.overlaps() == []
        assert took < SOON or not IS_MATRIX

    return wait


@contextmanager
def ten_waiting(tasks, worker):
    """Ten messages that wait in the worker; their key is free at the end of the block."""
    with tasks.work.lock_for("k"):
        results = [tasks.work.delay("k", number, 0.01) for number in range(10)]
        wait_until(lambda: waiting_in(worker) >= 10 and kept(tasks.work.app) == 10, "all wait")
        yield results


def wait_in_the_other(app, count=10):
    """Wait until so many messages wait in the second worker."""

    def waiting():
        options = {"destination": ["w1@lab"], "reply": True, "limit": 1, "timeout": 5}
        replies = app.control.broadcast("redislock_waiting", **options)
        return sum(len(told) for reply in replies or () for told in reply.values())

    wait_until(lambda: waiting() == count, "they wait in the other worker", 10)


def begin_to_stop(worker, how, app):
    """Begin the shutdown that `how` names; with `killed` the worker is dead a second after it knows."""
    if how == "control":
        app.control.shutdown(destination=["w0@lab"])
        return
    worker.begin_to_stop(signal.SIGQUIT if how in {"soft", "cold"} else signal.SIGTERM)
    if how == "killed":
        time.sleep(1.0)
        worker.kill()


# The worker ends.


@every("pool, broker, how", POOLS, QUEUES, ("killed", "warm", "control", "soft", "cold"))
def test_what_waits_in_a_worker_that_shuts_down_runs_elsewhere_at_once_and_in_order(
    config, tasks, start_worker, each_ran_once, unrelated, pool, how
):
    need_pool(pool)
    config.settings["worker_soft_shutdown_timeout"] = 5.0 if how == "soft" else 0.0
    first = start_worker(12 if pool in GREEN else 2, "-P", pool)
    unrelated()
    with ten_waiting(tasks, first) as results:
        start_worker(12 if pool in GREEN else 2, "-P", pool)
        begin_to_stop(first, how, tasks.work.app)
        wait_in_the_other(tasks.work.app)
    each_ran_once(results)


@every("pool, broker", POOLS, QUEUES)
def test_what_waits_when_all_workers_are_replaced_runs_in_the_new_ones_at_once_and_in_order(
    tasks, start_worker, each_ran_once, unrelated, pool
):
    need_pool(pool)
    first = start_worker(12 if pool in GREEN else 2, "-P", pool)
    unrelated()
    with ten_waiting(tasks, first) as results:
        first.begin_to_stop()
        start_worker(12 if pool in GREEN else 2, "-P", pool)
        wait_in_the_other(tasks.work.app)
    each_ran_once(results)


def test_what_has_its_place_in_the_queue_keeps_it_when_its_worker_shuts_down(
    tasks, start_worker, ledger, nothing_is_left
):
    first = start_worker(1)
    with tasks.queued.lock_for("k"):
        waits = tasks.queued.delay("k", "waits")
        wait_until(lambda: kept(tasks.queued.app) == 1, "it waits")
        first.stop()
        start_worker(1)
        wait_in_the_other(tasks.queued.app, 1)
        assert tasks.queued.delay("k", "duplicate").id == waits.id
    assert waits.get(timeout=10) == "waits"
    assert ledger.items() == ["waits"]
    nothing_is_left()


@every("pool, broker", POOLS, QUEUES)
def test_what_meets_its_key_while_its_worker_shuts_down_waits_in_another_one(
    config, lock_proxy, tasks, start_worker, each_ran_once, unrelated, pool
):
    need_pool(pool)
    patient(config)
    first = start_worker(12 if pool in GREEN else 2, "-P", pool)
    unrelated()
    with tasks.work.lock_for("k"):
        answer = lock_proxy.hold(b"EVALSHA", where=b"held-up")
        result = tasks.work.apply_async(("k", 0), task_id="held-up")
        answer.wait()
        first.begin_to_stop()
        time.sleep(4.0 if pool in GREEN else 0.5)  # it says nothing when it has stopped to consume
        answer.let_go()
        start_worker(12 if pool in GREEN else 2, "-P", pool)
        wait_in_the_other(tasks.work.app, 1)
    each_ran_once([result])


@every("broker", QUEUES)
def test_what_waits_in_a_worker_that_runs_in_its_main_thread_is_handed_over_while_it_runs(
    tasks, start_worker, each_ran_once, unrelated
):
    first = start_worker(1, "-P", "solo")
    with ten_waiting(tasks, first) as results:
        unrelated()
        start_worker(1, "-P", "solo")
        first.begin_to_stop()
        wait_in_the_other(tasks.work.app)
    each_ran_once(results)


def test_what_was_published_again_and_not_acked_runs_once(
    config, broker_server, broker_proxy, tasks, start_worker, each_ran_once
):
    """The worker is killed between the two, so its messages exist twice."""
    patient_broker = {"visibility_timeout": 120, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    config.settings["broker_transport_options"] = patient_broker
    first = start_worker(2)
    with ten_waiting(tasks, first) as results:
        ack = broker_proxy.drop_command(b"ZREM")
        first.begin_to_stop()
        ack.wait()
        first.kill()
        broker_proxy.mend()
        broker_server.ages()
        second = start_worker(2)
        wait_in_the_other(tasks.work.app, 20)
    each_ran_once(results)
    wait_until(lambda: "dropped: it already finished in another delivery" in second.output(), "the copies are dropped")


def test_a_worker_whose_broker_is_silent_ends_all_the_same_and_what_waited_runs_once(
    config, broker_server, broker_proxy, tasks, start_worker, each_ran_once
):
    patient_broker = {"visibility_timeout": 120, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    config.settings["broker_transport_options"] = patient_broker
    first = start_worker(2)
    with ten_waiting(tasks, first) as results:
        publish = broker_proxy.drop_command(b"LPUSH", nth=None)
        first.begin_to_stop()
        publish.wait()
        wait_until(lambda: "the broker does not answer" in first.output(), "it waits no longer", 10)
        first.wait()
        broker_proxy.mend()
        broker_server.ages()
        start_worker(2)
        wait_in_the_other(tasks.work.app)
    each_ran_once(results)


# The worker goes on.


def processes(control):
    """How many children the pool of the only worker has, as far as Celery knows."""
    (stats,) = (control.inspect(timeout=5, limit=1).stats() or {"nobody": {"pool": {"processes": []}}}).values()
    return len(stats["pool"]["processes"])


@every("broker", QUEUES)
def test_what_waits_runs_where_its_worker_leaves_the_queue_and_loses_a_child(
    tasks, config, start_worker, each_ran_once
):
    first = start_worker(2)
    control = tasks.work.app.control
    with ten_waiting(tasks, first) as results:
        assert control.cancel_consumer(config.queue, reply=True, limit=1, timeout=5)
        assert control.pool_shrink(1, reply=True, limit=1, timeout=5)
        # Celery may give the next run to the child that ends, until it has noticed that.
        wait_until(lambda: processes(control) == 1, "it knows that it has one child")
    each_ran_once(results)


@every("pool, broker", ("threads", "prefork", "gevent", "solo"), ("redis",))
def test_what_meets_its_key_while_the_broker_is_away_waits_when_it_is_back(
    broker_proxy, lock_proxy, app, config, tasks, start_worker, ledger, pool
):
    need_pool(pool)
    patient(config)
    worker = start_worker(8, "-P", pool)
    count = 1 if pool == "solo" else 4
    with tasks.work.lock_for("k"):
        answers = lock_proxy.hold(b"EVALSHA", where=b"held-up", nth=None)
        results = [tasks.work.apply_async(("k", number), task_id=f"held-up-{number}") for number in range(count)]
        wait_until(lambda: answers.struck == count, "all ask for their key")
        broker_proxy.refuse()
        if pool != "solo":
            wait_until(lambda: "Cannot connect to" in worker.output(), "it cannot connect")
        lock_proxy.mend()
        answers.let_go()
        wait_until(lambda: waiting_in(worker) == count, "all would wait", 60)  # gevent looks when it tries to connect
        time.sleep(0.5)  # what a child tells is heard then
        broker_proxy.mend()
        wait_until(lambda: consumes_again(app, config.queue), "the worker is back")
        wait_until(lambda: kept(tasks.work.app) == count, "they wait again", 10)
    assert sorted(result.get(timeout=10) for result in results) == list(range(count))
    assert sorted(ledger.items()) == [str(number) for number in range(count)]


@counts_on_wake_ups("many have their turn")
def test_the_key_is_never_idle_because_messages_leave_for_the_visibility_timeout(config, start_worker, ledger):
    count, seconds = (300, 0.2) if IS_MATRIX else (60, 0.3)
    options = {"visibility_timeout": count * seconds / 3, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    config.settings["broker_transport_options"] = options
    app = make_app(config)
    three = app.tasks["lab.three"]
    worker = start_worker(4)
    results = [three.delay("k", number, seconds) for number in range(count)]
    assert [result.get(timeout=60) for result in results] == list(range(count))
    runs = ledger.runs()
    assert len(runs) == count
    assert "; trying again in" not in worker.output(), "no message was sent back with a pause"
    took = max(run.end for run in runs) - runs[0].start
    assert took < 1.15 * count * seconds / 3 or not IS_MATRIX
    app.close()


@pytest.mark.skipif(BEFORE_5_7, reason="Celery before 5.7 keeps no list of the messages that are not due")
@every("pool, broker", ("threads", "prefork", "gevent"), ("redis",))
def test_a_message_that_is_not_due_runs_in_time_though_the_broker_could_not_be_reached_meanwhile(
    broker_proxy, config, tasks, start_worker, ledger, pool
):
    need_pool(pool)
    patient(config)
    worker = start_worker(2, "-P", pool)
    due = time.monotonic() + 6
    result = tasks.work.apply_async(("k", "due", 0.0), countdown=6)
    wait_until(lambda: "received" in worker.output(), "the worker keeps it")
    broker_proxy.refuse()
    wait_until(lambda: "Cannot connect to" in worker.output(), "it cannot connect")
    broker_proxy.mend()
    wait_until(lambda: ledger.items() == ["due"], "it runs", 20)
    assert time.monotonic() > due
    assert result.get(timeout=10) == "due"
