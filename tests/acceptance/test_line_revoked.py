"""A message that is revoked, terminated or expires while it waits ends then, and no other run is touched."""

from __future__ import annotations

import re
import time

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance.test_skip import first_event
from tests.lab.app import make_app
from tests.lab.servers import need_pool, wait_until, wait_until_stopped
from tests.lab.workers import kept, waiting_in

POOLS = ["prefork", "threads", "gevent", "solo"]


def discarded(worker, *results):
    """Whether the worker has ended the messages of these results as revoked."""
    output = worker.output()
    return all(re.search(rf"Discarding revoked task: \S+\[{result.id}\]", output) for result in results)


def ask(app, question, *arguments):
    """What the only worker answers to a question of `celery inspect`."""
    (answer,) = getattr(app.control.inspect(timeout=5, limit=1), question)(*arguments).values()
    return answer


@pytest.fixture
def limited(config):
    """An app in which the task `lab.work` has a rate limit: a token every half a minute."""
    config.settings["task_annotations"] = {"lab.work": {"rate_limit": "2/m"}}
    app = make_app(config)
    yield app
    app.close()


# Terminated.


def test_a_terminated_message_that_has_waited_kills_no_run_in_the_child_of_its_first_run(
    tasks, start_worker, ledger, gate
):
    """It was called, and its second child stands still. In the child of its first run another task runs by now."""
    app = tasks.work.app
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(app) == 1, "it waits")
        innocent = tasks.work.delay("other", "innocent", gate)
        busy = worker.busy_child()
        app.control.pool_grow(1, reply=True)
        wait_until(lambda: len(worker.children()) == 2, "there is another child")
        (idle,) = {child.pid for child in worker.children()} - {busy}
        worker.pause_child(idle)
    wait_until(lambda: "its turn came" in worker.output(), "it is called")
    wait_until(lambda: len(ask(app, "reserved")) == 1, "the pool has it")
    app.control.revoke(waits.id, terminate=True, signal="SIGKILL", reply=True)
    gate.open()
    assert innocent.get(timeout=20, propagate=False) == "innocent"
    worker.resume_child(idle)
    with pytest.raises(TaskRevokedError):
        waits.get(timeout=20)
    assert tasks.work.delay("k", "next").get(timeout=20) == "next"
    # Celery terminates what stands in the pool's queue when a child has taken it: its body may have begun.
    assert [item for item in ledger.items() if item != "waits"] == ["innocent", "next"]


def test_a_terminated_message_that_waits_ends_and_kills_no_run(tasks, start_worker, ledger, gate):
    app = tasks.work.app
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        following = tasks.work.delay("k", "next")
        wait_until(lambda: kept(app) == 2, "both wait")
        innocent = tasks.work.delay("other", "innocent", gate)
        worker.busy_child()
        app.control.revoke(waits.id, terminate=True, signal="SIGKILL", reply=True)
        wait_until(lambda: discarded(worker, waits), "it has ended", 5)
        wait_until(lambda: kept(app) == 1, "the other one waits on")
        gate.open()
        assert innocent.get(timeout=20) == "innocent"
    with pytest.raises(TaskRevokedError):
        waits.get(timeout=20)
    assert following.get(timeout=20) == "next"
    assert ledger.items() == ["innocent", "next"]


def test_a_message_that_is_terminated_while_its_run_asks_for_the_key_does_not_wait(tasks, start_worker, ledger):
    """The signal does not end the run, which finds its key held; but its message is acked, and its result stored."""
    app = tasks.work.app
    worker = start_worker(1)
    with tasks.stands_still.lock_for("k"):
        asks = tasks.stands_still.delay("k", "asks")
        (child,) = worker.children()
        wait_until_stopped(child.pid)
        app.control.revoke(asks.id, terminate=True, signal="SIGCONT", reply=True)
        wait_until(lambda: waiting_in(worker) == 1, "it would wait")
        assert tasks.plain.delay().get(timeout=10) == "plain"
        assert kept(app) == 0
    with pytest.raises(TaskRevokedError, match="terminated"):
        asks.get(timeout=5)
    assert [run for run in ledger.runs() if run.key == "k"] == []


def test_a_run_is_found_by_its_id_and_can_be_terminated_while_another_message_of_that_id_waits(
    tasks, start_worker, ledger, running, gate
):
    app = tasks.work.app
    worker = start_worker(2)
    runs = tasks.work.apply_async(("k", "runs", gate), task_id="one-id")
    running("runs")
    tasks.work.apply_async(("k", "waits"), task_id="one-id")
    wait_until(lambda: kept(app) == 1, "the other one waits")
    state, _ = ask(app, "query_task", "one-id")["one-id"]
    assert state == "active"
    app.control.revoke("one-id", terminate=True, reply=True)
    wait_until(lambda: ledger.running() == [], "it is terminated", 10)
    wait_until(lambda: kept(app) == 0, "the other one is revoked", 10)
    with pytest.raises(TaskRevokedError):
        runs.get(timeout=20)
    assert tasks.work.delay("k", "next").get(timeout=20) == "next"
    assert ledger.items() == ["runs", "next"]
    assert "Traceback" not in worker.output()


def test_a_run_is_found_by_its_id_after_another_message_of_that_id_was_revoked(
    tasks, start_worker, ledger, running, gate
):
    app = tasks.work.app
    worker = start_worker(2)
    runs = tasks.work.apply_async(("k", "runs", gate), task_id="one-id")
    running("runs")
    tasks.work.apply_async(("k", "waits"), task_id="one-id", expires=2)
    wait_until(lambda: waiting_in(worker), "the other one waits")
    wait_until(lambda: discarded(worker, runs), "it has expired")
    state, _ = ask(app, "query_task", "one-id")["one-id"]
    assert state == "active"
    gate.open()
    wait_until(lambda: ledger.running() == [], "it has run")
    assert ledger.items() == ["runs"]


# Revoked or expired.


@pytest.mark.parametrize("pool", POOLS)
def test_a_message_that_is_revoked_while_it_waits_ends_within_a_moment_and_the_next_one_runs(
    limited, start_worker, ledger, pool
):
    """Also where the next token of its rate limit is far off."""
    need_pool(pool)
    worker = start_worker(2, "-P", pool)
    work = limited.tasks["lab.work"]
    with work.lock_for("k"):
        waiting = [work.delay("k", number) for number in range(4)]
        wait_until(lambda: kept(limited) == 4, "all wait", 60)
        limited.control.revoke([result.id for result in waiting[:3]], reply=True, timeout=5, limit=1)
        wait_until(lambda: discarded(worker, *waiting[:3]), "three have ended", 5)
        assert kept(limited) == 1
    limited.control.rate_limit("lab.work", "100/s", reply=True)
    assert waiting[3].get(timeout=20) == 3
    for result in waiting[:3]:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=5)
    assert ledger.items() == ["3"]
    assert "Traceback" not in worker.output()


@pytest.mark.parametrize("pool", POOLS)
def test_messages_that_expire_while_they_wait_end_then_whatever_the_rate_limit_is(limited, start_worker, ledger, pool):
    need_pool(pool)
    worker = start_worker(2, "-P", pool)
    work = limited.tasks["lab.work"]
    with work.lock_for("k"):
        expires_at = time.time() + 4
        expiring = [work.apply_async(("k", number), expires=4) for number in range(4)]
        following = work.delay("k", "next")
        wait_until(lambda: kept(limited) == 5 or time.time() > expires_at, "all wait")
        wait_until(lambda: {result.state for result in expiring} == {"REVOKED"}, "all have expired", 10)
        for result in expiring:
            with pytest.raises(TaskRevokedError, match="expired"):
                result.get(timeout=5)
        wait_until(lambda: kept(limited) == 1, "the other one waits on", 5)
    limited.control.rate_limit("lab.work", "100/s", reply=True)
    assert following.get(timeout=20) == "next"
    assert ledger.items() == ["next"]
    assert "Traceback" not in worker.output()


def test_what_was_revoked_while_it_waited_is_told_and_acked_and_keeps_no_place(tasks, start_worker, locks):
    app = tasks.queued.app
    worker = start_worker(1, "-E")
    with tasks.queued.lock_for("k"):
        waits = tasks.queued.delay("k", "waits")
        wait_until(lambda: kept(app) == 1, "it waits")
        with first_event(app, "task-revoked") as seen:
            waits.revoke()
        assert seen == [(waits.id, "REVOKED")]
        wait_until(lambda: locks.client.keys("*:queued") == [], "its place in the queue is free", 5)
    worker.stop()
    other = start_worker(1)
    assert tasks.queued.delay("k", "next").get(timeout=20) == "next"
    assert waits.id not in other.output()


def test_a_message_that_is_revoked_by_its_stamp_while_it_waits_ends_and_others_wait_on(tasks, start_worker):
    app = tasks.work.app
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        stamped = [tasks.work.s("k", who).apply_async(stamped_headers=["who"], who=who) for who in ("a", "b")]
        wait_until(lambda: kept(app) == 2, "both wait")
        app.control.revoke_by_stamped_headers({"who": "a"}, reply=True, limit=1)
        wait_until(lambda: "Discarding revoked task" in worker.output(), "one has ended", 5)
        assert kept(app) == 1
    assert stamped[1].get(timeout=20) == "b"
    assert stamped[0].state == "REVOKED"


def test_a_message_that_waits_on_although_it_was_called_ends_as_well_when_it_is_revoked(
    limited, config, start_worker, gate
):
    """It has stood in the bucket for a token, while nobody else has waited, and a stranger has taken the slot."""
    config.settings["worker_prefetch_multiplier"] = 4
    worker = start_worker(1)
    work = limited.tasks["lab.work"]
    limited.control.rate_limit("lab.work", "30/m", reply=True, limit=1)
    with work.lock_for("k"):
        waits = work.delay("k", "waits")
        wait_until(lambda: kept(limited) == 1, "it waits")
        work.delay("other", "takes the token").get(timeout=20)
    wait_until(lambda: kept(limited) == 0, "it is called")
    stranger = limited.tasks["lab.plain"].delay(seconds=str(gate))
    wait_until(lambda: kept(limited) == 1, "it waits on")
    limited.control.revoke(waits.id, reply=True, timeout=5, limit=1)
    wait_until(lambda: discarded(worker, waits), "it has ended", 5)
    gate.open()
    stranger.get(timeout=20)
