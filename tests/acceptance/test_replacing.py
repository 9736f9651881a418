"""The newest call replaces the run that holds the key, with real workers."""

from __future__ import annotations

import random
import signal
import time

import pytest
from celery import chain, chord, states
from celery.exceptions import ChordError, TaskRevokedError
from kombu.exceptions import OperationalError

from celery_redislock import LockConfigError
from tests.conftest import IS_MATRIX, on_every_broker
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.workers import consume_from, kept

PATIENCE = 30
#: How many calls come at random times in how many seconds, for how long a body runs, and how many children are killed.
CALLS, WITHIN, LASTS, KILLS = (200, 60.0, 5.0, 20) if IS_MATRIX else (40, 12.0, 5.0, 4)
#: With these a publish fails at once where the broker does not answer.
NO_RETRIES = {"max_retries": 1, "interval_start": 0, "interval_step": 0}


@pytest.fixture
def nobody_opens(tmp_path):
    """The name of a file that there will never be."""
    return str(tmp_path / "nobody opens this")


def is_replaced(older, newer):
    """Whether the older result is REVOKED because of the newer one."""
    with pytest.raises(TaskRevokedError, match=f"^replaced by {newer.id}$"):
        older.get(timeout=PATIENCE)
    return older.state == states.REVOKED


class TestTheNewestCall:
    @on_every_broker
    def test_ends_the_running_one_and_runs_after_its_finally_block(
        self, app, tasks, start_worker, ledger, running, nobody_opens, gate, locks, nothing_is_left
    ):
        start_worker(2)
        older = tasks.newest.delay("k", "older", nobody_opens, "cleans", str(gate))
        running("older")
        newer = tasks.newest.delay("k", "newer")
        wait_until(lambda: kept(app) == 1, "the newer one waits")
        assert (ledger.items(), older.state) == (["older"], states.PENDING)
        gate.open()
        assert newer.get(timeout=PATIENCE) == "newer"
        assert is_replaced(older, newer)
        (cleaned,) = [line for line in ledger.lines() if line["event"] == "cleaned"]
        assert (cleaned["state"], cleaned["replaced"]) == ("held", newer.id)
        assert (ledger.items(), ledger.overlaps()) == (["older", "newer"], [])
        nothing_is_left()
        assert [key for key in locks.client.scan_iter() if b":replaced:" in key or b":note:" in key] == []

    @on_every_broker
    def test_ends_the_running_one_where_no_slot_is_free(
        self, tasks, start_worker, ledger, running, nobody_opens, nothing_is_left
    ):
        start_worker(1)
        older = tasks.newest.delay("k", "older", nobody_opens)
        running("older")
        newer = tasks.newest.delay("k", "newer")
        assert newer.get(timeout=PATIENCE) == "newer"
        assert is_replaced(older, newer)
        assert ledger.overlaps() == []
        nothing_is_left()

    def test_ends_the_running_one_while_its_main_process_stands_still(
        self, tasks, start_worker, ledger, running, nobody_opens
    ):
        worker = start_worker(1)
        older = tasks.newest.delay("k", "older", nobody_opens)
        running("older")
        worker.process.send_signal(signal.SIGSTOP)
        newer = tasks.newest.delay("k", "newer")
        wait_until(lambda: ledger.running() == [], "the body is over")
        worker.process.send_signal(signal.SIGCONT)
        assert newer.get(timeout=PATIENCE) == "newer"
        assert is_replaced(older, newer)

    def test_is_known_to_the_body_and_to_the_lock_server_until_the_body_has_ended(
        self, tasks, start_worker, running, gate, nobody_opens
    ):
        start_worker(2)
        older = tasks.newest.delay("k", "older", nobody_opens, "swallows", str(gate))
        running("older")
        newer = tasks.newest.delay("k", "newer")
        wait_until(lambda: tasks.newest.lock_info("k").state == "stopping", "it is asked to stop")
        assert tasks.newest.lock_info("k").who == f"task {older.id} on w0@lab, which is asked to stop"
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (older, newer)] == ["older", "newer"]

    def test_that_is_merged_ends_the_running_one(self, tasks, start_worker, ledger, running, nobody_opens):
        start_worker(1)
        older = tasks.newest.delay("k", "older", nobody_opens)
        running("older")
        newer, newest = tasks.newest.delay("k", "newer"), tasks.newest.delay("k", "newest")
        assert newest.id == newer.id
        assert newest.get(timeout=PATIENCE) == "newest"
        assert is_replaced(older, newer)
        assert ledger.items() == ["older", "newest"]

    def test_ends_no_run_of_its_own_where_it_comes_from_the_body(self, tasks, start_worker, ledger, running, gate):
        start_worker(2)
        first = tasks.newest.delay("k", "first", str(gate), "calls itself")
        wait_until(lambda: kept(tasks.newest.app) == 1, "its call waits")
        assert tasks.newest.lock_info("k").state == "held"
        gate.open()
        assert first.get(timeout=PATIENCE) == "first"
        wait_until(lambda: ledger.items() == ["first", "successor"], "its call runs")

    def test_ends_no_run_if_its_message_cannot_be_sent(self, config, broker_proxy, start_worker, ledger, running, gate):
        config.settings["broker_transport_options"] = NO_RETRIES
        app = make_app(config)
        task = app.tasks["lab.newest"]
        start_worker(2)
        only = task.delay("k", "only", str(gate))
        running("only")
        broker_proxy.refuse()
        with pytest.raises(OperationalError):
            task.delay("k", "unsent")
        assert task.lock_info("k").state == "held"
        broker_proxy.mend()
        gate.open()
        assert only.get(timeout=PATIENCE) == "only"
        app.close()

    def test_ends_the_running_one_before_its_debounce_is_over(self, tasks, start_worker, ledger, running, nobody_opens):
        start_worker(2)
        older = tasks.newest_debounced.apply_async(("k", "older", nobody_opens), task_id="at-once")
        running("older")
        newer = tasks.newest_debounced.delay("k", "newer")
        assert newer.get(timeout=PATIENCE) == "newer"
        assert is_replaced(older, newer)
        ended, began = ledger.runs()[0].end, ledger.runs()[1].start
        assert began - ended > 1.0

    def test_waits_politely_where_the_call_says_so(self, tasks, start_worker, ledger, running, gate):
        start_worker(2)
        older = tasks.newest.delay("k", "older", str(gate))
        running("older")
        newer = tasks.newest.apply_async(("k", "newer"), lock_on_conflict="wait")
        wait_until(lambda: kept(tasks.newest.app) == 1, "the newer one waits")
        assert tasks.newest.lock_info("k").state == "held"
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (older, newer)] == ["older", "newer"]

    def test_replaces_even_a_run_whose_call_has_waited_politely(self, tasks, start_worker, running, nobody_opens):
        start_worker(2)
        older = tasks.newest.apply_async(("k", "older", "", "checks", nobody_opens), lock_on_conflict="wait")
        running("older")
        newer = tasks.newest.delay("k", "newer")
        assert is_replaced(older, newer)
        assert newer.get(timeout=PATIENCE) == "newer"

    def test_may_ask_for_it_only_on_a_task_whose_runs_can_be_stopped(self, tasks):
        with pytest.raises(LockConfigError, match="'replace' is an option of the task only"):
            tasks.latest.apply_async(("k",), lock_on_conflict="replace")


class TestWhoIsNotReplacedButWaitedFor:
    def test_another_tasks_run(self, tasks, start_worker, running, ledger, gate):
        start_worker(2)
        other = tasks.shares_newest.delay("k", "other", str(gate))
        running("other")
        newest = tasks.newest_shared.delay("k", "newest")
        wait_until(lambda: kept(tasks.newest.app) == 1, "it waits")
        assert tasks.newest_shared.lock_info("k").state == "held"
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (other, newest)] == ["other", "newest"]

    def test_a_block(self, tasks, start_worker, ledger):
        start_worker(1)
        with tasks.newest.lock_for("k") as lock:
            newest = tasks.newest.delay("k", "newest")
            wait_until(lambda: kept(tasks.newest.app) == 1, "it waits")
            assert tasks.newest.lock_info("k").state == "held"
            lock.extend()
        assert newest.get(timeout=PATIENCE) == "newest"

    def test_a_key_that_cools_down(self, tasks, start_worker, ledger):
        start_worker(1)
        assert tasks.newest_cooled.delay("k", "first").get(timeout=PATIENCE) == "first"
        ended = ledger.runs()[0].end
        assert tasks.newest_cooled.delay("k", "second").get(timeout=PATIENCE) == "second"
        assert ledger.runs()[1].start - ended >= 1.0

    def test_a_run_that_swallows_the_error(self, tasks, start_worker, running, ledger, gate, nobody_opens):
        """It is a careless body, but its lock is its own until its end."""
        start_worker(2)
        careless = tasks.newest.delay("k", "careless", nobody_opens, "swallows", str(gate))
        running("careless")
        newest = tasks.newest.delay("k", "newest")
        wait_until(lambda: "swallowed" in [line["event"] for line in ledger.lines()], "it has swallowed the error")
        assert ledger.items() == ["careless"]
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (careless, newest)] == ["careless", "newest"]
        assert ledger.overlaps() == []


def test_a_run_that_was_not_merged_is_ended_by_an_earlier_call_where_its_workers_clock_is_behind(
    config, app, tasks, start_worker, running, ledger, locks, nobody_opens
):
    """Its start is by that clock, and the call by the lock server's."""
    earlier = tasks.newest.delay("k", "earlier")
    run = tasks.newest.apply_async(("k", "run", "", "checks", nobody_opens), task_id="r", queue="others")
    start_worker(2, "-Q", "others")
    running("run")
    key = tasks.newest.lock_for("k").key
    state, attempt, began_at, *rest = locks.client.get(key).split()
    token = b" ".join([state, attempt, b"%d" % (int(began_at) - 60_000), *rest])  # as by a clock a minute behind
    locks.client.set(key, token, keepttl=True)
    consume_from(app, config.queue)
    assert is_replaced(run, earlier)
    assert earlier.get(timeout=PATIENCE) == "earlier"
    assert ledger.items() == ["run", "earlier"]


class TestAReplacedRun:
    @pytest.fixture
    def replaced(self, tasks, start_worker, running):
        """A run that was replaced by another one, which has ended."""

        def replace(signature, task=None):
            start_worker(2)
            older = signature.apply_async()
            running("older")
            newer = (task or tasks.newest).delay("k", "newer")
            assert newer.get(timeout=PATIENCE) == "newer"
            return older, newer

        return replace

    def test_fails_the_rest_of_its_chain(self, tasks, replaced, nobody_opens, ledger):
        last, newer = replaced(chain(tasks.newest.si("k", "older", nobody_opens), tasks.plain.si()))
        assert is_replaced(last.parent, newer)
        assert is_replaced(last, newer)
        assert ledger.items() == ["older", "newer"]

    def test_fails_its_chord(self, tasks, replaced, nobody_opens, ledger):
        body, newer = replaced(chord([tasks.newest.si("k", "older", nobody_opens)], tasks.plain.si()))
        with pytest.raises((ChordError, TaskRevokedError), match=f"replaced by {newer.id}"):
            body.get(timeout=PATIENCE)
        assert ledger.items() == ["older", "newer"]

    def test_calls_neither_its_links_nor_its_errbacks_as_a_skipped_one(self, tasks, replaced, nobody_opens, ledger):
        linked = tasks.newest.si("k", "older", nobody_opens)
        linked.link(tasks.plain.si())
        linked.link_error(tasks.plain.si())
        older, newer = replaced(linked)
        assert is_replaced(older, newer)
        assert ledger.items() == ["older", "newer"]

    def test_is_not_retried_by_autoretry(self, tasks, replaced, nobody_opens, ledger):
        task = tasks.newest_autoretry
        older, newer = replaced(task.si("k", "older", nobody_opens), task)
        assert is_replaced(older, newer)
        assert ledger.items() == ["older", "newer"]

    @on_every_broker
    def test_whose_process_dies_does_not_run_again(self, tasks, replaced, running, nobody_opens, ledger):
        older, newer = replaced(tasks.newest.si("k", "older", nobody_opens, "dies"))
        assert is_replaced(older, newer)
        assert ledger.items() == ["older", "newer"]

    @on_every_broker
    def test_that_retries_itself_for_any_error_does_not_run_again(self, replaced, tasks, nobody_opens, ledger):
        """As in hatchet#4900: there the old retry still ran, though a newer run had cancelled the first attempt."""
        older, newer = replaced(tasks.newest.si("k", "older", nobody_opens, "retries"))
        assert is_replaced(older, newer)
        assert ledger.items() == ["older", "newer"]

    def test_that_lingers_after_it_has_sent_its_retry_is_revoked_and_not_to_be_retried_forever(
        self, app, tasks, start_worker, running, nobody_opens, gate, ledger
    ):
        """The retry ends after the run, which would otherwise store RETRY over the retry's own outcome."""
        worker = start_worker(3)
        older = tasks.newest.delay("k", "older", nobody_opens, "retries", gate)
        running("older")
        newer = tasks.newest.delay("k", "newer")
        retry_comes = f"lab.newest[{older.id}] received"
        wait_until(lambda: worker.output().count(retry_comes) == 2, "the retry has come")
        wait_until(lambda: kept(app) == 2 or "replaced by" in worker.output(), "both wait")
        gate.open()
        assert newer.get(timeout=PATIENCE) == "newer"
        wait_until(lambda: f"lab.newest[{older.id}] retry" in worker.output(), "the run has ended")
        asked_later = app.AsyncResult(older.id)  # `older` may have heard of an outcome that was stored for a moment
        wait_until(lambda: asked_later.state == states.REVOKED, "it has ended")
        assert is_replaced(asked_later, newer)
        assert ledger.items() == ["older", "newer"]

    @on_every_broker
    def test_that_waits_for_its_retry_runs_again_with_the_arguments_of_the_newest_call(
        self, tasks, start_worker, ledger
    ):
        start_worker(1)
        older = tasks.newest.delay("k", "older", 0.0, "fails", "4")
        wait_until(lambda: older.state == states.RETRY, "it will be retried")
        newer = tasks.newest.delay("k", "newer")
        assert (newer.id, newer.duplicate) == (older.id, True)
        assert newer.get(timeout=PATIENCE) == "newer"
        assert ledger.items() == ["older", "newer"]


class TestManyCallsAtRandomTimes:
    @on_every_broker
    def test_stop_each_other_until_the_last_one_runs_to_its_end_though_children_are_killed(
        self, tasks, start_worker, ledger, locks
    ):
        """What killed runs were given is kept for a minute after their messages have come again."""
        workers = [start_worker(2) for _ in range(2)]
        events = [(random.uniform(0, WITHIN), "call") for _ in range(CALLS)]
        events += [(random.uniform(1, WITHIN), "kill") for _ in range(KILLS)]
        began, calls, kills = time.monotonic(), [], 0
        for moment, what in [*sorted(events), (WITHIN, "call")]:
            time.sleep(max(0.0, began + moment - time.monotonic()))
            if what == "call":
                calls.append((time.monotonic(), tasks.newest.delay("k", len(calls), LASTS)))
                continue
            wait_until(ledger.running, "a child runs")
            children = {child.pid: worker for worker in workers for child in worker.children()}
            for pid in children.keys() & {run.pid for run in ledger.running()}:
                children[pid].kill_child(pid)
                kills += 1
        assert calls[-1][1].get(timeout=PATIENCE) == CALLS
        assert kills > KILLS / 2
        assert ledger.overlaps() == []
        items = [int(item) for item in ledger.items()]
        assert items == sorted(items)
        assert items.count(CALLS) == 1
        print(f"{len(items)} runs of {len(calls)} calls, {kills} killed; {stopped_within(ledger, calls)}")
        wait_until(lambda: [key for key in locks.held() if b":args:" not in key] == [], "nothing is held or in line")


def stopped_within(ledger, calls):
    """How long bodies went on after the first call that was to stop them, in words."""
    times = []
    for run in ledger.runs():
        newer = [at for at, _ in calls if run.start < at < run.end]
        times += [run.end - newer[0]] if newer else []
    shares = {"median": 0.5, "p95": 0.95, f"longest of {len(times)}": 1.0}
    found = [f"{sorted(times)[round(share * (len(times) - 1))]:.2f} s ({name})" for name, share in shares.items()]
    return f"a body went on for {', '.join(found)}"
