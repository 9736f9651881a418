"""Calls that are merged into the message that waits in the queue, with real workers."""

from __future__ import annotations

import pytest
from celery import Task, states
from celery.exceptions import TaskRevokedError

from tests.conftest import on_every_broker
from tests.lab.servers import wait_until

PATIENCE = 30


@pytest.fixture
def held(tasks, start_worker, running, gate):
    """A worker, and a run that holds the key until the gate opens."""

    def hold(task, **options):
        start_worker(3)
        holder = task.apply_async(("k", "holder", str(gate)), task_id="holder", **options)
        running("holder")
        return holder

    return hold


class TestLatest:
    @on_every_broker
    def test_the_run_has_the_arguments_of_the_last_call_and_every_caller_its_result(
        self, tasks, held, ledger, gate, nothing_is_left
    ):
        held(tasks.latest)
        calls = [tasks.latest.delay("k", number) for number in range(5)]
        assert [call.duplicate for call in calls] == [False, True, True, True, True]
        assert {call.id for call in calls} == {calls[0].id}
        gate.open()
        assert [call.get(timeout=PATIENCE) for call in calls] == [4] * 5
        assert ledger.items() == ["holder", "4"]
        nothing_is_left()

    @on_every_broker
    def test_a_call_after_the_start_is_a_message_of_its_own(self, tasks, start_worker, ledger, running, gate):
        start_worker(2)
        first = tasks.latest.delay("k", "first", str(gate))
        running("first")
        second, third = tasks.latest.delay("k", "second"), tasks.latest.delay("k", "third")
        assert (first.id != second.id, second.id == third.id) == (True, True)
        gate.open()
        assert [one.get(timeout=PATIENCE) for one in (first, second, third)] == ["first", "third", "third"]
        assert ledger.items() == ["first", "third"]

    @on_every_broker
    def test_a_child_that_dies_is_followed_by_a_run_with_equal_arguments(
        self, tasks, held, ledger, gate, tmp_path, nothing_is_left
    ):
        held(tasks.latest)
        for number in range(3):
            result = tasks.latest.delay("k", number, 0, "dies", str(tmp_path / "died"))
        gate.open()
        assert result.get(timeout=PATIENCE) == 2
        assert ledger.items() == ["holder", "2", "2"]

    @on_every_broker
    def test_a_retry_is_superseded_by_a_newer_call_that_has_begun(self, tasks, start_worker, running, gate, ledger):
        start_worker(2)
        stale = tasks.latest.delay("k", "stale", str(gate), "retry", "2")
        running("stale")
        newer = tasks.latest.delay("k", "newer")
        gate.open()
        assert newer.get(timeout=PATIENCE) == "newer"
        with pytest.raises(TaskRevokedError, match=f"superseded by {newer.id}"):
            stale.get(timeout=PATIENCE)
        assert ledger.items() == ["stale", "newer"]

    @on_every_broker
    def test_a_retry_takes_the_place_and_gets_later_arguments(self, tasks, start_worker, running, gate, ledger):
        start_worker(2)
        first = tasks.latest.delay("k", "first", str(gate), "retry", "1")
        running("first")
        gate.open()
        wait_until(lambda: first.state == states.RETRY, "it has called retry")
        later = tasks.latest.delay("k", "later")
        assert (later.id, later.duplicate) == (first.id, True)
        assert first.get(timeout=PATIENCE) == "later"
        assert ledger.items() == ["first", "later"]

    @pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="retry_on_worker_lost came with Celery 5.7")
    def test_the_retry_that_celery_publishes_for_a_lost_run_has_equal_arguments(
        self, tasks, held, ledger, gate, tmp_path
    ):
        held(tasks.latest_again)
        for number in range(3):
            result = tasks.latest_again.delay("k", number, 0, "dies", str(tmp_path / "died"))
        gate.open()
        assert result.get(timeout=PATIENCE) == 2
        assert ledger.items() == ["holder", "2", "2"]


class TestAll:
    @on_every_broker
    def test_the_run_has_the_arguments_of_each_call_in_order(self, tasks, held, ledger, gate, nothing_is_left):
        held(tasks.collected)
        calls = [tasks.collected.delay("k", number, how="calls") for number in range(5)]
        gate.open()
        assert [call.get(timeout=PATIENCE) for call in calls] == [[0, 1, 2, 3, 4]] * 5
        nothing_is_left()


class TestDebounce:
    @on_every_broker
    def test_one_run_follows_the_last_call(self, tasks, start_worker, ledger):
        start_worker(2)
        calls = [tasks.debounced.delay("k", number) for number in range(20)]
        assert [call.get(timeout=PATIENCE) for call in calls] == [19] * 20
        assert ledger.items() == ["19"]
