"""Every promise in every pool. What docs/compatibility.md says of a pool, and no other test shows, is shown here."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from celery import states
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from celery_redislock import LockUnavailable
from tests.compatibility.conftest import GREEN_POOLS
from tests.compatibility.policies import meet_every_policy
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.workers import kept

#: So long that no pause of the machine is an outage.
LONG_TIME_OUTS = {"socket_timeout": 10.0, "socket_connect_timeout": 10.0}

in_pools_of_many = pytest.mark.parametrize("pool", ["threads", *GREEN_POOLS])
in_pools_without_children = pytest.mark.parametrize("pool", ["threads", "solo", *GREEN_POOLS])


def test_runs_of_one_key_never_overlap_and_all_run(tasks, start, ledger, nothing_is_left):
    for _ in range(2):
        start(4)
    results = [tasks.work.delay(f"k{number % 2}", number, 0.02) for number in range(40)]
    assert [result.get(timeout=30) for result in results] == list(range(40))
    assert sorted(map(int, ledger.items())) == list(range(40))
    assert ledger.overlaps() == []
    nothing_is_left()


def test_a_run_that_outlasts_its_lease_keeps_its_key_while_duplicates_knock(config, start_both, ledger, gate):
    config.settings["redislock_lease"] = 5.0
    app = make_app(config)
    once = app.tasks["lab.once"]
    start_both()
    long_run = once.delay("k", "long", 0.0, False, str(gate))
    wait_until(ledger.runs, "it runs")
    (run,) = ledger.runs()
    duplicates = []

    def skipped():
        return [duplicate.state for duplicate in duplicates].count(states.REVOKED)

    while time.monotonic() < run.start + 6.0 or skipped() <= 10:
        duplicates.append(once.delay("k", "duplicate"))
        time.sleep(0.2)
    gate.open()
    assert long_run.get(timeout=10) == "long"
    for duplicate in duplicates:  # one may have waited in the busy worker of the pool solo, and run
        duplicate.get(timeout=10, propagate=False)
    assert ledger.overlaps() == []
    assert ledger.losses() == []
    app.close()


def test_every_policy_does_what_it_says(tasks, start_both, ledger, nothing_is_left):
    start_both()
    meet_every_policy(tasks, ledger)
    assert [(run.key, run.item) for run in ledger.runs() if run.item == "duplicate"] == [("wait", "duplicate")]
    assert ledger.overlaps() == []
    nothing_is_left()


def test_a_newer_call_ends_the_body_or_tells_it_to_stop(
    tasks, start_both, pool, running, ledger, nothing_is_left, tmp_path
):
    """A greenlet gets no error from another one, so its body asks."""
    how, nobody_opens = ("checks" if pool in GREEN_POOLS else ""), str(tmp_path / "nobody opens this")
    start_both()
    older = tasks.newest.delay("k", "older", nobody_opens, how, nobody_opens)
    running("older")
    newer = tasks.newest.delay("k", "newer")
    assert newer.get(timeout=30) == "newer"
    with pytest.raises(TaskRevokedError, match=f"replaced by {newer.id}"):
        older.get(timeout=30)
    assert ledger.items() == ["older", "newer"]
    assert ledger.overlaps() == []
    nothing_is_left()


def test_every_outage_policy_does_what_it_says(lock_proxy, config, start, ledger):
    names = {"retry": "lab.work", "raise": "lab.once", "run": "lab.keyed"}
    config.settings["task_annotations"] = {name: {"lock_on_outage": policy} for policy, name in names.items()}
    app = make_app(config)
    start(4)
    lock_proxy.refuse()
    results = {policy: app.tasks[name].delay("k", policy) for policy, name in names.items()}
    assert results["run"].get(timeout=20) == "run"
    with pytest.raises(LockUnavailable):
        results["raise"].get(timeout=20)
    assert ledger.items() == ["run"]
    lock_proxy.mend()
    assert results["retry"].get(timeout=20) == "retry"
    app.close()


def ends_with(ledger, item):
    return ledger.items()[-1:] == [item]


def test_every_way_out_of_a_body_gives_the_key_back(tasks, start, ledger, nothing_is_left):
    """The lease is 30 s: each one has its key because the one before it has released it."""
    start(1)
    for how in ("success", "failure", "retry", "ignore", "reject", "success"):
        result = tasks.ends.delay("k", how)
        if how in {"success", "retry"}:
            assert result.get(timeout=10) == how
        elif how == "failure":
            with pytest.raises(ValueError, match=how):
                result.get(timeout=10)
        wait_until(partial(ends_with, ledger, how), f"{how} has run")
        nothing_is_left()
    assert ledger.items() == ["success", "failure", "retry", "retry", "ignore", "reject", "success"]


def test_system_exit_gives_the_key_back_and_who_waits_has_its_turn(tasks, start, ledger, pool):
    """Celery stores no outcome of it in a pool without children, and a worker of the pool solo ends."""
    start(1)
    if pool == "solo":
        start(1)
    with tasks.ends.lock_for("k", "any"):
        tasks.ends.delay("k", "exit")
        wait_until(lambda: tasks.ends.lock_info("k", "any").waiting_processes == 1, "the first one stands in line")
        following = tasks.ends.delay("k", "success")
        wait_until(lambda: kept(tasks.ends.app, 1 + (pool == "solo")) == 2, "both wait")
    assert following.get(timeout=20) == "success"
    assert ledger.items() == ["exit", "success"]


@in_pools_of_many
@pytest.mark.parametrize("name", ["exits_early", "exits_early_unlocked"])
def test_system_exit_before_the_run_begins_costs_the_worker_no_prefetch(app, start, nothing_is_left, name):
    """As with a plain task: Celery calls nothing that would ack it, and a few of these would fill the window."""
    start(2)
    task = app.tasks[f"lab.{name}"]
    for how in ("exit", "cancelled", "exit", "cancelled"):
        task.delay(how)
    following = task.delay("runs")
    wait_until(following.ready, "the next one has run", 20)
    nothing_is_left()


@pytest.mark.parametrize("pool", GREEN_POOLS)
def test_a_greenlet_that_is_terminated_frees_its_key(tasks, app, start, ledger, running):
    start(2)
    result = tasks.work.delay("k", "terminated", 60)
    running("terminated")
    app.control.revoke(result.id, terminate=True)
    assert tasks.work.delay("k", "next").get(timeout=10) == "next"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=10)
    assert ledger.overlaps() == []


@pytest.mark.parametrize("pool", ["threads", *GREEN_POOLS])
def test_what_is_terminated_before_its_run_begins_is_acked_and_keeps_no_key(
    tasks, app, start, ledger, running, gate, nothing_is_left
):
    """It stands before a full pool, with its place in the queue. Celery terminates it as soon as the pool takes it."""
    worker = start(1)
    tasks.plain.delay("first", seconds=str(gate))
    wait_until(ledger.running, "the pool is full")
    terminated = tasks.queued.delay("k", "terminated")
    wait_until(lambda: f"[{terminated.id}] received" in worker.output(), "the worker has it")
    app.control.revoke(terminated.id, terminate=True, reply=True, limit=1)
    gate.open()
    with pytest.raises(TaskRevokedError):
        terminated.get(timeout=10)
    tasks.queued.delay("k", "next")
    wait_until(partial(ends_with, ledger, "next"), "the worker fetches on", 10)
    nothing_is_left()
    assert "terminated" not in ledger.items()


@pytest.mark.parametrize("pool", ["threads", *GREEN_POOLS])
@pytest.mark.parametrize("name", ["work", "late", "plain"])
def test_what_is_terminated_before_its_run_begins_keeps_no_slot_from_who_waits(tasks, app, start, ledger, gate, name):
    """As many as the pool has slots stand before it, and no run says that they have ended."""
    worker = start(1)
    tasks.work.delay("k", "first", seconds=str(gate))
    wait_until(ledger.running, "the pool is full")
    terminated = getattr(tasks, name).delay("other", "terminated")
    wait_until(lambda: f"[{terminated.id}] received" in worker.output(), "the worker has it")
    app.control.revoke(terminated.id, terminate=True, reply=True, limit=1)
    with tasks.work.lock_for("k2"):
        waits = tasks.work.delay("k2", "waits")
        gate.open()
        wait_until(lambda: kept(app, 1) == 1, "it waits")
    wait_until(waits.ready, "it has run")
    assert waits.get() == "waits"
    assert "terminated" not in ledger.items()


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_what_cannot_be_terminated_runs_on_with_its_key(tasks, app, start, ledger, running):
    start(2)
    result = tasks.work.delay("k", "goes on", 2.0)
    running("goes on")
    app.control.revoke(result.id, terminate=True)
    assert tasks.work.delay("k", "next").get(timeout=10) == "next"
    assert ledger.items() == ["goes on", "next"]
    assert ledger.overlaps() == []


@pytest.mark.parametrize("pool", ["gevent"])
def test_a_hard_time_limit_of_a_greenlet_frees_its_key(tasks, start, ledger, nothing_is_left):
    start(2)
    with pytest.raises(TimeLimitExceeded):
        tasks.work.apply_async(("k", "limited", 60), time_limit=1).get(timeout=10)
    assert tasks.work.delay("k", "next").get(timeout=10) == "next"
    assert ledger.overlaps() == []
    nothing_is_left()


@pytest.mark.parametrize("pool", ["gevent"])
def test_a_hard_time_limit_before_the_body_of_a_greenlet_ends_its_message_too(
    config, lock_proxy, tasks, start, ledger, broker_server, nothing_is_left
):
    config.settings["redislock_client_options"] = {"socket_timeout": 3.0}
    start(2)
    assert tasks.work.delay("other", "first").get(timeout=10) == "first"
    lock_proxy.blackhole()
    try:
        with pytest.raises(TimeLimitExceeded):
            tasks.work.apply_async(("k", "limited"), time_limit=1).get(timeout=20)
        wait_until(lambda: not broker_server.client.exists("unacked"), "its message is acked")
    finally:
        lock_proxy.mend()
    nothing_is_left()
    assert ledger.items() == ["first"]


@pytest.mark.parametrize("pool", ["threads", "solo", "eventlet"])
def test_where_celery_knows_no_time_limit_a_run_keeps_its_key_to_its_end(tasks, start, ledger):
    start(2)
    limited = tasks.work.apply_async(("k", "limited", 2.0), time_limit=1, soft_time_limit=1)
    following = tasks.work.delay("k", "next")
    assert [limited.get(timeout=10), following.get(timeout=10)] == ["limited", "next"]
    assert ledger.overlaps() == []


def test_a_warm_shutdown_ends_its_run_and_leaves_those_that_wait_to_another_worker(
    tasks, start, ledger, running, nothing_is_left
):
    first = start(4)
    with tasks.work.lock_for("k"):
        waiting = [tasks.work.delay("k", number) for number in range(3)]
        wait_until(lambda: kept(tasks.work.app) == 3, "all wait")
        runs = tasks.work.delay("other", "runs", 1.0)
        running("runs")
        first.stop()
        start(4)
    assert runs.get(timeout=10) == "runs"
    assert [result.get(timeout=20) for result in waiting] == [0, 1, 2]
    assert sorted(ledger.items()) == ["0", "1", "2", "runs"]
    nothing_is_left()


@in_pools_without_children
def test_a_killed_worker_keeps_its_key_for_a_lease_and_no_longer(config, start, ledger, locks, running):
    config.settings["redislock_lease"] = 2.0
    app = make_app(config)
    # In the pool solo a message is acked when its run has ended: RabbitMQ delivers it again, and then it takes no time.
    task = app.tasks["lab.tried_again"]
    killed = start(2)
    task.delay("k", "killed", 60)
    running("killed")
    killed.kill()
    assert -1 != locks.client.pttl(task.lock_for("k", "any").name) <= 2000
    start(2)
    assert task.delay("k", "next").get(timeout=20) == "next"
    assert ledger.overlaps() == []
    app.close()


@in_pools_of_many
def test_fifty_runs_at_once_share_five_connections(config, start, locks, tmp_path):
    config.settings["redislock_client_options"] = {"max_connections": 5, **LONG_TIME_OUTS}
    config.settings["task_annotations"] = {"*": {"lock_lease": 90.0}}  # which such time-outs need
    app = make_app(config)
    held_until = app.tasks["lab.held_until"]
    before = len(locks.client.client_list())
    worker = start(50)
    results = [held_until.delay(number, str(tmp_path / "go")) for number in range(50)]
    wait_until(lambda: len(locks.held()) == 50, "all hold their keys at once")
    assert len(locks.client.client_list()) - before <= 2 * 5 + 2  # and those of the keeper and of who listens
    (tmp_path / "go").touch()
    for result in results:
        assert result.get(timeout=20)[2] == "held"
    wait_until(lambda: locks.held() == [], "nothing is left")
    assert "the lock server is unavailable" not in worker.output()
    app.close()


@in_pools_of_many
def test_a_hundred_runs_that_wait_for_two_connections_make_no_outage_of_a_slow_server(
    config, start, lock_proxy, locks, ledger
):
    """All of them together wait for longer than one may wait for a connection."""
    time_outs = {"socket_timeout": 0.25, "socket_connect_timeout": 0.25}
    config.settings["redislock_client_options"] = {"max_connections": 2, **time_outs}
    app = make_app(replace(config, locks=locks.url()))
    lock_proxy.delay(0.05, to=b"EVALSHA")
    worker = start(100)
    results = [app.tasks["lab.work"].delay(number, number) for number in range(100)]
    assert [result.get(timeout=60) for result in results] == list(range(100))
    wait_until(lambda: locks.held() == [], "nothing is left")
    assert "the lock server is unavailable" not in worker.output()
    app.close()


@in_pools_of_many
def test_fifty_at_once_of_one_task_never_see_each_others_lock(tasks, start, tmp_path, locks):
    start(50)
    results = [tasks.held_until.delay(number, str(tmp_path / "go")) for number in range(50)]
    wait_until(lambda: len(locks.held()) == 50, "all run at once")
    (tmp_path / "go").touch()
    for number, result in enumerate(results):
        own = tasks.held_until.lock_for(number, "any").name
        assert result.get(timeout=20) == [own, own, "held"]


def test_nothing_of_a_run_is_kept_on_the_task_object(tasks, start):
    start(1)
    tasks.shows_itself.delay("warm-up").get(timeout=10)  # Celery itself keeps what it computes once
    first, second = (tasks.shows_itself.delay(key).get(timeout=10) for key in ("a", "b"))
    assert first == second
    assert len(first) > 50


@pytest.mark.parametrize("broker", ["redis"], indirect=True)  # Celery takes ten messages a second from RabbitMQ here
@pytest.mark.parametrize("pool", GREEN_POOLS)
def test_a_thousand_held_locks_in_one_process_are_renewed_in_batches(tasks, start, locks, ledger, tmp_path):
    worker = start(1000)
    for number in range(1000):
        tasks.held_until.delay(number, str(tmp_path / "never"))
    wait_until(lambda: locks.client.dbsize() >= 1000, "all are held", 60)
    locks.calls()
    begin = time.monotonic()
    calls: Counter[str] = Counter()

    def renewed():
        calls.update(locks.calls())
        return calls["pexpire"] >= 2500 and time.monotonic() - begin > 7

    wait_until(renewed, "each has been renewed more than once, and more than a lease is over")
    assert locks.client.dbsize() >= 1000
    assert calls["evalsha"] <= calls["pexpire"] / 20
    assert ledger.losses() == []
    assert "} is lost" not in worker.output()  # no lock; kombu may lose its connection, as so many runs ack at once


def test_a_holder_whose_lock_is_lost_is_told(config, tasks, start, ledger, locks):
    config.settings["redislock_lease"] = 6.0
    worker = start(2)
    result = tasks.watches.delay("k", "item", 60)

    def looks():
        return [(line["state"], line["check"]) for line in ledger.lines() if line["event"] == "lock"]

    wait_until(looks, "it has looked at its lock")
    locks.client.delete(tasks.watches.lock_for("k", "any").name)
    assert result.get(timeout=20) is None
    assert looks() == [("held", None), ("lost", "LockLost")]
    wait_until(lambda: [loss["task_id"] for loss in ledger.losses()] == [result.id], "the signal was sent")
    wait_until(lambda: f"task lab.watches[{result.id}]: the lock" in worker.output(), "the log says so")
