"""N at once where messages, replies, children and workers are lost, in every pool, and with limits that differ."""

from __future__ import annotations

import signal
import time

import pytest

from tests.acceptance.test_limits import IMPATIENT, taken
from tests.conftest import in_pools, on_every_broker, on_every_queue
from tests.lab.gate import Gate
from tests.lab.servers import need_pool, wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept, known, waiting_in


@on_every_queue
def test_limits_that_differ_between_calls_of_one_key_let_all_run_and_no_more_than_the_largest_at_once(
    tasks, start_worker, ledger, gate, nothing_is_left
):
    for _ in range(2):
        start_worker(4)
    for number in range(3):
        tasks.as_many.delay("k", 5, f"first {number}", gate)
    wait_until(lambda: len(ledger.running()) == 3, "three run")
    results = [tasks.as_many.delay("k", (1, 5, 2, 3)[number % 4], number, 0.03) for number in range(80)]
    gate.open()
    assert [result.get(timeout=30) for result in results] == list(range(80))
    assert len(ledger.items()) == 83
    assert 3 <= ledger.most_at_once() <= 5
    nothing_is_left()


def test_who_joins_ends_with_the_one_that_it_has_joined_though_the_others_run_on(
    tasks, start_worker, ledger, running, gate, tmp_path
):
    start_worker(5)
    tasks.three_join.delay("k", "joined", gate)
    running("joined")
    others = [tasks.three_join.delay("k", "other", Gate(tmp_path / "others")) for _ in range(2)]
    wait_until(lambda: len(ledger.running()) == 3, "three run")
    joiners = [tasks.three_join.delay("k", "joiner") for _ in range(6)]
    wait_until(lambda: kept(tasks.three_join.app) == 6, "all have met the three")
    gate.open()
    assert [result.get(timeout=20) for result in joiners] == ["joined"] * 6
    assert not any(other.ready() for other in others)
    assert len(ledger.items()) == 3


@counts_on_wake_ups("the second and the third have their turn five seconds later each")
@in_pools("threads", "gevent", others=["solo", "eventlet"])
def test_in_every_pool_three_run_at_once(pool, tasks, start_worker, ledger, gate, nothing_is_left):
    need_pool(pool)
    workers = 4 if pool == "solo" else 2  # each of which runs one at a time
    for _ in range(workers):
        start_worker(6, "-P", pool)
    with taken(tasks.three, "k"):
        results = [tasks.three.delay("k", number, gate if number < 15 else 0.1) for number in range(30)]
        wait_until(lambda: kept(tasks.three.app, workers) == 30, "all wait")
    wait_until(lambda: len(ledger.running()) == 3, "three run")
    gate.open()
    assert [result.get(timeout=30) for result in results] == list(range(30))
    assert len(ledger.items()) == 30
    assert ledger.most_at_once() == 3
    nothing_is_left()


def test_a_child_that_dies_between_the_call_and_the_run_costs_no_permit(tasks, start_worker, ledger, nothing_is_left):
    worker = start_worker(1)
    with taken(tasks.three, "k"):
        results = [tasks.three.delay("k", number) for number in range(5)]
        wait_until(lambda: waiting_in(worker) == 5 and kept(tasks.three.app) == 5, "all wait")
        (child,) = worker.children()
        worker.pause_child(child.pid)
    wait_until(lambda: "its turn came" in worker.output(), "the first is called")
    worker.kill_child(child.pid)
    assert [result.get(timeout=20) for result in results] == list(range(5))
    assert sorted(ledger.items()) == [str(number) for number in range(5)]
    nothing_is_left()


@pytest.mark.parametrize("name", ["three", "three_late"])
def test_messages_that_wait_for_longer_than_the_visibility_timeout_run_once(
    config, tasks, start_worker, ledger, nothing_is_left, name
):
    """Several deliveries of each wait, and are called to different permits at the same moment."""
    config.settings["broker_transport_options"] = IMPATIENT
    task = getattr(tasks, name)
    for _ in range(2):
        start_worker(3)
    with taken(task, "k"):
        results = [task.delay("k", number, 0.2) for number in range(8)]
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() > begin + 5, "the visibility timeout has passed twice")
    assert [result.get(timeout=60) for result in results] == list(range(8))
    assert sorted(ledger.items()) == [str(number) for number in range(8)]
    assert ledger.most_at_once() <= 3
    nothing_is_left()


def test_an_acquire_whose_reply_is_lost_takes_one_permit(
    lock_proxy, tasks, start_worker, ledger, locks, gate, nothing_is_left
):
    start_worker(1)
    tasks.three.delay("k", "warm").get(timeout=10)
    fault = lock_proxy.drop_reply(b"EVALSHA", b" struck/0/0/")  # not that to the release before
    result = tasks.three.apply_async(("k", "item", gate), task_id="struck")
    wait_until(lambda: len(ledger.running()) == 1, "it runs")
    assert fault.struck
    assert len(locks.held()) == 1
    gate.open()
    assert result.get(timeout=10) == "item"
    nothing_is_left()


@on_every_broker
def test_a_cold_shutdown_frees_all_permits_and_what_it_gives_back_runs_in_another_worker(
    tasks, start_worker, ledger, nothing_is_left
):
    first = start_worker(4)
    results = [tasks.three_late.delay("k", number, 60) for number in range(3)]
    wait_until(lambda: len(ledger.running()) == 3, "three run")
    results += [tasks.three_late.delay("k", number) for number in range(3, 6)]
    wait_until(lambda: kept(tasks.three.app) == 3, "three wait")
    wait_until(lambda: known(tasks.three.app) == 3, "the main process knows of the three")
    pids = [child.pid for child in first.children()]
    first.stop(signal.SIGQUIT)
    for pid in pids:
        ledger.died(pid)
    nothing_is_left()
    start_worker(4)
    assert [result.get(timeout=20) for result in results] == list(range(6))
    assert len(ledger.items()) == 9
    nothing_is_left()


def test_messages_that_find_no_room_come_back_and_run(config, tasks, start_worker, ledger, gate, nothing_is_left):
    config.settings["redislock_waiting_limit"] = 0
    start_worker(6)
    results = [tasks.three.delay("k", number, gate) for number in range(8)]
    wait_until(lambda: len(ledger.running()) == 3 and len(ledger.conflicts()) >= 5, "three run, and five come back")
    gate.open()
    assert [result.get(timeout=60) for result in results] == list(range(8))
    assert len(ledger.items()) == 8
    assert ledger.most_at_once() == 3
    nothing_is_left()


def test_those_who_wait_for_permits_survive_a_lock_server_that_restarts_empty(
    private_locks, tasks, start_worker, ledger, gate, nothing_is_left
):
    start_worker(8)
    first = [tasks.three.delay("k", f"first {number}", gate) for number in range(3)]
    wait_until(lambda: len(ledger.running()) == 3, "three run")
    results = [tasks.three.delay("k", number, 0.05) for number in range(6)]
    wait_until(lambda: kept(tasks.three.app) == 6, "six wait")
    private_locks.restart()
    assert [result.get(timeout=20) for result in results] == list(range(6))
    gate.open()
    assert [result.get(timeout=20) for result in first] == [f"first {number}" for number in range(3)]
    assert len(ledger.items()) == 9
    nothing_is_left()
