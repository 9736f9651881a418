"""Merged calls when a process dies, a server is away, or a message loses its place: with real workers."""

from __future__ import annotations

import time

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConfigError
from celery_redislock.message.calls import LONGEST_BODY
from celery_redislock.protocol.names import keys_of
from tests.conftest import on_every_broker
from tests.lab.gate import Gate
from tests.lab.servers import wait_until

PATIENCE = 30


@pytest.fixture
def second_gate(tmp_path):
    return Gate(tmp_path / "second")


@on_every_broker
def test_a_child_that_dies_before_it_asks_for_the_key_loses_no_call(
    tasks, start_worker, ledger, tmp_path, nothing_is_left
):
    calls = [tasks.latest_dying.delay("k", number, 0, "", str(tmp_path / "died")) for number in range(3)]
    start_worker(2)
    assert calls[0].get(timeout=PATIENCE) == 2
    assert ledger.items() == ["2"]
    nothing_is_left()


@pytest.mark.parametrize("how", ["failure", "calls"])
def test_a_merged_message_whose_ack_was_lost_keeps_the_outcome_of_its_run(
    app, tasks, start_worker, running, gate, second_gate, locks, broker_server, how
):
    """It has only its own arguments then, and those of the run were newer."""
    worker = start_worker(1)
    tasks.latest.delay("k", "holder", str(gate))
    running("holder")
    first, _ = [tasks.latest.delay("k", item, str(second_gate), how) for item in ("one", "two")]
    gate.open()
    running("two")
    worker.pause_child(worker.process.pid)  # the main process, which acks
    second_gate.open()
    wait_until(first.ready, "its run has ended")
    wait_until(lambda: not locks.held(), "its key is free")
    state = app.AsyncResult(first.id).state
    worker.kill()
    broker_server.ages()
    worker = start_worker(1)
    wait_until(lambda: f"task lab.latest[{first.id}]: " in worker.output(), "it has come again")
    wait_until(lambda: not broker_server.client.hlen("unacked"), "it is acked")
    assert f"task lab.latest[{first.id}]: dropped" in worker.output()
    assert app.AsyncResult(first.id).state == state
    assert state == (states.FAILURE if how == "failure" else states.SUCCESS)


class TestARetryThatTheLockServerWasNotToldAbout:
    @on_every_broker
    @pytest.mark.parametrize(("name", "renewed"), [("latest", ["renewed"]), ("collected", ["first", "renewed"])])
    def test_has_its_own_arguments(
        self, tasks, lock_proxy, start_worker, running, gate, second_gate, ledger, nothing_is_left, name, renewed
    ):
        task = getattr(tasks, name)
        start_worker(2)
        task.delay("k", "holder", str(gate))
        running("holder")
        calls = [task.delay("k", item, str(second_gate), "renews", "calls") for item in ("first", "second")]
        gate.open()
        running("second")
        lock_proxy.refuse()
        second_gate.open()
        wait_until(lambda: not ledger.running(), "it has called retry")
        lock_proxy.mend()
        assert calls[0].get(timeout=PATIENCE) == renewed
        assert ledger.items() == ["holder", "second", "renewed"]
        nothing_is_left()

    @on_every_broker
    def test_because_it_is_too_large_has_its_own_arguments(self, tasks, start_worker, ledger, nothing_is_left):
        start_worker(2)
        assert tasks.collected.delay("k", "small", 0, "grows").get(timeout=PATIENCE) == "x" * LONGEST_BODY
        nothing_is_left()


@on_every_broker
def test_a_ticket_that_has_lost_its_place_still_expires(tasks, start_worker, ledger, locks):
    calls = [tasks.latest_brief.apply_async(("k", number), expires=2) for number in range(2)]
    place = keys_of(tasks.latest_brief.lock_for("k").name).queued
    wait_until(lambda: not locks.client.exists(place), "its place has expired")
    following = tasks.latest_brief.delay("k", "next")
    assert following.id != calls[0].id
    time.sleep(2)
    start_worker(2)
    assert following.get(timeout=PATIENCE) == "next"
    for call in calls:
        with pytest.raises(TaskRevokedError, match=r"expired|superseded"):
            call.get(timeout=PATIENCE)
    assert ledger.items() == ["next"]


def test_a_call_that_waits_for_no_time_runs_at_once_after_the_clock_was_set_back(tasks, start_worker, locks, ledger):
    """All times that the lock server keeps are ahead of its clock then: here they are moved instead of the clock."""
    tasks.latest.delay("k", "first")
    merged = tasks.latest.delay("k", "last")
    for field in ("number", "first", "due"):
        locks.client.hincrby(keys_of(tasks.latest.lock_for("k").name).pending, field, 60_000_000)
    start_worker(1)
    wait_until(merged.ready, "it runs")
    assert merged.get() == "last"
    assert ledger.items() == ["last"]


def test_a_debounced_call_runs_soon_after_the_clock_that_was_set_back_is_put_right(
    config, tasks, start_worker, locks, ledger
):
    """Here the time when it is due is moved, instead of the clock."""
    config.settings["lab_look_again"] = 1.0
    tasks.debounced.delay("k", "first")
    last = tasks.debounced.delay("k", "last")
    pending = keys_of(tasks.debounced.lock_for("k").name).pending
    locks.client.hincrby(pending, "due", 3_600_000_000)
    worker = start_worker(1)
    wait_until(lambda: "not due yet" in worker.output(), "it sleeps")
    locks.client.hincrby(pending, "due", -3_600_000_000)
    wait_until(lambda: ledger.items() == ["last"], "it runs")
    assert last.get(timeout=PATIENCE) == "last"


@on_every_broker
@pytest.mark.parametrize(("name", "last"), [("debounced_brief", ["last"]), ("collected_brief", ["first", "last"])])
def test_a_ticket_that_is_not_due_keeps_its_place_longer_than_lock_queue_ttl(
    tasks, start_worker, ledger, nothing_is_left, name, last
):
    task = getattr(tasks, name)
    start_worker(2)
    first = task.delay("k", "first", how="calls")
    time.sleep(2.5)
    assert task.delay("k", "last", how="calls").id == first.id
    assert first.get(timeout=PATIENCE) == last
    assert len(ledger.items()) == 1
    nothing_is_left()


@on_every_broker
def test_a_call_that_was_merged_into_a_retry_runs_though_the_run_before_it_succeeds(
    tasks, start_worker, running, gate, second_gate, locks, nothing_is_left
):
    worker = start_worker(2)
    first = tasks.collected.delay("k", "first", str(gate), "swallows", str(second_gate))
    running("first")
    gate.open()
    wait_until(lambda: locks.client.keys("*:queued"), "it has sent its retry, or does so now")
    merged = tasks.collected.delay("k", "merged", how="calls")
    assert merged.id == first.id
    second_gate.open()
    wait_until(lambda: first.state == states.SUCCESS, "it has succeeded all the same")
    following = tasks.collected.delay("k", "next", how="calls")
    assert following.id != first.id
    assert following.get(timeout=PATIENCE) == ["next"]
    # The result backend keeps the first success of an id.
    wait_until(lambda: "['first', 'merged'" in worker.output(), "the retry has had both calls")
    nothing_is_left()


def test_a_serializer_that_reads_a_list_as_a_tuple_fails_the_run_and_says_why(config, tasks, start_worker):
    config.settings["accept_content"] = ["json", "tuples"]
    calls = [tasks.latest_tuple.delay("k", number) for number in range(2)]
    start_worker(2)
    with pytest.raises(LockConfigError, match=r"lab\.latest_tuple: lock_arguments needs a serializer"):
        calls[0].get(timeout=PATIENCE)
