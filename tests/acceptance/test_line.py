"""The line: messages that wait for one key run in the order of their publishing, and at once when it is their turn."""

from __future__ import annotations

import time

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from tests.conftest import on_every_broker, on_every_queue
from tests.lab.gate import Gate
from tests.lab.offers import lengthen
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups, few
from tests.lab.workers import first_rank, kept, stands_in_line


@counts_on_wake_ups("two workers that hear nothing may change their order, and the commands are counted")
@on_every_queue
def test_thirty_messages_for_one_key_run_in_order_on_two_workers_each_right_after_the_other(
    tasks, start_worker, ledger, locks
):
    for _ in range(2):
        start_worker(4)
    with tasks.work.lock_for("k"):
        results = [tasks.work.delay("k", number, 0.05) for number in range(30)]
        wait_until(lambda: kept(tasks.work.app, 2) == 30, "all wait")
        wait_until(lambda: stands_in_line(locks.client, tasks.work, "k", 2), "each worker with the rank of its first")
        locks.calls()
    for result in results:
        result.get(timeout=30)
    assert ledger.items() == [str(number) for number in range(30)]
    assert ledger.overlaps() == []
    assert locks.calls()["evalsha"] <= 30 * 6


def test_who_waits_runs_before_who_is_published_later_although_three_hundred_strangers_are_queued_between(
    tasks, start_worker, ledger, gate
):
    worker = start_worker(2)
    with tasks.work.lock_for("k"):
        first = tasks.work.delay("k", "m0")
        wait_until(lambda: f"[{first.id}]: lock" in worker.output(), "m0 waits")
        for _ in range(2):
            tasks.plain.delay(seconds=gate)  # otherwise a slow publisher finds the others done
        for _ in range(300):
            tasks.plain.delay()
        last = tasks.work.delay("k", "m1")
    gate.open()
    last.get(timeout=30)
    assert [item for item in ledger.items() if item in {"m0", "m1"}] == ["m0", "m1"]


def test_a_message_that_waits_takes_no_slot(tasks, start_worker, ledger):
    start_worker(1)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.delay("k", number) for number in range(few(20))]
        wait_until(lambda: kept(tasks.work.app) == len(waiting), "all wait")
        assert tasks.plain.delay("stranger").get(timeout=10) == "plain"
        assert {result.state for result in waiting} == {"RETRY"}
    for result in waiting:
        result.get(timeout=20)
    assert [item for item in ledger.items() if len(item) < 3] == [str(number) for number in range(len(waiting))]


def ran_but_for_the_limited(ledger):
    """What ran, in order. Where the machine is slow, a time limit may be over before its body begins."""
    return [item for item in ledger.items() if item != "limited"]


@pytest.mark.parametrize("late", ["lab_kills_late", "lab_replaces_late"])
def test_a_message_waits_for_no_child_that_is_to_be_killed_or_replaced_while_another_worker_has_a_free_one(
    config, tasks, start_worker, ledger, gate, tmp_path, late
):
    """Celery reports the end of a run at its hard time limit first, and may make another child seconds later."""
    at_last, other = Gate(tmp_path / "at last"), f"{config.queue}-other"
    start_worker(1, "-Q", other)
    config.settings |= {late: str(at_last), "lab_long_offers": True}
    start_worker(1)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app, 2) == 1, "it waits")
        limited = tasks.work.apply_async(("l", "limited", gate), time_limit=1)
        with pytest.raises(TimeLimitExceeded):
            limited.get(timeout=20)
        tasks.work.apply_async(("k", "later"), queue=other)
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 2, "both workers stand in line")
        time.sleep(0.5)  # the room looks every 0.05 s for a slot: it would stand in line with one that is none
    wait_until(lambda: ran_but_for_the_limited(ledger) == ["later"], "the later one runs")
    at_last.open()
    assert waits.get(timeout=20) == "waits"


@counts_on_wake_ups("it is offered the key, and declines")
@pytest.mark.parametrize("late", ["lab_kills_late", "lab_replaces_late"])
def test_a_message_for_which_a_slot_is_held_waits_all_the_same_where_no_child_lives(
    config, tasks, start_worker, ledger, running, gate, tmp_path, late
):
    """The slot of the run that ends at its time limit is held for it; but that run's child is killed."""
    at_last, never, other = Gate(tmp_path / "at last"), Gate(tmp_path / "never"), f"{config.queue}-other"
    start_worker(1, "-Q", other)
    config.settings |= {late: str(at_last), "lab_long_offers": True, "worker_prefetch_multiplier": 2}
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 1, "it waits, and its slot was free")
        stranger = tasks.work.delay("s", "stranger", gate)
        running("stranger")
        limited = tasks.work.apply_async(("l", "limited", never), time_limit=2)
        wait_until(lambda: f"[{limited.id}] received" in worker.output(), "it is fetched")
    with tasks.work.lock_for("k"):  # the room has declined the key
        gate.open()
        assert stranger.get(timeout=20) == "stranger"
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 1, "its room stands in line")
        with pytest.raises(TimeLimitExceeded):
            limited.get(timeout=20)
        tasks.work.apply_async(("k", "later"), queue=other)
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 2, "both workers stand in line")
    wait_until(lambda: ran_but_for_the_limited(ledger) == ["stranger", "later"], "the later one runs")
    at_last.open()
    assert waits.get(timeout=20) == "waits"


@counts_on_wake_ups("it is offered the key, and declines")
def test_a_message_waits_for_no_idle_child_that_has_died_while_another_worker_has_a_free_one(
    config, tasks, start_worker, ledger, tmp_path
):
    """Celery's semaphore still counts its slot, until the pool has made another child."""
    at_last, other = Gate(tmp_path / "at last"), f"{config.queue}-other"
    start_worker(1, "-Q", other)
    config.settings |= {"lab_replaces_late": str(at_last), "lab_long_offers": True}
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app, 2) == 1, "it waits")
        (child,) = worker.children()
        worker.kill_child(child.pid)
        tasks.work.apply_async(("k", "later"), queue=other)
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 2, "both workers stand in line")
    wait_until(lambda: ledger.items() == ["later"], "the later one runs")
    at_last.open()
    assert waits.get(timeout=20) == "waits"


def test_a_message_that_waits_for_the_key_of_a_killed_child_runs_in_an_idle_one_before_celery_notices_the_death(
    config, tasks, start_worker, running, tmp_path
):
    """The run of the dead child took a slot, and so did the dead child: one of the two is enough."""
    notices = Gate(tmp_path / "notices")
    config.settings["lab_replaces_late"] = str(notices)
    worker = start_worker(2)
    tasks.work.delay("k", "killed", 60)
    running("killed")
    waits = tasks.work.delay("k", "waits")
    wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
    worker.kill_child()
    assert waits.get(timeout=20) == "waits"
    notices.open()


@counts_on_wake_ups("the look that is held back is the one after the release")
def test_a_message_whose_slot_is_taken_while_it_is_called_waits_on_and_another_worker_has_its_turn(
    lock_proxy, locks, config, tasks, start_worker, ledger, running, gate, monkeypatch
):
    """Its call is held back, and a stranger has taken the slot meanwhile."""
    lengthen(monkeypatch.setattr)
    config.settings["lab_long_offers"] = True
    other = f"{config.queue}-other"
    start_worker(1)
    start_worker(1, "-Q", other)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(tasks.work.app, 2) == 1, "it waits")
        tasks.work.apply_async(("k", "later"), queue=other)
        wait_until(lambda: kept(tasks.work.app, 2) == 2, "the later one waits in the other worker")
        wait_until(lambda: stands_in_line(locks.client, tasks.work, "k", 2), "each with its rank")
        first = str(first_rank(locks.client, tasks.work, "k")).encode()
        call = lock_proxy.hold(b"EVALSHA", first, before=True)  # not a look of the other worker
    call.wait()
    stranger = tasks.work.delay("l", "stranger", gate)
    running("stranger")
    call.let_go()
    wait_until(lambda: ledger.items() == ["stranger", "later"], "the later one runs")
    gate.open()
    assert [stranger.get(timeout=20), waits.get(timeout=20)] == ["stranger", "waits"]


@on_every_queue
def test_a_worker_that_dies_loses_nothing_of_what_waits_in_it_also_where_messages_are_acked_early(
    config, tasks, start_worker, ledger, broker_server
):
    # So long that none is sent back while it waits: kombu's Redis transport loses what is in the queue when the worker
    # that asks for it is killed.
    config.settings["broker_transport_options"] = {
        "visibility_timeout": 120,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    first = start_worker(1)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.delay("k", number) for number in range(5)]
        wait_until(lambda: kept(tasks.work.app) == 5, "all wait")
        first.kill()
        broker_server.ages()
        start_worker(1)
    wait_until(lambda: all(result.ready() for result in waiting), "all have run")
    assert sorted(ledger.items()) == [str(number) for number in range(5)]


@on_every_broker
def test_messages_that_are_acked_early_are_acked_also_where_their_results_are_heard_first(config, tasks, start_worker):
    """A message that is never acked takes one of those that the worker may fetch; soon it would fetch none."""
    config.settings["lab_slow_acks"] = True
    start_worker(1)
    results = [tasks.work.delay(f"k{number}", number) for number in range(12)]
    wait_until(lambda: all(result.ready() for result in results), "all have run")
    assert [result.get() for result in results] == list(range(12))


def test_messages_that_are_acked_early_are_acked_also_where_they_begin_before_their_acceptance_is_heard(
    config, tasks, start_worker, broker_server
):
    config.settings["worker_prefetch_multiplier"] = 8
    results = [tasks.work.delay(f"k{number}", number) for number in range(200)]
    start_worker(1)
    assert [result.get(timeout=60) for result in results] == list(range(200))
    with broker_server.connect() as broker:
        wait_until(lambda: broker.hlen("unacked") == 0, "all are acked")


@counts_on_wake_ups("a call lasts for a minute here")
def test_a_message_that_is_revoked_while_it_waits_does_not_run_and_the_next_one_does(
    config, tasks, start_worker, ledger
):
    """No call lapses during the test: the next one would wait for the end of one to the revoked message."""
    config.settings["lab_long_offers"] = True
    worker = start_worker(2)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.delay("k", number) for number in range(3)]
        wait_until(lambda: kept(tasks.work.app) == 3, "all wait")
        waiting[0].revoke()
        wait_until(lambda: "flagged as revoked" in worker.output(), "the worker knows")
    with pytest.raises(TaskRevokedError):
        waiting[0].get(timeout=20)
    waiting[2].get(timeout=20)
    assert ledger.items() == ["1", "2"]


def test_a_worker_tells_what_waits_in_it_and_the_lock_how_many_rooms_wait(tasks, app, start_worker, ledger):
    start_worker(1)
    with tasks.work.lock_for("k", "secret") as lock:
        waiting = [tasks.work.delay("k", "secret") for _ in range(2)]
        wait_until(lambda: kept(app) == 2, "both wait")
        told = asked(app)
        assert [(one["id"], one["name"], one["lock"]) for one in told] == [
            (result.id, "lab.work", lock.name) for result in waiting
        ]
        assert "secret" not in str(told)
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 1, "their room stands in line")
    for result in waiting:
        result.get(timeout=20)
    assert asked(app) == []


def asked(app):
    """What `celery inspect redislock_waiting` tells of the one worker."""
    ((told,),) = (
        reply.values() for reply in app.control.broadcast("redislock_waiting", reply=True, limit=1, timeout=10)
    )
    return told
