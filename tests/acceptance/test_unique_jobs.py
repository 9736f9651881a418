"""The scopes job and queue with real workers: from the publish to the end, and every way out before the start."""

from __future__ import annotations

import time

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_redislock import LockConflict, LockKeyError, LockUnavailable
from celery_redislock.script import ACQUIRE, RELEASE, RENEW
from celery_redislock.store import LockStore
from tests.conftest import on_every_broker
from tests.lab.servers import wait_until


@pytest.fixture
def running(ledger):
    """Waits until a run of this item has begun; returns the child's pid."""

    def wait(item):
        wait_until(lambda: str(item) in ledger.items(), f"{item} runs")
        return [run.pid for run in ledger.runs() if run.item == str(item)][-1]

    return wait


@pytest.fixture
def nothing_is_left(locks):
    """Waits until Redis is empty. The lease of these tests is 30 s, and a message's key lives for an hour."""
    return lambda: wait_until(lambda: locks.client.keys() == [], "nothing is left", 10)


class TestScopeJob:
    @on_every_broker
    def test_the_existing_result_is_real_and_the_key_is_free_after_its_run(
        self, tasks, start_worker, ledger, running, nothing_is_left
    ):
        first = tasks.job.delay("k", "first", 1.0)
        queued = tasks.job.delay("k", "not sent")
        start_worker(2)
        running("first")
        meanwhile = tasks.job.delay("k", "not sent")
        assert (queued.id, meanwhile.id) == (first.id, first.id)
        assert meanwhile.get(timeout=10) == "first"
        nothing_is_left()
        assert tasks.job.delay("k", "second").get(timeout=10) == "second"
        assert ledger.items() == ["first", "second"]

    def test_the_run_has_the_lease_of_its_own_and_takes_two_round_trips(
        self, tasks, start_worker, running, locks, nothing_is_left
    ):
        start_worker(1)
        tasks.job.delay("warm")
        nothing_is_left()
        locks.client.config_resetstat()
        tasks.job.delay("k", "item", 1.0)
        running("item")
        (key,) = locks.client.keys()
        assert 0 < locks.client.ttl(key) <= 30
        assert not locks.client.get(key).startswith(b"~")
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

    def test_a_retry_that_is_revoked_before_the_key_is_left_to_it_keeps_nothing(self, tasks, app, start_worker, ledger):
        """It arrives while the body that has sent it is still in its `finally`."""
        worker = start_worker(2)
        result = tasks.job_again.delay("k", "a", 1, 3.0)
        wait_until(ledger.conflicts, "the retry has come")
        app.control.revoke(result.id)
        wait_until(lambda: f"Discarding revoked task: lab.job_again[{result.id}]" in worker.output(), "it is dropped")
        assert len(ledger.running()) == 1
        wait_until(lambda: not ledger.running(), "the body has ended")
        wait_until(lambda: tasks.job_again.lock_info("k") is None, "its key is free", 10)
        assert ledger.items() == ["a0"]

    def test_a_successor_is_no_duplicate(self, tasks, start_worker, ledger, nothing_is_left):
        start_worker(2)
        tasks.next_job.delay("k", 1, 5)
        wait_until(lambda: len(ledger.runs()) == 5, "all pages")
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_a_duplicate_that_had_to_be_sent_meets_its_policy(self, tasks, start_worker, ledger, running):
        start_worker(2)
        first = tasks.job.delay("k", "first", 1.0)
        running("first")
        with pytest.raises(TaskRevokedError, match=f"duplicate of {first.id}"):
            tasks.job.apply_async(("k", "second"), task_id="mine").get(timeout=10)
        waits = tasks.patient_job.delay("l", "third", 1.0)
        running("third")
        assert tasks.patient_job.apply_async(("l", "fourth"), task_id="too").get(timeout=10) == "fourth"
        assert waits.get(timeout=10) == "third"
        assert ledger.items() == ["first", "third", "fourth"]
        assert ledger.overlaps() == []

    def test_wait_does_not_block_the_only_child_for_a_holder_that_is_queued_behind_it(
        self, tasks, start_worker, ledger, app
    ):
        """It would wait for ten seconds for a message that only this child could run."""
        first = tasks.patient_job.apply_async(("k", "first"), countdown=3)
        second = tasks.patient_job.apply_async(("k", "second"), task_id="second")
        worker = start_worker(1)
        wait_until(lambda: f"task lab.patient_job[{second.id}]: lock" in worker.output(), "it has met the key")
        started = time.monotonic()
        assert tasks.plain.delay().get(timeout=10) == "plain"
        assert time.monotonic() - started < 5
        assert first.get(timeout=20) == "first"
        assert second.get(timeout=20) == "second"

    def test_a_lock_outside_tasks_makes_the_job_come_back(self, tasks, start_worker, ledger):
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
    @pytest.mark.parametrize("name", ["queued", "queued_waits"])
    @on_every_broker
    def test_one_runs_one_waits_and_the_rest_are_duplicates_of_that_one(
        self, tasks, start_worker, ledger, running, nothing_is_left, name
    ):
        task = getattr(tasks, name)
        start_worker(3)
        first = task.delay("k", "first", 1.0)
        running("first")
        second = task.delay("k", "second", 0.5)
        others = [task.delay("k", f"other {number}") for number in range(5)]
        assert second.duplicate is False
        assert {other.id for other in others} == {second.id}
        running("second")
        third = task.delay("k", "third")
        assert third.duplicate is False
        assert [result.get(timeout=10) for result in (first, second, third)] == ["first", "second", "third"]
        assert ledger.items() == ["first", "second", "third"]
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_the_place_is_kept_while_the_one_that_waits_comes_back(self, config, tasks, start_worker, running, locks):
        config.settings["redislock_queue_ttl"] = 1.5
        start_worker(2)
        tasks.queued.delay("k", "first", 5.0)
        running("first")
        tasks.queued.app.conf.redislock_queue_ttl = 1.5
        second = tasks.queued.delay("k", "second")
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            assert tasks.queued.delay("k", "third").id == second.id
            time.sleep(0.1)

    def test_the_place_is_kept_though_the_child_that_sent_its_message_back_is_recycled(
        self, config, tasks, start_worker, running, ledger
    ):
        config.settings["worker_max_tasks_per_child"] = 1
        worker = start_worker(2)
        tasks.queued.delay("k", "first", 5.0)
        busy = running("first")
        (idle,) = {child.pid for child in worker.children()} - {busy}
        second = tasks.queued.delay("k", "second")
        wait_until(lambda: idle not in {child.pid for child in worker.children()}, "its child has gone")
        assert ledger.conflicts()
        while ledger.running():
            assert tasks.queued.delay("k", "third").id == second.id
            time.sleep(0.05)

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


class TestMessagesThatNeverStart:
    @pytest.fixture(params=["job", "queued"])
    def task(self, request, tasks):
        return getattr(tasks, request.param)

    @on_every_broker
    def test_a_revoked_one_frees_its_key(self, task, app, start_worker, ledger, nothing_is_left):
        worker = start_worker(1)
        app.control.revoke("revoked")
        wait_until(lambda: "Tasks flagged as revoked: revoked" in worker.output(), "the worker knows")
        result = task.apply_async(("k", "revoked"), task_id="revoked")
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
        nothing_is_left()
        assert task.delay("k", "next").get(timeout=10) == "next"
        assert ledger.items() == ["next"]

    def test_one_revoked_amid_its_countdown_frees_its_key(self, task, app, start_worker, ledger, nothing_is_left):
        worker = start_worker(1)
        result = task.apply_async(("k", "revoked"), countdown=2)
        wait_until(lambda: f"[{result.id}] received" in worker.output(), "the worker has it")
        app.control.revoke(result.id)
        nothing_is_left()
        assert ledger.items() == []

    def test_a_retry_revoked_before_the_run_that_sent_it_has_ended_frees_its_key(
        self, tasks, app, start_worker, running, nothing_is_left
    ):
        """What it was promised is left to nobody then."""
        worker = start_worker(2)
        first = tasks.job_again.delay("k", "a", 1, 2.0)
        running("a0")
        app.control.revoke(first.id)
        wait_until(lambda: f"Discarding revoked task: lab.job_again[{first.id}]" in worker.output(), "it is revoked")
        nothing_is_left()

    def test_an_expired_one_frees_its_key(self, task, start_worker, locks, ledger):
        """The key lives until the message expires at the most, and a worker that sees the message gives it back."""
        result = task.apply_async(("k", "expired"), expires=1)
        (key,) = locks.client.keys()
        assert locks.client.pttl(key) <= 1000
        locks.client.persist(key)
        expiry = time.time() + 1
        wait_until(lambda: time.time() > expiry, "it has expired")
        start_worker(1)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
        wait_until(lambda: locks.client.keys() == [], "nothing is left")
        assert ledger.items() == []

    def test_one_rejected_before_it_starts_frees_its_key(self, tasks, start_worker, nothing_is_left):
        worker = start_worker(1)
        result = tasks.refusing_job.delay("k")
        wait_until(lambda: f"[{result.id}]" in worker.output(), "the worker has it")
        nothing_is_left()

    def test_one_rejected_by_a_child_that_is_recycled_frees_its_key(self, config, tasks, start_worker, nothing_is_left):
        config.settings["worker_max_tasks_per_child"] = 1
        worker = start_worker(1)
        result = tasks.refusing_job.delay("k")
        wait_until(lambda: f"[{result.id}]" in worker.output(), "the worker has it")
        nothing_is_left()

    def test_one_whose_child_dies_before_it_asks_frees_its_key(self, tasks, start_worker, nothing_is_left):
        worker = start_worker(1)
        result = tasks.dying_job.delay("k")
        wait_until(lambda: f"[{result.id}] received" in worker.output(), "the worker has it")
        nothing_is_left()


class TestAStepOfAChain:
    """Its worker publishes it, in the name of the step before, which must not fail for it."""

    def test_whose_key_cannot_be_made_fails_itself(self, tasks, start_worker):
        start_worker(1)
        result = chain(tasks.plain.si(), tasks.shared_job.si(1.5)).apply_async()
        with pytest.raises(LockKeyError, match="'key' is a float"):
            result.get(timeout=10)
        assert result.parent.get(timeout=10) == "plain"

    def test_that_lock_on_outage_refuses_fails_itself(self, config, lock_proxy, tasks, start_worker):
        config.settings["redislock_on_outage"] = "raise"
        start_worker(1)
        lock_proxy.refuse()
        result = chain(tasks.plain.si(), tasks.job.si("k")).apply_async()
        with pytest.raises(LockUnavailable):
            result.get(timeout=10)
        assert result.parent.get(timeout=10) == "plain"


class TestFaults:
    """The lease of these tests is 30 s, and what is left to a message lives for an hour: nothing ends by itself."""

    @pytest.mark.parametrize("hang", [False, True], ids=["cut", "silent"])
    @pytest.mark.parametrize(
        ("script", "nth"),
        [(ACQUIRE, 1), (RENEW, 1), (ACQUIRE, 2), (RELEASE, 1), (ACQUIRE, 3), (RELEASE, 2)],
        ids=["taken", "lengthened", "claimed", "handed over", "claimed again", "released"],
    )
    def test_a_lost_reply_changes_nothing(self, lock_proxy, locks, tasks, start_worker, ledger, script, nth, hang):
        for known in (ACQUIRE, RENEW, RELEASE):
            locks.client.script_load(known.text)
        start_worker(2)
        fault = lock_proxy.drop_reply(b"EVALSHA", script.sha.encode(), nth, hang=hang)
        result = tasks.job_again.delay("k", "a", 1)
        assert result.get(timeout=10) == "a"
        fault.wait()
        assert ledger.items() == ["a0", "a1"]
        assert ledger.overlaps() == []
        wait_until(lambda: locks.client.keys("*}") == [], "no lock is left, but notes", 10)

    def test_a_message_that_is_out_although_its_publish_failed_runs_and_no_key_stays(
        self, broker_proxy, tasks, start_worker, ledger, nothing_is_left
    ):
        fault = broker_proxy.drop_reply(b"LPUSH")
        with pytest.raises(OperationalError):
            tasks.job.delay("k", "out")
        assert fault.struck
        nothing_is_left()
        second = tasks.job.delay("k", "second")
        assert second.duplicate is False
        start_worker(2)
        assert second.get(timeout=10) == "second"
        wait_until(lambda: sorted(ledger.items()) == ["out", "second"], "both have run")
        assert ledger.overlaps() == []
        nothing_is_left()

    @pytest.mark.parametrize("name", ["job_again", "held_again"])
    def test_a_retry_that_ran_without_its_lock_is_left_nothing_afterwards(
        self, config, lock_proxy, tasks, start_worker, ledger, running, locks, name
    ):
        """It has given up what the run before it can leave it only when Redis answers again."""
        config.settings["redislock_on_outage"] = "run"
        start_worker(2)
        first = getattr(tasks, name).delay("k", "a", 1, 1.0)
        running("a0")
        lock_proxy.refuse()
        assert first.get(timeout=20) == "a"
        assert ledger.items() == ["a0", "a1"]
        lock_proxy.mend()
        wait_until(lambda: locks.client.keys("*}") == [], "no lock is left, but notes", 10)

    @pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
    def test_in_every_pool_a_job_is_unique_and_what_does_not_start_is_given_up(
        self, tasks, app, start_worker, ledger, nothing_is_left, pool
    ):
        worker = start_worker(2, "-P", pool)
        first = tasks.job_again.delay("k", "a", 2, 0.2)
        assert first.get(timeout=20) == "a"
        nothing_is_left()
        later = [tasks.queued.apply_async((key, "revoked"), countdown=2) for key in range(50)]
        wait_until(lambda: all(f"[{result.id}] received" in worker.output() for result in later), "the worker has all")
        app.control.revoke([result.id for result in later])
        nothing_is_left()
        assert ledger.items() == ["a0", "a1", "a2"]

    def test_a_claimed_message_that_comes_again_runs_once(self, config, tasks, start_worker, ledger, locks):
        """Its first delivery has used what was left to it."""
        config.settings["task_acks_late"] = True
        config.settings["broker_transport_options"] = {
            "visibility_timeout": 2,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
        worker = start_worker(2)
        first = tasks.job.delay("k", "a", 5.0)
        assert first.get(timeout=20) == "a"
        wait_until(lambda: f"{first.id}]: dropped, it has finished" in worker.output(), "a copy came and was dropped")
        assert ledger.items() == ["a"]
        wait_until(lambda: locks.client.keys("*}") == [], "no lock is left, but notes", 10)

    def test_one_whose_child_dies_while_redis_is_away_frees_its_key_afterwards(
        self, lock_proxy, tasks, start_worker, nothing_is_left
    ):
        worker = start_worker(1)
        result = tasks.dying_job.apply_async(("k",), countdown=1)
        lock_proxy.refuse()
        wait_until(lambda: f"task lab.dying_job[{result.id}]: its process died; " in worker.output(), "it has died")
        lock_proxy.mend()
        nothing_is_left()


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

    @pytest.mark.parametrize("policy", ["retry", "wait"])
    def test_retry_and_wait_come_back_after_it(self, config, tasks, start_worker, ledger, policy):
        config.settings["redislock_retry_max_delay"] = 60.0
        task = getattr(tasks, f"cools_{policy}")
        start_worker(2)
        assert task.delay("k", "first").get(timeout=10) == "first"
        assert task.delay("k", "second").get(timeout=10) == "second"
        first, second = ledger.runs()
        assert second.start - first.end >= 1.9
        assert len(ledger.conflicts()) <= 3  # it has not asked again and again

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
        assert tasks.cools_retry.apply_async(("k", "item"), task_id="same").get(timeout=10) == "item"
        tasks.cools_retry.apply_async(("k", "item"), task_id="same")
        wait_until(lambda: "[same]: dropped, it has finished in another delivery" in worker.output(), "it is dropped")
        assert ledger.items() == ["item"]

    def test_the_death_of_an_idle_child_does_not_end_it(self, config, tasks, start_worker, ledger, locks):
        """Its main process releases what the child held last."""
        config.settings["task_annotations"] = {"lab.cools_skip": {"lock_cooldown": 60.0}}
        worker = start_worker(1)
        assert tasks.cools_skip.delay("k", "first").get(timeout=10) == "first"
        store, key = LockStore(locks.client), tasks.cools_skip.lock_for("k").name
        wait_until(lambda: store.inspect(key).state == "cooling", "it cools down")  # the result was stored before
        (child,) = worker.children()
        worker.kill_child(child.pid)
        wait_until(lambda: worker.children() and worker.children()[0].pid != child.pid, "there is another child")
        assert store.inspect(key).state == "cooling"
