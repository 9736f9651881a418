"""Jobs that never start, and faults on their way: what was left to them is given up."""

from __future__ import annotations

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_redislock import LockKeyError, LockUnavailable
from celery_redislock.protocol.names import GONE
from celery_redislock.protocol.scripts import ACQUIRE, RELEASE, RENEW, RESERVE
from tests.conftest import in_pools, on_every_broker
from tests.lab.kinds import needs_one_server
from tests.lab.servers import need_pool, wait_until

#: Seconds of a countdown, after which a message is thrown away: until then it must have been revoked.
AMID = 6


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
        result = task.apply_async(("k", "revoked"), countdown=AMID)
        wait_until(lambda: f"[{result.id}] received" in worker.output(), "the worker has it")
        app.control.revoke(result.id)
        nothing_is_left()
        assert ledger.items() == []

    def test_a_retry_revoked_before_the_run_that_sent_it_has_ended_frees_its_key(
        self, tasks, app, start_worker, running, nothing_is_left, gate, tmp_path
    ):
        """What it was promised is left to nobody then."""
        worker = start_worker(2)
        before = tmp_path / "before"
        first = tasks.job_again.delay("k", "a", 1, before=str(before), file=str(gate))
        running("a0")
        app.control.revoke(first.id)
        wait_until(lambda: f"Tasks flagged as revoked: {first.id}" in worker.output(), "the worker knows")
        before.touch()
        wait_until(lambda: f"Discarding revoked task: lab.job_again[{first.id}]" in worker.output(), "it is revoked")
        gate.open()
        nothing_is_left()

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

    @pytest.mark.parametrize("name", ["job_again", "held_again", "queued_held_again"])
    def test_retries_that_have_run_in_children_that_are_recycled_leave_no_note_behind(
        self, config, tasks, start_worker, locks, name
    ):
        """They have used what was left to them, so that nobody can leave it to them once more."""
        config.settings["worker_max_tasks_per_child"] = 1
        worker = start_worker(2)
        # The pool may notice only after five seconds that a child has ended.
        assert getattr(tasks, name).delay("k", "a", 3).get(timeout=60) == "a"
        worker.stop()  # by its end it has looked after all its children
        assert locks.client.keys("*}") == []
        assert locks.client.keys(f"*{GONE}*") == []

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
        [(RESERVE, 1), (RENEW, 1), (ACQUIRE, 1), (RELEASE, 1), (ACQUIRE, 2), (RELEASE, 2)],
        ids=["taken", "lengthened", "claimed", "handed over", "claimed again", "released"],
    )
    def test_a_lost_reply_changes_nothing(self, lock_proxy, locks, tasks, start_worker, ledger, script, nth, hang):
        for known in (RESERVE, ACQUIRE, RENEW, RELEASE):
            locks.client.script_load(known.text)
        start_worker(2)
        fault = lock_proxy.drop_reply(b"EVALSHA", script.sha.encode(), nth, hang=hang)
        result = tasks.job_again.delay("k", "a", 1)
        assert result.get(timeout=30) == "a"
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
        self, config, lock_proxy, tasks, start_worker, ledger, running, locks, gate, name
    ):
        """It has given up what the run before it can leave it only when Redis answers again."""
        config.settings["redislock_on_outage"] = "run"
        start_worker(2)
        first = getattr(tasks, name).delay("k", "a", 1, before=str(gate))
        running("a0")
        lock_proxy.refuse()
        gate.open()
        assert first.get(timeout=20) == "a"
        assert ledger.items() == ["a0", "a1"]
        lock_proxy.mend()
        wait_until(lambda: locks.client.keys("*}") == [], "no lock is left, but notes", 10)

    @in_pools("threads", "gevent", others=["solo", "eventlet"])
    def test_in_every_pool_a_job_is_unique_and_what_does_not_start_is_given_up(
        self, tasks, app, start_worker, ledger, nothing_is_left, pool
    ):
        need_pool(pool)
        worker = start_worker(2, "-P", pool)
        first = tasks.job_again.delay("k", "a", 2, 0.2)
        assert first.get(timeout=20) == "a"
        nothing_is_left()
        later = [tasks.queued.apply_async((key, "revoked"), countdown=AMID) for key in range(50)]
        wait_until(lambda: all(f"[{result.id}] received" in worker.output() for result in later), "the worker has all")
        app.control.revoke([result.id for result in later])
        nothing_is_left()
        assert ledger.items() == ["a0", "a1", "a2"]

    def test_a_claimed_message_that_comes_again_runs_once(self, config, tasks, start_worker, ledger, locks, gate):
        """Its first delivery has used what was left to it."""
        config.settings["task_acks_late"] = True
        config.settings["broker_transport_options"] = {
            "visibility_timeout": 2,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
        worker = start_worker(2)
        first = tasks.job.delay("k", "a", file=str(gate))
        wait_until(ledger.conflicts, "a copy has met it")
        gate.open()
        assert first.get(timeout=20) == "a"
        wait_until(
            lambda: f"{first.id}]: dropped: it already finished" in worker.output(), "a copy came and was dropped"
        )
        assert ledger.items() == ["a"]
        wait_until(lambda: locks.client.keys("*}") == [], "no lock is left, but notes", 10)

    def test_one_whose_child_dies_while_redis_is_away_frees_its_key_afterwards(
        self, lock_proxy, tasks, app, start_worker, nothing_is_left
    ):
        worker = start_worker(1)
        result = tasks.dying_job.apply_async(("k",), queue="later")
        lock_proxy.refuse()
        app.control.add_consumer("later")
        died = f"task lab.dying_job[{result.id}]: its process ended, but its lock may not be released"
        wait_until(lambda: died in worker.output(), "it has died")
        lock_proxy.mend()
        nothing_is_left()


@needs_one_server("its keys are put back as they were")
@pytest.mark.parametrize("is_known", [True, False])
def test_a_job_whose_run_a_new_primary_does_not_know_of_keeps_no_other_from_its_key_where_its_end_is_known(
    config, locks, start_worker, request, ledger, nothing_is_left, is_known
):
    """The primary fails after the publish was replicated, and before the start of the run was."""
    config.settings["task_annotations"] = {"lab.job": {"ignore_result": not is_known}}
    job = request.getfixturevalue("tasks").job
    first = job.delay("k", "first")
    replicated = {key: (locks.client.pttl(key), locks.client.dump(key)) for key in locks.held()}
    start_worker(1)
    wait_until(lambda: ledger.items() == ["first"], "it runs")
    nothing_is_left()
    for key, (ttl, value) in replicated.items():
        locks.client.restore(key, ttl, value)
    if is_known:
        assert job.delay("k", "second").get(timeout=20) == "second"
    else:
        assert job.delay("k", "second").id == first.id
