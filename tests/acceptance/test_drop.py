"""To drop what waits for a key: what ends, what is spared, what comes later; and to release a queued job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import chain, chord, states
from celery.bin.base import CLIContext
from celery.exceptions import ChordError, TaskRevokedError
from click.testing import CliRunner, Result

from celery_redislock.cli.commands import locks as group
from celery_redislock.protocol.names import keys_of
from tests.conftest import on_every_broker
from tests.lab.kinds import left_out
from tests.lab.servers import wait_until
from tests.lab.workers import kept

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
DROPPED = "dropped from the line by an operator"


@pytest.fixture
def cli(app) -> Callable[..., Result]:
    """Runs a command in this process; there is no terminal."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(group, arguments, obj=CLIContext(app, no_color=True, workdir=None))

    return run


@pytest.fixture
def drop(cli, tasks) -> Callable[..., None]:
    """Drops what waits for a key, which must be so many messages."""

    def run(key: str, number: int) -> None:
        said = cli("drop", key, "--yes", "--timeout", "3")
        assert said.exit_code == 0, said.output
        assert said.stdout.splitlines()[-1] == f"dropped: {number}"

    return run


@pytest.fixture
def held(tasks, running, gate) -> Callable[..., tuple]:
    """Runs a task that holds its key until the gate opens; returns its result and the key."""

    def hold(task=None, key: str = "k"):
        task = task or tasks.work
        first = task.delay(key, "first", gate)
        running("first")
        return first, task.lock_for(key).name

    return hold


@on_every_broker
def test_what_waits_ends_as_revoked_and_the_holder_goes_on(tasks, app, start_worker, held, drop, gate, ledger):
    start_worker(2)
    first, key = held()
    waiting = [tasks.work.delay("k", number) for number in range(120)]  # more than a worker ends at once
    other = tasks.work.delay("other", "other")
    wait_until(lambda: kept(app) == 120, "all others wait")
    drop(key, 120)
    for one in waiting:
        with pytest.raises(TaskRevokedError, match=DROPPED):
            one.get(timeout=20)
    assert kept(app) == 0
    gate.open()
    assert (first.get(timeout=20), other.get(timeout=20)) == ("first", "other")
    later = tasks.work.delay("k", "later")
    assert later.get(timeout=20) == "later"
    assert sorted(ledger.items()) == ["first", "later", "other"]


def test_neither_a_chain_nor_a_chord_of_what_is_dropped_hangs(tasks, app, start_worker, held, drop, gate):
    start_worker(2)
    _, key = held()
    tail = chain(tasks.work.si("k", 1), tasks.plain.si()).apply_async()
    body = chord(
        [tasks.work.si("k", 2), chain(tasks.work.si("k", 3), tasks.plain.si())], tasks.plain.si()
    ).apply_async()
    wait_until(lambda: kept(app) == 3, "they wait")
    drop(key, 3)
    wait_until(lambda: tail.ready() and body.ready(), "both have ended")
    with pytest.raises(TaskRevokedError, match=DROPPED):
        tail.get(timeout=20)
    with pytest.raises((ChordError, TaskRevokedError), match=DROPPED):  # as for `skip`, it depends on which ends first
        body.get(timeout=20)
    gate.open()


@left_out("its user may read no key without the prefix", "acl")
def test_it_asks_before_it_drops_and_says_what_would_end(tasks, app, start_worker, held, cli, gate):
    start_worker(2)
    _, key = held()
    assert cli("drop", key).stdout.startswith("0 messages in 0 workers would end as REVOKED")
    mistyped = cli("drop", "{k}", "--yes")
    assert (mistyped.exit_code, "is free; the keys of tasks look like" in mistyped.stderr) == (1, True)
    waits = tasks.work.delay("k", "waits")
    wait_until(lambda: kept(app) == 1, "it waits")
    said = cli("drop", key)
    assert said.exit_code == 3
    assert said.stdout.startswith("1 message in 1 worker would end as REVOKED")
    assert "no terminal" in said.stderr
    assert cli("drop", key, "--timeout", "0").exit_code == 69
    gate.open()
    assert waits.get(timeout=20) == "waits"


def test_an_older_message_that_comes_to_wait_later_is_dropped_and_a_newer_one_is_not(
    tasks, app, config, start_worker, held, drop, gate
):
    start_worker(2)
    first, key = held()
    waits = tasks.work.delay("k", "waits")
    wait_until(lambda: kept(app) == 1, "it waits")
    app.control.cancel_consumer(config.queue, reply=True, timeout=5, limit=1)
    older = tasks.work.delay("k", "older")
    drop(key, 1)
    newer = tasks.work.delay("k", "newer")
    app.control.add_consumer(config.queue, reply=True, timeout=5, limit=1)
    for one in (waits, older):
        wait_until(one.ready, "it has ended")
        with pytest.raises(TaskRevokedError, match=DROPPED):
            one.get(timeout=20)
    for _ in range(2):  # when the second has ended, the worker has ended all that it found beside the first
        last = tasks.work.delay("k", "last")
        wait_until(lambda: kept(app) == 2, "the newer ones wait")
        last.revoke()  # Celery 5.7 stores REVOKED at once
        wait_until(lambda: kept(app) == 1, "the worker has looked at all that wait, and keeps the newer one")
    assert not newer.ready()
    gate.open()
    assert (first.get(timeout=20), newer.get(timeout=20)) == ("first", "newer")


def test_a_message_that_no_worker_has_received_is_dropped_though_none_waits_yet(
    tasks, app, config, start_worker, held, cli, drop, gate
):
    nothing = cli("drop", "redislock:{k}", "--yes", "--timeout", "0.1")
    assert (nothing.exit_code, "no worker answered" in nothing.stderr) == (3, True)
    start_worker(2)
    _, key = held()
    app.control.cancel_consumer(config.queue, reply=True, timeout=5, limit=1)
    older = tasks.work.delay("k", "older")
    drop(key, 0)
    app.control.add_consumer(config.queue, reply=True, timeout=5, limit=1)
    with pytest.raises(TaskRevokedError, match=DROPPED):
        older.get(timeout=20)
    gate.open()


def test_a_message_that_may_be_a_copy_of_the_holders_is_spared(tasks, app, start_worker, held, drop, gate):
    start_worker(2)
    first, key = held()
    tasks.work.apply_async(("k", "copy"), task_id=first.id)
    other = tasks.work.delay("k", "other")
    wait_until(lambda: kept(app) == 2, "both wait")
    drop(key, 1)
    with pytest.raises(TaskRevokedError, match=DROPPED):
        other.get(timeout=20)
    assert kept(app) == 1
    assert first.state == states.PENDING
    gate.open()
    wait_until(lambda: first.get(timeout=20) in {"first", "copy"}, "it has run")


def test_a_job_that_is_dropped_can_be_sent_again(tasks, app, start_worker, drop, gate, running, locks):
    start_worker(2)
    tasks.queued.delay("k", "first", gate)
    running("first")
    waits = tasks.queued.delay("k", "waits")
    wait_until(lambda: kept(app) == 1, "it waits")
    assert tasks.queued.delay("k").id == waits.id
    name = tasks.queued.lock_for("k").name
    drop(name, 1)
    with pytest.raises(TaskRevokedError, match=DROPPED):
        waits.get(timeout=20)
    wait_until(lambda: not locks.client.exists(keys_of(name).queued), "its place is free")
    again = tasks.queued.delay("k", "again")
    assert not again.duplicate
    gate.open()
    assert again.get(timeout=20) == "again"


def test_what_a_released_job_has_reserved_is_free_with_its_window(tasks, cli):
    for task, key, part in ((tasks.windowed, "w", ""), (tasks.job, "j", ""), (tasks.queued, "q", ":queued")):
        first = task.delay(key)
        assert task.delay(key).id == first.id
        name = task.lock_for(key).name + part
        assert cli("release", name, "--yes", "--timeout", "0").exit_code == 0
        assert not task.delay(key).duplicate
