"""Every policy in every shape of canvas: no `get()` and no chord hangs, and no continuation is lost (complaint 7)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from celery import chain, chord, group, states
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConflict
from celery_redislock.policy.conflict import POLICIES
from tests.conftest import on_every_broker
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.versions import BEFORE_5_7
from tests.lab.workers import known

#: What the duplicate ends as: its state, and its result where it has one.
ENDS = {
    "skip": (states.REVOKED, None),
    "wait": (states.SUCCESS, "duplicate"),
    "raise": (states.FAILURE, None),
    "join": (states.SUCCESS, "holder"),
}
ERRORS = {"skip": TaskRevokedError, "raise": LockConflict}
PATIENCE = 30


class Shape:
    """One shape of canvas with a duplicate in it, each under a key of its own.

    Attributes:
        duplicate: The id of the duplicate.
        last: The result of what comes after it.
        expected: What that gives where the duplicate succeeded, made of the duplicate's result.
    """

    def __init__(self, name, send, expected):
        self.name, self.send, self.expected = name, send, expected

    def hold(self, task):
        self.duplicate = f"{task.name} {self.name}"
        self.holder = task.delay(self.duplicate, "holder", "holds")

    def start(self, task, plain):
        self.last = self.send(task.si(self.duplicate, "duplicate").set(task_id=self.duplicate), plain)


def test_every_policy_for_duplicates_is_tried_here():
    """By ``replace`` it is the holder that ends: test_replacing.py."""
    assert set(POLICIES) == {*ENDS, "replace"}


def same(result):
    return result


SHAPES = [
    Shape("plain call", lambda duplicate, plain: duplicate.apply_async(), same),
    Shape("first of a chain", lambda d, p: chain(d, p.s(), p.s()).apply_async(), lambda _: "plain"),
    Shape("middle of a chain", lambda d, p: chain(p.si(), d, p.s()).apply_async(), lambda _: "plain"),
    Shape("last of a chain", lambda d, p: chain(p.si(), p.si(), d).apply_async(), same),
    Shape("group", lambda d, p: group(p.si(), d, p.si()).apply_async(), lambda r: ["plain", r, "plain"]),
    Shape("chord header", lambda d, p: chord([p.si(), d, p.si()])(p.s()), lambda _: "plain"),
    Shape("chain in a chord header", lambda d, p: chord([chain(p.si(), d, p.s()), p.si()])(p.s()), lambda _: "plain"),
    Shape("chord body", lambda d, p: chord([p.si(), p.si()])(d), same),
]


@pytest.mark.parametrize("policy", ENDS)
@on_every_broker
def test_nothing_hangs_and_no_continuation_is_lost(tasks, app, start_worker, ledger, policy):
    start_worker(len(SHAPES) + 4)
    task = getattr(tasks, f"on_{policy}")
    for shape in SHAPES:
        shape.hold(task)
    wait_until(lambda: len(ledger.running()) == len(SHAPES), "the holders run")
    for shape in SHAPES:
        shape.start(task, tasks.plain)
    state, value = ENDS[policy]
    for shape in SHAPES:
        assert shape.holder.get(timeout=PATIENCE) == "holder", shape.name
        duplicate = app.AsyncResult(shape.duplicate)
        if policy in ERRORS:
            with pytest.raises(ERRORS[policy]):
                duplicate.get(timeout=PATIENCE)
            with pytest.raises(Exception, match=r"duplicate of|is held by"):
                shape.last.get(timeout=PATIENCE)
        else:
            assert duplicate.get(timeout=PATIENCE) == value, shape.name
            assert shape.last.get(timeout=PATIENCE) == shape.expected(value), shape.name
        assert duplicate.state == state, shape.name
        ran = "duplicate" in [run.item for run in ledger.runs() if run.key == shape.duplicate]
        assert ran == (policy == "wait"), shape.name
    assert overlaps(ledger) == []


@pytest.mark.parametrize("policy", ENDS)
def test_links_and_ignored_results_end_as_the_policy_says(tasks, app, start_worker, ledger, policy):
    start_worker(6)
    task, errback = getattr(tasks, f"on_{policy}"), getattr(tasks, f"errback_{policy}")
    holders = {key: task.delay(key, "holder", "holds") for key in ("link", "link_error", "ignored")}
    wait_until(lambda: len(ledger.running()) == 3, "the holders run")
    tasks.plain.apply_async(link=task.si("link", "duplicate").set(task_id="linked"))
    tasks.breaks.apply_async(link_error=errback.si("link_error").set(task_id="errback"))
    ignored = task.apply_async(("ignored", "duplicate"), ignore_result=True, link=tasks.plain.si("after"))
    for task_id, own in (("linked", "duplicate"), ("errback", "errback")):
        if policy in ERRORS:
            with pytest.raises(ERRORS[policy]):
                app.AsyncResult(task_id).get(timeout=PATIENCE)
        else:
            expected = "holder" if policy == "join" else own
            assert app.AsyncResult(task_id).get(timeout=PATIENCE) == expected
    for holder in holders.values():
        assert holder.get(timeout=PATIENCE) == "holder"
    if policy == "wait":
        wait_until(lambda: items(ledger, "ignored") == ["holder", "duplicate"], "the ignored duplicate ran")
    if policy not in ERRORS:
        wait_until(lambda: len(items(ledger, "plain")) == 2, "its link ran")
    assert ignored.state == states.PENDING
    assert overlaps(ledger) == []


@pytest.mark.parametrize("policy", ERRORS)
def test_a_step_whose_result_is_ignored_ends_its_chain_where_errors_are_stored_all_the_same(
    config, tasks, start_worker, policy
):
    config.settings["task_store_errors_even_if_ignored"] = True
    start_worker(1)
    task = getattr(tasks, f"on_{policy}")
    with task.lock_for("k"):
        last = chain(task.si("k", "duplicate").set(ignore_result=True), tasks.plain.si()).apply_async()
        wait_until(last.ready, "the chain has ended")
        with pytest.raises(ERRORS[policy]):
            last.get(timeout=PATIENCE)
    assert last.parent.state == ENDS[policy][0]


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_who_has_a_result_from_a_database_and_calls_again_is_no_duplicate_wherever_the_app_is(
    config, start_worker, tmp_path, ledger, zone
):
    pytest.importorskip("sqlalchemy")  # Celery stores a date in the app's zone; it comes back without one
    config.backend, config.settings["timezone"] = f"db+sqlite:///{tmp_path / 'results'}", zone
    start_worker(2)
    task = make_app(config).tasks["lab.lingers_skip"]
    for item in range(8):
        assert task.delay("k", item).get(timeout=PATIENCE, interval=0.005) == item
    assert ledger.items() == [str(item) for item in range(8)]
    assert overlaps(ledger) == []


def overlaps(ledger):
    return [pair for pair in ledger.overlaps() if pair[0].key != "plain"]  # which has no lock


def items(ledger, key):
    return [run.item if key != "plain" else "" for run in ledger.runs() if run.key == key]


class TestWait:
    def test_it_takes_the_key_as_soon_as_it_is_free_and_without_coming_back(self, tasks, start_worker, ledger):
        worker = start_worker(2)
        holder = tasks.on_wait.delay("k", "holder", "holds")
        wait_until(ledger.runs, "the holder runs")
        waiter = tasks.on_wait.delay("k", "waiter")
        assert (holder.get(timeout=PATIENCE), waiter.get(timeout=PATIENCE)) == ("holder", "waiter")
        assert worker.output().count(f"[{waiter.id}] received") == 1
        assert len(ledger.conflicts()) == 1


@pytest.mark.parametrize("policy", ERRORS)
def test_a_conflict_is_nothing_that_autoretry_for_retries(tasks, start_worker, ledger, policy):
    worker = start_worker(1)
    task = getattr(tasks, f"auto_{policy}")
    with task.lock_for("k"):
        duplicate = task.delay("k")
        with pytest.raises(ERRORS[policy]):
            duplicate.get(timeout=PATIENCE)
    assert worker.output().count(f"[{duplicate.id}] received") == 1
    assert ledger.runs() == []


def test_a_message_that_comes_back_is_no_publish_of_the_tasks_own(tasks, start_worker, ledger):
    """An `apply_async` that answers duplicates otherwise, as those of other plugins, would lose it."""
    start_worker(2)
    with tasks.own_publish.lock_for("k"):
        waiting = tasks.own_publish.delay("k", "waiting")
        wait_until(ledger.conflicts, "it has met the lock")
    assert waiting.get(timeout=10) == "waiting"
    assert ledger.items() == ["waiting"]


class TestJoin:
    @pytest.mark.parametrize("result", [0, "", None, [], False])
    def test_a_falsy_result_is_a_result(self, tasks, start_worker, ledger, result):
        start_worker(2)
        tasks.on_join.delay("k", result, "holds")
        wait_until(ledger.runs, "the holder runs")
        assert tasks.on_join.delay("k", "duplicate").get(timeout=PATIENCE) == result
        assert len(ledger.runs()) == 1

    def test_the_holders_error_is_the_duplicates_too_and_ends_its_chain(self, tasks, start_worker, ledger):
        start_worker(2)
        tasks.on_join.delay("k", "an error", "fails")
        wait_until(ledger.runs, "the holder runs")
        last = chain(tasks.on_join.si("k", "duplicate"), tasks.plain.s()).apply_async()
        with pytest.raises(ValueError, match="an error"):
            last.parent.get(timeout=PATIENCE)
        with pytest.raises(ValueError, match="an error"):
            last.get(timeout=PATIENCE)
        assert len(ledger.runs()) == 1

    @pytest.mark.skipif(BEFORE_5_7, reason="Celery records no such outcome before 5.7; the duplicate runs then")
    @pytest.mark.parametrize("way", ["exits", "rejects"])
    def test_the_way_that_a_holder_left_fails_the_duplicate_and_its_chain(self, tasks, start_worker, ledger, way):
        worker = start_worker(2)
        holder = tasks.on_join.delay("k", "holder", way)
        wait_until(ledger.runs, "the holder runs")

        def holds_the_key_until_celery_has_stored_that():
            """Celery does so after the end of a run that rejects, when the key is free; a duplicate may be faster."""
            with tasks.on_join.lock_for("k"):
                holder.get(timeout=PATIENCE, propagate=False)

        with ThreadPoolExecutor() as threads:
            threads.submit(holds_the_key_until_celery_has_stored_that)
            wait_until(lambda: tasks.on_join.lock_info("k").waiting_processes, "it stands in line first")
            last = chain(tasks.on_join.si("k", "duplicate"), tasks.plain.s()).apply_async()
        for result in (last.parent, last):
            result.get(timeout=PATIENCE, propagate=False)
            assert result.state == states.FAILURE
        # What has joined a lost process has lost none of its own: its message must not be delivered again.
        wait_until(lambda: known(tasks.on_join.app) == 0, "the worker has read the outcomes")
        assert "delivered again" not in worker.output()
        assert ledger.items() == ["holder"]

    @pytest.mark.parametrize(
        ("holds", "error"),
        [("lacks memory", "MemoryError: holder"), ("loses its process", "WorkerLostError: holder")],
    )
    def test_an_error_on_which_celery_acts_only_fails_the_duplicate(
        self, config, tasks, start_worker, ledger, holds, error
    ):
        """Celery ends a worker whose run raises MemoryError, and WorkerLostError may requeue the message."""
        start_worker(1)
        tasks.on_join.delay("k", "holder", holds)
        wait_until(ledger.runs, "the holder runs")
        config.settings["task_annotations"] = {"lab.on_join": {"acks_late": True, "reject_on_worker_lost": True}}
        other = replace(config, queue=f"{config.queue}-other")
        worker = start_worker(1, config=other)
        duplicate = tasks.on_join.apply_async(("k", "duplicate"), queue=other.queue)
        wait_until(duplicate.ready, "the duplicate ends")
        wait_until(tasks.plain.apply_async(queue=other.queue).ready, "another task runs")
        assert repr(duplicate.result) == f"TaskError({error!r})"
        assert "Unrecoverable error" not in worker.output()
        assert "duplicate" not in ledger.items()

    def test_it_waits_for_the_next_attempt_of_a_holder_that_retries(self, tasks, start_worker, ledger):
        start_worker(2)
        tasks.on_join.delay("k", "holder", "retries")
        wait_until(ledger.runs, "the holder runs")
        assert tasks.on_join.delay("k", "duplicate").get(timeout=PATIENCE) == "holder"
        assert ledger.items() == ["holder", "holder"]

    def test_it_runs_in_the_place_of_a_holder_that_died_without_an_outcome(self, config, start_worker, ledger):
        config.settings["redislock_lease"] = 5
        app = make_app(config)
        task = app.tasks["lab.on_join"]
        first = start_worker(1)
        task.delay("k", "holder", "hangs")
        wait_until(ledger.runs, "the holder runs")
        start_worker(1, config=replace(config, queue="other"))
        duplicate = task.apply_async(("k", "duplicate"), queue="other")  # which the first worker does not see
        wait_until(ledger.conflicts, "the duplicate has met it")
        first.kill()
        assert duplicate.get(timeout=PATIENCE) == "duplicate"
        app.close()

    def test_it_runs_in_the_place_of_a_holder_whose_result_is_ignored(self, tasks, start_worker, ledger):
        start_worker(2)
        tasks.on_join.apply_async(("k", "holder", "holds"), ignore_result=True)
        wait_until(ledger.runs, "the holder runs")
        assert tasks.on_join.delay("k", "duplicate").get(timeout=PATIENCE) == "duplicate"
        assert ledger.items() == ["holder", "duplicate"]

    def test_a_holder_that_retries_and_then_ignores_is_not_waited_for(self, tasks, start_worker, running, ledger):
        """Its state would stay RETRY, as if it were to run again."""
        start_worker(3)
        tasks.on_join.delay("k", "holder", "ignores")
        running("holder")
        assert tasks.on_join.delay("k", "duplicate").get(timeout=PATIENCE) == "duplicate"
        assert ledger.items() == ["holder", "holder", "duplicate"]

    @pytest.mark.parametrize("name", ["on_join", "on_wait"])
    def test_a_holder_that_waited_and_then_ignores_is_not_waited_for(self, tasks, start_worker, running, ledger, name):
        """Its state would stay RETRY, which its wait has stored, as if it were to run again."""
        start_worker(2)
        with tasks.on_join.lock_for("k"):
            holder = getattr(tasks, name).delay("k", "holder", "only ignores")
            wait_until(lambda: holder.state == states.RETRY, "it waits")
        running("holder")
        assert tasks.on_join.delay("k", "duplicate").get(timeout=PATIENCE) == "duplicate"
        assert ledger.items() == ["holder", "duplicate"]

    def test_a_holder_that_waited_and_then_replaces_itself_has_the_outcome_of_its_replacement(
        self, tasks, start_worker, running, ledger
    ):
        start_worker(2)
        with tasks.on_join.lock_for("k"):
            holder = tasks.on_join.delay("k", "holder", "replaces")
            wait_until(lambda: holder.state == states.RETRY, "it waits")
        running("holder")
        duplicate = tasks.on_join.delay("k", "duplicate")
        assert holder.get(timeout=PATIENCE) == "plain"
        assert duplicate.get(timeout=PATIENCE) in {"plain", "duplicate"}

    def test_a_lock_that_is_no_task_has_no_outcome_to_join(self, tasks, start_worker, ledger):
        start_worker(1)
        with tasks.on_join.lock_for("k"):
            result = tasks.on_join.delay("k", "duplicate")
            wait_until(ledger.conflicts, "it has met the lock")
        assert result.get(timeout=PATIENCE) == "duplicate"


def test_raise_names_the_holder_also_after_the_result_backend(tasks, start_worker, ledger):
    worker = start_worker(2)
    holder = tasks.on_raise.delay("k", "holder", "holds")
    wait_until(ledger.runs, "the holder runs")
    with pytest.raises(LockConflict) as caught:
        tasks.on_raise.delay("k", "duplicate").get(timeout=PATIENCE)
    assert caught.value.holder.task_id == holder.id
    assert caught.value.holder.task == "lab.on_raise"
    assert caught.value.key == tasks.on_raise.lock_for("k").name
    said = f"raised expected: LockConflict('the lock {caught.value.key} is held by task {holder.id} on w0@lab')"
    wait_until(lambda: said in worker.output(), "the worker's log names the holder")
    assert "Traceback" not in worker.output()  # it was asked for
    assert "ERROR" not in worker.output()
