"""A lock that is lost under its running body: the holder is told, and nobody else's lock is touched."""

from __future__ import annotations

import pytest

from celery_redislock import LockLost
from tests.conftest import in_pools
from tests.lab.kinds import TWICE
from tests.lab.servers import need_pool, wait_until


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
@pytest.mark.parametrize("thief", [None, "a thief's token"])
def test_abort_raises_lock_lost_in_the_body(tasks, start_worker, ledger, locks, pool, thief):
    worker = start_worker(2, "-P", pool)
    result = tasks.aborted.delay("k")
    wait_until(ledger.runs, "it runs")
    key = tasks.aborted.lock_for("k").name
    locks.client.set(key, thief) if thief else locks.client.delete(key)
    with pytest.raises(LockLost, match="its key was deleted, expired or taken") as caught:
        result.get(timeout=10)
    assert caught.value.key == key
    assert f"the lock {key} is lost: its key was deleted, expired or taken" in worker.output()
    assert locks.client.get(key) == (thief.encode() if thief else None)
    locks.client.delete(key)
    assert tasks.aborted.delay("k", 0.1).get(timeout=10) == "not aborted"  # the thread's next task is not struck


@pytest.mark.parametrize("how", ["self.run", "super().run", "in a thread", "in a thread with the request"])
def test_a_body_that_has_called_a_body_is_aborted_all_the_same(tasks, start_worker, ledger, locks, how):
    start_worker(1)
    result = tasks.calls.delay("k", how)
    wait_until(ledger.runs, "it runs")
    key = tasks.calls.lock_for("k").name
    locks.client.delete(key)
    with pytest.raises(LockLost) as caught:
        result.get(timeout=10)
    assert caught.value.key == key


def test_by_default_a_body_goes_on_and_its_outcome_stands(tasks, start_worker, ledger, locks, gate):
    worker = start_worker(1)
    result = tasks.late.delay("k", "item", gate)
    wait_until(ledger.runs, "it runs")
    locks.client.set(tasks.late.lock_for("k").name, "a thief's token")
    wait_until(lambda: "is lost: its key was deleted, expired or taken" in worker.output(), "it is noticed")
    gate.open()
    assert result.get(timeout=10) == "item"
    assert locks.client.get(tasks.late.lock_for("k").name) == b"a thief's token"


def lock_of(ledger, item):
    """What the body saw of its lock: its states, each with what `check()` raised then, and its last deadline.

    But not that it was at risk: on a busy machine any renewal may be late.
    """
    lines = [line for line in ledger.lines() if line.get("item") == item]
    states = [
        (line["state"], line["check"]) for line in lines if line["event"] == "lock" and line["state"] != "at_risk"
    ]
    deadlines = [line["at"] for line in lines if line["event"] == "deadline"]
    return states, deadlines[-1]


def told(ledger, result):
    """When the holder was told, and why."""
    wait_until(lambda: result.id in [loss["task_id"] for loss in ledger.losses()], "the holder is told")
    (loss,) = [loss for loss in ledger.losses() if loss["task_id"] == result.id]
    return loss["at"], loss["reason"]


def test_a_process_that_stood_still_past_its_lease_knows_that_the_key_is_lost_and_leaves_it_to_its_next_holder(
    config, tasks, start_worker, ledger, locks, gate
):
    config.settings["redislock_lease"] = 5.0
    worker = start_worker(3)
    old = tasks.watches.delay("k", "old", 30)
    wait_until(lambda: "held" in [line.get("state") for line in ledger.lines()], "it has looked at its lock")
    child = worker.pause_child()
    try:
        new = tasks.watches.delay("k", "new", gate)
        wait_until(lambda: "new" in ledger.items(), "the next one has the key")
        key = tasks.watches.lock_for("k", "any").name
        token = locks.client.get(key)
    finally:
        worker.resume_child(child)
    at, reason = told(ledger, old)
    assert reason == "not renewed by its deadline"
    assert old.get(timeout=10) is None
    states, deadline = lock_of(ledger, "old")
    assert states == [("held", None), ("lost", "LockLost")]
    assert at > deadline
    assert f"task lab.watches[{old.id}]: the lock {key} is lost: {reason}" in worker.output()
    assert locks.client.get(key) == token, "the old one has ended, and the next one holds the key still"
    gate.open()
    assert new.get(timeout=10) is None
    assert [loss["task_id"] for loss in ledger.losses()] == [old.id]
    assert "lost" not in dict(lock_of(ledger, "new")[0])


@pytest.mark.parametrize("on_lost", ["warn", "abort"])
def test_in_front_of_a_silent_server_the_holder_is_told_at_its_deadline_and_not_a_time_out_later(
    lock_proxy, config, tasks, start_worker, ledger, on_lost
):
    """Two renewals time out, the second of them more than two seconds after the deadline."""
    timeouts = {"socket_timeout": 1.4 if TWICE else 3.0, "socket_connect_timeout": 0.2}
    config.settings.update(redislock_on_lost=on_lost, redislock_client_options=timeouts)
    config.settings["task_annotations"] = {"*": {"lock_lease": 5.0}}
    start_worker(1)
    result = tasks.watches.delay("k", "item", 30)
    wait_until(ledger.runs, "it runs")
    lock_proxy.blackhole()
    at, reason = told(ledger, result)
    states, deadline = lock_of(ledger, "item")
    assert reason == "not renewed by its deadline"
    assert 0 <= at - deadline < 2.0
    if on_lost == "abort":
        with pytest.raises(LockLost, match=reason):
            result.get(timeout=10)
        (run,) = ledger.runs()
        assert run.end - deadline < 2.0
    else:
        assert result.get(timeout=10) is None
        states, _ = lock_of(ledger, "item")
        assert states == [("held", None), ("lost", "LockLost")]


def test_a_server_that_restarts_empty_is_noticed_at_the_next_renewal(
    private_locks, config, tasks, start_worker, ledger, locks
):
    config.settings["redislock_lease"] = 6.0  # renewed every two seconds: the server is back long before the deadline
    worker = start_worker(1)
    result = tasks.watches.delay("k", "item", 30)
    wait_until(ledger.runs, "it runs")
    private_locks.restart()
    at, reason = told(ledger, result)
    assert reason == "its key was deleted, expired or taken"
    assert result.get(timeout=10) is None
    states, deadline = lock_of(ledger, "item")
    assert states == [("held", None), ("lost", "LockLost")]
    assert at < deadline
    key = tasks.watches.lock_for("k", "any").name
    assert f"task lab.watches[{result.id}]: the lock {key} is lost: {reason}" in worker.output()
    assert locks.client.keys("*}") == []


@in_pools("gevent", others=["eventlet"])
def test_in_a_pool_of_greenlets_nothing_is_raised_in_the_body_and_check_tells(
    config, tasks, start_worker, ledger, locks, pool
):
    need_pool(pool)
    config.settings.update(redislock_lease=5.0, redislock_on_lost="abort")
    start_worker(2, "-P", pool)
    result = tasks.watches.delay("k", "item", 30)
    wait_until(ledger.runs, "it runs")
    locks.client.delete(tasks.watches.lock_for("k", "any").name)
    assert result.get(timeout=10) is None
    states, _ = lock_of(ledger, "item")
    assert states == [("held", None), ("lost", "LockLost")]
    assert told(ledger, result)[1] == "its key was deleted, expired or taken"
