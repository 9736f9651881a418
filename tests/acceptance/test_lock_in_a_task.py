"""What a task sees of its lock, what others see of it, and what it costs."""

from __future__ import annotations

from celery_redislock import LockInfo
from tests.lab.app import make_app
from tests.lab.cluster_locks import needs_one_server
from tests.lab.servers import wait_until
from tests.lab.wake_ups import LEASE


def test_a_bound_task_sees_its_lock_and_none_of_our_headers(tasks, start_worker):
    start_worker(1)
    seen = tasks.bound.delay(5, account=7).get(timeout=10)
    assert seen["key"] == tasks.bound.lock_for(9, account=7).name
    assert seen["state"] == "held"
    assert LEASE * 5 / 6 < seen["remaining"] <= LEASE
    assert "redislock" not in str(seen["headers"])


def test_lock_info_names_the_holder(tasks, start_worker, ledger):
    start_worker(1)
    assert tasks.work.lock_info("k") is None
    result = tasks.work.delay("k", seconds=2)
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


def test_a_direct_call_takes_no_lock(tasks, locks):
    locks.calls()
    assert tasks.work("k", "direct") == "direct"
    assert locks.calls() == {}


@needs_one_server("one warm-up reaches one node")
def test_an_uncontended_run_costs_one_round_trip_to_acquire_and_one_to_release(tasks, start_worker, locks):
    start_worker(1)
    tasks.work.delay("warm-up").get(timeout=10)  # connects, and loads the scripts
    wait_until(lambda: locks.client.keys() == [], "the warm-up has ended")
    locks.calls()
    for number in range(20):
        tasks.work.delay(number).get(timeout=10)
    wait_until(lambda: locks.client.keys() == [], "the last one has ended")
    inside_the_scripts = {"set": 20, "get": 20, "del": 20, "exists": 40}
    assert locks.calls() == {"evalsha": 40, **inside_the_scripts}


def test_tasks_in_threads_of_one_process_see_their_own_lock(tasks, start_worker):
    start_worker(4, "-P", "threads")
    results = {key: tasks.threaded.delay(key, 0.3) for key in "abcd"}
    for key, result in results.items():
        expected = tasks.threaded.lock_for(key, 0).name
        assert result.get(timeout=10) == [expected, expected]


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
    states = [line["state"] for line in ledger.lines() if line["event"] == "lock"]
    assert [state for state in states if state != "at_risk"] == ["held", "lost"]
    name, key = f"task lab.hangs[{hung.id}]", tasks.hangs.lock_for("k", "any").name
    assert f"{name} still runs after lock_max_hold (1 s): its lock {key} is not renewed any more" in worker.output()
    assert f"{name}: the lock {key} is lost: it was held for longer than lock_max_hold" in worker.output()


def test_switched_off_a_worker_runs_one_key_twice_at_once_and_asks_nothing(config, start_worker, ledger, locks):
    config.settings["redislock_enabled"] = False
    start_worker(2)
    task = make_app(config).tasks["lab.work"]
    locks.calls()
    results = [task.delay("k", item, 1.0) for item in "ab"]
    wait_until(lambda: len(ledger.running()) == 2, "both run")
    assert sorted(result.get(timeout=10) for result in results) == ["a", "b"]
    assert locks.calls() == {}
