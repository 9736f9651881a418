"""A copy, the same attempt delivered again, never meets a policy, never runs twice, never changes an outcome."""

from __future__ import annotations

import pytest
from celery import Task

from celery_redislock.message.header import HEADER, Header
from celery_redislock.protocol.names import NOTE
from celery_redislock.protocol.tokens import mint_publish
from tests.conftest import on_every_broker
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.workers import kept

pytestmark = on_every_broker


@pytest.fixture
def tasks(config, start_worker):
    """With ``task_track_started``, whose STARTED must not overwrite an outcome."""
    config.settings["task_track_started"] = True
    app = make_app(config)
    worker = start_worker(4)
    app.worker = worker
    yield app
    app.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_waits_for_its_first_delivery_and_is_dropped_then(tasks, ledger, locks, gate, fails):
    app = tasks
    task, args = app.tasks["lab.once"], ("k", "body", 0.0, fails, str(gate))
    header = {HEADER: Header(mint_publish()).wire}
    # Celery's own publish, which adds no name of its own to the message.
    first = Task.apply_async(task, args, task_id="one-id", headers=header)
    wait_until(lambda: first.state == "STARTED", "the first delivery runs")
    Task.apply_async(task, args, task_id="one-id", headers=header)
    wait_until(ledger.conflicts, "the copy has met its first delivery")
    gate.open()
    first.get(timeout=10, propagate=False)
    wait_until(lambda: "dropped: it already finished in another delivery" in app.worker.output(), "the copy is dropped")
    assert ledger.items() == ["body"]
    assert app.AsyncResult("one-id").state == ("FAILURE" if fails else "SUCCESS")
    (note,) = locks.client.keys()  # left because a copy was seen, for a day
    assert f"{NOTE}one-id/0/0/".encode() in note
    assert 86400 < locks.client.ttl(note) <= 90000  # and twice the visibility timeout


def test_a_run_without_copies_leaves_no_note(tasks, locks):
    assert tasks.tasks["lab.work"].delay("k", 1).get(timeout=10) == 1
    wait_until(lambda: locks.client.keys() == [], "nothing is left")


def test_three_hundred_runs_of_which_nearly_all_wait_in_line_leave_nothing(tasks, start_worker, locks, ledger):
    start_worker(4)
    work = tasks.tasks["lab.work"]
    with work.lock_for(0), work.lock_for(1), work.lock_for(2):
        results = [work.delay(number % 3, number) for number in range(300)]
        wait_until(lambda: kept(tasks, 2) > 290, "they wait", 60)  # a few are still with a child
    for result in results:
        result.get(timeout=30)
    assert sorted(ledger.items()) == sorted(map(str, range(300)))
    assert len([key for key in [*locks.client.keys()] if locks.client.ttl(key) > 10]) <= 3
    wait_until(lambda: locks.client.keys() == [], "nothing is left")


def test_a_second_publish_of_a_finished_id_runs(tasks, ledger):
    task = tasks.tasks["lab.work"]
    for item in "ab":  # one after another, with the caller's own id
        task.apply_async(("k", item), task_id="one-id")
        wait_until(lambda item=item: item in ledger.items() and task.lock_info("k") is None, f"{item} has run")
    assert ledger.items() == ["a", "b"]


def test_another_publish_under_the_id_of_one_that_runs_is_no_copy_and_runs_after_it(tasks, ledger, gate):
    """As one of the next day: the note of yesterday's must not drop it where it meets a conflict."""
    task = tasks.tasks["lab.once"]
    task.apply_async(("k", "today"), {"file": str(gate)}, task_id="one-id")
    wait_until(lambda: "today" in ledger.items(), "the first one runs")
    task.apply_async(("k", "tomorrow"), task_id="one-id")
    wait_until(ledger.conflicts, "the second one has met it")
    gate.open()
    wait_until(lambda: "tomorrow" in ledger.items(), "the second one runs")
    assert ledger.overlaps() == []
