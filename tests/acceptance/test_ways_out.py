"""Every way out of a body gives the key back, and says in time what the task became."""

from __future__ import annotations

import time

import pytest
from celery.exceptions import SoftTimeLimitExceeded, WorkerLostError

from celery_redislock import LockLost
from tests.lab.servers import wait_until
from tests.lab.versions import BEFORE_5_7


def is_free(task, *args):
    return lambda: task.lock_info(*args) is None


def test_success_and_failure_release_in_after_return(tasks, start_worker, locks):
    start_worker(1)
    assert tasks.ends.delay("k", "success").get(timeout=10) == "success"
    with pytest.raises(ValueError, match="failure"):
        tasks.ends.delay("k", "failure").get(timeout=10)
    wait_until(is_free(tasks.ends, "k", "any"), "the key is free", 15)  # the lease is 30 s
    assert locks.client.keys() == []


@pytest.mark.parametrize("how", ["ignore", "reject"])
def test_what_skips_after_return_releases_when_the_run_has_been_traced(tasks, start_worker, ledger, locks, how):
    start_worker(1)
    tasks.ends.delay("k", how)
    after_it = tasks.ends.delay("k", "success")
    wait_until(after_it.ready, "the next one has run", 10)
    assert after_it.get() == "success"
    assert ledger.items() == [how, "success"]
    wait_until(lambda: locks.client.keys() == [], "nothing is left")


def test_a_task_without_a_lock_ends_in_a_child_without_a_call_of_ours(tasks, start_worker):
    start_worker(1)
    assert tasks.ends.delay("k", "ignore").ready() is False
    assert tasks.hears.delay().get(timeout=10) == []


def test_retry_releases_and_its_next_attempt_takes_the_key_anew(tasks, start_worker, ledger, locks):
    start_worker(1)
    assert tasks.ends.delay("k", "retry").get(timeout=10) == "retry"
    assert ledger.items() == ["retry", "retry"]
    wait_until(lambda: locks.client.keys() == [], "nothing is left")


def test_system_exit_releases(tasks, start_worker, locks):
    start_worker(1)
    result = tasks.ends.delay("k", "exit")
    if not BEFORE_5_7:  # else nobody ever hears of its end
        with pytest.raises(WorkerLostError):
            result.get(timeout=20)
    assert tasks.ends.delay("k", "success").get(timeout=20) == "success"


def test_a_failing_hook_of_the_users_does_not_keep_the_key(tasks, start_worker, locks):
    worker = start_worker(1)
    tasks.hooked.delay("k")
    wait_until(lambda: "the user's own hook fails" in worker.output(), "the hook failed")
    wait_until(lambda: locks.client.keys() == [], "nothing is left")


def test_a_soft_time_limit_is_an_ordinary_failure(tasks, start_worker, locks):
    start_worker(1)
    with pytest.raises(SoftTimeLimitExceeded):
        tasks.work.apply_async(("k", "item", 30), soft_time_limit=1).get(timeout=10)
    wait_until(lambda: locks.client.keys() == [], "nothing is left", 15)


@pytest.mark.parametrize("options", [{}, {"task_id": "its own"}], ids=["plain", "with an id"])
class TestAPublishWhoseCallableKeyIsSlow:
    """Nothing that is raised in the body meanwhile is taken for an error of the callable's."""

    def test_does_not_swallow_a_soft_time_limit(self, tasks, start_worker, options):
        start_worker(1)
        with pytest.raises(SoftTimeLimitExceeded):
            tasks.publishes.apply_async(("k", tasks.slow_key.name), options, soft_time_limit=1).get(timeout=20)

    def test_does_not_swallow_the_loss_of_the_lock(self, config, tasks, start_worker, running, locks, options):
        config.settings["redislock_lease"] = 3.0
        start_worker(1)
        result = tasks.publishes.apply_async(("k", tasks.slow_key.name), options)
        running()
        locks.client.delete(tasks.publishes.lock_for("k").name)
        with pytest.raises(LockLost):
            result.get(timeout=20)


def test_a_soft_time_limit_amid_the_publish_of_a_retry_loses_no_run(tasks, start_worker):
    start_worker(1)
    assert tasks.slow_key.apply_async((1,), soft_time_limit=3).get(timeout=20) == 1


def test_a_before_start_without_super_fails_the_task_instead_of_running_it_unlocked(tasks, start_worker, ledger):
    start_worker(1)
    with pytest.raises(Exception, match=r"super\(\).before_start"):
        tasks.unhooked.delay().get(timeout=10)
    assert ledger.runs() == []


@pytest.mark.parametrize(
    ("policy", "state"), [("skip", "REVOKED"), ("wait", "SUCCESS"), ("raise", "FAILURE"), ("join", "SUCCESS")]
)
def test_a_before_start_that_swallows_an_error_of_the_locks_runs_no_body_without_it(
    tasks, start_worker, running, gate, ledger, nothing_is_left, policy, state
):
    worker = start_worker(2)
    holder = tasks.swallowing_wait.delay("holder", gate)
    running("holder")
    duplicate = getattr(tasks, f"swallowing_{policy}").delay("duplicate")
    wait_until(lambda: f"{duplicate.id}]: lock redislock:{{swallowing}} is held by" in worker.output(), "they met")
    gate.open()
    assert holder.get(timeout=10) == "holder"
    duplicate.get(timeout=20, propagate=False)
    assert duplicate.state == state
    assert ledger.items() == ["holder"] + ["duplicate"] * (policy == "wait")
    assert ledger.overlaps() == []
    nothing_is_left()


def test_a_before_start_that_asks_until_the_key_is_free_leaves_none_of_what_it_was_granted(
    tasks, start_worker, ledger, nothing_is_left
):
    worker = start_worker(1)
    with tasks.polling.lock_for():
        result = tasks.polling.delay()
        wait_until(lambda: "is held by" in worker.output(), "it has met the key")
    assert result.get(timeout=20) == 1
    assert ledger.items() == ["0", "1"]
    nothing_is_left()


def test_a_run_of_three_leases_keeps_its_key_while_duplicates_knock(config, start_worker, ledger, gate):
    from tests.lab.app import make_app

    lease = 4.0
    config.settings["redislock_lease"] = lease
    app = make_app(config)
    start_worker(2)
    long_run = app.tasks["lab.once"].delay("k", "long", gate)
    wait_until(ledger.runs, "it runs")
    end = time.monotonic() + 3 * lease
    while time.monotonic() < end:
        duplicate = app.tasks["lab.once"].delay("k", "duplicate")
        duplicate.get(timeout=20, propagate=False)
        assert duplicate.state == "REVOKED"
        time.sleep(0.2)
    gate.open()
    assert long_run.get(timeout=10) == "long"
    assert ledger.overlaps() == []
