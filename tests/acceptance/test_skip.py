"""Policy skip: the duplicate ends at once as REVOKED, in every shape of canvas, and everybody can see it."""

from __future__ import annotations

import threading

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from tests.conftest import on_every_broker
from tests.lab.servers import wait_until

pytestmark = on_every_broker


@pytest.fixture
def holder(tasks, start_worker, ledger):
    """A run that holds the key ``k`` for a while."""
    worker = start_worker(4, "-E")
    result = tasks.once.delay("k", "holder", 4)
    result.output = worker.output
    wait_until(ledger.runs, "the holder runs")
    return result


def get(result):
    """The outcome of a result, long before the holder ends."""
    return result.get(timeout=3)


def test_a_plain_duplicate_is_revoked_at_once_naming_the_holder(holder, tasks, ledger):
    duplicate = tasks.once.delay("k", "duplicate")
    with pytest.raises(TaskRevokedError, match=f"duplicate of {holder.id}"):
        get(duplicate)
    assert duplicate.state == "REVOKED"
    assert not holder.ready()
    assert ledger.items() == ["holder"]


def test_the_rest_of_a_chain_is_revoked_with_its_skipped_step(holder, tasks, ledger):
    result = chain(
        tasks.step.si("other", 1), tasks.once.si("k", 2), tasks.step.si("other", 3), tasks.plain.si()
    ).delay()
    with pytest.raises(TaskRevokedError):
        get(result)
    assert ledger.items() == ["holder", "1"]


def test_a_skipped_member_fails_its_chord_at_once(holder, tasks):
    result = chord([tasks.plain.si(), tasks.once.si("k", 1)], tasks.plain.s()).delay()
    with pytest.raises((ChordError, TaskRevokedError), match="duplicate of"):
        get(result)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_skipped_step_of_a_chain_inside_a_chord_header_fails_the_chord_at_once(holder, tasks, place):
    steps = [tasks.step.si(place, n) for n in range(3)]
    steps[["first", "middle", "last"].index(place)] = tasks.once.si("k", "duplicate")
    result = chord([tasks.plain.si(), chain(*steps)], tasks.plain.s()).delay()
    with pytest.raises((ChordError, TaskRevokedError), match="duplicate of"):
        get(result)


def test_a_group_ends_with_its_skipped_member(holder, tasks):
    result = group(tasks.plain.si(), tasks.once.si("k", 1)).delay()
    with pytest.raises(TaskRevokedError):
        get(result)


def test_the_links_of_a_skipped_task_do_not_run(holder, tasks, ledger):
    duplicate = tasks.once.apply_async(("k", 1), link=tasks.plain.si(), link_error=tasks.plain.si())
    with pytest.raises(TaskRevokedError):
        get(duplicate)
    assert holder.get(timeout=10) == "holder"
    assert ledger.items() == ["holder"]


def test_the_skip_is_seen_by_celerys_own_event_and_by_the_log(holder, app, tasks, config):
    seen = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"task-revoked": seen.append})
        thread = threading.Thread(target=lambda: _capture(receiver))
        thread.start()
        wait_until(lambda: receiver.consumers_ready, "the receiver listens")
        duplicate = tasks.once.delay("k", 1)
        thread.join(20)
    assert [event["uuid"] for event in seen] == [duplicate.id]
    line = f"lab.once[{duplicate.id}]: lock {tasks.once.lock_for('k').name} is held by task {holder.id} on w0@lab: skip"
    assert line in holder.output()


def _capture(receiver):
    def stop(event):
        receiver.should_stop = True
        original(event)

    original = receiver.handlers["task-revoked"]
    receiver.handlers["task-revoked"] = stop
    receiver.consumers_ready = True
    for _ in receiver.itercapture(limit=None, timeout=20):
        if receiver.should_stop:
            return
