"""What Sentry sees, by its SDK's own Celery integration, which looks at the bodies of tasks and at the log."""

from __future__ import annotations

import json

import pytest

from celery_redislock import LockConflict, LockKeyError
from tests.lab.servers import wait_until
from tests.lab.workers import worker

pytest.importorskip("sentry_sdk")


@pytest.fixture
def seen(config, tmp_path):
    """Types of the errors that Sentry has been sent, each with the task's id; beside it the worker."""

    def look():
        file = tmp_path / "sentry"
        events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return sorted((event["exception"]["values"][-1]["type"], event["tags"]["celery_task_id"]) for event in events)

    with worker(config, tmp_path, 2, app="tests.lab.sentry") as look.worker:
        yield look


def test_what_keeps_a_body_from_running_is_seen_as_what_it_raises_is(seen, app, tasks):
    failures = {
        "LockKeyError": tasks.keyed.delay(1.5),
        "TypeError": app.send_task("lab.work", ()),
        "ValueError": tasks.once.delay("k", "item", fails=True),
    }
    for failed in failures.values():
        failed.get(timeout=30, propagate=False)
    expected = sorted((kind, failed.id) for kind, failed in failures.items())
    wait_until(lambda: len(seen()) >= len(failures), "Sentry has been sent them all")
    assert seen() == expected
    tracebacks = "Traceback (most recent call last)"
    wait_until(lambda: seen.worker.output().count(tracebacks) >= len(failures), "Celery has logged them all")
    assert seen.worker.output().count(tracebacks) == len(failures)
    assert seen.worker.output().count("(its traceback is in Celery's own line)") == 2
    with pytest.raises(LockKeyError):
        failures["LockKeyError"].get(timeout=1)


def test_a_conflict_is_none_of_sentrys_business(seen, tasks, ledger):
    holder = tasks.on_join.delay("joined", "an error", "fails")
    wait_until(ledger.runs, "the holder runs")
    duplicate = tasks.on_join.delay("joined", "duplicate")
    with tasks.on_raise.lock_for("k"), tasks.on_skip.lock_for("k"):
        skipped, refused = tasks.on_skip.delay("k"), tasks.on_raise.delay("k")
        with pytest.raises(LockConflict):
            refused.get(timeout=30)
        skipped.get(timeout=30, propagate=False)
    for failed in (holder, duplicate):
        with pytest.raises(ValueError, match="an error"):
            failed.get(timeout=30)
    wait_until(seen, "Sentry has been sent the holder's error")
    assert seen() == [("ValueError", holder.id)]  # and not once more for the duplicate that joined it


def test_a_check_in_of_sentry_crons_is_closed_by_a_run_and_left_open_by_a_skip(seen, tasks, tmp_path):
    """With `monitor_beat_tasks`, beat opens a check-in for each call, whose id is in the headers of the message."""

    def call(policy, key="k"):
        headers = {"sentry-monitor-slug": policy, "sentry-monitor-config": {}, "sentry-monitor-check-in-id": policy}
        return getattr(tasks, f"on_{policy}").apply_async((key,), headers=headers)

    def closed():
        file = tmp_path / "sentry-check-ins"
        told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {one["monitor_slug"]: one["status"] for one in told}

    with tasks.on_skip.lock_for("k"):  # the tasks share their keys
        calls = [call(policy) for policy in ("skip", "raise", "wait", "join")]
        for ended in calls[:2]:
            ended.get(timeout=30, propagate=False)
    for ended in calls[2:]:
        ended.get(timeout=30)
    wait_until(lambda: len(closed()) == 3, "all check-ins are closed that ever will be")
    assert closed() == {"raise": "error", "wait": "ok", "join": "ok"}
    call("skip", "free").get(timeout=30)
    wait_until(lambda: closed().get("skip") == "ok", "a run that is not skipped closes its own")
