"""Why a task has not run: each sentence of ``celery locks why`` is reached with real workers, and is true there."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import chain
from celery.app.trace import build_tracer
from celery.bin.base import CLIContext
from celery.exceptions import Retry
from click.testing import CliRunner

from celery_redislock import Lock
from celery_redislock.app import server_of
from celery_redislock.cli import workers
from celery_redislock.cli.commands import locks as group
from celery_redislock.cli.sentences import Say
from celery_redislock.protocol import tokens
from celery_redislock.protocol.tokens import SENDING, Attempt
from tests.conftest import every
from tests.lab.app import make_app
from tests.lab.kinds import left_out, needs_one_server
from tests.lab.servers import wait_until
from tests.lab.versions import BEFORE_5_7
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import acked, client_for, kept, stands_in_line

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery

FIELDS = ["key", "task", "task_id", "hostname", "since", "ttl", "state", "scope", "waiting", "reason"]
Why = Callable[..., str]


@pytest.fixture
def why(app) -> Why:
    """Asks until these sentences are said, for a worker may be too busy to answer in time; returns all that is said.

    ``why(result, Say.WAITS, Say.HELD)``
    """

    def ask(result: Any, *sentences: Say, of: Any = app) -> str:
        said = [""]
        patience = itertools.chain([0.3, 1.0], itertools.repeat(3.0))

        def are_said() -> bool:
            context = CLIContext(of, no_color=True, workdir=None)
            run = CliRunner().invoke(group, ["why", str(result), f"--timeout={next(patience)}"], obj=context)
            assert run.exit_code in {0, 1}, run.output
            said.append(run.output)
            return all(says(said[-1], one) for one in sentences)

        try:
            wait_until(are_said, f"{sentences} are said")
        except pytest.fail.Exception:
            pytest.fail(f"{sentences} are not said in:\n{said[-1]}")
        return said[-1]

    return ask


@pytest.fixture
def delete_by_hand(tasks, app, locks) -> Callable[..., None]:
    """Deletes a key for which a message waits, which calls nobody: its room has looked, and looks again much later."""

    def delete(key: str, task: Any) -> None:
        wait_until(lambda: locks.client.pubsub_channels("redislock:room:*"), "the room hears hints")
        with tasks.keyed.lock_for("another"):
            last = tasks.keyed.delay("another")
            wait_until(lambda: stands_in_line(locks.client, tasks.keyed, "another"), "the room has looked at all lines")
        last.get(timeout=20)
        assert stands_in_line(locks.client, task, "k")
        locks.client.delete(key)

    return delete


def says(text: str, sentence: Say) -> bool:
    """Whether `text` has the sentence, whatever is filled in."""
    pattern = ".*?".join(map(re.escape, re.split(r"\{\w+\}", sentence.value)))
    return re.search(pattern, text) is not None


def states(app: Any, result: Any) -> list[str]:
    """What programs are told: of the task first, and then of who holds its key."""
    context = CLIContext(app, no_color=True, workdir=None)
    run = CliRunner().invoke(group, ["why", str(result), "--json", "--timeout=5"], obj=context)
    told = [json.loads(line) for line in run.stdout.splitlines()]
    assert [list(one) for one in told] == [FIELDS] * len(told)
    assert told[0]["task_id"] == str(result)
    assert says(told[0]["reason"], Say.WAITS)
    return [one["state"] for one in told]


@left_out("its user may use no such key", "acl")
def test_a_job_whose_worker_computes_another_key_than_its_publisher_names_both(
    config, tasks, why, start_worker, running, gate
):
    config.settings["redislock_prefix"] = "newer"
    start_worker(1)
    job = tasks.job.delay("k", "job", gate)
    running("job")
    said = why(job, Say.RUNS, Say.HOLDS, Say.OTHER_KEY)
    reserved = tasks.job.lock_for("k").name
    assert f"reserved {reserved}, but its worker computed {reserved.replace('redislock:', 'newer:')}:" in said
    gate.open()


# It waits.


def test_one_that_waits_is_told_who_holds_its_key_that_the_holder_lives_and_how_many_are_before_it(
    tasks, app, why, start_worker, running
):
    start_worker(3)
    first = tasks.work.delay("k", "first", 90)
    running("first")
    alone = tasks.work.delay("k", 0)
    wait_until(lambda: kept(app) == 1, "it waits")
    said = why(alone, Say.WAITS, Say.HELD, Say.RENEWED, Say.AHEAD)
    assert f"is held by task {first.id} on w0@lab" in said
    assert "No message is ahead of it; 1 message in line in the 1 worker that answered." in said
    behind = tasks.work.delay("k", 1)
    wait_until(lambda: kept(app) == 2, "both wait")
    assert "No message is ahead of it; 2 messages in line" in why(alone, Say.AHEAD)
    assert states(app, alone) == ["waiting", "held"]
    assert "1 message is ahead of it; 2 messages in line in the 1 worker that answered." in why(behind, Say.AHEAD)
    said = why(first, Say.RUNS, Say.HOLDS)
    assert "It has held redislock:{lab.work:" in said


@needs_one_server("a key is deleted by hand")
def test_one_that_waits_for_a_free_key_is_told_what_its_worker_lacks_or_that_its_turn_comes(
    config, tasks, app, locks, why, start_worker, running, gate, delete_by_hand
):
    start_worker(2)
    lock = Lock(server_of(app).client, tasks.work.lock_for("k").name, timeout=600, renew=False)
    assert lock.acquire(blocking=False)
    first, second = (tasks.work.delay("k", number) for number in range(2))
    wait_until(lambda: kept(app) == 2, "both wait")
    delete_by_hand(lock.name, tasks.work)
    assert f"{lock.name} is free, and the worker has a process for it" in why(first, Say.NEXT, Say.AHEAD)
    assert "within" not in why(second, Say.FREE, Say.AHEAD)
    elsewhere = make_app(config)
    elsewhere.conf.redislock_url = locks.url(7)
    assert "7, but the worker uses " in why(first, Say.ELSEWHERE, of=elsewhere)
    for item in ("one", "another"):
        tasks.work.delay(item, item, gate)
        running(item)
    assert "within" not in why(first, Say.NO_PROCESS)
    server_of(elsewhere).stop()
    elsewhere.close()
    gate.open()


def test_one_that_waits_for_a_free_key_is_told_that_the_rate_limit_of_its_task_keeps_it_back(
    tasks, app, why, start_worker
):
    start_worker(2)
    assert app.control.rate_limit("lab.work", "1/h", reply=True, limit=1, timeout=10)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(app) == 1, "it waits")
        tasks.work.delay("other", "other").get(timeout=10)  # it takes the token
    assert "within" not in why(waits, Say.WAITS, Say.NO_RATE)
    assert app.control.rate_limit("lab.work", "100/s", reply=True, limit=1, timeout=10)
    assert waits.get(timeout=20) == "waits"


@needs_one_server("a proxy is in front of it")
def test_one_whose_worker_cannot_reach_the_lock_server_is_told_so(
    config, tasks, app, locks, why, lock_proxy, start_worker
):
    start_worker(2)
    direct = make_app(config)
    direct.conf.redislock_url = locks.url()
    lock = direct.tasks["lab.work"].lock_for("k")
    assert lock.acquire(blocking=False)
    waits = tasks.work.delay("k", "waits")
    wait_until(lambda: kept(app) == 1, "it waits")
    lock_proxy.refuse()
    lock.release()
    assert "within" not in why(waits, Say.WAITS, Say.NO_SERVER, of=direct)
    lock_proxy.mend()
    assert waits.get(timeout=30) == "waits"
    server_of(direct).stop()
    direct.close()


@needs_one_server("a test writes to it by hand")
def test_where_another_library_holds_the_key_nobody_knows_whether_it_lives(tasks, app, locks, why, start_worker):
    start_worker(1)
    key = tasks.work.lock_for("k").name
    locks.client.set(key, "0c1d2e", px=60_000)
    waits = tasks.work.delay("k", "waits")
    why(waits, Say.WAITS, Say.FOREIGN, Say.ENDS)
    locks.client.persist(key)
    why(waits, Say.FOREIGN, Say.NEVER_ENDS)
    locks.client.delete(key)
    assert waits.get(timeout=20) == "waits"


@counts_on_wake_ups("who waits looks when the lease should have ended")
@needs_one_server("a key is deleted by hand")
def test_where_a_limit_is_reached_all_holders_are_named_and_else_a_permit_is_said_to_be_free(
    tasks, app, why, start_worker, delete_by_hand
):
    start_worker(3)
    key = tasks.three.lock_for("k").name
    permits = [Lock(server_of(app).client, key, timeout=600, limit=3) for _ in range(3)]
    assert all(permit.acquire(blocking=False) for permit in permits)
    fourth = tasks.three.delay("k")
    wait_until(lambda: kept(app) == 1, "it waits")
    assert re.findall(r"(:permit:\d)? is held by", why(fourth, Say.WAITS, Say.HELD)) == ["", ":permit:2", ":permit:3"]
    delete_by_hand(f"{key}:permit:2", tasks.three)
    assert f"A permit of {key} is free, and" in why(fourth, Say.NEXT)
    permits[0].release()
    fourth.get(timeout=20)


@counts_on_wake_ups("who waits looks when the lease should have ended")
def test_a_holder_is_told_that_it_is_not_renewed_after_lock_max_hold(
    config, tasks, app, why, start_worker, running, gate
):
    config.settings |= {"redislock_lease": 30.0, "task_annotations": {"lab.work": {"lock_max_hold": 0.1}}}
    start_worker(2)
    tasks.work.delay("k", "first", gate)
    running("first")
    waits = tasks.work.delay("k", "second")
    why(waits, Say.WAITS, Say.HELD, Say.HELD_TOO_LONG, of=make_app(config))
    gate.open()
    assert waits.get(timeout=20) == "second"


# It runs, or is about to.


def test_one_that_is_not_due_has_no_free_process_is_limited_or_needs_no_lock_is_told_so(tasks, app, why, start_worker):
    start_worker(1, "--prefetch-multiplier", "8")
    first = tasks.plain.delay(seconds=60)
    why(first, Say.RUNS, Say.NEEDS_NONE)
    assert app.control.rate_limit("lab.keyed", "1/h", reply=True, limit=1, timeout=10)
    _, limited = (tasks.keyed.delay("A1", number) for number in range(2))
    later = tasks.work.apply_async(("other",), countdown=600)
    reserved = tasks.work.delay("another")
    why(limited, Say.LIMITED)
    assert re.search(r"until its eta, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\.\n", why(later, Say.SCHEDULED))
    why(reserved, Say.RESERVED)


def test_a_run_that_has_not_asked_for_its_lock_is_told_since_when_it_runs(tasks, why, start_worker, ledger):
    worker = start_worker(1)
    run = tasks.stands_still.delay("k", "first")
    assert "ago)" in why(run, Say.RUNS, Say.NOT_ASKED)
    (child,) = worker.children()
    worker.resume_child(child.pid)
    run.get(timeout=20)


def test_one_whose_turn_has_come_is_not_said_to_wait_though_no_process_takes_it_yet(tasks, app, why, start_worker):
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(app) == 1, "it waits")
        (child,) = worker.children()
        worker.pause_child(child.pid)
    why(waits, Say.CALLED)
    worker.resume_child(child.pid)
    assert waits.get(timeout=20) == "waits"


@needs_one_server("a key is deleted by hand")
def test_a_run_that_has_lost_its_key_is_told_who_holds_it_now(tasks, app, locks, why, start_worker, running):
    start_worker(1)
    run = tasks.work.delay("k", "first", 60)
    running("first")
    wait_until(lambda: acked(app, "lab.work") == 1, "the worker knows that it runs")
    lock = tasks.work.lock_for("k")
    locks.client.delete(lock.name)
    assert lock.acquire(blocking=False)
    said = why(run, Say.RUNS, Say.HOLDS_NOTHING, Say.HELD)
    assert "is held by a lock outside tasks" in said
    lock.release()


def test_one_that_stands_for_several_calls_is_told_how_many_wherever_it_waits(tasks, why, start_worker, running, gate):
    start_worker(1, "--prefetch-multiplier", "8")
    tasks.latest.delay("k", "holder", str(gate))
    running("holder")
    ticket, *_ = [tasks.latest.delay("k", number) for number in range(3)]
    assert "stands for 3 calls." in why(ticket, Say.RESERVED, Say.CALLS)
    with tasks.latest.lock_for("other"):
        waits, _ = (tasks.latest.delay("other", number) for number in range(2))
        gate.open()
        assert "stands for 2 calls." in why(waits, Say.WAITS, Say.CALLS)
    assert ticket.get(timeout=20) == 2
    assert "stands for" not in why(ticket, Say.DONE)


def test_one_whose_debounce_is_not_over_is_said_to_sleep_until_it_is_due(tasks, config, why, start_worker):
    config.settings["task_annotations"] = {"lab.debounced": {"lock_debounce": 60.0}}
    longer = make_app(config).tasks["lab.debounced"]
    start_worker(1)
    first = tasks.debounced.delay("k", "first")
    longer.delay("k", "second")
    said = why(first, Say.ASLEEP, Say.CALLS)
    assert re.search(r"So far it stands for 2 calls, due in 5\ds\.", said)
    later = longer.delay("other")
    assert "stands for 1 call, due in " in why(later, Say.SCHEDULED, Say.CALLS)


def test_one_that_takes_turns_is_told_its_group_its_rank_and_how_many_groups_there_are(
    tasks, app, why, start_worker, running, gate
):
    start_worker(2)
    tasks.one_by_turns.delay("k", "A", "first", gate)
    running("Afirst")
    results = [tasks.one_by_turns.delay("k", customer) for customer in ("A", "A", "B", "C")]
    wait_until(lambda: kept(app) == 4, "all wait")
    said = why(results[0], Say.WAITS, Say.HELD, Say.AHEAD, Say.TURN)
    assert "Its group of A has 2 messages in line, and takes turns with 2 other groups (lock_fair)." in said
    context = CLIContext(app, no_color=True, workdir=None)
    shown = CliRunner().invoke(group, ["show", "redislock:{k}", "--timeout=10"], obj=context).output
    assert "Groups that take turns, the next one first: 3.\n" in shown
    assert "\n  of A: 2 messages\n" in shown
    assert "\n  of C: 1 message\n" in shown
    totals = CliRunner().invoke(group, ["export", "--timeout=5"], obj=context).output
    oldest = re.search(r'oldest_wait_seconds\{task="lab.one_by_turns"\} ([\d.]+)', totals)
    assert 1 < float(oldest[1]) < 60  # by the clock, though the ranks are no times
    gate.open()


@needs_one_server("a proxy is in front of it")
def test_one_that_was_sent_back_in_an_outage_is_told_of_it_and_one_without_a_lock_only_that_it_is_not_due(
    tasks, app, why, lock_proxy, start_worker
):
    start_worker(1)
    plain = tasks.plain.apply_async(countdown=600)
    why(plain, Say.SCHEDULED)
    lock_proxy.refuse()
    sent_back = tasks.work.delay("k", "first")

    def is_told() -> bool:
        context = CLIContext(app, no_color=True, workdir=None)
        run = CliRunner().invoke(group, ["why", sent_back.id, "--timeout=3"], obj=context)
        error = "could not reach the lock server " in run.stderr and "; nothing listens there: " in run.stderr
        return (run.exit_code, says(run.stdout, Say.SCHEDULED), error) == (69, True, True)

    wait_until(is_told, "it is told of the outage")
    why(plain, Say.SCHEDULED)
    lock_proxy.mend()
    assert sent_back.get(timeout=30) == "first"


# Its process has died.


def test_one_whose_process_has_died_is_told_whether_it_comes_again_and_not_that_it_held_a_lock(
    config, tasks, why, start_worker, running, tmp_path
):
    config.settings["lab_replaces_late"] = str(tmp_path / "replaces")  # so Celery does not notice
    start_worker(6)
    run, again = tasks.work.delay("k", "first", 60), tasks.given_back.delay("g", "again", 60)
    for item in ("first", "again"):
        os.kill(running(item), signal.SIGKILL)
    early = tasks.dying.delay("d")
    why(run, Say.DIED, Say.COMES_NOT)
    why(again, Say.DIED, Say.COMES_AGAIN)
    assert "RAN" not in why(early, Say.DIED, Say.COMES_AGAIN)


@every("broker", ["redis", "rabbitmq"])
def test_what_a_killed_worker_has_left_is_told_with_what_is_known_and_when_it_comes_again(
    config, tasks, app, why, start_worker, running, broker
):
    config.settings |= {"redislock_lease": 60.0, "task_track_started": True}
    worker = start_worker(3, "-n", "dead@lab")
    silent = tasks.work.delay("k", "first", 60)
    late = tasks.ends.delay("later", "retry late")
    kept_for = tasks.three_again.delay("r", "item", times=1, countdown=60)
    wait_until(lambda: late.state == kept_for.state == "RETRY", "they are to run again")
    running("first")
    waits = tasks.work.delay("k", "second")
    wait_until(lambda: waits.state == "RETRY", "it waits")
    worker.kill()
    when = "RabbitMQ gives" if broker.startswith("amqp") else "1h00m after the dead one received it"
    said = why(waits, Say.HAD_TO_WAIT, Say.HELD, Say.SILENT)
    assert when in said
    assert "within" not in said
    said = why(silent, Say.STARTED, Say.HOLDS_SOMEWHERE, Say.HELD)
    assert when in said
    why(late, Say.RETRIES)
    assert "NOT STARTED" not in why(kept_for, Say.RETRIES, Say.NEXT_ATTEMPT)


def test_while_a_worker_shuts_down_its_run_is_said_to_go_on_and_its_waiting_message_to_be_on_its_way(
    tasks, app, why, start_worker, running, gate
):
    worker = start_worker(2)
    with tasks.work.lock_for("k"):
        run = tasks.work.delay("k", "first", gate)
        wait_until(lambda: kept(app) == 1, "it has waited, and its result says so from then on")
    running("first")
    waits = tasks.work.delay("k", "second")
    wait_until(lambda: kept(app) == 1, "it waits")
    worker.begin_to_stop()
    assert "HAD TO WAIT" not in why(run, Say.HOLDS_SOMEWHERE, Say.HELD, Say.RENEWED, Say.SILENT)
    assert "within" not in why(waits, Say.HAD_TO_WAIT, Say.HELD, Say.RENEWED, Say.SILENT)
    gate.open()
    worker.wait()


@pytest.mark.skipif(BEFORE_5_7, reason="before Celery 5.7 only the worker that has the task stores REVOKED")
def test_a_run_that_goes_on_in_a_stopping_worker_is_said_to_hold_its_lock_though_another_worker_stored_it_as_revoked(
    tasks, app, why, start_worker, running, gate
):
    stopping = start_worker(1)
    run = tasks.work.delay("k", "item", gate)
    running("item")
    stopping.begin_to_stop()
    start_worker(1)
    app.control.revoke(run.id, terminate=True)
    wait_until(lambda: run.state == "REVOKED", "the other worker stores it")
    why(run, Say.REVOKED, Say.HOLDS_SOMEWHERE, Say.HELD, Say.SILENT)
    gate.open()
    stopping.wait()


def test_a_run_that_a_cold_shutdown_has_ended_is_not_said_to_run_again(tasks, why, start_worker, running):
    worker = start_worker(1)
    lost = tasks.work.delay("k", "item", 60)
    running("item")
    worker.stop(signal.SIGQUIT)
    assert "RUN AGAIN" not in why(lost, Say.CANCELLED)


def test_a_task_that_has_caught_its_own_retry_and_retried_again_is_said_to_run_again(app, why):
    @app.task(bind=True)
    def retries_twice(self):
        try:
            self.retry(countdown=600)
        except Retry as error:
            self.retry(exc=error, countdown=600)

    task, task_id = app.tasks[retries_twice.name], str(uuid4())
    request = {"id": task_id, "task": task.name, "args": (), "kwargs": {}, "delivery_info": {}}
    assert build_tracer(task.name, task, app=app)(task_id, (), {}, request).info.state == "RETRY"
    why(task_id, Say.RETRIES)


def test_a_job_that_was_revoked_before_it_ran_is_only_said_to_be_revoked(tasks, app, why, start_worker):
    start_worker(1)
    job = tasks.job.apply_async(("k", "item"), queue="no worker consumes this")
    app.backend.mark_as_revoked(job.id, "revoked")  # as a worker of Celery 5.7 does at once
    assert "NOT STARTED" not in why(job, Say.REVOKED)


@counts_on_wake_ups("who waits looks when the lease should have ended")
def test_a_holder_whose_worker_was_killed_is_not_renewed_and_its_key_ends_by_itself(
    config, tasks, app, why, start_worker, running
):
    config.settings["redislock_lease"] = 12.0  # so long that the answers come before its end
    dead = start_worker(1)
    first = tasks.work.delay("k", "first", 60)
    running("first")
    assert app.control.cancel_consumer(config.queue, reply=True, limit=1, timeout=10)  # the next one goes to the other
    start_worker(1)
    second = tasks.work.delay("k", "second")
    wait_until(lambda: kept(app, 2) == 1, "it waits in the second worker")
    dead.kill()
    why(second, Say.WAITS, Say.SILENT, Say.NOT_RENEWED)
    assert second.get(timeout=40) == "second"
    assert "have died with its worker" in why(first, Say.UNKNOWN)


# It has ended.


def test_what_has_ended_is_told_how_and_the_text_of_its_own_error_is_not_shown(
    tasks, app, why, start_worker, running, gate
):
    start_worker(2)
    first = tasks.until.delay("k", "first", str(gate))
    running("first")
    skipped = tasks.until.delay("k", "second", str(gate))
    wait_until(lambda: skipped.state == "REVOKED", "it is skipped")
    assert f": duplicate of {first.id} " in why(skipped, Say.SKIPPED)
    gate.open()
    why(first, Say.DONE)
    with tasks.on_raise.lock_for("k"):
        refused = tasks.on_raise.delay("k", "secret")
        assert "the lock redislock:{k} is held by a lock outside tasks on" in why(refused, Say.REFUSED)
    broken = chain(tasks.once.si("k", "secret", fails=True), tasks.plain.si()).apply_async()
    assert "RUN" not in why(broken, Say.FAILED, Say.CHAIN)
    said = why(broken.parent, Say.FAILED)
    assert "with ValueError." in said
    assert "secret" not in said
    unstored = tasks.unstorable.delay("k")
    assert "EncodeError. Its work is done." in why(unstored, Say.NOT_STORED)
    reports = tasks.reports.delay("k")
    said = why(reports, Say.STATUS)
    assert "has the state PROGRESS." in said
    assert "secret" not in said
    expired = tasks.work.apply_async(("k",), expires=0.001)
    assert ": expired." in why(expired, Say.REVOKED)


def test_a_retry_that_a_newer_call_has_overtaken_is_told_so(tasks, why, start_worker, running, gate):
    start_worker(2)
    stale = tasks.latest.delay("k", "stale", str(gate), "retry", "2")
    running("stale")
    newer = tasks.latest.delay("k", "newer")
    gate.open()
    assert f": superseded by {newer.id}." in why(stale, Say.SUPERSEDED)


def test_a_run_that_a_newer_call_replaces_is_asked_to_stop_and_then_was_replaced(
    tasks, why, start_worker, running, ledger, gate
):
    start_worker(2)
    tasks.newest.delay("k", "older", f"{gate} that stays shut", "swallows", str(gate))
    running("older")
    newer = tasks.newest.delay("k", "newer", 30.0)
    said = why(newer, Say.WAITS, Say.HELD, Say.STOPPING)
    assert f"It is ASKED TO STOP: task {newer.id}, a newer call, replaces it once its body has ended." in said
    gate.open()
    running("newer")
    newest = tasks.newest.delay("k", "newest")
    assert newest.get(timeout=30) == "newest"
    assert f": replaced by {newest.id}, a newer call" in why(newer, Say.REPLACED)


@pytest.mark.parametrize("fails", [False, True])
def test_one_that_has_joined_another_is_not_said_to_have_run(tasks, app, why, start_worker, running, fails):
    start_worker(2)
    first = tasks.on_join.delay("k", "first", holds="fails" if fails else "waits")
    running("first")
    second = tasks.on_join.apply_async(("k", "second"), link=tasks.plain.si())
    assert f"it joined task {first.id} and has that task's result, {'FAILURE' if fails else 'SUCCESS'}" in why(
        second, Say.JOINED
    )
    why(first, Say.FAILED if fails else Say.DONE)


def test_one_whose_process_was_killed_is_told_so_and_not_that_it_has_failed_by_itself(
    tasks, why, start_worker, running
):
    start_worker(1)
    run = tasks.work.delay("k", "first", 60)
    os.kill(running("first"), signal.SIGKILL)
    said = why(run, Say.CUT_SHORT)
    assert "(WorkerLostError)" in said


# Only the lock server knows it.


def test_a_job_whose_message_no_worker_has_yet_is_told_that_its_key_is_kept_and_one_whose_key_cools_that_it_has_run(
    config, tasks, why, start_worker
):
    config.settings |= {"task_ignore_result": True, "task_annotations": {"lab.cooling_job": {"lock_cooldown": 60.0}}}
    app = make_app(config)
    queued = app.tasks["lab.cooling_job"].delay("k")
    why(queued, Say.QUEUED, Say.KEPT, of=app)
    key = app.tasks["lab.cooling_job"].lock_for("k").key
    client_for(app, key).setrange(key, 0, SENDING)  # as a publisher leaves it that dies before it says more
    why(queued, Say.SENDING, Say.KEPT, of=app)
    start_worker(1)
    why(queued, Say.COOLS, Say.KEPT, of=app)
    server_of(app).stop()
    app.close()


# Not all can be asked.


def test_an_empty_id_is_refused(app):
    """As in ``celery locks why $TASK``, where the variable is not set. Every id would begin with it."""
    run = CliRunner().invoke(group, ["why", " "], obj=CLIContext(app, no_color=True, workdir=None))
    assert (run.exit_code, run.output.splitlines()[-1]) == (2, "Error: Invalid value for TASK_ID: it is empty")


def test_one_that_nobody_knows_is_told_where_to_look(why):
    why(uuid4(), Say.UNKNOWN)


@pytest.mark.parametrize("backend", ["disabled://", "rpc://"])
def test_an_app_whose_results_nobody_else_can_read_is_told_so(config, why, backend):
    config.backend = backend
    said = why(uuid4(), Say.UNKNOWN, Say.NO_BACKEND, of=make_app(config))
    assert f"({backend.removesuffix('://')})." in said


def test_a_broker_or_a_result_backend_that_is_away_is_named(config, why, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.3)  # Celery goes on trying
    config.broker = config.backend = "redis://127.0.0.1:1/0"
    why(uuid4(), Say.UNKNOWN, Say.BACKEND_AWAY, Say.WORKERS_AWAY, of=make_app(config))


ESCAPE = "\x1b[31m\n"


@needs_one_server("a test writes to it by hand")
def test_nothing_is_printed_as_it_came(app, tasks, locks, why):
    """What a broker, a result backend or a lock server may hold was written by anybody."""
    task_id = str(uuid4())
    said = ""
    for state, result in (
        ("FAILURE", {"exc_type": f"Error{ESCAPE}", "exc_message": ["secret"], "exc_module": "shop"}),
        ("RETRY", {"exc_type": f"Error{ESCAPE}", "exc_message": ["secret"], "exc_module": "shop"}),
        ("REVOKED", {"exc_type": "TaskRevokedError", "exc_message": [ESCAPE], "exc_module": "celery.exceptions"}),
        (f"OWN{ESCAPE}", None),
    ):
        meta = {"status": state, "result": result, "traceback": None, "children": [], "task_id": task_id}
        app.backend.set(app.backend.get_key_for_task(task_id), json.dumps(meta))
        said += why(task_id)
    origin = tokens.origin(f"w@{ESCAPE}", f"lab{ESCAPE}")
    token = tokens.mint(tokens.mint_nonce(), Attempt(f"id{ESCAPE}", 0, 0), origin)
    locks.client.set("redislock:{k}", token.value, px=60_000)
    said += why(f"id{ESCAPE}", Say.HOLDS_SOMEWHERE, Say.HELD)
    assert "\x1b" not in said
    assert "OWN\\x1b[31m\\n" in said


def test_a_message_that_waits_for_its_rate_hears_when_that_is_free_again(tasks, start_worker, why, app):
    start_worker(2)
    for _ in range(2):
        tasks.rated_slowly.delay("k").get(timeout=20)
    waits = tasks.rated_slowly.delay("k")
    wait_until(lambda: kept(app) == 1, "it waits")
    told = why(waits, Say.WAITS, Say.SPENT)
    assert re.search(r"The rate of redislock:\{lab\.rated_slowly:\w+\}, 2/m, is used up until 20\d\d-", told), told
    assert told.count("is used up") == 1
    for _ in range(2):
        tasks.rated_skip.delay("k").get(timeout=20)
    why(tasks.rated_skip.delay("k"), Say.SKIPPED)
