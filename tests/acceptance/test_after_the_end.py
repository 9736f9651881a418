"""Who has seen a run end calls again and is served, although that run may hold its key for a moment longer."""

from __future__ import annotations

import pytest
from celery import group

from celery_redislock import LockConflict
from tests.lab.servers import wait_until

pytestmark = pytest.mark.usefixtures("worker")


@pytest.fixture
def worker(start_worker):
    return start_worker(4)


def ends_of(results):
    for result in results:
        result.get(timeout=20, propagate=False)
    return [str(result.result) for result in results]


@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
@pytest.mark.parametrize("name", ["lingering_job", "lingers_skip", "lingers_raise", "lingers_join"])
def test_who_has_its_result_and_calls_again_gets_a_run_of_its_own(tasks, ledger, name, fails):
    task = getattr(tasks, name)
    for item in range(8):
        result = task.delay("k", item, fails)
        assert ends_of([result]) == [f"{item} fails" if fails else str(item)]
        assert result.duplicate is False
    assert ledger.items() == [str(item) for item in range(8)]
    assert ledger.overlaps() == []


def test_a_call_in_the_midst_of_a_run_is_still_its_duplicate(tasks, running, gate):
    first = tasks.once.delay("k", "first", file=str(gate))
    running("first")
    second = tasks.once.delay("k", "second")
    wait_until(second.ready, "it is skipped")
    assert second.state == "REVOKED"
    gate.open()
    first.get(timeout=10)
    tasks.on_raise.delay("k", "held", "hangs")
    running("held")
    with pytest.raises(LockConflict):
        tasks.on_raise.delay("k", "refused").get(timeout=10)


@pytest.mark.parametrize("name", ["patient_job", "queued"])
def test_every_single_link_runs(tasks, ledger, name):
    """The worker sends it with the ids of its parent and root: it must go on, so that no other's result answers it."""
    link = getattr(tasks, name)
    group(tasks.plain.si(number).set(link=link.si("k", number)) for number in range(5)).delay()
    wait_until(lambda: {str(number) for number in range(5)} <= set(ledger.items()), "all have run", 20)


def test_a_link_without_a_key_does_not_fail_its_parent(tasks, app, locks):
    parent = tasks.plain.apply_async(link=tasks.shared_job.si(["no", "key"]))
    assert parent.get(timeout=10) == "plain"
    wait_until(lambda: app.AsyncResult(parent.children[0].id).state == "FAILURE", "the link fails by itself")
    assert parent.state == "SUCCESS"
