"""Lock options of a call, with real workers: they apply to its message, wherever and however often that runs."""

from __future__ import annotations

import os
import signal

import pytest
from celery import Task, chain, chord, group, states
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict
from celery_redislock.message.header import HEADER
from celery_redislock.protocol.names import GONE
from tests.conftest import on_every_broker
from tests.lab.servers import wait_until

PATIENCE = 30
#: What a duplicate ends as by the policy of its call, and what its `get()` gives or raises.
ENDS = {
    "skip": (states.REVOKED, TaskRevokedError),
    "wait": (states.SUCCESS, "duplicate"),
    "raise": (states.FAILURE, LockConflict),
    "join": (states.SUCCESS, "holder"),
}
#: The ways to publish a message: each takes its signature, and a task without a lock.
WAYS = {
    "apply_async": lambda duplicate, plain: duplicate.type.apply_async(duplicate.args, **duplicate.options),
    "set": lambda duplicate, plain: duplicate.apply_async(),
    "the last of a chain": lambda duplicate, plain: chain(plain.si(), plain.si(), duplicate)(),
    "group": lambda duplicate, plain: group(plain.si(), duplicate)(),
    "chord header": lambda duplicate, plain: chord([plain.si(), duplicate])(plain.si()),
    "chord body": lambda duplicate, plain: chord([plain.si(), plain.si()])(duplicate),
    "link": lambda duplicate, plain: plain.apply_async(link=duplicate),
}
JOB = {"lock_scope": "job"}


@pytest.mark.parametrize("policy", ENDS)
@on_every_broker
def test_a_message_meets_the_policy_of_its_call_however_it_was_published(tasks, app, start_worker, ledger, policy):
    start_worker(len(WAYS) + 2)
    task = tasks.on_wait if policy != "wait" else tasks.on_skip
    holders = [task.delay(way, "holder", "holds") for way in WAYS]
    wait_until(lambda: len(ledger.running()) == len(WAYS), "the holders run")
    for way, send in WAYS.items():
        send(task.si(way, "duplicate").set(task_id=f"{policy} {way}", lock_on_conflict=policy), tasks.plain)
    assert [holder.get(timeout=PATIENCE) for holder in holders] == ["holder"] * len(WAYS)
    state, end = ENDS[policy]
    for way in WAYS:
        result = app.AsyncResult(f"{policy} {way}")
        if isinstance(end, str):
            assert result.get(timeout=PATIENCE) == end, way
        else:
            with pytest.raises(end):
                result.get(timeout=PATIENCE)
        assert result.state == state, way
    ran = sum(run.item == "duplicate" for run in ledger.runs())
    assert ran == (len(WAYS) if policy == "wait" else 0)


class TestScopeJob:
    @on_every_broker
    def test_it_answers_duplicates_from_the_publish_to_the_end(
        self, tasks, start_worker, ledger, running, gate, nothing_is_left
    ):
        first = tasks.work.apply_async(("k", "first", str(gate)), **JOB)
        queued = tasks.work.apply_async(("k", "not sent"), **JOB)
        start_worker(2)
        running("first")
        meanwhile = tasks.work.apply_async(("k", "not sent"), **JOB)
        other = tasks.work.delay("k", "waits")  # a call without that is sent, and meets its policy
        assert [one.duplicate for one in (first, queued, meanwhile, other)] == [False, True, True, False]
        gate.open()
        assert {queued.get(timeout=PATIENCE), meanwhile.get(timeout=PATIENCE)} == {"first"}
        assert other.get(timeout=PATIENCE) == "waits"
        nothing_is_left()
        assert tasks.work.apply_async(("k", "second"), **JOB).get(timeout=PATIENCE) == "second"
        assert ledger.items() == ["first", "waits", "second"]

    @on_every_broker
    def test_its_retries_keep_it_and_the_key(self, tasks, start_worker, ledger, nothing_is_left):
        start_worker(3)
        first = tasks.run_again.apply_async(("k", "a", 3, 0.3), **JOB)
        seen = set()
        while not first.ready():
            seen.add(tasks.run_again.apply_async(("k", "b"), **JOB).id)
        seen.discard(first.id)
        assert first.get(timeout=PATIENCE) == "a"
        assert len(seen) <= 1  # one may have come between the end of the first and its result
        wait_until(lambda: len(ledger.runs()) == 4 + len(seen), "all have run")
        assert ledger.items()[:4] == ["a0", "a1", "a2", "a3"]
        nothing_is_left()

    def test_a_retry_revoked_before_the_run_that_sent_it_has_ended_frees_its_key(
        self, tasks, app, start_worker, running, locks, nothing_is_left, gate, tmp_path
    ):
        """Only the options of its message tell the main process that the run before would leave it the key."""
        worker, before = start_worker(2), tmp_path / "before"
        first = tasks.run_again.apply_async(("k", "a", 1), {"before": str(before), "file": str(gate)}, **JOB)
        running("a0")
        app.control.revoke(first.id)
        wait_until(lambda: f"Tasks flagged as revoked: {first.id}" in worker.output(), "the worker knows")
        before.touch()
        wait_until(lambda: f"Discarding revoked task: lab.run_again[{first.id}]" in worker.output(), "it is revoked")
        wait_until(lambda: any(GONE.encode() in key for key in locks.held()), "its claim is given up")
        gate.open()
        nothing_is_left()

    @pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="retry_on_worker_lost came with Celery 5.7")
    def test_the_retry_of_a_run_whose_process_died_keeps_it_and_the_key(
        self, tasks, start_worker, ledger, running, locks
    ):
        start_worker(2)
        first = tasks.tried_again.apply_async(("k", "first", 60), lock_cooldown=60, **JOB)
        os.kill(running("first"), signal.SIGKILL)
        wait_until(lambda: first.state == states.RETRY, "it is tried again")
        again = tasks.tried_again.apply_async(("k", "not sent"), **JOB)
        assert (again.id, first.get(timeout=PATIENCE)) == (first.id, "first")
        wait_until(lambda: tasks.tried_again.lock_info("k").state == "cooling", "it cools down")


@pytest.fixture
def config(config, request):
    """A worker keeps as many messages waiting as the test says."""
    config.settings["redislock_waiting_limit"] = getattr(request, "param", 1000)
    return config


in_line_and_sent_back = pytest.mark.parametrize("config", [1000, 0], ids=["in line", "sent back"], indirect=True)


@in_line_and_sent_back
@on_every_broker
def test_a_message_that_has_waited_keeps_its_options(tasks, start_worker, ledger):
    start_worker(1)
    with tasks.once.lock_for("k"):
        waits = tasks.once.apply_async(("k", "waits"), lock_on_conflict="wait", lock_cooldown=60)
        wait_until(ledger.conflicts, "it has met the lock")
    assert waits.get(timeout=PATIENCE) == "waits"
    wait_until(lambda: tasks.once.lock_info("k").state == "cooling", "it cools down")
    with pytest.raises(TaskRevokedError, match=f"cooling down after {waits.id}"):
        tasks.once.delay("k", "skipped").get(timeout=PATIENCE)
    assert ledger.items() == ["waits"]


@pytest.mark.parametrize("cooldown", [60, 0], ids=["cools down", "is free"])
@pytest.mark.parametrize(("policy", "end"), [("skip", "REVOKED"), ("raise", "FAILURE"), ("join", "first")])
def test_who_comes_between_a_result_and_the_release_waits_to_see_whether_the_key_cools_down(
    tasks, start_worker, ledger, gate, policy, end, cooldown
):
    """Only the call of the run before knows. If the key is free, the newcomer is no duplicate of what has ended."""
    start_worker(2)
    first = tasks.held_up.apply_async(("k", "first"), {"file": str(gate)}, lock_cooldown=cooldown)
    assert first.get(timeout=PATIENCE) == "first"
    second = tasks.held_up.apply_async(("k", "second"), lock_cooldown=60, lock_on_conflict=policy)
    wait_until(ledger.conflicts, "it has met the first one")
    gate.open()
    wait_until(second.ready, "it has ended", PATIENCE)
    assert (end if cooldown else "second") in (second.state, second.result)
    assert ledger.items() == (["first"] if cooldown else ["first", "second"])
    wait_until(lambda: tasks.held_up.lock_info("k").state == "cooling", "it cools down")


def test_wait_for_ends_the_wait_of_its_own_message_alone(tasks, start_worker, ledger):
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        patient = tasks.work.delay("k", "patient")
        hurried = tasks.work.apply_async(("k", "hurried"), lock_wait_for=0.5)
        with pytest.raises(LockConflict):
            hurried.get(timeout=PATIENCE)
    assert patient.get(timeout=PATIENCE) == "patient"
    assert "waited longer than lock_wait_for = 0.5 s (wait)" in worker.output()
    assert ledger.items() == ["patient"]


def test_a_refused_call_that_raises_is_no_error_in_the_log(tasks, start_worker, ledger):
    """A conflict that its task did not ask for, as after `lock_wait_for`, still is one."""
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        refused = tasks.work.apply_async(("k", "refused"), lock_on_conflict="raise")
        with pytest.raises(LockConflict):
            refused.get(timeout=PATIENCE)
        wait_until(lambda: f"[{refused.id}] raised expected: LockConflict" in worker.output(), "its line")
        assert "Traceback" not in worker.output()
        late = tasks.work.apply_async(("k", "late"), lock_wait_for=0.1)
        with pytest.raises(LockConflict):
            late.get(timeout=PATIENCE)
    wait_until(lambda: f"[{late.id}] raised unexpected: LockConflict" in worker.output(), "its line")


@in_line_and_sent_back
def test_what_another_version_of_the_task_allowed_is_an_error_in_the_log_and_loses_nothing(
    tasks, start_worker, ledger, nothing_is_left
):
    """The message follows the options of the task here, and says so once."""
    worker = start_worker(1)
    options = {"scope": "queue", "on_conflict": "skip", "cooldown": 60}
    with tasks.work.lock_for("k"):
        waits = Task.apply_async(tasks.work, ("k", "waits"), headers={HEADER: {"options": options}})
        wait_until(ledger.conflicts, "it has met the lock")
    assert waits.get(timeout=PATIENCE) == "waits"
    nothing_is_left()
    said = "runs without the lock options of its call: lab.work: lock_scope = 'queue' with lock_on_conflict = 'skip'"
    assert worker.output().count(f"ERROR/ForkPoolWorker-1] task lab.work[{waits.id}] {said}") == 1
