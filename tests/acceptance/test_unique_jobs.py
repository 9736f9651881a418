"""The scopes job and queue with real workers: from the publish to the end."""

from __future__ import annotations

import time

import pytest
from celery.exceptions import TaskRevokedError

from tests.conftest import on_every_broker, on_every_queue
from tests.lab.servers import wait_until
from tests.lab.wake_ups import A_MINUTE, counts_on_wake_ups


class TestScopeJob:
    @on_every_broker
    def test_the_existing_result_is_real_and_the_key_is_free_after_its_run(
        self, tasks, start_worker, ledger, running, gate, nothing_is_left
    ):
        first = tasks.job.delay("k", "first", gate)
        queued = tasks.job.delay("k", "not sent")
        start_worker(2)
        running("first")
        meanwhile = tasks.job.delay("k", "not sent")
        gate.open()
        assert (queued.id, meanwhile.id) == (first.id, first.id)
        assert meanwhile.get(timeout=10) == "first"
        nothing_is_left()
        assert tasks.job.delay("k", "second").get(timeout=10) == "second"
        assert ledger.items() == ["first", "second"]

    def test_the_run_has_the_lease_of_its_own_and_takes_two_round_trips(
        self, tasks, start_worker, running, locks, gate, nothing_is_left
    ):
        start_worker(1)
        tasks.job.delay("warm")
        nothing_is_left()
        locks.client.config_resetstat()
        tasks.job.delay("k", "item", gate)
        running("item")
        (key,) = locks.client.keys()
        assert 0 < locks.client.ttl(key) <= 30
        assert not locks.client.get(key).startswith(b"~")
        gate.open()
        nothing_is_left()
        assert locks.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 2 + 2

    @pytest.mark.parametrize("how", ["success", "failure", "ignore", "reject", "exit"])
    def test_the_key_is_free_after_every_way_out(self, tasks, start_worker, running, nothing_is_left, how):
        start_worker(1)
        tasks.job_ends.delay("k", how)
        running(how)
        nothing_is_left()

    @on_every_broker
    def test_the_key_is_held_across_retries(self, tasks, start_worker, ledger, running, locks, nothing_is_left):
        """The next attempt arrives before the `finally` of this one has ended; none waits for longer than that."""
        start_worker(3)
        first = tasks.job_again.delay("k", "a", 3, 0.5)
        seen = set()
        while not first.ready():
            seen.add(tasks.job_again.delay("k", "b").id)
        seen.discard(first.id)
        assert first.get(timeout=20) == "a"
        assert len(seen) <= 1  # one may have come between the end of the first and its result
        wait_until(lambda: len(ledger.runs()) == 4 + len(seen), "all have run")
        assert ledger.items()[:4] == ["a0", "a1", "a2", "a3"]
        assert ledger.overlaps() == []
        nothing_is_left()

    @on_every_broker
    @pytest.mark.parametrize("child", [{}, {"worker_max_tasks_per_child": 1}], ids=["kept", "recycled"])
    def test_a_retry_that_is_sent_before_its_run_asks_for_the_key_keeps_the_key(
        self, config, tasks, start_worker, ledger, locks, nothing_is_left, child
    ):
        config.settings.update(child)
        start_worker(2)
        first = tasks.put_off_job.delay("k", 6)
        wait_until(lambda: first.state == "RETRY", "it has retried")
        (key,) = locks.client.keys()
        wait_until(lambda: locks.client.ttl(key) > 3600, "the key is kept for its countdown too")
        almost_due = time.monotonic() + 4.0
        while time.monotonic() < almost_due:
            assert tasks.put_off_job.delay("k", 6).id == first.id
            time.sleep(0.1)
        first.get(timeout=10)
        assert len(ledger.runs()) == 1
        nothing_is_left()

    def test_a_retry_to_come_keeps_the_key_for_its_countdown_and_lock_queue_ttl(self, tasks, start_worker, locks):
        start_worker(1)
        first = tasks.job_again.delay("k", "a", 1, countdown=500)
        wait_until(lambda: first.state == "RETRY", "it has retried")

        def handed_over():
            keys = locks.client.keys()
            return [locks.client.ttl(key) for key in keys if locks.client.get(key).startswith(b"~")]

        wait_until(handed_over, "the key is handed over")
        (ttl,) = handed_over()
        assert 3600 < ttl <= 4100
        assert tasks.job_again.delay("k", "b").id == first.id

    def test_a_successor_is_no_duplicate(self, tasks, start_worker, ledger, nothing_is_left):
        start_worker(2)
        tasks.next_job.delay("k", 1, 5)
        wait_until(lambda: len(ledger.runs()) == 5, "all pages")
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_a_duplicate_that_had_to_be_sent_meets_its_policy(self, tasks, start_worker, ledger, running, gate):
        start_worker(2)
        first = tasks.job.delay("k", "first", gate)
        running("first")
        with pytest.raises(TaskRevokedError, match=f"duplicate of {first.id}"):
            tasks.job.apply_async(("k", "second"), task_id="mine").get(timeout=10)
        gate.open()
        waits = tasks.patient_job.delay("l", "third", 1.0)
        running("third")
        assert tasks.patient_job.apply_async(("l", "fourth"), task_id="too").get(timeout=10) == "fourth"
        assert waits.get(timeout=10) == "third"
        assert ledger.items() == ["first", "third", "fourth"]
        assert ledger.overlaps() == []

    @counts_on_wake_ups(A_MINUTE)
    def test_wait_does_not_block_the_only_child_for_a_holder_that_is_queued_behind_it(
        self, config, tasks, start_worker, ledger, app
    ):
        queue = f"{config.queue}-later"
        first = tasks.patient_job.apply_async(("k", "first"), queue=queue)
        second = tasks.patient_job.apply_async(("k", "second"), task_id="second")
        worker = start_worker(1)
        wait_until(lambda: f"task lab.patient_job[{second.id}]: lock" in worker.output(), "it has met the key")
        assert tasks.plain.delay().get(timeout=20) == "plain"
        app.control.add_consumer(queue, reply=True, limit=1, timeout=10)
        assert first.get(timeout=20) == "first"
        assert second.get(timeout=20) == "second"

    def test_a_lock_outside_tasks_makes_the_job_wait(self, tasks, start_worker, ledger):
        start_worker(1)
        with tasks.job.lock_for("k"):
            result = tasks.job.delay("k", "item")
            wait_until(lambda: result.state == "RETRY", "it has met the lock")
        assert result.get(timeout=10) == "item"

    def test_another_task_that_shares_the_key_takes_its_turn(self, tasks, start_worker, ledger, running):
        start_worker(2)
        first = tasks.shared_job_too.delay("k", 1.0)
        running("shared_job_too")
        second = tasks.shared_job.delay("k")
        assert [second.get(timeout=10), first.get(timeout=10)] == ["shared_job", "shared_job_too"]
        assert ledger.overlaps() == []

    def test_a_message_whose_key_has_lapsed_still_runs(self, tasks, start_worker, ledger, locks):
        lapsed = tasks.job.delay("k", "lapsed")
        locks.client.flushall()
        later = tasks.job.delay("k", "later", 1.0)
        assert later.duplicate is False
        start_worker(2)
        assert [lapsed.get(timeout=10), later.get(timeout=10)] == ["lapsed", "later"]
        assert sorted(ledger.items()) == ["lapsed", "later"]
        assert ledger.overlaps() == []

    def test_a_message_of_a_purged_queue_keeps_its_key_for_lock_queue_ttl(self, config, app, tasks, start_worker):
        app.conf.redislock_queue_ttl = 1.0
        purged = tasks.job.delay("k", "purged")
        app.control.purge()
        wait_until(lambda: not tasks.job.delay("k", "next").duplicate, "its key is free")
        start_worker(1)
        assert tasks.job.delay("k").id != purged.id
        wait_until(lambda: tasks.job.lock_info("k") is None, "the next one has run")

    def test_the_publisher_and_the_worker_may_have_other_scopes(self, config, tasks, start_worker, nothing_is_left):
        """As while a change of the scope is rolled out: the message tells what was left to it."""
        config.settings["task_annotations"] = {
            "lab.job": {"lock_scope": "run"},
            "lab.queued": {"lock_scope": "run"},
        }
        results = [tasks.job.delay("k", "job"), tasks.queued.delay("k", "queued")]  # with the scopes of this app
        start_worker(1)
        assert [result.get(timeout=10) for result in results] == ["job", "queued"]
        nothing_is_left()


class TestScopeQueue:
    @on_every_queue
    def test_one_runs_one_waits_and_the_rest_are_duplicates_of_that_one(
        self, tasks, start_worker, ledger, running, gate, nothing_is_left
    ):
        task = tasks.queued
        start_worker(3)
        first = task.delay("k", "first", gate)
        running("first")
        second = task.delay("k", "second", 0.5)
        others = [task.delay("k", f"other {number}") for number in range(5)]
        assert second.duplicate is False
        assert {other.id for other in others} == {second.id}
        gate.open()
        running("second")
        third = task.delay("k", "third")
        assert third.duplicate is False
        assert [result.get(timeout=10) for result in (first, second, third)] == ["first", "second", "third"]
        assert ledger.items() == ["first", "second", "third"]
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_the_place_is_kept_while_the_one_that_waits_stands_in_line(
        self, config, tasks, start_worker, running, gate
    ):
        config.settings["redislock_queue_ttl"] = 4.0
        start_worker(2)
        tasks.queued.delay("k", "first", gate)
        running("first")
        tasks.queued.app.conf.redislock_queue_ttl = 4.0
        second = tasks.queued.delay("k", "second")
        end = time.monotonic() + 6.0
        while time.monotonic() < end:
            assert tasks.queued.delay("k", "third").id == second.id
            time.sleep(0.1)

    def test_the_place_is_kept_though_the_child_that_met_the_key_is_recycled(
        self, config, tasks, start_worker, running, ledger, gate
    ):
        config.settings["worker_max_tasks_per_child"] = 1
        worker = start_worker(2)
        tasks.queued.delay("k", "first", gate)
        busy = running("first")
        (idle,) = {child.pid for child in worker.children()} - {busy}
        second = tasks.queued.delay("k", "second")
        wait_until(lambda: idle not in {child.pid for child in worker.children()}, "its child has gone")
        assert ledger.conflicts()
        for _ in range(20):
            assert tasks.queued.delay("k", "third").id == second.id
            time.sleep(0.05)
        gate.open()
        assert second.get(timeout=20) == "second"

    @pytest.mark.parametrize("name", ["queued_again", "queued_held_again"])
    def test_a_retry_takes_its_turn_and_no_more_than_one_waits(
        self, tasks, start_worker, ledger, nothing_is_left, name
    ):
        task = getattr(tasks, name)
        start_worker(3)
        first = task.delay("k", "a", 2, 0.3)
        assert first.get(timeout=20) == "a"
        assert ledger.items() == ["a0", "a1", "a2"]
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_while_a_retry_waits_a_publish_is_a_duplicate_of_it(self, tasks, start_worker, ledger, running, locks):
        start_worker(2)
        first = tasks.queued_again.delay("k", "a", 1, countdown=60)
        wait_until(lambda: first.state == "RETRY", "it has retried")
        assert tasks.queued_again.delay("k", "b").id == first.id
