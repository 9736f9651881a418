"""What docs/changing-a-key.md says of messages that are there when a deploy changes their task, with real workers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
from celery import states

from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.workers import kept


@pytest.fixture
def version(config):
    """Makes the config and the task of a version of the code: ``version(name, **options)``."""
    with ExitStack() as stack:

        def make(name, settings=None, **options):
            annotations = {"task_annotations": {f"lab.{name}": options}}
            made = replace(config, settings={**config.settings, **annotations, **(settings or {})})
            app = make_app(made)
            stack.callback(app.close)
            return made, app.tasks[f"lab.{name}"]

        yield make


def test_what_waits_is_skipped_where_a_limit_goes_and_all_arguments_make_the_key(version, start_worker, ledger, gate):
    (old, before), (new, _) = version("work", lock_args=None, lock_limit=2), version("work", lock_args=None)
    first = start_worker(3, config=old)
    results = [before.delay("k", "item", gate) for _ in range(3)]
    wait_until(lambda: kept(before.app) == 1, "one waits")
    start_worker(1, config=new)
    first.begin_to_stop()
    wait_until(lambda: sum(result.ready() for result in results) == 1, "it has ended")
    assert len(ledger.running()) == 2
    gate.open()
    first.wait()
    wait_until(lambda: all(result.ready() for result in results), "all have ended")
    assert sorted(result.state for result in results) == [states.REVOKED, states.SUCCESS, states.SUCCESS]


def test_a_permit_that_was_kept_for_a_retry_stays_where_the_limit_becomes_one(version, start_worker, ledger):
    """It keeps nobody from the key: a lock with one holder has one permit."""
    (old, before), (new, after) = version("three_again"), version("three_again", lock_limit=1)
    first = start_worker(3, config=old)
    results = [before.delay("k", number, 1, countdown=6.0) for number in range(3)]
    wait_until(lambda: sum(result.state == states.RETRY for result in results) == 3, "all are to be tried again")
    first.stop()
    start_worker(3, config=new)
    assert [result.get(timeout=30) for result in results] == [0, 1, 2]
    wait_until(lambda: after.lock_info("k") is None, "the key is free")
    assert {holder.state for holder in before.lock_info("k").holders} == {"queued"}
    assert after.delay("k", 3).get(timeout=10) == 3
    assert ledger.most_at_once() <= 3


@pytest.mark.parametrize("how", ["locks off", "another server"])
def test_a_job_keeps_its_key_where_its_worker_does_not_reach_its_reservation(
    version, start_worker, ledger, locks, broker_server, how
):
    """And where its result is not stored, later calls are taken for its duplicates."""
    off = {"redislock_enabled": False} if how == "locks off" else {"redislock_url": broker_server.url()}
    _, task = version("job", ignore_result=True)
    new, _ = version("job", off, ignore_result=True)
    worker = start_worker(1, config=new)
    first = task.delay("k", "first")
    wait_until(lambda: "succeeded" in worker.output(), "it has run")
    again = task.delay("k", "again")
    assert (again.duplicate, again.id) == (True, first.id)
    assert task.lock_info("k").state == "queued"
    worker.stop()
    assert "computes lock" not in worker.output()
    assert [locks.client.pttl(key) > 3_000_000 for key in locks.held()] == [True]
    assert ledger.items() == ["first"]


def test_messages_under_the_old_name_of_a_task_are_dropped_by_workers_that_do_not_know_it(
    config, tasks, start_worker, ledger, broker_server
):
    waits = tasks.work.delay("k", "lost")
    worker = start_worker(1, config=replace(config, tasks=["plain"]))
    wait_until(lambda: "Received unregistered task of type 'lab.work'" in worker.output(), "it is dropped")
    worker.stop()
    assert broker_server.client.llen(config.queue) == 0
    assert waits.state == states.FAILURE
    assert ledger.items() == []


def test_without_a_url_of_their_own_the_locks_move_with_the_broker(config, broker_server, start_worker, ledger, gate):
    """As in any change of the key, runs of the old workers and of the new ones overlap."""
    config.settings["redislock_url"] = None
    with ExitStack() as stack:
        for one in (config, replace(config, broker=broker_server.celery_url(2))):
            app = make_app(one)
            stack.callback(app.close)
            start_worker(1, config=one)
            app.tasks["lab.work"].delay("k", "item", gate)
        wait_until(lambda: len(ledger.running()) == 2, "both run")
        gate.open()


@pytest.mark.parametrize("prefixes", [{}, {"redislock_prefix": "other"}], ids=["one prefix", "a prefix each"])
def test_apps_on_one_server_have_a_key_in_common_where_their_tasks_have_the_same_name(
    config, tasks, start_worker, running, prefixes
):
    other = replace(config, queue="lab-other", settings={**config.settings, **prefixes})
    app = make_app(other)
    start_worker(1)
    start_worker(1, config=other)
    first = tasks.on_skip.delay("k", "first", "waits for five")
    running("first")
    second = app.tasks["lab.on_skip"].delay("k", "second")
    wait_until(second.ready, "it has ended")
    assert second.state == (states.SUCCESS if prefixes else states.REVOKED)
    first.revoke(terminate=True)
    app.close()
