"""What the broker delivers again while its first execution runs: it runs once to its end, and its outcome stands."""

from __future__ import annotations

import json

import pytest
from celery import states
from kombu.utils.uuid import uuid

from tests.lab.gate import Gate
from tests.lab.servers import wait_until
from tests.lab.versions import BEFORE_5_7

#: With these the Redis broker gives a message again that was not acked for two seconds; it looks every second. Without
#: the last two it looks every hundred seconds, and a test sees no copy.
IMPATIENT = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
#: So long a countdown outlasts the visibility timeout, in seconds.
LONG = 4.0

on_rabbitmq = pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)


@pytest.fixture
def impatient(config):
    config.settings["broker_transport_options"] = IMPATIENT


@pytest.fixture
def nothing_waits(config, app, broker_server):
    """Whether the Redis broker has no message any more, neither in the queue nor with the only worker.

    A message that the worker is just taking is in neither; so it is asked, and looked at once more when it answers.
    """

    def is_empty():
        return not (broker_server.client.llen(config.queue) or broker_server.client.hlen("unacked"))

    return lambda: is_empty() and app.control.ping(timeout=10, limit=1) and is_empty()


def stored(result):
    """State and result as the backend has them now; an AsyncResult remembers what it once got."""
    fresh = result.app.AsyncResult(result.id)
    return fresh.state, str(fresh.result)


def received(worker, result):
    return worker.output().count(f"[{result.id}] received")


def dropped(worker, result):
    return worker.output().count(f"[{result.id}]: dropped: it already finished in another delivery")


def came_back(worker, result):
    return sum(f"[{result.id}]: lock" in line and "(always waits)" in line for line in worker.output().splitlines())


def test_copies_from_the_visibility_timeout_meet_a_running_body_and_change_nothing(
    impatient, start_worker, tasks, ledger, gate, nothing_waits
):
    worker = start_worker(8)
    succeed = [task.delay(task.name, "succeeds", gate) for task in (tasks.late, tasks.tracked)]
    fail = [task.delay(f"{task.name}, fails", "fails", gate, fails=True) for task in (tasks.late, tasks.tracked)]
    wait_until(lambda: succeed[1].state == fail[1].state == states.STARTED, "those that are tracked are shown so")
    wait_until(lambda: all(came_back(worker, result) for result in succeed + fail), "a copy has met each")
    gate.open()
    for result in succeed:
        assert result.get(timeout=20) == "succeeds"
    for result in fail:
        with pytest.raises(ValueError, match="fails fails"):
            result.get(timeout=10)
    wait_until(nothing_waits, "all copies have gone")
    for result in succeed + fail:
        wait_until(lambda result=result: dropped(worker, result), "its copy is dropped")
    assert sorted(ledger.items()) == ["fails", "fails", "succeeds", "succeeds"]
    assert {stored(result) for result in succeed} == {(states.SUCCESS, "succeeds")}
    assert {stored(result) for result in fail} == {(states.FAILURE, "fails fails")}


def test_copies_that_wait_unseen_for_the_only_child_are_dropped_too(
    impatient, config, broker_server, start_worker, tasks, ledger, gate, tmp_path, nothing_waits
):
    """The worker may have no more messages than the one that runs: it receives the copy after it."""

    def has_come():
        return broker_server.client.llen(config.queue)

    worker = start_worker(1)
    success = tasks.late.delay("a", "succeeds", gate)
    wait_until(has_come, "a copy has come")
    gate.open()
    assert success.get(timeout=20) == "succeeds"
    wait_until(lambda: received(worker, success) > 1, "it is received")
    wait_until(nothing_waits, "all its copies have gone")
    gate = Gate(tmp_path / "second")
    failure = tasks.tracked.delay("b", "fails", gate, fails=True)
    wait_until(has_come, "a copy has come")
    gate.open()
    with pytest.raises(ValueError, match="fails fails"):
        failure.get(timeout=20)
    wait_until(nothing_waits, "all copies have gone")
    for result in (success, failure):
        assert received(worker, result) > 1
        assert came_back(worker, result) == 0
    assert ledger.items() == ["succeeds", "fails"]
    assert stored(success) == (states.SUCCESS, "succeeds")
    assert stored(failure) == (states.FAILURE, "fails fails")


def test_a_copy_that_celery_answers_with_the_result_of_the_first_delivery_is_acked(
    config, start_worker, tasks, ledger, broker_server, nothing_waits
):
    """Celery skips its body, by an option that needs `task_acks_late`; the task itself is acked early."""
    config.settings["task_acks_late"] = config.settings["worker_deduplicate_successful_tasks"] = True
    config.settings["task_annotations"] = {"lab.work": {"acks_late": False}}
    result = tasks.work.delay("k", "once")
    message = json.loads(broker_server.client.lindex(config.queue, 0))
    worker = start_worker(1)
    assert result.get(timeout=20) == "once"
    message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
    message["properties"]["delivery_tag"] = uuid()
    broker_server.client.lpush(config.queue, json.dumps(message))
    wait_until(lambda: "already completed successfully" in worker.output(), "Celery answers the copy")
    wait_until(nothing_waits, "it is acked", 10)
    assert ledger.items() == ["once"]


def test_a_run_that_is_cut_short_before_its_result_is_stored_does_not_count_as_finished(
    impatient, start_worker, tasks, ledger, gate, nothing_waits
):
    """So ends what a cold shutdown meets between the end of its body and the storing of its result."""
    worker = start_worker(3)
    result = tasks.cut_short.delay("k", "twice", gate)
    wait_until(lambda: came_back(worker, result), "a copy has met it")
    gate.open()
    assert result.get(timeout=20) == "twice"
    wait_until(nothing_waits, "all copies have gone")
    assert ledger.items() == ["twice", "twice"]


@on_rabbitmq
@pytest.mark.parametrize("children", [1, 3])
def test_a_message_given_again_after_a_lost_connection_runs_once(
    broker_proxy, start_worker, tasks, ledger, gate, children
):
    """With several children its copy meets the running body; with one it waits for it, unseen.

    Before Celery 5.7 it always waits: after a lost connection the pool gives it to the busy child.
    """
    worker = start_worker(children)
    meets_it = children > 1 and not BEFORE_5_7
    success = tasks.late.delay("a", "once", gate)
    wait_until(ledger.runs, "it runs")
    broker_proxy.cut()
    wait_until(lambda: received(worker, success) > 1, "its copy has come")
    wait_until(lambda: came_back(worker, success) or not meets_it, "its copy has met it")
    gate.open()
    assert success.get(timeout=20) == "once"
    wait_until(lambda: dropped(worker, success), "its copy is dropped")
    assert bool(came_back(worker, success)) == meets_it
    assert ledger.items() == ["once"]
    assert stored(success) == (states.SUCCESS, "once")


def test_a_run_that_ends_while_its_worker_puts_back_what_is_unacked_does_not_run_again(
    broker_proxy, broker_server, start_worker, tasks, ledger, gate, running, tmp_path, nothing_waits
):
    """Once it has lost its connection, kombu puts them back into the queue one by one, the last first."""
    worker, long = start_worker(3), Gate(tmp_path / "long")
    tasks.late.delay("other", "first", long)
    running("first")
    result = tasks.late.delay("k", "once", gate)
    running("once")
    put_back = broker_proxy.hold(to=b"HGET", nth=2, before=True)
    for connection in broker_server.client.client_list():
        if connection["cmd"] == "brpop":
            broker_server.client.client_kill_filter(_id=connection["id"])
    wait_until(lambda: put_back.struck, "the second message is being put back")
    gate.open()
    assert result.get(timeout=20) == "once"
    wait_until(lambda: tasks.late.lock_info("k") is None, "the run is over")
    put_back.let_go()
    long.open()  # before Celery 5.7, the pool may give the copy to that busy child
    wait_until(lambda: dropped(worker, result) == 1, "its copy is dropped")
    wait_until(nothing_waits, "all have gone")
    assert ledger.items() == ["first", "once"]


def test_a_message_that_comes_while_its_worker_puts_back_what_is_unacked_runs_once(
    broker_proxy, broker_server, start_worker, tasks, ledger, gate, running, nothing_waits
):
    """Kombu reads a last message from a channel that it closes, as another connection is lost; a thread runs it."""
    worker = start_worker(3, "-P", "threads")
    tasks.late.delay("other", "first", gate)
    running("first")
    put_back = broker_proxy.hold(to=b"HGET", before=True)
    broker_server.client.client_kill_filter(_type="pubsub")
    result = tasks.late.delay("k", "once")
    wait_until(lambda: put_back.struck, "the first message is being put back")
    assert result.get(timeout=20) == "once"
    wait_until(lambda: tasks.late.lock_info("k") is None, "the run is over")
    put_back.let_go()
    wait_until(lambda: dropped(worker, result) == 1, "its copy is dropped")
    gate.open()
    wait_until(nothing_waits, "all have gone")
    assert ledger.items() == ["first", "once"]


def test_what_waits_in_a_worker_that_loses_its_connection_is_delivered_again_once(
    broker_proxy, broker_server, config, start_worker, tasks, ledger, nothing_waits
):
    """Kombu puts it back into the queue, and another worker has received it when the first one is connected again.

    When that one loses its connection too, the messages are marked as redelivered in both.
    """

    def polls():
        return {one["id"] for one in broker_server.client.client_list() if one["cmd"] == "brpop"}

    def lose(connection, other, times):
        connects_again = broker_proxy.hold(to=b"SADD", before=True)  # it declares its queues
        broker_server.client.client_kill_filter(_id=connection)
        wait_until(lambda: connects_again.struck, "the worker is about to be connected again")
        wait_until(lambda: all(received(other, result) == times for result in results), "all wait in the other one")
        connects_again.let_go()
        wait_until(lambda: len(polls()) == 2, "both receive messages")

    config.settings["redislock_waiting_limit"] = 100
    first, numbers = start_worker(1), [str(number) for number in range(20)]
    wait_until(lambda: len(polls()) == 1, "it receives messages")
    of_first = polls()
    with tasks.work.lock_for("k"):
        results = [tasks.work.delay("k", number) for number in numbers]
        wait_until(lambda: all(received(first, result) for result in results), "all wait in the first worker")
        second = start_worker(1)
        wait_until(lambda: len(polls()) == 2, "both receive messages")
        (of_second,) = polls() - of_first
        lose(*of_first, second, 1)
        lose(of_second, first, 2)
    assert [result.get(timeout=20) for result in results] == numbers
    wait_until(nothing_waits, "none is left")
    assert [received(first, result) + received(second, result) for result in results] == [3] * len(numbers)
    assert ledger.items() == numbers


@on_rabbitmq
def test_a_message_whose_run_is_cancelled_with_its_lost_connection_runs_again(
    broker_proxy, config, start_worker, tasks, ledger, locks
):
    config.settings["worker_cancel_long_running_tasks_on_connection_loss"] = True
    worker = start_worker(2)
    result = tasks.restarted.delay("a", "twice", 60)
    wait_until(ledger.runs, "it runs")
    broker_proxy.cut()
    assert result.get(timeout=20) == "twice"
    first, second = ledger.runs()
    assert first.item == second.item == "twice"
    # Celery sends SIGTERM twice. The second one may end the child before its body has written down its end; then its
    # main process has released the key, once it was dead.
    assert first.end <= second.start or "its process died; its lock" in worker.output()
    wait_until(lambda: locks.client.keys("redislock:*}") == [], "the key is free")


@pytest.mark.skipif(BEFORE_5_7, reason="Celery may not get as far as to close the channel, or the worker ends")
@pytest.mark.parametrize("are_results_away", [False, True], ids=["with its results", "without"])
def test_a_message_whose_run_is_cancelled_while_redis_is_away_is_delivered_again_when_it_is_back(
    broker_proxy, config, start_worker, tasks, ledger, running, are_results_away
):
    """Kombu cannot put it back, and would leave it to the visibility timeout."""
    config.settings["worker_cancel_long_running_tasks_on_connection_loss"] = True
    if are_results_away:  # Celery fails when it stores RETRY
        config.backend = f"{broker_proxy.url.rpartition('/')[0]}/1"
        config.settings["result_backend_transport_options"] = {"retry_policy": {"max_retries": 0}}
    worker = start_worker(2)
    result = tasks.restarted.delay("a", "twice", 60)
    running("twice")
    broker_proxy.refuse()
    wait_until(lambda: "Cannot connect to" in worker.output(), "the worker cannot connect")
    broker_proxy.mend()
    wait_until(lambda: ledger.items() == ["twice", "twice"], "it has run again")  # Celery may have stored REVOKED
    wait_until(lambda: stored(result) == (states.SUCCESS, "twice"), "its result is stored")
    assert received(worker, result) == 2


def test_a_message_whose_countdown_outlasts_the_visibility_timeout_meets_its_policy(
    impatient, start_worker, tasks, running, gate, nothing_waits, ledger
):
    """It has waited for long, and copies of it come; but it was to be acked before its body began: it has not begun."""
    start_worker(2)
    tasks.once.delay("k", "first", gate)
    running("first")
    late = tasks.once.apply_async(("k", "duplicate"), countdown=LONG)
    wait_until(late.ready, "it has met the first one")
    wait_until(nothing_waits, "all copies have gone")
    gate.open()
    assert late.state == states.REVOKED
    assert "skip" in {conflict["policy"] for conflict in ledger.conflicts()}
    assert ledger.items() == ["first"]


def test_a_message_that_is_sent_back_twice_by_kombu_runs_once(
    config, broker_proxy, start_worker, tasks, ledger, running, gate, nothing_waits
):
    """The reply to its publish is lost, and kombu publishes it again, as `task_publish_retry` says."""
    config.settings.update(task_publish_retry=True, redislock_waiting_limit=0)
    worker = start_worker(2)
    tasks.work.delay("k", "first", gate)
    running("first")
    fault = broker_proxy.drop_reply(b"LPUSH", config.queue.encode(), nth=2)
    second = tasks.work.delay("k", "second")
    wait_until(lambda: fault.struck, "the reply to a message that came back was lost")
    gate.open()
    assert second.get(timeout=20) == "second"
    wait_until(lambda: dropped(worker, second) == 1, "its twin is dropped")  # acked before its child says so
    wait_until(nothing_waits, "both have gone")
    assert ledger.items() == ["first", "second"]


def test_a_message_that_leaves_its_worker_as_it_seems_in_vain_runs_once(
    config, broker_proxy, start_worker, tasks, ledger, nothing_waits
):
    """The reply to its publish is lost, and the key is free by then: it runs here, and what was published comes too."""
    config.settings.update(task_publish_retry=False)
    config.settings["broker_transport_options"] = {"visibility_timeout": 8, "socket_timeout": 2}
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        result = tasks.work.delay("k", "once")
        fault = broker_proxy.drop_reply(b"LPUSH", config.queue.encode(), hang=True)
        wait_until(lambda: fault.struck, "it is published again, and the worker does not hear of that")
    assert result.get(timeout=20) == "once"
    wait_until(lambda: dropped(worker, result) == 1, "one of the two is dropped")
    wait_until(nothing_waits, "both have gone")
    assert ledger.items() == ["once"]


def test_a_message_that_waited_in_a_worker_for_too_long_does_not_run_after_its_copy(
    impatient, start_worker, tasks, ledger, gate, config
):
    """Its first delivery, which is not marked as redelivered, begins when another worker has run the copy."""
    first = start_worker(1)
    busy = tasks.work.delay("other", "busy", gate)
    wait_until(ledger.runs, "the only child is busy")
    result = tasks.work.delay("k", "once")
    wait_until(lambda: received(first, result), "the message waits in the worker")
    start_worker(1)
    assert result.get(timeout=20) == "once"
    wait_until(lambda: tasks.work.lock_info("k") is None, "the copy, which has run in the second worker, frees its key")
    gate.open()  # the first worker was busy until now
    assert busy.get(timeout=20) == "busy"
    wait_until(lambda: dropped(first, result), "the first delivery is dropped")
    assert ledger.items() == ["busy", "once"]
