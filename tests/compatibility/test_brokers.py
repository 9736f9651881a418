"""Small brokers: the file system, with worker processes, and memory, with a worker in the test's own process.

What Redis and RabbitMQ do is shown in tests/acceptance: see docs/compatibility.md. Of SQS only our own rules are
tested, in tests/unit/test_broker_rules.py.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest
from celery import states
from celery.contrib.testing.worker import start_worker as start_in_this_process

from celery_redislock.signals import lock_conflict
from tests.compatibility.policies import meet_every_policy
from tests.lab.servers import wait_until
from tests.lab.workers import kept

#: From redis-py, for Celery's result backend: warnings are errors in this process, where the worker of `memory` is.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

on_the_file_system = pytest.mark.parametrize("broker", ["filesystem"], indirect=True)


@pytest.fixture(params=["filesystem", "memory"])
def broker(request):
    return f"{request.param}://"


@pytest.fixture
def config(config, tmp_path):
    folder = tmp_path / "messages"
    folder.mkdir()
    config.settings["broker_transport_options"] = {
        "data_folder_in": str(folder),
        "data_folder_out": str(folder),
        "control_folder": str(folder / "control"),
        "polling_interval": 0.02,
    }
    return config


@pytest.fixture
def start(broker, app, start_worker, ledger):
    """Starts a worker of four slots: a process, or, where messages are in memory, threads of this process."""

    def write_down(holder, policy, **_):
        """As tests/lab/worker.py does."""
        ledger.write({"event": "conflict", "holders": [holder.task_id], "policy": policy})

    with ExitStack() as stack:
        if broker == "memory://":
            lock_conflict.connect(write_down)
            yield lambda: stack.enter_context(
                start_in_this_process(app, concurrency=4, pool="threads", perform_ping_check=False)
            )
        else:
            yield lambda: start_worker(4)
    lock_conflict.disconnect(write_down)
    gc.collect()


def test_those_who_wait_run_in_order_and_hold_no_stranger_up(tasks, start, ledger, nothing_is_left):
    start()
    with tasks.work.lock_for("k"), tasks.counted_late.lock_for("k"):
        waiting = [task.delay("k", number, 0.02) for number in range(10) for task in (tasks.work, tasks.counted_late)]
        wait_until(lambda: kept(tasks.work.app) == 20, "all wait")
        assert tasks.work.delay("stranger", "stranger").get(timeout=10) == "stranger"
        assert ledger.items() == ["stranger"]
    for result in waiting:
        result.get(timeout=20)
    for ids in ([result.id for result in waiting[first::2]] for first in (0, 1)):
        assert [run.task_id for run in ledger.runs() if run.task_id in ids] == ids
    nothing_is_left()


def test_every_policy_does_what_it_says(tasks, start, ledger, nothing_is_left):
    start()
    meet_every_policy(tasks, ledger)
    assert ledger.overlaps() == []
    nothing_is_left()


def test_every_way_out_gives_the_key_back(tasks, start, ledger, nothing_is_left):
    start()
    for how in ("success", "failure", "retry", "ignore", "reject"):
        tasks.ends.delay("k", how)
    wait_until(lambda: len(ledger.runs()) == 6 and not ledger.running(), "all have run, and one twice")
    assert ledger.overlaps() == []
    nothing_is_left()


def test_a_message_that_meets_an_outage_comes_back_and_runs(lock_proxy, tasks, start, ledger):
    start()
    lock_proxy.refuse()
    results = [tasks.work.delay("k", number) for number in range(3)]
    lock_proxy.mend()
    assert [result.get(timeout=30) for result in results] == [0, 1, 2]
    assert ledger.overlaps() == []


def test_no_more_run_at_once_than_the_limit_says(tasks, start, ledger, gate, nothing_is_left):
    start()
    results = [tasks.three_until.delay("k", number, str(gate)) for number in range(12)]
    wait_until(
        lambda: len(ledger.running()) == 3 and kept(tasks.three_until.app) == 9, "three run, and the others wait"
    )
    gate.open()
    assert [result.get(timeout=30) for result in results] == list(range(12))
    assert ledger.most_at_once() == 3
    nothing_is_left()


def test_a_job_is_unique_and_one_waits_in_the_queue(tasks, start, ledger, gate, nothing_is_left):
    first, second = tasks.job.delay("k", "first"), tasks.job.delay("k", "second")
    assert second.id == first.id
    assert second.duplicate is True
    start()
    assert first.get(timeout=10) == "first"
    runs = tasks.queued.delay("k", "runs", file=str(gate))
    wait_until(lambda: "runs" in ledger.items(), "it runs")
    waits, again = tasks.queued.delay("k", "waits"), tasks.queued.delay("k", "again")
    assert again.id == waits.id
    gate.open()
    assert [result.get(timeout=10) for result in (runs, waits)] == ["runs", "waits"]
    assert ledger.items() == ["first", "runs", "waits"]
    nothing_is_left()


@pytest.mark.parametrize("broker", ["memory"], indirect=True)
def test_the_timer_runs_before_two_threads_of_the_pool_can_both_start_it(start):
    """Celery starts it where it is used first, and no lock of its own keeps two threads from doing so."""
    worker = start()
    wait_until(lambda: worker.timer.running, "the timer runs, though nothing has used it")


@on_the_file_system
def test_a_warm_shutdown_gives_back_what_waits_and_another_worker_runs_it(tasks, start, ledger, nothing_is_left):
    first = start()
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.delay("k", number) for number in range(3)]
        wait_until(lambda: kept(tasks.work.app) == 3, "all wait")
        first.stop()
        start()
        wait_until(lambda: kept(tasks.work.app) == 3, "all wait again")  # the file system gives them in any order
    assert [result.get(timeout=20) for result in waiting] == [0, 1, 2]
    assert ledger.items() == ["0", "1", "2"]
    nothing_is_left()


@on_the_file_system
def test_what_waits_in_a_killed_worker_is_lost_as_the_worker_has_said(tasks, start, ledger):
    killed = start()
    said = "the broker filesystem deletes a message when it delivers it"
    assert killed.output().count(said) == 1
    with tasks.counted_late.lock_for("k"):
        lost = tasks.counted_late.delay("k", "lost")
        wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
        wait_until(lambda: tasks.counted_late.lock_info("k").waiting_processes, "its room stands in line")
        killed.kill()
        start()
    assert tasks.counted_late.delay("k", "next").get(timeout=20) == [
        "next",
        0,
    ]  # no rank in the line of a dead room is in its way
    assert ledger.items() == ["next"]
    assert lost.state == states.RETRY


def test_more_messages_than_a_worker_fetches_at_once_run_and_are_acked(tasks, start):
    """A message that is acked early and never acked takes one of those that the worker may fetch."""
    start()
    results = [tasks.work.delay(number, number) for number in range(20)]
    assert [result.get(timeout=20) for result in results] == list(range(20))
