"""A worker that ends, in whatever way, leaves no key behind and loses no work."""

from __future__ import annotations

import signal

import psutil
import pytest
from celery import states
from celery.worker import WorkController

from celery_redislock.protocol.names import NOTE
from celery_redislock.protocol.scripts import ACQUIRE
from tests.conftest import on_every_broker
from tests.lab.gate import Gate
from tests.lab.servers import wait_until
from tests.lab.versions import BEFORE_5_7
from tests.lab.workers import acked, kept, known

#: The lease of these tests' locks is 30 s, if nothing else is said: what is free before that was released.
SOON = 10.0


@pytest.fixture
def no_key_is_left(locks):
    """Whether no lock is held."""
    return lambda: locks.client.keys("redislock:*}") == []


def stop_twice(worker):
    """Ctrl+C, and once more as the worker suggests."""
    worker.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Hitting Ctrl+C again" in worker.output(), "it has taken the first one")
    worker.stop(signal.SIGINT)


@on_every_broker
def test_a_warm_shutdown_waits_for_its_run_and_leaves_the_next_one_to_another_worker(
    tasks, start_worker, ledger, running, gate, no_key_is_left
):
    first_worker = start_worker(2)
    first = tasks.work.delay("k", "first", gate)
    child = running("first")
    following = tasks.work.delay("k", "next")
    wait_until(lambda: kept(tasks.work.app) == 1, "the next one waits")
    first_worker.begin_to_stop(signal.SIGTERM)
    gate.open()
    first_worker.wait()
    wait_until(no_key_is_left, "the key is free", SOON)
    assert first.get(timeout=SOON) == "first"
    start_worker(2)
    assert following.get(timeout=SOON) == "next"
    assert ledger.items() == ["first", "next"]
    assert running("next") != child
    wait_until(no_key_is_left, "the key is free", SOON)


@pytest.mark.parametrize("has_begun", [True, False], ids=["begun", "asks for its key"])
@pytest.mark.parametrize("name", ["work", "late"])
def test_a_run_that_ends_in_a_warm_shutdown_leaves_its_note_because_redis_may_lose_its_ack(
    tasks, start_worker, locks, lock_proxy, running, gate, name, has_begun
):
    """So that its copy is dropped, if there will be one."""
    first_worker = start_worker(1, "-l", "DEBUG")
    task = getattr(tasks, name)
    key = task.lock_for("k").key
    asked = None if has_begun else lock_proxy.hold(b"EVALSHA", ACQUIRE.sha.encode(), before=True)
    result = task.apply_async(("k", "first", gate), task_id="same")
    if asked is None:
        running("first")
    else:
        asked.wait()
    first_worker.begin_to_stop(signal.SIGTERM)
    # The last step of a consumer to stop is its connection.
    wait_until(lambda: "Stopping Connection..." in first_worker.output(), "its consumer has stopped")
    if asked is not None:
        asked.let_go()
    gate.open()
    first_worker.wait()
    assert result.get(timeout=SOON) == "first"
    wait_until(lambda: not locks.client.exists(key), "the key is free", SOON)
    left = locks.client.keys()
    assert [f"{NOTE}same/0/0/".encode() in key for key in left] == [True]


@pytest.mark.parametrize(
    ("name", "hears"),
    [("work", True), ("late", True), ("late", False)],
    ids=["acked early", "acked late", "runs after the stop"],
)
def test_a_run_whose_begin_the_main_process_has_not_read_when_it_is_told_to_stop_runs_once(
    config, tasks, start_worker, ledger, gate, no_key_is_left, name, hears
):
    """Celery 5.7 forgets such runs as it stops, and gives their messages back."""
    config.settings["lab_blocks"] = str(gate)
    first_worker = start_worker(1, "-l", "DEBUG")
    task = getattr(tasks, name)
    assert task.delay("k", "first").get(timeout=SOON) == "first"
    wait_until(lambda: known(task.app) == 0, "the pool knows that its child is free")
    (child,) = first_worker.children()
    first_worker.pause_child(child.pid)
    result = task.delay("k", "once")
    wait_until(lambda: f"[{result.id}] received" in first_worker.output(), "the message comes")
    assert known(task.app) == 0, "by now it is with the child, which stands still"
    task.app.control.broadcast("lab_block")
    wait_until(lambda: "the main process is busy" in first_worker.output(), "the main process reads nothing")
    if hears:
        first_worker.resume_child(child.pid)
        wait_until(lambda: ledger.items() == ["first", "once"] and no_key_is_left(), "it has run")
    first_worker.begin_to_stop(signal.SIGTERM)
    gate.open()
    if not hears:
        wait_until(lambda: "Stopping Connection..." in first_worker.output(), "its consumer has stopped")
        first_worker.resume_child(child.pid)
    first_worker.wait()
    start_worker(1)
    assert task.delay("k", "next").get(timeout=SOON) == "next"
    assert result.get(timeout=SOON) == "once"
    assert ledger.items() == ["first", "once", "next"]


def _cold(stop, broker):
    return pytest.param(stop, broker, id=f"{stop.__name__}-{broker}")


def stop_at_once(worker):
    worker.stop(signal.SIGQUIT)


@pytest.mark.parametrize(
    ("stop", "broker"),
    [_cold(stop_at_once, "redis"), _cold(stop_at_once, "rabbitmq"), _cold(stop_twice, "redis")],
    indirect=["broker"],
)
def test_a_cold_shutdown_frees_every_key_and_what_it_gives_back_runs_in_another_worker(
    tasks, start_worker, ledger, running, no_key_is_left, stop
):
    first_worker = start_worker(3)
    given_back = tasks.restarted.delay("k", "given back", 60)
    tasks.work.delay("l", "lost", 60)  # acked before it ran: Celery itself loses it
    pids = [running("given back"), running("lost")]
    wait_until(lambda: known(tasks.work.app) == 2, "the main process knows of both")
    stop(first_worker)
    wait_until(no_key_is_left, "the keys are free", SOON)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its children are dead", SOON)
    start_worker(2)
    assert given_back.get(timeout=SOON) == "given back"
    assert tasks.work.delay("l", "next").get(timeout=SOON) == "next"
    assert sorted(ledger.items()) == ["given back", "given back", "lost", "next"]
    wait_until(no_key_is_left, "the keys are free", SOON)


@pytest.mark.skipif(BEFORE_5_7, reason="before Celery 5.7 the handler does not look at the pool")
@on_every_broker
def test_a_cold_shutdown_while_a_lost_connection_is_handled_ends_as_any_other(
    broker_proxy, config, tasks, start_worker, ledger, running, no_key_is_left
):
    """Celery's own handler then looks at the pool, which the signal has stopped: a traceback, and the worker's end."""
    config.settings["lab_quits_when_cut"] = True
    first_worker = start_worker(2)
    tasks.restarted.delay("k", "given back", 60)
    running("given back")
    wait_until(lambda: known(tasks.work.app) == 1, "the main process knows of it")
    broker_proxy.cut()
    first_worker.wait()
    assert "Traceback" not in first_worker.output()
    wait_until(no_key_is_left, "the key is free", SOON)
    config.settings["lab_quits_when_cut"] = False
    start_worker(2)
    wait_until(lambda: ledger.items() == ["given back", "given back"], "it runs again", SOON)


@on_every_broker
def test_a_soft_shutdown_lets_end_what_ends_in_time_and_gives_the_rest_back(
    config, tasks, start_worker, ledger, running, gate, no_key_is_left
):
    if not hasattr(WorkController, "wait_for_soft_shutdown"):
        pytest.skip("the soft shutdown came with Celery 5.5")
    config.settings["worker_soft_shutdown_timeout"] = 5.0
    first_worker = start_worker(3)
    given_back = tasks.restarted.delay("k", "given back", 60)
    in_time = tasks.work.delay("l", "in time", gate)
    child = running("given back")
    wait_until(lambda: known(tasks.work.app) == 2, "the main process knows of both")
    first_worker.begin_to_stop(signal.SIGQUIT)
    wait_until(lambda: "Initiating Soft Shutdown" in first_worker.output(), "it has begun")
    gate.open()
    first_worker.wait()
    wait_until(no_key_is_left, "the keys are free", SOON)
    wait_until(lambda: not psutil.pid_exists(child), "its child is dead", SOON)
    assert (in_time.state, in_time.result) == (states.SUCCESS, "in time")
    start_worker(2)
    assert given_back.get(timeout=SOON) == "given back"
    assert tasks.work.delay("l", "next").get(timeout=SOON) == "next"
    assert sorted(ledger.items()) == ["given back", "given back", "in time", "next"]
    wait_until(no_key_is_left, "the keys are free", SOON)


def test_a_worker_with_many_children_ends_soon_although_the_lock_server_is_silent(
    config, lock_proxy, tasks, start_worker, ledger
):
    """What the children may hold is released at exit, one after the other; each would wait for the server in vain."""
    config.settings["redislock_client_options"] = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
    worker = start_worker(6)
    results = [tasks.work.delay(f"k{number}", number, 0.5) for number in range(6)]
    assert [result.get(timeout=SOON) for result in results] == list(range(6))
    lock_proxy.blackhole()
    worker.begin_to_stop(signal.SIGTERM)
    wait_until(lambda: worker.process.poll() is not None, "it has ended", 15)


@on_every_broker
def test_a_worker_killed_whole_keeps_its_keys_for_a_lease_and_its_unacked_work_runs_then(
    config, tasks, start_worker, ledger, locks, running, no_key_is_left, broker, broker_server
):
    config.settings["redislock_lease"] = 6.0
    if broker.startswith("redis"):
        # Not so short that a copy may be on its way to the worker when that is killed: kombu would lose it.
        config.settings["broker_transport_options"] = {
            "visibility_timeout": 120,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    first_worker = start_worker(3)
    given_again = tasks.restarted.delay("k", "given again", 60)
    tasks.work.delay("l", "lost", 60)
    pids = [running("given again"), running("lost")]
    wait_until(lambda: acked(tasks.work.app, "lab.work") == 1, "the message of the lost one is acked")
    first_worker.process.send_signal(signal.SIGKILL)
    first_worker.process.wait(SOON)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its children died with it", SOON)
    assert len(locks.client.keys("redislock:*}")) == 2
    broker_server.ages()  # Redis gives a message again only then, RabbitMQ when the connection has ended
    start_worker(2)
    following = tasks.work.delay("l", "next")
    assert given_again.get(timeout=2 * SOON) == "given again"
    assert following.get(timeout=2 * SOON) == "next"
    assert sorted(ledger.items()) == ["given again", "given again", "lost", "next"]
    wait_until(no_key_is_left, "the keys are free", SOON)


@pytest.mark.parametrize("option", ["--max-tasks-per-child=5", "--autoscale=4,1"])
def test_children_that_come_and_go_lose_nothing_and_keep_no_key(
    tasks, start_worker, ledger, tmp_path, no_key_is_left, option
):
    worker = start_worker(4, option)  # with two, Celery itself may stall for seconds when both are replaced at once
    app, results = tasks.work.app, []
    for wave in range(2):
        gate = Gate(tmp_path / f"gate{wave}")
        for number in range(20):
            item = f"{wave}-{number}"
            key = "shared" if number % 2 else item
            results.append((item, tasks.work.delay(key, item, 0.02 if number % 2 else gate)))
        wait_until(lambda: len(ledger.running()) == 4, "each child runs one")
        gate.open()
        for item, result in results:
            assert result.get(timeout=60) == item
        if option.startswith("--autoscale"):
            # By hand, for Celery's own scaling down may end a child that has just begun with a message.
            wait_until(lambda: known(app) == 0, "the main process knows that all have ended")
            app.control.autoscale(max=1, min=1, reply=True, limit=1, timeout=10)
            wait_until(lambda: len(worker.children()) == 1, "it has scaled down")
            app.control.autoscale(max=4, min=1, reply=True, limit=1, timeout=10)
    assert sorted(ledger.items()) == sorted(item for item, _ in results)
    assert ledger.overlaps() == []
    assert len({run.pid for run in ledger.runs()}) > 4
    wait_until(no_key_is_left, "the keys are free", SOON)
    assert "its process died; its lock" not in worker.output()
