"""Keys that are kept after a run: across a retry, and until they have cooled down."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict
from celery_redislock.server.lock_server import LockServer
from tests.lab.servers import wait_until
from tests.lab.wake_ups import A_MINUTE, counts_on_wake_ups


@counts_on_wake_ups(A_MINUTE)
def test_hold_on_retry_lets_nobody_in_between(tasks, start_worker, ledger, running):
    start_worker(3)
    first = tasks.held_again.delay("k", "a", 3, 0.3)
    running("a0")
    others = [tasks.held_again.delay("k", f"b{number}") for number in range(3)]
    assert first.get(timeout=20) == "a"
    for other in others:
        other.get(timeout=20)
    assert ledger.items()[:4] == ["a0", "a1", "a2", "a3"]
    assert ledger.overlaps() == []


def test_a_lost_key_is_not_handed_over(tasks, start_worker, ledger, running, locks):
    """The thief keeps what he took; the retry takes its turn after him."""
    start_worker(2)
    first = tasks.held_again.delay("k", "a", 1, 1.0)
    running("a0")
    (key,) = locks.client.keys()
    locks.client.set(key, "thief", px=2000)
    assert first.get(timeout=20) == "a"
    assert locks.client.get(key) != b"thief"
    assert ledger.items() == ["a0", "a1"]


class TestCooldown:
    def test_a_duplicate_is_skipped_and_told_why(self, tasks, start_worker, ledger, locks):
        start_worker(2)
        first = tasks.cools_skip.delay("k", "first")
        assert first.get(timeout=10) == "first"
        with pytest.raises(TaskRevokedError, match=f"cooling down after {first.id}"):
            tasks.cools_skip.delay("k", "second").get(timeout=10)
        (key,) = locks.client.keys()
        assert 0 < locks.client.pttl(key) <= 2000
        assert tasks.cools_skip.lock_info("k").state == "cooling"
        assert ledger.items() == ["first"]

    def test_who_waits_runs_as_soon_as_it_is_over(self, tasks, start_worker, ledger):
        start_worker(2)
        assert tasks.cools_wait.delay("k", "first").get(timeout=10) == "first"
        assert tasks.cools_wait.delay("k", "second").get(timeout=10) == "second"
        first, second = ledger.runs()
        assert second.start - first.end >= 1.9
        assert len(ledger.conflicts()) == 1  # it has not asked again and again

    def test_raise_names_the_run_that_succeeded_and_join_has_its_outcome_at_once(
        self, config, tasks, start_worker, ledger
    ):
        config.settings["task_annotations"] = {
            "lab.cools_raise": {"lock_cooldown": 60.0},
            "lab.cools_join": {"lock_cooldown": 60.0},
        }
        start_worker(1)
        first = tasks.cools_raise.delay("k", "first")
        assert first.get(timeout=10) == "first"
        with pytest.raises(LockConflict, match=f"{first.id}, which has succeeded on .* and cools down"):
            tasks.cools_raise.delay("k", "second").get(timeout=10)
        assert tasks.cools_join.delay("k", "third").get(timeout=10) == "third"
        assert tasks.cools_join.delay("k", "fourth").get(timeout=10) == "third"
        assert ledger.items() == ["first", "third"]

    def test_nothing_cools_down_after_a_failure(self, tasks, start_worker, locks):
        start_worker(1)
        with pytest.raises(ValueError, match="first fails"):
            tasks.cools_skip.delay("k", "first", fails=True).get(timeout=10)
        assert tasks.cools_skip.delay("k", "second").get(timeout=10) == "second"

    def test_in_scope_job_a_publish_is_answered_with_the_last_result(self, tasks, start_worker, ledger):
        start_worker(1)
        first = tasks.cooling_job.delay("k", "first")
        assert first.get(timeout=10) == "first"
        wait_until(lambda: tasks.cooling_job.lock_info("k").state == "cooling", "it cools down")
        second = tasks.cooling_job.delay("k", "second")
        assert (second.id, second.duplicate, second.get(timeout=1)) == (first.id, True, "first")
        wait_until(lambda: tasks.cooling_job.lock_info("k") is None, "it has cooled down")
        assert tasks.cooling_job.delay("k", "third").get(timeout=10) == "third"

    def test_a_copy_of_what_has_succeeded_is_dropped_while_the_key_cools_down(self, tasks, start_worker, ledger):
        worker = start_worker(1)
        send = tasks.cools_wait.app.send_task  # which does not name the publish: both are one message
        assert send("lab.cools_wait", ("k", "item"), task_id="same").get(timeout=10) == "item"
        send("lab.cools_wait", ("k", "item"), task_id="same")
        wait_until(lambda: "[same]: dropped, it has finished in another delivery" in worker.output(), "it is dropped")
        assert ledger.items() == ["item"]

    def test_the_death_of_an_idle_child_does_not_end_it(self, config, tasks, start_worker, ledger, locks):
        """Its main process releases what the child held last."""
        config.settings["task_annotations"] = {"lab.cools_skip": {"lock_cooldown": 60.0}}
        worker = start_worker(1)
        assert tasks.cools_skip.delay("k", "first").get(timeout=10) == "first"
        store, key = LockServer.behind(locks.client).store, tasks.cools_skip.lock_for("k").name
        wait_until(lambda: store.inspect(key).state == "cooling", "it cools down")  # the result was stored before
        (child,) = worker.children()
        worker.kill_child(child.pid)
        wait_until(lambda: worker.children() and worker.children()[0].pid != child.pid, "there is another child")
        assert store.inspect(key).state == "cooling"
