"""At most one job in a window: what a call within it gets, what ends it, and what a recorder sees amid faults."""

from __future__ import annotations

import itertools
import subprocess
from contextlib import suppress

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError, WorkerLostError
from kombu.exceptions import OperationalError

from celery_redislock import LockConfigError, LockedTask
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.tokens import escape
from tests.conftest import IS_MATRIX, on_every_broker
from tests.lab.app import make_app
from tests.lab.publishers import ORDERS, Plan, publishing
from tests.lab.servers import free_port, wait_until
from tests.lab.tasks.windows import BRIEF
from tests.lab.window_judge import Judge

#: With these the Redis broker gives a message again that was not acked for two seconds.
IMPATIENT = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
#: With these a publish fails at once where the broker does not answer.
NO_RETRIES = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
HOUR_IN_MS = 3_600_000

#: Seconds for which the publishers of the recorder publish, and the pauses between two faults.
FOR, BETWEEN_FAULTS = 60.0 if IS_MATRIX else 8.0, 0.4
#: One after the other, again and again. An order is carried out by the publisher that sends the next message. The first
#: fault waits for the publishers; what must be witnessed comes before the first start of a worker, which may take long.
FAULTS = ["refuse", "cut", *ORDERS, "kill", "double", "die", "dawdle"]
#: What the recorder must have seen, or it has proved nothing.
WITNESSED = {"jobs", "answers", "errors", "dies", "dawdles", "doubles"}


def window_of(task, key="k"):
    """The name of the key in Redis that keeps the window open."""
    return keys_of(task.lock_for(key).name).window(escape(task.name))


@pytest.fixture
def is_open(locks):
    return lambda task: bool(locks.client.exists(window_of(task)))


@pytest.fixture
def only_the_window_is_left(locks):
    """Waits until the job has released its key."""
    return lambda task: wait_until(lambda: locks.held() == [window_of(task).encode()], "its key is free")


class TestACallWithinAWindow:
    @on_every_broker
    @pytest.mark.parametrize("how", ["success", "failure", "retry"])
    def test_gets_the_result_of_the_job_whatever_became_of_it(
        self, tasks, start_worker, ledger, running, gate, only_the_window_is_left, how
    ):
        first = tasks.windowed.delay("k", "first", gate, how)
        queued = tasks.windowed.delay("k", "not sent")
        start_worker(2)
        running("first")
        meanwhile = tasks.windowed.delay("k", "not sent")
        gate.open()
        first.get(timeout=10, propagate=False)
        only_the_window_is_left(tasks.windowed)
        ended = tasks.windowed.delay("k", "not sent")
        assert [(one.id, one.duplicate) for one in (queued, meanwhile, ended)] == 3 * [(first.id, True)]
        if how == "failure":
            with pytest.raises(ValueError, match="first fails"):
                ended.get(timeout=10)
        else:
            assert ended.get(timeout=10) == "first"
        assert ledger.items() == ["first"] * (2 if how == "retry" else 1)

    def test_gets_it_though_the_process_of_the_job_was_killed(
        self, tasks, start_worker, running, gate, only_the_window_is_left
    ):
        worker = start_worker(1)
        first = tasks.windowed.delay("k", "killed", gate)
        running("killed")
        worker.kill_child()
        only_the_window_is_left(tasks.windowed)
        second = tasks.windowed.delay("k", "not sent")
        assert (second.id, second.duplicate) == (first.id, True)
        with pytest.raises(WorkerLostError):
            second.get(timeout=30)

    def test_gets_it_though_its_worker_was_killed_and_another_one_ran_it(
        self, config, broker_server, tasks, start_worker, ledger, running, gate, locks
    ):
        # Not so short that a copy may be on its way to the worker when that is killed: kombu would lose it.
        config.settings["broker_transport_options"] = {**IMPATIENT, "visibility_timeout": 120}
        worker = start_worker(1)
        first = tasks.windowed_late.delay("k", "first", gate)
        running("first")
        worker.kill()
        broker_server.ages()
        assert tasks.windowed_late.delay("k", "not sent").id == first.id
        gate.open()
        locks.client.delete(tasks.windowed_late.lock_for("k").name)  # not after half a minute
        start_worker(1)
        assert first.get(timeout=30) == "first"
        second = tasks.windowed_late.delay("k", "not sent")
        assert (second.id, second.duplicate) == (first.id, True)
        assert ledger.items() == ["first", "first"]

    def test_gets_an_ignored_result_where_none_is_stored(self, tasks, start_worker, ledger, only_the_window_is_left):
        start_worker(1)
        first = tasks.windowed_blind.delay("k", "first")
        only_the_window_is_left(tasks.windowed_blind)
        second = tasks.windowed_blind.delay("k", "not sent")
        assert (second.id, second.duplicate, second.ignored, second.get(timeout=10)) == (first.id, True, True, None)
        assert ledger.items() == ["first"]

    def test_from_the_body_of_the_job_gets_that_very_job(self, tasks, start_worker, ledger):
        start_worker(1)
        first = tasks.windowed.delay("k", "first", how="call")
        assert first.get(timeout=10) == first.id
        assert ledger.items() == ["first"]

    @pytest.mark.parametrize("how", ["task_id", "link", "link_error", "chain", "group", "chord"])
    def test_is_sent_if_its_id_matters(self, tasks, start_worker, ledger, only_the_window_is_left, how):
        start_worker(2)
        task, plain = tasks.windowed, tasks.plain
        tasks.windowed.delay("k", "first").get(timeout=10)
        only_the_window_is_left(task)
        publish = {
            "task_id": lambda: task.apply_async(("k", "second"), task_id="mine"),
            "link": lambda: task.apply_async(("k", "second"), link=plain.si()),
            "link_error": lambda: task.apply_async(("k", "second"), link_error=plain.si()),
            "chain": lambda: chain(task.si("k", "second"), plain.si()).apply_async(),
            "group": lambda: group(task.si("k", "second"), plain.si()).apply_async(),
            "chord": lambda: chord([task.si("k", "second"), plain.si()])(plain.si()),
        }[how]
        publish().get(timeout=20)
        assert [item for item in ledger.items() if not item.isdigit()] == ["first", "second"]  # and the others

    def test_is_sent_for_another_key(self, tasks):
        first = tasks.windowed.delay("k")
        other = tasks.windowed.delay("other")
        assert (other.duplicate, other.id == first.id) == (False, False)


class TestAWindow:
    def test_begins_with_the_publish_and_lasts_as_long_as_the_task_says(self, tasks, start_worker, locks):
        start_worker(1)
        first = tasks.windowed.delay("k", "first", 0.0, "retry")
        left = locks.client.pttl(window_of(tasks.windowed))
        assert 0 < left <= HOUR_IN_MS
        first.get(timeout=10)
        tasks.windowed.delay("k", "not sent")
        assert 0 < locks.client.pttl(window_of(tasks.windowed)) <= left

    def test_ends_by_itself_and_the_next_job_opens_another(self, tasks, start_worker, ledger, is_open):
        start_worker(1)
        task = tasks.windowed_brief
        first = task.delay("k", "first")
        assert first.get(timeout=10) == "first"
        wait_until(lambda: not is_open(task), "it has ended")
        second = task.delay("k", "second")
        assert second.duplicate is False
        assert is_open(task)
        assert second.get(timeout=10) == "second"
        assert ledger.items() == ["first", "second"]

    def test_that_ends_before_its_job_does_not_let_a_second_one_in(self, tasks, locks, is_open):
        first = tasks.windowed.delay("k", "first")
        locks.client.pexpire(window_of(tasks.windowed), 1)
        wait_until(lambda: not is_open(tasks.windowed), "it has ended")
        second = tasks.windowed.delay("k", "not sent")
        assert (second.id, second.duplicate) == (first.id, True)
        assert not is_open(tasks.windowed)

    def test_is_closed_by_whoever_deletes_its_key(self, tasks, start_worker, locks, only_the_window_is_left):
        start_worker(1)
        tasks.windowed.delay("k", "first").get(timeout=10)
        only_the_window_is_left(tasks.windowed)
        locks.client.delete(window_of(tasks.windowed))
        second = tasks.windowed.delay("k", "second")
        assert (second.duplicate, second.get(timeout=10)) == (False, "second")

    def test_is_closed_by_a_revoke_before_the_start(self, app, tasks, start_worker, ledger, is_open):
        worker = start_worker(1)
        first = tasks.windowed.apply_async(("k", "revoked"), countdown=6)
        wait_until(lambda: f"[{first.id}] received" in worker.output(), "the worker has it")
        app.control.revoke(first.id)
        with pytest.raises(TaskRevokedError):
            first.get(timeout=20)
        wait_until(lambda: not is_open(tasks.windowed), "it is closed")
        assert tasks.windowed.delay("k", "next").get(timeout=10) == "next"
        assert ledger.items() == ["next"]

    def test_is_closed_by_an_expiry_before_the_start(self, tasks, start_worker, ledger, is_open):
        first = tasks.windowed.apply_async(("k", "expired"), expires=0.01)
        start_worker(1)  # which takes longer than that
        with pytest.raises(TaskRevokedError):
            first.get(timeout=20)
        wait_until(lambda: not is_open(tasks.windowed), "it is closed")
        assert tasks.windowed.delay("k", "next").get(timeout=10) == "next"
        assert ledger.items() == ["next"]

    @pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
    def test_stays_open_when_rabbitmq_drops_the_message_because_it_has_expired(
        self, tasks, start_worker, is_open, locks
    ):
        first = tasks.windowed.apply_async(("k", "dropped"), expires=0.01)
        start_worker(1)  # which takes longer than that
        assert tasks.plain.delay("other").get(timeout=20) is not None
        wait_until(lambda: locks.client.keys() == [window_of(tasks.windowed).encode()], "the key is free")
        second = tasks.windowed.delay("k", "not sent")
        assert (second.id, second.duplicate, second.state) == (first.id, True, "PENDING")
        locks.client.delete(window_of(tasks.windowed))  # as the page says
        assert tasks.windowed.delay("k", "next").get(timeout=10) == "next"

    def test_is_never_opened_by_a_message_that_could_not_be_sent(self, config, locks):
        config.broker = f"redis://127.0.0.1:{free_port()}/0"
        config.settings["broker_transport_options"] = NO_RETRIES
        with pytest.raises(OperationalError):
            make_app(config).tasks["lab.windowed"].delay("k")
        assert locks.client.keys() == []

    def test_is_gone_when_redis_is_emptied(self, tasks, locks):
        first = tasks.windowed.delay("k", "first")
        locks.client.flushall()
        second = tasks.windowed.delay("k", "second")
        assert (second.duplicate, second.id == first.id) == (False, False)

    def test_stays_when_a_copy_of_its_message_is_dropped(
        self, config, tasks, start_worker, ledger, running, gate, is_open, broker_server
    ):
        config.settings["broker_transport_options"] = IMPATIENT
        worker = start_worker(2)
        first = tasks.windowed_skip.delay("k", "first", gate)
        running("first")
        wait_until(lambda: f"[{first.id}]: lock" in worker.output(), "a copy has met it")
        gate.open()
        assert first.get(timeout=10) == "first"
        wait_until(lambda: f"[{first.id}]: dropped" in worker.output(), "it is dropped")
        assert is_open(tasks.windowed_skip)
        assert tasks.windowed_skip.delay("k", "not sent").id == first.id
        assert ledger.items() == ["first"]


def test_a_window_longer_than_results_are_kept_is_refused_where_the_task_is_declared(app):
    app.conf.result_expires = 600
    with pytest.raises(LockConfigError, match="lock_window = 3600 is longer than result_expires = 600"):

        @app.task(base=LockedTask, lock_scope="job", lock_window=3600, shared=False, lazy=False, name="shop.refused")
        def refused(): ...

    @app.task(base=LockedTask, lock_scope="job", lock_window=3600, ignore_result=True, shared=False, lazy=False)
    def blind(): ...


class TestARecorderThatKnowsNothingOfLocks:
    """Ten publishers, two workers, and faults: of connections, workers and publishers, but not of Redis."""

    @pytest.fixture
    def orders(self, tmp_path):
        folder = tmp_path / "orders"
        folder.mkdir()
        return folder

    @pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
    def test_sees_no_second_job_in_a_window_and_no_id_that_never_runs(
        self, config, tasks, broker_proxy, start_worker, ledger, orders
    ):
        """RabbitMQ delivers again at once what a worker that is cut off or killed had not acked."""
        config.settings["broker_transport_options"] = {**NO_RETRIES, "confirm_publish": True}
        workers = [start_worker(2) for _ in range(2)]
        kills = 0

        def refuse_until_a_publish_fails():
            before = Judge(ledger, BRIEF).counts["errors"]
            broker_proxy.refuse()
            wait_until(
                lambda: Judge(ledger, BRIEF).counts["errors"] > before or publishers.poll() is not None,
                "a publish fails",
            )
            broker_proxy.mend()

        with publishing(config, Plan("windowed_brief", FOR, str(orders))) as publishers:
            for fault in itertools.cycle(FAULTS):
                with suppress(subprocess.TimeoutExpired):
                    publishers.wait(BETWEEN_FAULTS)
                if publishers.poll() is not None:
                    break
                match fault:
                    case "cut":
                        broker_proxy.cut()
                    case "kill":
                        workers.pop(0).kill()
                        workers.append(start_worker(2))
                        kills += 1
                    case "refuse":
                        refuse_until_a_publish_fails()
                    case order:
                        (orders / order).touch()
            assert publishers.returncode == 0
        last = [tasks.windowed_brief.delay(key) for key in range(Plan.keys)]
        wait_until(lambda: all(one.ready() for one in last), "the last jobs have run")
        wait_until(lambda: Judge(ledger, BRIEF).never_ran() == [], "every job that a caller knows of has run")
        judge = Judge(ledger, BRIEF)
        assert judge.unexcused() == [], f"{judge.counts}, {judge.excuses()}, {kills} workers killed"
        assert judge.of_another_key() == []
        assert {what for what, count in judge.counts.items() if count} >= WITNESSED
        assert kills
