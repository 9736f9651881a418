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
from tests.acceptance.test_redelivery import came_back, dropped, received
from tests.conftest import on_every_broker, on_every_queue
from tests.lab.app import make_app
from tests.lab.gate import Gate
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept, waiting_in

#: With these the Redis broker gives a message again that was not acked for two seconds.
IMPATIENT = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}


@contextmanager
def taken(task, *args, seats=3):
    """So many permits are somebody else's until the end of the block."""
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
def test_sixty_messages_run_three_at_once_on_two_workers_each_about_in_the_order_of_the_ranks(
    tasks, start_worker, ledger, started, gate, nothing_is_left
):
    for _ in range(2):
        start_worker(4)
    for number in range(3):
        tasks.three.delay("k", f"first {number}", gate)
    started(3)
    results = [tasks.three.delay("k", number, 0.05) for number in range(60)]
    wait_until(lambda: kept(tasks.three.app, 2) == 60, "all wait")
    gate.open()
    assert [result.get(timeout=30) for result in results] == list(range(60))
    assert ledger.most_at_once() == 3
    served = [int(item) for item in ledger.items()[3:]]
    assert sorted(served) == list(range(60))
    # Each worker's in order, but for the moment in which a child begins. In any order the mean would be 10.
    of_worker = {}
    for run in ledger.runs()[3:]:
        of_worker.setdefault(psutil.Process(run.pid).ppid(), []).append(int(run.item))
    assert len(of_worker) == 2
    for mine in of_worker.values():
        assert mean(abs(mine.index(number) - turn) for turn, number in enumerate(sorted(mine))) < 3
    nothing_is_left()


def test_two_keys_have_three_each(tasks, start_worker, ledger, started, gate):
    start_worker(8)
    results = [tasks.three.delay(number % 2, number, gate) for number in range(12)]
    started(6)
    wait_until(lambda: kept(tasks.three.app) == 6, "the others wait")
    assert sorted(run.key for run in ledger.running()) == ["0", "0", "0", "1", "1", "1"]
    gate.open()
    for result in results:
        result.get(timeout=20)
    for key in "01":
        assert sum(run.key == key for run in ledger.runs()) == 6


def test_a_callable_says_how_many_run_at_once(tasks, start_worker, ledger, started, gate):
    start_worker(6)
    results = [tasks.as_many.delay("premium", 4, number, gate) for number in range(12)]
    started(4)
    wait_until(lambda: kept(tasks.as_many.app) == 8, "the others wait")
    gate.open()
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
        ("raises", r"lock_limit raised RuntimeError in limits.py, line \d+"),
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
    assert "its body did not run" in worker.output()


# The policies.


def test_skip_drops_the_fourth_and_no_other(tasks, start_worker, ledger, started, gate):
    start_worker(4)
    first = [tasks.three_skip.delay("k", f"run {number}", gate) for number in range(3)]
    started(3)
    with pytest.raises(TaskRevokedError, match="duplicate of"):
        tasks.three_skip.delay("k", "too many").get(timeout=10)
    gate.open()
    for number, result in enumerate(first):
        assert result.get(timeout=10) == f"run {number}"
    assert tasks.three_skip.delay("k", "later").get(timeout=10) == "later"
    assert sorted(ledger.items()) == ["later", "run 0", "run 1", "run 2"]


def test_raise_names_all_who_run_and_so_do_the_log_and_lock_info(tasks, start_worker, started, gate):
    worker = start_worker(4)
    first = [tasks.three_raise.delay("k", f"run {number}", gate) for number in range(3)]
    started(3)
    ids = {result.id for result in first}
    info = tasks.three_raise.lock_info("k")
    assert {one.task_id for one in info.holders} == ids
    with pytest.raises(LockConflict) as refused:
        tasks.three_raise.delay("k", "too many").get(timeout=10)
    assert {one.task_id for one in refused.value.holders} == ids
    (line,) = [line for line in worker.output().splitlines() if "; failed with LockConflict (raise)" in line]
    assert all(f"task {one} on w0@lab" in line for one in ids)


def test_join_ends_with_the_outcome_of_one_who_runs_and_only_where_three_do(
    tasks, start_worker, ledger, started, tmp_path
):
    start_worker(5)
    gates = [Gate(tmp_path / f"gate {number}") for number in range(3)]
    first = [tasks.three_join.delay("k", f"run {number}", gate) for number, gate in enumerate(gates)]
    started(3)
    joiners = [tasks.three_join.delay("k", "joiner") for _ in range(4)]
    wait_until(lambda: kept(tasks.three_join.app) == 4, "all have met the three")
    # They have joined the first whom they met. Where another ended before that one, they would run with its permit.
    (joined,) = {conflict["holder"] for conflict in ledger.conflicts()}
    (number,) = [number for number, result in enumerate(first) if result.id == joined]
    gates[number].open()
    assert {result.get(timeout=10) for result in [first[number], *joiners]} == {f"run {number}"}
    for gate in gates:
        gate.open()
    assert {result.get(timeout=10) for result in first} == {"run 0", "run 1", "run 2"}
    assert sorted(ledger.items()) == ["run 0", "run 1", "run 2"]


# Deaths.


@counts_on_wake_ups("who waits looks when the lease of the killed one ends")
@on_every_broker
def test_the_permit_of_a_killed_child_is_free_at_once_and_its_message_runs_again(
    tasks, start_worker, ledger, started, tmp_path
):
    worker, end = start_worker(4), tmp_path / "end"
    results = [tasks.three_until.delay("k", f"run {number}", str(end)) for number in range(3)]
    started(3)
    waits = tasks.three_until.delay("k", "waits", str(end))
    wait_until(lambda: waiting_in(worker) == 1, "the fourth waits")
    victim = next(run for run in ledger.runs() if run.item == "run 1")
    worker.kill_child(victim.pid)
    # By the one that waits; or by its own message, which is older, if Celery has noticed the death at once.
    wait_until(lambda: len(ledger.running()) == 3, "somebody has the permit, long before the lease ends", 15)
    end.touch()
    assert waits.get(timeout=10) == "waits"
    for number, result in enumerate(results):
        assert result.get(timeout=10) == f"run {number}"
    assert sorted(ledger.items()) == ["run 0", "run 1", "run 1", "run 2", "waits"]
    again = [run for run in ledger.runs() if run.item == "run 1"]
    assert again[0].end <= again[1].start
    assert ledger.most_at_once() == 3


@counts_on_wake_ups("many messages have their turn, one every five seconds for each worker")
def test_ten_children_killed_under_load_cost_no_permit_and_leave_nothing(
    tasks, start_worker, ledger, started, gate, nothing_is_left
):
    workers = [start_worker(4) for _ in range(2)]
    results = [tasks.three_late.delay("k", number, gate) for number in range(3)]
    started(3)
    results += [tasks.three_late.delay("k", number, 0.1) for number in range(3, 60)]
    gate.open()
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


def test_a_killed_worker_keeps_its_permits_for_a_lease_and_its_messages_run_then(
    config, tasks, start_worker, ledger, broker_server
):
    # Not so short that a copy may be on its way to the worker when that is killed: kombu would lose it.
    config.settings["broker_transport_options"] = {**IMPATIENT, "visibility_timeout": 120}
    config.settings["task_annotations"] = {"lab.three_late": {"lock_lease": 3.0}}
    first = start_worker(3)
    results = [tasks.three_late.delay("k", number, 60) for number in range(2)]
    wait_until(lambda: len(ledger.running()) == 2, "two run")
    first.kill()
    broker_server.ages()
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
def test_a_time_limit_frees_its_permit_and_no_other(
    tasks, start_worker, ledger, started, limits, error, gate, nothing_is_left
):
    start_worker(4)
    others = [tasks.three.delay("k", f"run {number}", gate) for number in range(2)]
    started(2)
    limited = tasks.three.apply_async(("k", "limited", 30), **limits)
    wait_until(lambda: "limited" in ledger.items() or limited.ready(), "it has the third permit")
    waits = tasks.three.delay("k", "waits")
    with pytest.raises(error):
        limited.get(timeout=10)
    assert waits.get(timeout=15) == "waits"  # the lease is 30 s
    assert not any(other.ready() for other in others)
    gate.open()
    for number, other in enumerate(others):
        assert other.get(timeout=10) == f"run {number}"
    nothing_is_left()


# Copies.


def test_copies_of_a_run_get_no_second_permit_and_are_dropped_afterwards(
    config, tasks, start_worker, ledger, gate, nothing_is_left
):
    config.settings["broker_transport_options"] = IMPATIENT
    worker = start_worker(8)
    result = tasks.three_late.delay("k", "once", gate)
    wait_until(lambda: came_back(worker, result), "a copy has met it")
    gate.open()
    assert result.get(timeout=20) == "once"
    wait_until(lambda: dropped(worker, result), "a copy is dropped", 40)
    assert ledger.items() == ["once"]
    nothing_is_left()


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_copy_after_a_lost_connection_gets_no_second_permit(broker_proxy, tasks, start_worker, ledger, gate):
    worker = start_worker(4)
    result = tasks.three_late.delay("k", "once", gate)
    wait_until(ledger.runs, "it runs")
    broker_proxy.cut()
    wait_until(lambda: received(worker, result) > 1, "its copy comes")
    gate.open()
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


def test_a_retry_that_holds_its_permit_comes_before_who_waits(tasks, start_worker, ledger, running, nothing_is_left):
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
def test_retries_that_hold_their_permits_leave_none_behind(tasks, start_worker, ledger, started, gate, nothing_is_left):
    for _ in range(2):
        start_worker(4)
    results = [tasks.three_again.delay("k", f"item {number}.", 2, gate) for number in range(3)]
    started(3)
    results += [tasks.three_again.delay("k", f"item {number}.", 2, number % 3 / 20) for number in range(3, 20)]
    gate.open()
    for result in results:
        result.get(timeout=30)
    assert len(ledger.items()) == len(set(ledger.items())) == 60
    assert ledger.most_at_once() == 3
    nothing_is_left()


def test_a_retry_that_is_revoked_gives_its_permit_back(tasks, start_worker, ledger, gate, nothing_is_left):
    worker = start_worker(3)

    def is_reserved():
        return "queued" in {one.state for one in tasks.three_again.lock_info("k").holders}

    with taken(tasks.three_again, "k", seats=2):
        first = tasks.three_again.delay("k", "a", 1, gate, 2.0)
        wait_until(lambda: received(worker, first) == 2, "the worker has the retry")
        first.revoke()
        wait_until(lambda: "flagged as revoked" in worker.output(), "the worker knows")
        gate.open()
        wait_until(lambda: is_reserved() or "Discarding revoked" in worker.output(), "its permit is reserved, or was")
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
    tasks, start_worker, ledger, started, gate, nothing_is_left
):
    first = start_worker(4)
    running = [tasks.three.delay("k", f"run {number}", gate) for number in range(3)]
    started(3)
    waiting = [tasks.three.delay("k", f"waits {number}") for number in range(4)]
    wait_until(lambda: kept(tasks.three.app) == 4, "four wait")
    first.begin_to_stop(signal.SIGTERM)
    gate.open()
    first.wait()
    assert [result.get(timeout=10) for result in running] == [f"run {number}" for number in range(3)]
    start_worker(4)
    assert [result.get(timeout=10) for result in waiting] == [f"waits {number}" for number in range(4)]
    assert len(ledger.items()) == 7
    assert ledger.most_at_once() == 3
    nothing_is_left()


# A rolling deploy.


@counts_on_wake_ups("many messages have their turn, one every five seconds for each worker")
@pytest.mark.parametrize(("old", "new"), [(3, 2), (3, 1), (1, 3), (2, 3)])
def test_in_a_rolling_deploy_no_more_than_the_larger_limit_run_at_once(
    with_limit, start_worker, ledger, started, gate, tmp_path, nothing_is_left, old, new
):
    app = make_app(with_limit(old))
    task = app.tasks["lab.three"]
    before = start_worker(4, config=with_limit(old))
    after = start_worker(4, config=replace(with_limit(new), queue="lab-not-yet"))
    results = [task.delay("k", number, gate) for number in range(old)]
    started(old)
    app.control.add_consumer(with_limit(old).queue, destination=["w1@lab"], reply=True, limit=1)
    # It waits for messages of its old queue alone until one comes, or for a second.
    app.tasks["celery.accumulate"].apply_async((1,), queue="lab-not-yet").get(timeout=10)
    pids = {child.pid for child in after.children()}
    later = Gate(tmp_path / "later")
    results += [task.delay("k", number, later if number < 15 else 0.1) for number in range(old, 30)]
    wait_until(lambda: kept(app, 2) + len(ledger.runs()) >= 30, "all wait or run")
    if new > old:
        wait_until(lambda: len(ledger.running()) == new, "as many run as the new worker admits to")
    before.begin_to_stop(signal.SIGTERM)
    wait_until(lambda: task.lock_info("k").waiting_processes == 1, "the old worker has left the line")
    gate.open()
    before.wait()
    wait_until(lambda: len(ledger.running()) == new, "as many run as the new worker admits to")
    later.open()
    assert [result.get(timeout=30) for result in results] == list(range(30))
    assert sorted(int(item) for item in ledger.items()) == list(range(30))
    assert ledger.most_at_once() == max(old, new)
    assert ledger.most_at_once(pids) == new
    first_end = min(run.end for run in ledger.runs() if run.pid not in pids)
    assert (min(run.start for run in ledger.runs() if run.pid in pids) < first_end) == (new > old)
    nothing_is_left()
    app.close()


@pytest.mark.parametrize("new", [1, 2])
def test_a_copy_gets_no_second_permit_after_the_limit_was_lowered(config, start_worker, ledger, gate, new):
    """Its run has the third permit, above the limit of the worker that gets the copy."""
    config.settings["broker_transport_options"] = IMPATIENT

    def with_limit(limit):
        annotations = {"lab.three_late": {"lock_limit": limit}}
        return replace(config, settings={**config.settings, "task_annotations": annotations})

    app = make_app(with_limit(3))
    task = app.tasks["lab.three_late"]
    before = start_worker(1, config=with_limit(3))
    with taken(task, "k", seats=2):
        result = task.delay("k", "once", gate)
        wait_until(ledger.runs, "it runs with the third permit")
    after = start_worker(3, config=with_limit(new))
    wait_until(lambda: came_back(after, result), "a copy has met it in the new worker")
    gate.open()
    assert result.get(timeout=20) == "once"
    wait_until(lambda: dropped(before, result) + dropped(after, result), "its copy is dropped", 40)
    assert ledger.items() == ["once"]
    app.close()
