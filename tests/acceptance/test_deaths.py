"""A child that dies holds its key no longer, and not for a moment less long than it lives."""

from __future__ import annotations

import math
import os
import re
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest
from celery import Task, chord, states
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from tests.acceptance.test_limits import taken
from tests.conftest import IS_MATRIX, every, on_every_broker
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import acked

#: The lease of these tests' locks is 30 s, of which 20 s are left at least when a child dies: what is free before that
#: was released.
SOON = 15.0
#: Nothing is said of how soon Celery tells of a death.
PATIENCE = 30.0
#: Seconds. A child that is slower to begin its body dies before.
TIME_LIMIT = 4


@pytest.fixture
def freed_by_death(locks, ledger):
    """Waits until the key is free; fails where its child could still run the body then."""

    def wait(pid):
        def key_is_free():
            held, alive = locks.client.keys(), _runs(pid)  # in this order
            ended = ledger.runs()[0].end < math.inf  # a SystemExit unwinds the body, and the child releases itself
            assert held or ended or not alive, "the key was free while its body could go on"
            return not held

        wait_until(key_is_free, "the key is free", SOON)

    return wait


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_child_frees_its_key(tasks, start_worker, running, freed_by_death, sig):
    worker = start_worker(2)
    result = tasks.work.delay("k", "killed", 60)
    pid = running("killed")
    os.kill(pid, sig)
    freed_by_death(pid)
    with pytest.raises(WorkerLostError):
        result.get(timeout=PATIENCE)
    assert tasks.work.delay("k", "next").get(timeout=PATIENCE) == "next"
    if sig != signal.SIGTERM:
        wait_until(lambda: "its process died; its lock" in worker.output(), "the worker has told of the release")


def test_a_killed_child_frees_its_key_where_the_system_tells_of_no_deaths(
    config, tasks, start_worker, running, freed_by_death
):
    config.settings["lab_no_waitid"] = True
    start_worker(1)
    assert tasks.work.delay("k", "first").get(timeout=PATIENCE) == "first"
    result = tasks.work.delay("k", "killed", 60)
    os.kill(pid := running("killed"), signal.SIGKILL)
    freed_by_death(pid)
    with pytest.raises(WorkerLostError):
        result.get(timeout=PATIENCE)
    assert tasks.work.delay("k", "next").get(timeout=PATIENCE) == "next"


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system tells of no deaths")
def test_half_of_twelve_killed_children_free_their_keys_within_30_ms(tasks, start_worker, ledger, locks, running):
    """The time is held against its bound by `make matrix`, for a busy machine proves nothing."""
    start_worker(4)
    taken = []
    for number in range(12 if IS_MATRIX else 3):
        tasks.work.delay(number, number, 60)
        pid = running(number)
        (key,) = locks.client.keys("redislock:*}")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while locks.client.exists(key):
            assert time.monotonic() - killed < SOON
        taken.append(time.monotonic() - killed)
    assert not IS_MATRIX or statistics.median(taken) < 0.03


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system tells of no deaths")
def test_no_thread_of_a_worker_wakes_up_while_no_child_dies(app, tasks, start_worker, running):
    """A busy machine only wakes them up less often. The main thread has Celery's timers."""
    worker = start_worker(2)
    assert tasks.work.delay("k", "over").get(timeout=PATIENCE) == "over"
    tasks.work.delay("k", "holds", 60)
    running("holds")
    wait_until(lambda: acked(app, "lab.work") == 1, "the main process has heard that it runs")
    main = worker.process.pid

    def wake_ups():
        status = {path.name: (path / "status").read_text() for path in Path(f"/proc/{main}/task").iterdir()}
        threads = {name: re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M) for name, text in status.items()}
        return {name: int(found[1]) for name, found in threads.items() if found and name != str(main)}

    before = wake_ups()
    time.sleep(2)
    after = wake_ups()
    assert before.keys() <= after.keys()
    assert before
    assert {name: after[name] - count for name, count in before.items() if after[name] > count + 1} == {}


@pytest.mark.parametrize("name", ["own_request", "named_request"])
def test_a_killed_child_frees_its_key_where_the_user_has_a_request_class_of_his_own(
    tasks, start_worker, ledger, running, freed_by_death, name
):
    task = getattr(tasks, name)
    start_worker(2)
    result = task.delay("k", "killed", 60)
    pid = running("killed")
    os.kill(pid, signal.SIGKILL)
    freed_by_death(pid)
    with pytest.raises(WorkerLostError):
        result.get(timeout=PATIENCE)
    assert task.delay("k", "next").get(timeout=PATIENCE) == "next"
    told = [line["event"] for line in ledger.lines() if line.get("task_id") == result.id]
    assert {"own request accepted", "own request failed"} <= set(told)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_hard_time_limit_frees_the_key_when_the_child_is_dead_and_not_before(
    tasks, start_worker, ledger, running, freed_by_death, stubborn
):
    start_worker(2)
    task = tasks.stubborn if stubborn else tasks.work
    result = task.apply_async(("k", "limited", 60), time_limit=TIME_LIMIT)
    freed_by_death(running("limited"))
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=PATIENCE)


def test_a_terminated_child_frees_its_key(tasks, app, start_worker, running, freed_by_death):
    start_worker(2)
    result = tasks.work.delay("k", "terminated", 60)
    pid = running("terminated")
    app.control.revoke(result.id, terminate=True, signal="SIGKILL")
    freed_by_death(pid)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE)
    assert tasks.work.delay("k", "next").get(timeout=PATIENCE) == "next"


def test_a_terminated_run_does_not_come_again_even_if_its_task_is_given_back(
    tasks, app, start_worker, ledger, running, freed_by_death
):
    start_worker(2)
    result = tasks.given_back.delay("k", "terminated", 60)
    pid = running("terminated")
    app.control.revoke(result.id, terminate=True)
    freed_by_death(pid)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE)
    assert tasks.given_back.delay("k", "next").get(timeout=PATIENCE) == "next"
    assert [run.item for run in ledger.runs()] == ["terminated", "next"]


def test_a_revoked_task_that_goes_on_all_the_same_keeps_its_key(tasks, app, start_worker, ledger, running, gate):
    """Its main process has announced it as revoked; the body swallowed the SIGTERM."""
    start_worker(2)
    result = tasks.stubborn.delay("k", "stubborn", file=str(gate))
    running("stubborn")
    app.control.revoke(result.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE)
    following = tasks.stubborn.delay("k", "next")
    wait_until(ledger.conflicts, "the next one has met it")
    gate.open()
    assert following.get(timeout=PATIENCE) == "next"
    first, second = ledger.runs()
    assert (first.item, second.item) == ("stubborn", "next")
    assert first.end <= second.start


retries_the_lost = pytest.mark.skipif(
    not hasattr(Task, "retry_on_worker_lost"), reason="retry_on_worker_lost came with Celery 5.7"
)


@on_every_broker
def test_a_task_given_back_by_its_dead_child_runs_again_at_once(tasks, start_worker, ledger, running):
    start_worker(2)
    result = tasks.given_back.delay("k", "twice", 60)
    os.kill(running("twice"), signal.SIGKILL)
    assert result.get(timeout=SOON) == "twice"
    assert ledger.items() == ["twice", "twice"]


@retries_the_lost
def test_a_task_retried_for_its_dead_child_runs_again_at_once(tasks, start_worker, ledger, running):
    start_worker(2)
    result = tasks.tried_again.delay("k", "twice", 60)
    os.kill(running("twice"), signal.SIGKILL)
    assert result.get(timeout=SOON) == "twice"
    assert ledger.items() == ["twice", "twice"]


@retries_the_lost
@every("broker", ["redis", "rabbitmq"])
def test_a_job_retried_for_its_dead_child_keeps_its_key_until_the_retry(
    tasks, start_worker, ledger, running, nothing_is_left
):
    """It is kept by the main process, which does not make its name."""
    worker = start_worker(2)
    result = tasks.job_tried_again.delay("k", "twice", 60)
    os.kill(pid := running("twice"), signal.SIGKILL)
    wait_until(lambda: "its process died; its lock" in worker.output(), "the main process has seen it")
    again = tasks.job_tried_again.delay("k", "another")
    assert (again.id, again.duplicate) == (result.id, True)
    wait_until(lambda: result.state == states.RETRY, "Celery has seen it")
    again = tasks.job_tried_again.delay("k", "another")
    assert (again.id, again.duplicate) == (result.id, True)
    assert result.get(timeout=SOON) == "twice"
    assert ledger.items() == ["twice", "twice"]
    nothing_is_left()
    made = {line["pid"] for line in ledger.lines() if line["event"] == "key made"}
    assert pid in made
    assert worker.process.pid not in made


@retries_the_lost
@pytest.mark.parametrize("seats", [0, 1])
def test_a_permit_is_kept_until_the_retry_for_a_dead_child_whichever_it_is(tasks, start_worker, locks, running, seats):
    start_worker(2)
    with taken(tasks.three_tried_again, "k", seats=seats):
        result = tasks.three_tried_again.delay("k", "twice", 60)
        os.kill(running("twice"), signal.SIGKILL)
        wait_until(lambda: result.state == states.RETRY, "Celery has published it")
        (kept,) = (key for key in locks.client.scan_iter() if locks.client.get(key).startswith(b"~"))
        wait_until(lambda: locks.client.ttl(kept) > 60, "it is kept for its countdown and more", SOON)


@retries_the_lost
def test_a_retry_for_a_dead_child_that_is_revoked_frees_the_key(app, tasks, start_worker, running, nothing_is_left):
    start_worker(2)
    result = tasks.job_tried_again.delay("k", "killed", 60)
    os.kill(running("killed"), signal.SIGKILL)
    wait_until(lambda: result.state == states.RETRY, "Celery has seen it")
    app.control.revoke(result.id)
    nothing_is_left()
    assert tasks.job_tried_again.delay("k", "next").get(timeout=PATIENCE) == "next"


@retries_the_lost
@pytest.mark.parametrize("how", ["terminated", "out of retries", "out of time"])
def test_a_job_that_is_not_retried_for_its_dead_child_frees_its_key(
    app, tasks, start_worker, running, nothing_is_left, how
):
    start_worker(2)
    task = tasks.job_tried_once if how == "out of retries" else tasks.job_tried_again
    result = task.apply_async(("k", "killed", 60), time_limit=TIME_LIMIT if how == "out of time" else None)
    pid = running("killed")
    if how == "terminated":
        app.control.revoke(result.id, terminate=True, signal="SIGKILL")
    elif how == "out of retries":
        os.kill(pid, signal.SIGKILL)
    nothing_is_left()
    wait_until(lambda: result.state in {states.FAILURE, states.REVOKED}, "it has ended", PATIENCE)


@pytest.mark.parametrize("name", ["tells_key", "tells_key_late"])
def test_a_killed_child_frees_its_key_without_a_line_of_the_users_code_in_the_main_process(
    tasks, start_worker, ledger, running, freed_by_death, name
):
    task = getattr(tasks, name)
    worker = start_worker(2)
    task.delay("k", "killed", 60)
    os.kill(pid := running("killed"), signal.SIGKILL)
    freed_by_death(pid)
    assert task.delay("k", "next").get(timeout=PATIENCE) == "next"
    made = {line["pid"] for line in ledger.lines() if line["event"] == "key made"}
    assert pid in made
    assert worker.process.pid not in made


@every("name, broker", ["killing_key", "killing_limit", "dying"], ["redis", "rabbitmq"])
def test_a_message_whose_children_die_before_it_begins_fails_after_three_of_them(
    app, tasks, start_worker, nothing_is_left, name
):
    """As Celery fails one at the first death that it has acked early; its chord fails too, and its worker goes on."""
    worker = start_worker(2)
    body = chord([getattr(tasks, name).s("k"), tasks.work.s("other", "member")])(tasks.work.si("body", "body"))
    lost = body.parent.children[0]
    wait_until(lambda: lost.state == states.FAILURE, "it has failed", PATIENCE)
    assert isinstance(lost.result, WorkerLostError)
    wait_until(lambda: body.state == states.FAILURE, "the chord's body has failed")
    assert worker.output().count("its process died before the task began") == 3
    assert "its process died before the task began, as did 2 before it; it fails" in worker.output()
    assert tasks.work.delay("k", "next").get(timeout=PATIENCE) == "next"
    assert worker.process.poll() is None
    nothing_is_left()


@counts_on_wake_ups("two hundred messages have their turn, one every five seconds for each key")
def test_twenty_children_killed_under_load_leave_nothing(tasks, start_worker, ledger, locks):
    """Each kill strikes some child at some point; what it held is free, and every other message still runs."""
    worker = start_worker(4)
    results = [tasks.given_back.delay(n % 3, n) for n in range(200)]
    killed = 0
    while killed < 20:
        for child in worker.children()[:1]:
            child.kill()
            killed += 1
        done = len(ledger.runs())
        wait_until(lambda done=done: len(ledger.runs()) >= min(200, done + 5), "work goes on")
    for number, result in enumerate(results):
        assert result.get(timeout=60) == number
    wait_until(lambda: locks.client.keys("redislock:*}") == [], "no key is left", SOON)
