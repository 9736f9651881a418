"""What a task sees of its lock, what others see of it, and what it costs."""

from __future__ import annotations

from celery_redislock import LockInfo
from tests.conftest import in_pools
from tests.lab.app import make_app
from tests.lab.servers import need_pool, wait_until
from tests.lab.wake_ups import LEASE


def test_a_bound_task_sees_its_lock_and_none_of_our_headers(tasks, start_worker):
    start_worker(1)
    seen = tasks.bound.delay(5, account=7).get(timeout=10)
    assert seen["key"] == tasks.bound.lock_for(9, account=7).name
    assert seen["state"] == "held"
    assert LEASE / 2 < seen["remaining"] <= LEASE
    assert "redislock" not in str(seen["headers"])


@in_pools("prefork", "threads", others=["gevent", "eventlet"])
def test_a_check_in_a_thread_that_the_body_has_started_says_that_the_lock_must_be_passed_to_it(
    tasks, start_worker, pool
):
    need_pool(pool)
    start_worker(2, "-P", pool)
    own, given, *alone = tasks.helped.delay("k").get(timeout=10)
    assert (own, given) == ("held", "held")
    for error in alone:
        assert error.startswith("lab.helped: its self.lock was read in a thread that runs no task")
        assert "lock = self.lock" in error


def test_a_thread_that_outlives_its_body_is_told_that_the_lock_is_not_its_own_any_more(
    tasks, start_worker, ledger, gate, nothing_is_left
):
    start_worker(1)
    tasks.outlived.delay("k", gate)
    wait_until(ledger.runs, "it runs")
    nothing_is_left()
    gate.open()
    wait_until(lambda: any(line["event"] == "looked" for line in ledger.lines()), "the thread has looked")
    (looked,) = [line for line in ledger.lines() if line["event"] == "looked"]
    assert "its run has ended" in looked["seen"]
    assert (looked["state"], looked["remaining"]) == ("lost", 0.0)


def test_lock_info_names_the_holder(tasks, start_worker, ledger, gate):
    start_worker(1)
    assert tasks.work.lock_info("k") is None
    result = tasks.work.delay("k", seconds=gate)
    wait_until(ledger.runs, "it runs")
    info = tasks.work.lock_info("k")
    assert isinstance(info, LockInfo)
    assert (info.task_id, info.task, info.hostname) == (result.id, "lab.work", "w0@lab")
    assert info.since.utcoffset().total_seconds() == 0
    assert LEASE / 2 < info.ttl <= LEASE


def test_code_outside_the_task_and_the_task_exclude_each_other(tasks, start_worker, ledger):
    start_worker(1)
    with tasks.work.lock_for("k") as lock:
        result = tasks.work.delay("k", "task")
        wait_until(lambda: result.state == "RETRY", "the task waits its turn")
        assert ledger.runs() == []
        assert lock.state == "held"
        assert tasks.work.lock_info("k").task_id is None
    assert result.get(timeout=10) == "task"


def test_a_task_that_hangs_past_lock_max_hold_loses_its_key_and_the_log_names_it(tasks, start_worker, ledger):
    """Renewed up to lock_max_hold, one second, its lease of two ends."""
    worker = start_worker(2)
    hung = tasks.hangs.delay("k", "hung", 60)
    wait_until(ledger.runs, "it runs")
    following = tasks.hangs.delay("k", "next")
    following.get(timeout=10)
    first, second = ledger.runs()
    assert (first.item, second.item) == ("hung", "next")
    assert second.start - first.start > 2.0
    assert first.end > second.end  # it hangs still

    def states():
        return [line["state"] for line in ledger.lines() if line["event"] == "lock" and line["state"] != "at_risk"]

    wait_until(lambda: states() == ["held", "lost"], "the body sees it")
    name, key = f"task lab.hangs[{hung.id}]", tasks.hangs.lock_for("k", "any").name
    for said in (
        f"{name} is still running after lock_max_hold (1 s): its lock {key} is no longer renewed",
        f"{name}: the lock {key} is lost: held for longer than lock_max_hold",
    ):
        wait_until(lambda said=said: said in worker.output(), said)


def test_switched_off_a_worker_runs_one_key_twice_at_once_and_asks_nothing(config, start_worker, ledger, locks, gate):
    config.settings["redislock_enabled"] = False
    start_worker(2)
    task = make_app(config).tasks["lab.work"]
    locks.calls()
    results = [task.delay("k", item, gate) for item in "ab"]
    wait_until(lambda: len(ledger.running()) == 2, "both run")
    gate.open()
    assert sorted(result.get(timeout=10) for result in results) == ["a", "b"]
    assert locks.calls() == {}
