"""N at once: never more than N runs of one key, whatever becomes of a run, a child, a worker or a message."""

from __future__ import annotations

import signal
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import mean

import psutil
import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from celery_redislock import LockConflict, LockKeyError
from celery_redislock.testing import busy
from tests.acceptance.test_redelivery import dropped
from tests.conftest import on_every_broker, on_every_queue
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept, waiting_in

#: With these the Redis broker gives a message again that was not acked for two seconds.
IMPATIENT = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}


@contextmanager
def taken(task, *args, seats=3):
    """So many slots are somebody else's until the end of the block."""
    with ExitStack() as stack:
        for _ in range(seats):
            stack.enter_context(busy(task.lock_for(*args)))
        yield


@pytest.fixture
def started(ledger):
    """Waits until so many runs go on."""
    return lambda count: wait_until(lambda: len(ledger.running()) == count, f"{count} run")


@pytest.fixture
def with_limit(config):
    """The config of a worker, or of a publisher, whose code has another limit for the task `three`."""

    def change(limit):
        return replace(config, settings={**config.settings, "task_annotations": {"lab.three": {"lock_limit": limit}}})

    return change


# How many.


@counts_on_wake_ups("sixty messages have their turn, one every five seconds for each worker")
@on_every_queue
def test_sixty_messages_run_three_at_once_on_two_workers_each_about_in_the_order_of_the_places(
    tasks, start_worker, ledger, nothing_is_left
):
    for _ in range(2):
        start_worker(4)
    with taken(tasks.three, "k"):
        results = [tasks.three.delay("k", number, 0.05) for number in range(60)]
        wait_until(lambda: kept(tasks.three.app, 2) == 60, "all wait")
    assert [result.get(timeout=30) for result in results] == list(range(60))
    assert ledger.most_at_once() == 3
    served = [int(item) for item in ledger.items()]
    assert sorted(served) == list(range(60))
    # Each worker's in order, but for the moment in which a child begins. In any order the mean would be 10.
    of_worker = {}
    for run in ledger.runs():
        of_worker.setdefault(psutil.Process(run.pid).ppid(), []).append(int(run.item))
    assert len(of_worker) == 2
    for mine in of_worker.values():
        assert mean(abs(mine.index(number) - place) for place, number in enumerate(sorted(mine))) < 3
    nothing_is_left()


def test_two_keys_have_three_each(tasks, start_worker, ledger):
    start_worker(8)
    results = [tasks.three.delay(number % 2, number, 0.3) for number in range(12)]
    for result in results:
        result.get(timeout=20)
    assert 3 < ledger.most_at_once() <= 6
    for key in "01":
        assert sum(run.key == key for run in ledger.runs()) == 6


def test_a_callable_says_how_many_run_at_once(tasks, start_worker, ledger):
    start_worker(6)
    results = [tasks.as_many.delay("premium", 4, number, 0.3) for number in range(12)]
    for result in results:
        result.get(timeout=20)
    assert ledger.most_at_once() == 4


@pytest.mark.parametrize(
    ("limit", "match"),
    [
        (0, "lock_limit must return a whole number from 1 to 50, not 0"),
        (51, "not 51"),
        (2.0, "not a float"),
        (True, "not a bool"),
        ("secret", "not a str"),
        (None, "not a NoneType"),
        ("raises", r"lock_limit raised RuntimeError in limits.py, line \d+; mend the callable"),
    ],
)
def test_a_run_whose_limit_is_nonsense_fails_and_locks_nothing(tasks, start_worker, ledger, locks, limit, match):
    worker = start_worker(1)
    with pytest.raises(LockKeyError, match=match) as error:
        tasks.as_many.delay("k", limit).get(timeout=10)
    assert "lab.as_many" in str(error.value)
    assert "secret" not in str(error.value)
    assert ledger.runs() == []
    assert locks.client.keys() == []
    assert "its body is not run" in worker.output()


# The policies.


def test_skip_drops_the_fourth_and_no_other(tasks, start_worker, ledger, started):
    start_worker(4)
    first = [tasks.three_skip.delay("k", f"run {number}", 1.5) for number in range(3)]
    started(3)
    with pytest.raises(TaskRevokedError, match="duplicate of"):
        tasks.three_skip.delay("k", "too many").get(timeout=10)
    for number, result in enumerate(first):
        assert result.get(timeout=10) == f"run {number}"
    assert tasks.three_skip.delay("k", "later").get(timeout=10) == "later"
    assert sorted(ledger.items()) == ["later", "run 0", "run 1", "run 2"]


def test_raise_names_all_who_run_and_so_do_the_log_and_lock_info(tasks, start_worker, started):
    worker = start_worker(4)
    first = [tasks.three_raise.delay("k", f"run {number}", 1.5) for number in range(3)]
    started(3)
    ids = {result.id for result in first}
    info = tasks.three_raise.lock_info("k")
    assert {one.task_id for one in info.holders} == ids
    with pytest.raises(LockConflict) as refused:
        tasks.three_raise.delay("k", "too many").get(timeout=10)
    assert {one.task_id for one in refused.value.holders} == ids
    (line,) = [line for line in worker.output().splitlines() if "raise: it fails with LockConflict" in line]
    assert all(f"task {one} on w0@lab" in line for one in ids)


def test_join_ends_with_the_outcome_of_one_who_runs_and_only_where_three_do(tasks, start_worker, ledger, started):
    start_worker(5)
    first = [tasks.three_join.delay("k", f"run {number}", 1.5) for number in range(3)]
    started(3)
    joiners = [tasks.three_join.delay("k", "joiner") for _ in range(4)]
    outcomes = {result.get(timeout=10) for result in first}
    assert {result.get(timeout=10) for result in joiners} <= outcomes
    assert sorted(ledger.items()) == ["run 0", "run 1", "run 2"]


# Deaths.


@counts_on_wake_ups("who waits looks when the lease of the killed one ends")
@on_every_broker
def test_the_slot_of_a_killed_child_is_free_at_once_and_its_message_runs_again(tasks, start_worker, ledger, started):
    worker = start_worker(4)
    results = [tasks.three_late.delay("k", f"run {number}", 3.0) for number in range(3)]
    started(3)
    waits = tasks.three_late.delay("k", "waits")
    wait_until(lambda: waiting_in(worker) == 1, "the fourth waits")
    victim = next(run for run in ledger.runs() if run.item == "run 1")
    worker.kill_child(victim.pid)
    assert waits.get(timeout=2.0) == "waits"
    for number, result in enumerate(results):
        assert result.get(timeout=10) == f"run {number}"
    assert sorted(ledger.items()) == ["run 0", "run 1", "run 1", "run 2", "waits"]
    again = [run for run in ledger.runs() if run.item == "run 1"]
    assert again[0].end <= again[1].start
    assert ledger.most_at_once() == 3
    freed = next(run.start for run in ledger.runs() if run.item == "waits") - again[0].end
    assert freed < 1.0


@counts_on_wake_ups("many messages have their turn, one every five seconds for each worker")
def test_ten_children_killed_under_load_cost_no_slot_and_leave_nothing(tasks, start_worker, ledger, nothing_is_left):
    workers = [start_worker(4) for _ in range(2)]
    results = [tasks.three_late.delay("k", number, 0.1) for number in range(60)]
    for number in range(10):
        done = len(ledger.runs())
        wait_until(lambda done=done: len(ledger.runs()) >= min(60, done + 4), "work goes on")
        worker = workers[number % 2]
        busy_pids = {run.pid for run in ledger.running()} & {child.pid for child in worker.children()}
        if busy_pids:
            worker.kill_child(busy_pids.pop())
    assert [result.get(timeout=60) for result in results] == list(range(60))
    assert ledger.most_at_once() == 3
    nothing_is_left()


def test_a_killed_worker_keeps_its_slots_for_a_lease_and_its_messages_run_then(config, tasks, start_worker, ledger):
    config.settings["broker_transport_options"] = IMPATIENT
    first = start_worker(3)
    results = [tasks.three_late.delay("k", number, 60) for number in range(2)]
    wait_until(lambda: len(ledger.running()) == 2, "two run")
    first.kill()
    start_worker(4)
    others = [tasks.three_late.delay("k", number, 0.1) for number in range(2, 12)]
    assert [result.get(timeout=30) for result in results + others] == list(range(12))
    for number in range(2):
        died, again = [run for run in ledger.runs() if run.item == str(number)]
        assert died.end <= again.start
    assert ledger.most_at_once() <= 3


@pytest.mark.parametrize(
    ("limits", "error"), [({"time_limit": 1}, TimeLimitExceeded), ({"soft_time_limit": 1}, SoftTimeLimitExceeded)]
)
def test_a_time_limit_frees_its_slot_and_no_other(tasks, start_worker, ledger, started, limits, error, nothing_is_left):
    worker = start_worker(4)
    limited = tasks.three.apply_async(("k", "limited", 30), **limits)
    others = [tasks.three.delay("k", f"run {number}", 4) for number in range(2)]
    started(3)
    waits = tasks.three.delay("k", "waits")
    wait_until(lambda: waiting_in(worker) == 1, "the fourth waits")
    with pytest.raises(error):
        limited.get(timeout=10)
    assert waits.get(timeout=2) == "waits"
    assert not any(other.ready() for other in others)
    for number, other in enumerate(others):
        assert other.get(timeout=10) == f"run {number}"
    nothing_is_left()


# Copies.


def test_copies_of_a_run_get_no_second_slot_and_are_dropped_afterwards(
    config, tasks, start_worker, ledger, nothing_is_left
):
    config.settings["broker_transport_options"] = IMPATIENT
    worker = start_worker(8)
    result = tasks.three_late.delay("k", "once", 6.0)
    assert result.get(timeout=20) == "once"
    wait_until(lambda: dropped(worker, result), "a copy is dropped", 40)
    assert ledger.items() == ["once"]
    nothing_is_left()


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_copy_after_a_lost_connection_gets_no_second_slot(broker_proxy, tasks, start_worker, ledger):
    worker = start_worker(4)
    result = tasks.three_late.delay("k", "once", 4.0)
    wait_until(ledger.runs, "it runs")
    broker_proxy.cut()
    assert result.get(timeout=20) == "once"
    wait_until(lambda: dropped(worker, result), "its copy is dropped", 40)
    assert ledger.items() == ["once"]


# Successors and retries.


def test_a_page_that_its_predecessor_has_sent_waits_where_three_run_though_others_would_be_skipped(
    tasks, start_worker, ledger, nothing_is_left
):
    start_worker(3)
    with taken(tasks.three_pages, "k", seats=2):
        tasks.three_pages.delay("k", 1, 8)
        wait_until(lambda: len(ledger.runs()) == 8 and not ledger.running(), "all pages ran", 30)
    assert ledger.items() == [str(number) for number in range(1, 9)]
    assert ledger.overlaps() == []
    nothing_is_left()


def test_a_retry_that_holds_its_slot_comes_before_who_waits(tasks, start_worker, ledger, running, nothing_is_left):
    worker = start_worker(3)
    with taken(tasks.three_again, "k", seats=2):
        first = tasks.three_again.delay("k", "a", 3, 0.3)
        running("a0")
        others = [tasks.three_again.delay("k", f"b{number}") for number in range(3)]
        assert first.get(timeout=20) == "a"
        for other in others:
            other.get(timeout=20)
    assert ledger.items()[:4] == ["a0", "a1", "a2", "a3"]
    assert ledger.overlaps() == []
    assert "Traceback" not in worker.output()
    nothing_is_left()


@on_every_broker
def test_retries_that_hold_their_slots_leave_none_behind(tasks, start_worker, ledger, nothing_is_left):
    for _ in range(2):
        start_worker(4)
    results = [tasks.three_again.delay("k", f"item {number}.", 2, number % 3 / 20) for number in range(20)]
    for result in results:
        result.get(timeout=30)
    assert len(ledger.items()) == len(set(ledger.items())) == 60
    assert ledger.most_at_once() == 3
    nothing_is_left()


def test_a_retry_that_is_revoked_gives_its_slot_back(tasks, start_worker, ledger, running, nothing_is_left):
    start_worker(3)
    with taken(tasks.three_again, "k", seats=2):
        first = tasks.three_again.delay("k", "a", 1, 0.0, 2.0)
        running("a0")
        wait_until(
            lambda: "queued" in {one.state for one in tasks.three_again.lock_info("k").holders}, "its slot is reserved"
        )
        first.revoke()
        assert tasks.three_again.delay("k", "b").get(timeout=10) == "b"
    assert ledger.items() == ["a0", "b0"]
    nothing_is_left()


# Ways out of the line.


@counts_on_wake_ups("four messages have their turn, one every five seconds")
def test_one_that_is_revoked_while_it_waits_does_not_run_and_the_others_do(tasks, start_worker, ledger):
    worker = start_worker(4)
    with taken(tasks.three, "k"):
        waiting = [tasks.three.delay("k", number) for number in range(5)]
        wait_until(lambda: kept(tasks.three.app) == 5, "all wait")
        waiting[1].revoke()
        wait_until(lambda: "flagged as revoked" in worker.output(), "the worker knows")
    for number in (0, 2, 3, 4):
        assert waiting[number].get(timeout=10) == number
    assert sorted(ledger.items()) == ["0", "2", "3", "4"]


@on_every_broker
def test_a_warm_shutdown_ends_three_and_leaves_those_that_wait_to_another_worker(
    tasks, start_worker, ledger, started, nothing_is_left
):
    first = start_worker(4)
    running = [tasks.three.delay("k", f"run {number}", 1.5) for number in range(3)]
    started(3)
    waiting = [tasks.three.delay("k", f"waits {number}") for number in range(4)]
    wait_until(lambda: waiting_in(first) == 4, "four wait")
    first.stop(signal.SIGTERM)
    assert [result.get(timeout=1) for result in running] == [f"run {number}" for number in range(3)]
    start_worker(4)
    assert [result.get(timeout=10) for result in waiting] == [f"waits {number}" for number in range(4)]
    assert len(ledger.items()) == 7
    assert ledger.most_at_once() == 3
    nothing_is_left()


# A rolling deploy.


@counts_on_wake_ups("many messages have their turn, one every five seconds for each worker")
@pytest.mark.parametrize(("old", "new"), [(3, 2), (3, 1), (1, 3), (2, 3)])
def test_in_a_rolling_deploy_no_more_than_the_larger_limit_run_at_once(
    with_limit, start_worker, ledger, started, nothing_is_left, old, new
):
    app = make_app(with_limit(old))
    task = app.tasks["lab.three"]
    before = start_worker(4, config=with_limit(old))
    results = [task.delay("k", number, 4.0) for number in range(old)]
    started(old)
    after = start_worker(4, config=with_limit(new))
    pids = {child.pid for child in after.children()}
    results += [task.delay("k", number, 0.1) for number in range(old, 30)]
    wait_until(lambda: kept(app, 2) + len(ledger.runs()) >= 30, "all wait or run")
    before.stop(signal.SIGTERM)
    assert [result.get(timeout=30) for result in results] == list(range(30))
    assert sorted(int(item) for item in ledger.items()) == list(range(30))
    assert ledger.most_at_once() == max(old, new)
    assert ledger.most_at_once(pids) == new
    first_end = min(run.end for run in ledger.runs() if run.pid not in pids)
    assert (min(run.start for run in ledger.runs() if run.pid in pids) < first_end) == (new > old)
    nothing_is_left()
    app.close()


@pytest.mark.parametrize("new", [1, 2])
def test_a_copy_gets_no_second_slot_after_the_limit_was_lowered(config, start_worker, ledger, new):
    """Its run has the third slot, above the limit of the worker that gets the copy."""
    config.settings["broker_transport_options"] = IMPATIENT

    def with_limit(limit):
        annotations = {"lab.three_late": {"lock_limit": limit}}
        return replace(config, settings={**config.settings, "task_annotations": annotations})

    app = make_app(with_limit(3))
    task = app.tasks["lab.three_late"]
    start_worker(1, config=with_limit(3))
    with taken(task, "k", seats=2):
        result = task.delay("k", "once", 6.0)
        wait_until(ledger.runs, "it runs in the third slot")
    after = start_worker(3, config=with_limit(new))
    assert result.get(timeout=20) == "once"
    wait_until(lambda: dropped(after, result), "its copy is dropped", 40)
    assert ledger.items() == ["once"]
    app.close()
