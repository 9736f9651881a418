"""One job means one: however many callers contend for it, and whatever becomes of their jobs."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import IS_MATRIX, every
from tests.lab.callers import OTHERS, WAYS, Plan, contend
from tests.lab.ledger import Ledger
from tests.lab.observer import Observer
from tests.lab.recorder import load_scripts, recording
from tests.lab.servers import wait_until
from tests.lab.workers import waiting_in

#: Seconds for which the callers of a test contend.
FOR = 25.0 if IS_MATRIX else 2.0
MIXED = "mixed"
#: Of a publish: it asks once, once more where its caller may have seen a job end, and lengthens what it has reserved.
SCRIPTS_OF_A_PUBLISH = 3

POLICIES = ["wait", "skip", "raise", "join"]
BROKERS = ["redis", "rabbitmq"]


@pytest.fixture
def contended(config, app, ledger, start_worker):
    """Has callers contend as planned, waits until all their jobs have ended, and returns what an observer has seen."""

    def play(plan: Plan) -> Observer:
        for _ in range(2):
            start_worker(2)
        contend(config, plan)
        open_jobs = {job.call.id for job in Observer(ledger).jobs}

        def all_have_ended():
            open_jobs.difference_update([job for job in open_jobs if app.AsyncResult(job).ready()])
            return not open_jobs

        wait_until(all_have_ended, "all jobs have ended")
        return Observer(ledger)

    return play


def complaints(observer: Observer, ledger: Ledger, *, of_the_queue: bool = False) -> dict[str, object]:
    """What must not be seen, and has been: how often, and the first time."""
    pairs = observer.pairs_in_the_queue() if of_the_queue else observer.pairs()
    seen = {
        "sent while one was outstanding": pairs,
        "answered with a job that was seen to end": observer.late_answers(),
        "answered with a job that nobody sent": observer.unknown_answers(),
        "waited in vain": observer.unseen,
        "overlapping runs": ledger.overlaps(),
    }
    calls = f"{len(observer.calls)} calls, {len(observer.jobs)} jobs"
    return {f"{what} ({calls})": (len(found), found[0]) for what, found in seen.items() if found}


class TestContendingCallers:
    @every("policy, way, broker", POLICIES, [MIXED, *WAYS], BROKERS)
    def test_no_second_job_is_sent_while_one_is_outstanding(self, contended, ledger, policy, way, broker):
        if broker == "rabbitmq" and way == "expiry":
            pytest.skip("RabbitMQ drops what has expired, and nobody hears of it")
        ways = [*4 * ["plain"], *WAYS] if way == MIXED else [way]
        plan = Plan(f"one_job_{policy}", FOR, [one for one in ways if (one, broker) != ("expiry", "rabbitmq")])
        assert complaints(contended(plan), ledger) == {}

    @every("policy, broker", POLICIES, BROKERS)
    def test_nor_amid_messages_and_locks_that_are_no_bare_jobs(self, contended, ledger, policy, broker):
        assert complaints(contended(Plan(f"one_job_{policy}", FOR, ["plain", *OTHERS])), ledger) == {}

    @every("broker", BROKERS)
    def test_nor_by_callers_inside_a_running_event_loop(self, contended, ledger, broker):
        assert complaints(contended(Plan("one_job_wait", FOR, in_a_loop=True)), ledger) == {}

    @every("way, broker", ["plain", "retry", "failure"], BROKERS)
    def test_in_scope_queue_no_second_job_is_sent_while_one_is_queued(self, contended, ledger, way, broker):
        assert complaints(contended(Plan("one_queued", FOR, [way])), ledger, of_the_queue=True) == {}


@pytest.fixture
def sleeps(monkeypatch):
    """The seconds that the test's own thread has slept."""
    slept, sleep, thread = [], time.sleep, threading.get_ident()

    def note(seconds):
        if threading.get_ident() == thread:
            slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", note)
    return slept


def publish(task, *args, in_a_loop=False, **options):
    """Publish, inside a running event loop if that is asked for."""

    async def call():
        return task.apply_async(args, **options)

    return asyncio.run(call()) if in_a_loop else task.apply_async(args, **options)


class TestWhoHasSeenAJobEnd:
    @pytest.fixture(params=["success", "failure"])
    def ended(self, request, tasks, start_worker, gate):
        """A task whose job has ended, as everybody may see, but keeps its key until the gate is open."""
        start_worker(2)
        first = tasks.one_job_wait.apply_async(("k", "first", 0.0, request.param), {"file": gate})
        first.get(timeout=10, propagate=False)
        return tasks.one_job_wait

    @pytest.mark.parametrize("in_a_loop", [False, True], ids=["", "in a loop"])
    def test_gets_a_new_one_at_once_and_later_callers_that_one(self, ended, ledger, gate, sleeps, in_a_loop):
        second = publish(ended, "k", "second", in_a_loop=in_a_loop)
        third = publish(ended, "k", "third", in_a_loop=in_a_loop)
        assert sleeps == []
        assert (second.duplicate, third.duplicate) == (False, True)
        assert third.id == second.id
        assert ledger.items() == ["first"]
        gate.open()
        assert third.get(timeout=10) == "second"
        assert ledger.items() == ["first", "second"]

    @pytest.mark.parametrize("key", ["held", "free", "amid"])
    def test_fifty_such_callers_make_one(self, ended, ledger, locks, gate, tmp_path, key):
        """Their calls come while the key is held still, when it is free, or while it is released."""
        if key == "free":
            gate.open()
            wait_until(lambda: locks.held() == [], "the key is free")
        goes_on, all_are_there = tmp_path / "second", threading.Barrier(50 + (key == "amid"))

        def call(number):
            all_are_there.wait(20)
            return ended.delay("k", number, str(goes_on))

        with ThreadPoolExecutor(50) as callers:
            calls = [callers.submit(call, number) for number in range(50)]
            if key == "amid":
                all_are_there.wait(20)
                gate.open()
        results = [one.result() for one in calls]
        gate.open()
        goes_on.touch()
        assert sum(not result.duplicate for result in results) == 1
        assert len({result.id for result in results}) == 1
        results[0].get(timeout=10)
        assert len(ledger.runs()) == 2


class TestAPublish:
    """It neither sleeps nor asks again and again, whatever it meets. What it sends here lands in nobody's queue."""

    @pytest.fixture
    def quick(self, locks, sleeps):
        load_scripts(locks)

        def check(task, *args, **options):
            del sleeps[:]
            with recording(locks) as commands:
                result = publish(task, *args, queue="lab-nobodys", **options)
            assert sleeps == []
            assert len(commands) <= SCRIPTS_OF_A_PUBLISH, commands
            return result

        return check

    @pytest.mark.parametrize("in_a_loop", [False, True], ids=["", "in a loop"])
    def test_that_finds_its_job_queued_running_or_ended_asks_twice_at_most(
        self, quick, tasks, start_worker, running, gate, in_a_loop
    ):
        task = tasks.one_job_wait
        task.delay("warm")  # connects
        queued = quick(task, "queued", in_a_loop=in_a_loop)
        assert quick(task, "queued", in_a_loop=in_a_loop).id == queued.id
        start_worker(2)
        runs = task.delay("runs", "runs", gate)
        running("runs")
        assert quick(task, "runs", in_a_loop=in_a_loop).id == runs.id
        task.apply_async(("ended", "ended"), {"file": gate}).get(timeout=10)
        sent = quick(task, "ended", in_a_loop=in_a_loop)
        assert not sent.duplicate
        assert quick(task, "ended", in_a_loop=in_a_loop).id == sent.id
        gate.open()

    def test_that_finds_the_one_revoked_that_it_would_be_answered_with_asks_twice_at_most(
        self, quick, tasks, app, start_worker
    ):
        """Its worker shows it as revoked at once, and frees its key when its countdown is over."""
        start_worker(1)
        first = tasks.one_job_wait.apply_async(("k", "revoked"), countdown=5)
        app.control.revoke(first.id)
        wait_until(lambda: first.state == "REVOKED", "it is revoked")
        second = quick(tasks.one_job_wait, "k")
        assert not second.duplicate
        assert quick(tasks.one_job_wait, "k").id == second.id


class TestWhereOnlyOthersHoldTheKeyOrStandInLine:
    """They are no bare jobs, so one is sent; the next publish is answered with that."""

    def test_a_lock_outside_tasks(self, tasks, start_worker, ledger):
        worker, task = start_worker(2), tasks.one_job_wait
        with task.lock_for("k"):
            first = task.delay("k", "first")
            assert not first.duplicate
            assert task.delay("k", "while it is queued").id == first.id
            wait_until(lambda: waiting_in(worker), "it waits in line")
            assert task.delay("k", "while it waits").id == first.id
        assert first.get(timeout=10) == "first"
        assert ledger.items() == ["first"]

    def test_another_task_with_the_same_key(self, tasks, start_worker, ledger, running, gate):
        worker, task = start_worker(2), tasks.shared_job
        other = tasks.shared_job_too.delay("k", gate)
        running("shared_job_too")
        first = task.delay("k")
        assert not first.duplicate
        assert task.delay("k").id == first.id
        wait_until(lambda: waiting_in(worker), "it waits in line")
        assert task.delay("k").id == first.id
        gate.open()
        assert (other.get(timeout=10), first.get(timeout=10)) == ("shared_job_too", "shared_job")
        assert ledger.items() == ["shared_job_too", "shared_job"]

    @every("policy, option, broker", POLICIES, ["task_id", "link"], BROKERS)
    def test_a_message_that_is_not_bare(self, tasks, start_worker, ledger, policy, option, broker):
        """It waits for a lock outside tasks, whatever its policy."""
        worker, task = start_worker(2), getattr(tasks, f"one_job_{policy}")
        options = {"task_id": {"task_id": "mine"}, "link": {"link": tasks.plain.si()}}[option]
        with task.lock_for("k"):
            other = task.apply_async(("k", "other"), **options)
            wait_until(lambda: waiting_in(worker) == 1, "it waits in line")
            first = task.delay("k", "first")
            assert not first.duplicate
            assert task.delay("k", "while it is queued").id == first.id
            wait_until(lambda: waiting_in(worker) == 2, "it waits in line, too")
            assert task.delay("k", "while it waits").id == first.id
        assert [other.get(timeout=10), first.get(timeout=10)] == ["other", "first"]
        assert [item for item in ledger.items() if not item.isdigit()] == ["other", "first"]  # and the link's

    def test_a_job_that_runs_and_is_not_bare(self, tasks, start_worker, ledger, running, gate):
        """It may answer a publish itself, or one is sent: never two."""
        start_worker(2)
        task = tasks.one_job_wait
        other = task.apply_async(("k", "other", gate), task_id="mine")
        running("other")
        results = [task.delay("k", "first") for _ in range(5)]
        gate.open()
        assert len({result.id for result in results}) == 1
        assert sum(not result.duplicate for result in results) <= 1
        results[0].get(timeout=10)
        other.get(timeout=10)
        assert ledger.items() == ["other", "first"][: len({"mine", results[0].id})]
