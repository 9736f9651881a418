"""Keys that are kept after a run: across a retry, and until they have cooled down."""

from __future__ import annotations

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict
from celery_redislock.lock.lock_server import LockServer
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


def test_a_lost_key_is_not_handed_over(tasks, start_worker, ledger, running, locks, gate):
    """The thief keeps what he took; the retry takes its turn after him."""
    start_worker(2)
    first = tasks.held_again.delay("k", "a", 1, file=str(gate))
    running("a0")
    key = tasks.held_again.lock_for("k").name
    locks.client.set(key, "thief", px=2000)
    gate.open()
    assert first.get(timeout=20) == "a"
    assert locks.client.get(key) != b"thief"
    assert ledger.items() == ["a0", "a1"]


@pytest.fixture
def for_a_minute(config):
    """The keys of these tests cool down for so long."""
    names = ("cools_skip", "cools_wait", "cools_raise", "cools_join", "cooling_job")
    config.settings["task_annotations"] = {f"lab.{name}": {"lock_cooldown": 60.0} for name in names}


class TestCooldown:
    def test_of_more_than_redis_can_count_is_one_of_thirty_years(self, tasks, start_worker, locks):
        worker = start_worker(2)
        assert tasks.cools_forever.delay("k", "first").get(timeout=10) == "first"
        wait_until(lambda: tasks.cools_forever.lock_info("k").state == "cooling", "it cools down")
        (key,) = locks.client.keys()
        assert locks.client.ttl(key) == pytest.approx(1e9, abs=60)
        assert "the lock server is unavailable" not in worker.output()

    @pytest.mark.usefixtures("for_a_minute")
    def test_a_duplicate_is_skipped_and_told_why(self, tasks, start_worker, ledger, locks):
        start_worker(2)
        first = tasks.cools_skip.delay("k", "first")
        assert first.get(timeout=10) == "first"
        wait_until(lambda: tasks.cools_skip.lock_info("k").state == "cooling", "it cools down")  # a moment later
        with pytest.raises(TaskRevokedError, match=f"cooling down after {first.id}"):
            tasks.cools_skip.delay("k", "second").get(timeout=10)
        (key,) = locks.client.keys()
        assert 0 < locks.client.pttl(key) <= 60_000
        assert tasks.cools_skip.lock_info("k").state == "cooling"
        assert ledger.items() == ["first"]

    @pytest.mark.parametrize(
        ("policy", "end"),
        [
            ("skip", "REVOKED"),
            ("raise", "FAILURE"),
            ("join", "first"),
            ("job", "first"),
            pytest.param("j" * 200, "first", id="a long name"),
        ],
    )
    def test_it_answers_who_comes_between_the_result_and_its_begin(
        self, tasks, start_worker, ledger, locks, gate, policy, end
    ):
        """Its result is stored a moment before the key cools down: a duplicate must not wait until that is over."""
        start_worker(2)
        task = getattr(tasks, f"lingers_then_cools_{policy}")
        first = task.delay("k", "first", file=str(gate))
        assert first.get(timeout=10) == "first"
        second = task.delay("k", "second")
        if policy == "join":  # it looks for the outcome when the first one does not hold the key any more
            wait_until(ledger.conflicts, "it has met the first one")
        else:
            wait_until(second.ready, "it is answered while the first one still holds its key")
        gate.open()
        wait_until(second.ready, "it is answered")
        assert end in (second.state, second.result)
        wait_until(lambda: task.lock_info("k").state == "cooling", "it cools down")
        assert ledger.items() == ["first"]

    def test_who_waits_runs_as_soon_as_it_is_over(self, config, tasks, start_worker, ledger):
        # Nothing but time ends it: the second message must arrive before that.
        config.settings["task_annotations"] = {"lab.cools_wait": {"lock_cooldown": 5.0}}
        start_worker(2)
        assert tasks.cools_wait.delay("k", "first").get(timeout=10) == "first"
        assert tasks.cools_wait.delay("k", "second").get(timeout=10) == "second"
        first, second = ledger.runs()
        assert second.start - first.end >= 4.9
        assert len(ledger.conflicts()) == 1  # it has not asked again and again

    @pytest.mark.usefixtures("for_a_minute")
    def test_raise_names_the_run_that_succeeded_and_join_has_its_outcome_at_once(self, tasks, start_worker, ledger):
        start_worker(1)
        first = tasks.cools_raise.delay("k", "first")
        assert first.get(timeout=10) == "first"
        with pytest.raises(LockConflict, match=f"{first.id}, which succeeded on .* and is cooling down"):
            tasks.cools_raise.delay("k", "second").get(timeout=10)
        assert tasks.cools_join.delay("k", "third").get(timeout=10) == "third"
        assert tasks.cools_join.delay("k", "fourth").get(timeout=10) == "third"
        assert ledger.items() == ["first", "third"]

    def test_nothing_cools_down_after_a_failure(self, tasks, start_worker, locks):
        start_worker(1)
        with pytest.raises(ValueError, match="first fails"):
            tasks.cools_skip.delay("k", "first", fails=True).get(timeout=10)
        assert tasks.cools_skip.delay("k", "second").get(timeout=10, propagate=False) == "second"

    @pytest.mark.usefixtures("for_a_minute")
    def test_in_scope_job_a_publish_is_answered_with_the_last_result(self, tasks, start_worker, ledger, locks):
        start_worker(1)
        first = tasks.cooling_job.delay("k", "first")
        assert first.get(timeout=10) == "first"
        wait_until(lambda: tasks.cooling_job.lock_info("k").state == "cooling", "it cools down")
        second = tasks.cooling_job.delay("k", "second")
        assert (second.id, second.duplicate, second.get(timeout=10)) == (first.id, True, "first")
        locks.client.pexpire(tasks.cooling_job.lock_for("k").name, 1)
        wait_until(lambda: tasks.cooling_job.lock_info("k") is None, "it has cooled down")
        assert tasks.cooling_job.delay("k", "third").get(timeout=10) == "third"

    @pytest.mark.usefixtures("for_a_minute")
    def test_a_chords_body_is_skipped_for_a_member_of_its_header_that_did_not_end_last(
        self, tasks, start_worker, ledger, gate
    ):
        """Its parent is the one that ended last, as Celery tells; of the others it knows nothing."""
        start_worker(2)
        header = [tasks.cools_skip.si("k", "header"), tasks.work.si("other", "ends last", gate)]
        body = chord(header)(tasks.cools_skip.si("k", "body"))
        wait_until(lambda: getattr(tasks.cools_skip.lock_info("k"), "state", "") == "cooling", "it cools down")
        gate.open()
        with pytest.raises(TaskRevokedError, match=f"cooling down after {body.parent[0].id}"):
            body.get(timeout=10)
        assert sorted(ledger.items()) == ["ends last", "header"]

    def test_a_chords_body_waits_for_the_member_of_its_header_that_ended_last(self, tasks, start_worker, ledger):
        start_worker(1)
        before = tasks.work.si("other", "other")
        body = chord([before, chain(tasks.work.si("other", "first"), tasks.cools_skip.si("k", "header"))])(
            tasks.cools_skip.si("k", "body")
        )
        assert body.get(timeout=20) == "body"
        assert ledger.items()[-2:] == ["header", "body"]

    @pytest.mark.usefixtures("for_a_minute")
    def test_a_copy_of_what_has_succeeded_is_dropped_while_the_key_cools_down(self, tasks, start_worker, ledger):
        worker = start_worker(1)
        send = tasks.cools_wait.app.send_task  # which does not name the publish: both are one message
        assert send("lab.cools_wait", ("k", "item"), task_id="same").get(timeout=10) == "item"
        send("lab.cools_wait", ("k", "item"), task_id="same")
        wait_until(
            lambda: "[same]: dropped: it already finished in another delivery" in worker.output(), "it is dropped"
        )
        assert ledger.items() == ["item"]

    @pytest.mark.usefixtures("for_a_minute")
    def test_the_death_of_an_idle_child_does_not_end_it(self, tasks, start_worker, ledger, locks):
        """Its main process releases what the child held last."""
        worker = start_worker(1)
        assert tasks.cools_skip.delay("k", "first").get(timeout=10) == "first"
        store, demand = LockServer.behind(locks.client).store, tasks.cools_skip.lock_for("k").demand
        wait_until(lambda: store.inspect(demand).state == "cooling", "it cools down")  # the result was stored before
        (child,) = worker.children()
        worker.kill_child(child.pid)
        wait_until(lambda: worker.children() and worker.children()[0].pid != child.pid, "there is another child")
        assert store.inspect(demand).state == "cooling"
