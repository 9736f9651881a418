"""What is merged into a waiting message, and what is not: docs/merging-calls.md, with real workers."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConfigError, LockUnavailable
from celery_redislock.message.calls import LONGEST_BODY
from celery_redislock.protocol.names import keys_of
from tests.lab.servers import wait_until

PATIENCE = 30


@pytest.fixture
def held(tasks, start_worker, running, gate):
    """A worker, and a run that holds the key until the gate opens."""

    def hold(task):
        start_worker(3)
        holder = task.delay("k", "holder", str(gate))
        running("holder")
        return holder

    return hold


def test_a_call_that_is_not_plain_or_is_large_keeps_its_own_arguments(tasks, held, gate):
    held(tasks.latest)
    ticket = tasks.latest.delay("k", "ticket")
    large = "x" * LONGEST_BODY
    alone = {
        large: tasks.latest.delay("k", large),
        "id": tasks.latest.apply_async(("k", "id"), task_id="its-own"),
        "link": tasks.latest.apply_async(("k", "link"), link=tasks.latest.si("other", "linked")),
    }
    last = tasks.latest.delay("k", "last")
    assert last.id == ticket.id
    assert {result.id for result in alone.values()} & {ticket.id} == set()
    assert not any(result.duplicate for result in alone.values())
    gate.open()
    assert {item: result.get(timeout=PATIENCE) for item, result in alone.items()} == {item: item for item in alone}
    assert ticket.get(timeout=PATIENCE) == "last"


def test_a_ticket_expires_with_the_last_of_its_calls(tasks, held, gate):
    held(tasks.latest)
    calls = [tasks.latest.apply_async(("k", number), expires=expires) for number, expires in enumerate((0.3, 0.01))]
    time.sleep(0.5)
    gate.open()
    for result in calls:
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=PATIENCE)


@pytest.mark.parametrize("expiries", [(None, 2), (2, None), (2, 60)], ids=str)
def test_a_ticket_with_a_call_that_has_not_expired_runs(tasks, held, gate, expiries):
    held(tasks.latest)
    calls = [tasks.latest.apply_async(("k", number), expires=expires) for number, expires in enumerate(expiries)]
    over = time.time() + 2
    wait_until(lambda: time.time() > over, "one of them has expired")
    gate.open()
    assert [result.get(timeout=PATIENCE) for result in calls] == [1, 1]


def test_a_revoked_ticket_is_revoked_for_every_caller(tasks, start_worker):
    calls = [tasks.latest.apply_async(("k", number), countdown=60) for number in range(2)]
    worker = start_worker(1)
    wait_until(lambda: f"[{calls[0].id}] received" in worker.output(), "the worker has it")
    calls[1].revoke()
    for result in calls:
        with pytest.raises(TaskRevokedError, match="revoked"):
            result.get(timeout=PATIENCE)


def test_a_later_countdown_counts_and_an_earlier_one_wakes_no_message(tasks, start_worker):
    start_worker(2)
    began_at = time.monotonic()
    tasks.latest.apply_async(("later", "first"), countdown=0.5)
    later = tasks.latest.apply_async(("later", "last"), countdown=3)
    tasks.latest.apply_async(("earlier", "first"), countdown=2)
    earlier = tasks.latest.delay("earlier", "last")
    assert earlier.get(timeout=PATIENCE) == "last"
    assert time.monotonic() - began_at >= 2
    assert later.get(timeout=PATIENCE) == "last"
    assert time.monotonic() - began_at >= 3


def test_with_lock_on_outage_raise_an_outage_at_the_start_of_the_run_fails_it_for_every_caller(
    tasks, start_worker, lock_proxy, ledger
):
    start_worker(2)
    calls = [tasks.latest_raise.apply_async(("k", number), countdown=2) for number in range(2)]
    assert calls[1].id == calls[0].id
    lock_proxy.refuse()
    for call in calls:
        with pytest.raises(LockUnavailable):
            call.get(timeout=PATIENCE)
    assert ledger.items() == []


def test_in_an_emptied_server_the_ticket_has_its_own_arguments(tasks, start_worker, locks):
    ticket, merged = tasks.latest.delay("k", "ticket"), tasks.latest.delay("k", "merged")
    assert merged.id == ticket.id
    for key in locks.client.scan_iter("*lab.latest*"):
        locks.client.delete(key)
    start_worker(1)
    assert ticket.get(timeout=PATIENCE) == "ticket"


def test_in_an_emptied_server_whose_clock_is_behind_a_later_call_may_be_superseded(tasks, start_worker, locks, ledger):
    ticket = tasks.latest.delay("k", "ticket")
    for key in locks.client.scan_iter("*lab.latest*"):
        locks.client.delete(key)
    later = tasks.latest.delay("k", "later")
    locks.client.hincrby(keys_of(tasks.latest.lock_for("k").name).pending, "number", -60_000_000)  # as by that clock
    start_worker(1)
    assert ticket.get(timeout=PATIENCE) == "ticket"
    with pytest.raises(TaskRevokedError, match=f"superseded by {ticket.id}"):
        later.get(timeout=PATIENCE)
    assert ledger.items() == ["ticket"]


def test_where_the_publishers_clock_is_ahead_the_run_comes_that_much_later(
    app, tasks, start_worker, ledger, monkeypatch
):
    """Its message has a countdown, which is by the clocks of the publisher and the worker."""
    now = app.now
    monkeypatch.setattr(app, "now", lambda: now() + timedelta(seconds=3))
    start_worker(1)
    called_at = time.monotonic()
    assert tasks.debounced.delay("k", "item").get(timeout=PATIENCE) == "item"
    assert ledger.runs()[0].start - called_at > 3


def test_the_hundred_and_first_call_is_a_message_of_its_own(tasks, held, gate):
    held(tasks.collected)
    calls = [tasks.collected.delay("k", number, how="calls") for number in range(101)]
    assert {result.id for result in calls[:100]} == {calls[0].id}
    assert calls[100].id != calls[0].id
    gate.open()
    assert calls[0].get(timeout=PATIENCE) == list(range(100))
    assert calls[100].get(timeout=PATIENCE) == [100]


def test_a_call_with_pickle_or_with_another_scope_is_refused(tasks):
    with pytest.raises(LockConfigError, match="could run code in your workers"):
        tasks.latest.apply_async(("k", 1), serializer="pickle")
    with pytest.raises(LockConfigError, match="no message waits that calls could join"):
        tasks.latest.apply_async(("k", 1), lock_scope="run")


def test_a_message_that_sleeps_does_not_wake_up_because_of_lock_wait_for(tasks, start_worker):
    worker = start_worker(2)
    calls = [tasks.debounced.apply_async(("k", number), lock_wait_for=60) for number in range(3)]
    assert calls[0].get(timeout=PATIENCE) == 2
    assert worker.output().count("not due yet") <= 3


def test_the_place_of_a_lost_ticket_is_free_after_lock_queue_ttl_however_many_calls_come(app, tasks):
    lost = tasks.latest_brief.delay("k", 0)
    app.control.purge()
    wait_until(lambda: tasks.latest_brief.delay("k", 1).id != lost.id, "another message is sent", 20)


def test_a_retry_with_other_arguments_that_are_too_large_to_merge_runs_with_them(tasks, start_worker):
    start_worker(2)
    assert tasks.latest.delay("k", "small", 0, "grows").get(timeout=PATIENCE) == "x" * LONGEST_BODY
