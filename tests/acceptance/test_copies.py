"""A copy, the same attempt delivered again, never meets a policy, never runs twice, never changes an outcome."""

from __future__ import annotations

import pytest

from tests.conftest import on_every_broker
from tests.lab.app import make_app
from tests.lab.servers import wait_until

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
def test_a_copy_waits_for_its_first_delivery_and_is_dropped_then(tasks, ledger, locks, fails):
    app = tasks
    task, args = app.tasks["lab.step"], ("k", "body", 1.0, fails)
    first = task.apply_async(args, task_id="one-id")
    wait_until(lambda: first.state == "STARTED", "the first delivery runs")
    task.apply_async(args, task_id="one-id")
    wait_until(ledger.conflicts, "the copy has met its first delivery")
    first.get(timeout=10, propagate=False)
    wait_until(lambda: "dropped, it has finished in another delivery" in app.worker.output(), "the copy is dropped")
    assert ledger.items() == ["body"]
    assert app.AsyncResult("one-id").state == ("FAILURE" if fails else "SUCCESS")
    (note,) = locks.client.keys()  # left because a copy was seen, for a day
    assert b":note:one-id/0/0" in note
    assert 80000 < locks.client.ttl(note) <= 86400


def test_a_run_without_copies_leaves_no_note(tasks, locks):
    assert tasks.tasks["lab.work"].delay("k", 1).get(timeout=10) == 1
    wait_until(lambda: locks.client.keys() == [], "nothing is left")


def test_a_second_publish_of_a_finished_id_runs(tasks, ledger):
    task = tasks.tasks["lab.work"]
    for item in "ab":  # one after another, with the caller's own id
        task.apply_async(("k", item), task_id="one-id")
        wait_until(lambda item=item: item in ledger.items() and task.lock_info("k") is None, f"{item} has run")
    assert ledger.items() == ["a", "b"]
