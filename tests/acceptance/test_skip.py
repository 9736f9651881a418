"""Policy skip: the duplicate ends at once as REVOKED, in every shape of canvas, and everybody can see it."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from tests.conftest import on_every_broker
from tests.lab.servers import wait_until

pytestmark = on_every_broker


@pytest.fixture
def holder(tasks, start_worker, ledger, gate):
    """A run that holds the key ``k`` until the gate is open."""
    worker = start_worker(4, "-E")
    result = tasks.once.delay("k", "holder", gate)
    result.output = worker.output
    wait_until(ledger.runs, "the holder runs")
    return result


def get(result):
    """The outcome of a result, while the holder runs."""
    return result.get(timeout=20)


def test_a_plain_duplicate_is_revoked_at_once_naming_the_holder(holder, tasks, ledger):
    duplicate = tasks.once.delay("k", "duplicate")
    with pytest.raises(TaskRevokedError, match=f"duplicate of {holder.id}"):
        get(duplicate)
    assert duplicate.state == "REVOKED"
    assert not holder.ready()
    assert ledger.items() == ["holder"]


def test_the_rest_of_a_chain_is_revoked_with_its_skipped_step(holder, tasks, ledger):
    result = chain(
        tasks.once.si("other", 1), tasks.once.si("k", 2), tasks.once.si("other", 3), tasks.plain.si()
    ).delay()
    with pytest.raises(TaskRevokedError):
        get(result)
    assert ledger.items() == ["holder", "1"]


def test_a_skipped_member_fails_its_chord_at_once(holder, tasks):
    result = chord([tasks.plain.si(), tasks.once.si("k", 1)], tasks.plain.s()).delay()
    with pytest.raises((ChordError, TaskRevokedError), match="duplicate of"):
        get(result)


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_a_skipped_step_of_a_chain_inside_a_chord_header_fails_the_chord_at_once(holder, tasks, position):
    steps = [tasks.once.si(position, n) for n in range(3)]
    steps[["first", "middle", "last"].index(position)] = tasks.once.si("k", "duplicate")
    result = chord([tasks.plain.si(), chain(*steps)], tasks.plain.s()).delay()
    with pytest.raises((ChordError, TaskRevokedError), match="duplicate of"):
        get(result)


def test_a_group_ends_with_its_skipped_member(holder, tasks):
    result = group(tasks.plain.si(), tasks.once.si("k", 1)).delay()
    with pytest.raises(TaskRevokedError):
        get(result)


def test_the_links_of_a_skipped_task_do_not_run(holder, tasks, ledger, gate):
    duplicate = tasks.once.apply_async(("k", 1), link=tasks.plain.si(), link_error=tasks.plain.si())
    with pytest.raises(TaskRevokedError):
        get(duplicate)
    gate.open()
    assert holder.get(timeout=10) == "holder"
    assert ledger.items() == ["holder"]


def test_the_skip_is_seen_by_celerys_own_event_and_by_the_log(holder, app, tasks):
    with first_event(app, "task-revoked") as seen:
        duplicate = tasks.once.delay("k", 1)
    assert seen == [(duplicate.id, "REVOKED")]
    line = (
        f"lab.once[{duplicate.id}]: lock {tasks.once.lock_for('k').name} is held by task {holder.id} on w0@lab; skipped"
    )
    assert line in holder.output()


def test_the_last_step_of_a_chain_is_not_skipped_where_its_first_step_runs_once_more(holder, tasks, ledger, gate):
    """As after a lost ack, with the note of its end lost too. The parent of the last step is the second."""
    last = tasks.once.apply_async(("k", "last"), root_id=holder.id, parent_id="second")
    wait_until(ledger.conflicts, "it has met the first step")
    assert ledger.conflicts()[0]["policy"] == "always waits"
    gate.open()
    assert last.get(timeout=20) == "last"


def test_a_run_that_is_sent_back_is_seen_by_celerys_own_event_and_state(holder, app, tasks, ledger, gate):
    first = tasks.work.delay("w", 1, gate)
    wait_until(lambda: "1" in ledger.items(), "the first one runs")
    with first_event(app, "task-retried") as seen:
        second = tasks.work.delay("w", 2)
    assert seen == [(second.id, "RETRY")]
    assert second.state == "RETRY"
    assert second.info.holder.task_id == first.id
    gate.open()
    assert second.get(timeout=20) == 2


@contextmanager
def first_event(app, kind):
    """Listens to Celery's events during the block; then a list of the first task of that kind and its state.

    The block begins when one event has been heard: on Redis nobody hears what is sent before it has subscribed.
    """
    seen, state, heard = [], app.events.State(), threading.Event()

    def hear(event):
        heard.set()
        state.event(event)

    def note(event):
        state.event(event)
        seen.append((event["uuid"], state.tasks[event["uuid"]].state))
        receiver.should_stop = True

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": hear, kind: note})
        thread = threading.Thread(target=lambda: list(receiver.itercapture(timeout=20)))
        thread.start()
        with app.events.default_dispatcher() as dispatcher:
            wait_until(lambda: dispatcher.send("lab-listens") or heard.wait(0.1), "it listens")
        yield seen
        thread.join(30)
