"""Every way out of the line: nothing that waits is lost or runs twice, and who waits next runs."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace

import pytest
from celery.exceptions import TaskRevokedError
from celery.worker import WorkController

from celery_redislock import LockConflict, LockLost, LockUnavailable
from celery_redislock.protocol.names import keys_of
from tests.acceptance.test_outages import CANNOT, consumes_again
from tests.conftest import on_every_broker, on_every_queue
from tests.lab.app import make_app
from tests.lab.kinds import OPTIONS, TWICE, left_out, needs_one_server
from tests.lab.servers import Valkey, wait_until, wait_until_stopped
from tests.lab.wake_ups import A_MINUTE, counts_on_wake_ups, few
from tests.lab.workers import client_for, kept, stands_in_line, waiting_in, waits_for_events

#: With these a child waits so long for an answer that it is killed or stopped before it asks again.
PATIENT = dict.fromkeys(OPTIONS, 2.5 if TWICE else 5.0)
#: With these the Redis broker gives a message again that was not acked for two seconds.
IMPATIENT = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}


@contextmanager
def in_line(task, worker, count=5, key="k", seconds=0.02):
    """The results of messages that wait in the worker, which stands in line for them, until the end of the block."""
    with task.lock_for(key) as lock:
        client = client_for(task.app, lock.name)
        results = [task.delay(key, number, seconds) for number in range(count)]
        wait_until(lambda: waiting_in(worker) >= count and kept(task.app) >= count, "all wait")
        wait_until(lambda: stands_in_line(client, task, key), "its room stands with the rank of the first")
        yield results


@pytest.fixture
def each_runs_once(ledger, locks):
    """Waits until each of the messages of `in_line` has run, and holds that each ran once, one after the other."""

    def wait(results, *, in_order=True):
        assert [result.get(timeout=30) for result in results] == list(range(len(results)))
        items = [run.item for run in ledger.runs() if run.key == "k" and run.item != "-1"]
        if not in_order:
            items.sort(key=int)
        assert items == [str(number) for number in range(len(results))]
        assert ledger.overlaps() == []
        wait_until(lambda: locks.held() == [], "nothing is left", 10)

    return wait


def prefetched(app):
    """The prefetch count of the only worker."""
    (stats,) = app.control.inspect(timeout=5, limit=1).stats().values()
    return stats["prefetch_count"]


def rank_in_line(task, locks):
    """The rank of the first room in the line for the key k; None where there is no line."""
    rooms = locks.client.zrange(keys_of(task.lock_for("k").key).line, 0, 0, withscores=True)
    return rooms[0][1] if rooms else None


# Who is called, and dies.


def test_a_child_that_dies_between_the_call_and_the_run_costs_nothing(tasks, start_worker, each_runs_once):
    worker = start_worker(1)
    with in_line(tasks.work, worker) as results:
        (child,) = worker.children()
        worker.pause_child(child.pid)
    wait_until(lambda: "its turn came" in worker.output(), "the first is called")
    worker.kill_child(child.pid)
    each_runs_once(results)


def test_the_last_that_waited_runs_soon_if_its_child_dies_before_the_run_although_celery_does_not_notice(
    config, tasks, start_worker
):
    """Celery may notice it five seconds late; here, never."""
    config.settings["lab_misses_deaths"] = True
    worker = start_worker(1)
    with in_line(tasks.work, worker, 1) as (result,):
        (child,) = worker.children()
        worker.pause_child(child.pid)
    wait_until(lambda: "its turn came" in worker.output(), "it is called")
    worker.kill_child(child.pid)
    wait_until(result.successful, "it has run")


def patient(config):
    """Have the workers of this config wait for an answer; every lease must be long enough for that."""
    config.settings["task_annotations"] = {"*": {"lock_lease": 15.0}}
    config.settings["redislock_client_options"] = PATIENT


def test_a_child_that_dies_when_it_asks_for_its_key_gives_a_message_back_that_is_acked_early(
    config, lock_proxy, tasks, start_worker, each_runs_once
):
    patient(config)
    worker = start_worker(1)
    with in_line(tasks.work, worker) as results:
        (child,) = worker.children()
        fault = lock_proxy.drop_command(b"EVALSHA", where=results[0].id.encode())
    fault.wait()
    worker.kill_child(child.pid)
    each_runs_once(results, in_order=False)


# What ends while it waits.


def test_a_message_that_expires_ends_and_the_next_one_runs(tasks, start_worker, ledger):
    worker = start_worker(1)
    with tasks.work.lock_for("k"):
        first = tasks.work.apply_async(("k", "first"), expires=1)
        following = tasks.work.delay("k", "next")
        wait_until(lambda: waiting_in(worker) + first.ready() >= 2, "both wait, or the first has expired before")
        with pytest.raises(TaskRevokedError, match="expired"):
            first.get(timeout=10)
    assert following.get(timeout=20) == "next"
    assert ledger.items() == ["next"]


def test_a_message_that_has_waited_for_too_long_fails_and_the_next_one_runs(config, start_worker, ledger):
    config.settings["task_annotations"] = {"lab.keyed_too": {"lock_wait_for": 1.0}}
    app = make_app(config)
    worker = start_worker(1)
    with app.tasks["lab.keyed"].lock_for("k"):
        first = app.tasks["lab.keyed_too"].delay(1, "k")
        following = app.tasks["lab.keyed"].delay("k", "next")
        wait_until(lambda: waiting_in(worker) == 2, "both wait")
        with pytest.raises(LockConflict):
            first.get(timeout=10)
        assert following.state == "RETRY"
    assert following.get(timeout=20) == "next"
    assert ledger.items() == ["next"]
    app.close()


# The worker ends.


STOPS = {"warm": (signal.SIGTERM, 0), "soft": (signal.SIGQUIT, 0.5), "cold": (signal.SIGQUIT, 0)}


@on_every_queue
@pytest.mark.parametrize("stop", STOPS)
def test_a_shutdown_gives_back_what_waits_and_another_worker_runs_it(
    config, tasks, start_worker, each_runs_once, locks, stop
):
    sig, timeout = STOPS[stop]
    if timeout and not hasattr(WorkController, "wait_for_soft_shutdown"):
        pytest.skip("the soft shutdown came with Celery 5.5")
    config.settings["worker_soft_shutdown_timeout"] = timeout
    first = start_worker(2)
    with in_line(tasks.work, first) as results:
        rank = rank_in_line(tasks.work, locks)
        # A shutdown that interrupts the reading of a report, or the talk with RabbitMQ about a new consumer, may wait
        # for ever: Celery's handler of SIGQUIT talks over the same connection. Who answers has come to the end of both.
        assert tasks.work.app.control.ping(timeout=10, limit=1)
        first.stop(sig)
        assert rank_in_line(tasks.work, locks) is None
        second = start_worker(2)
        wait_until(lambda: waiting_in(second) == 5 and kept(tasks.work.app) == 5, "they wait in the other worker")
        wait_until(lambda: rank_in_line(tasks.work, locks) == rank, "each with its rank")
    each_runs_once(results)


@on_every_broker
def test_a_cold_shutdown_gives_back_a_message_that_is_acked_early_and_has_not_begun(
    config, lock_proxy, tasks, start_worker, ledger
):
    patient(config)
    first = start_worker(1)
    tasks.plain.delay().get(timeout=10)
    fault = lock_proxy.drop_command(b"EVALSHA", where=b"{lab.work:")
    result = tasks.work.delay("k", "item")
    fault.wait()
    first.stop(signal.SIGQUIT)
    lock_proxy.mend()
    start_worker(1)
    assert result.get(timeout=20) == "item"
    assert ledger.items()[1:] == ["item"]


# The broker goes away.


@on_every_queue
@pytest.mark.parametrize("how", ["cut", "refuse"])
def test_what_waits_when_the_broker_goes_away_waits_again_when_it_is_back(
    broker, config, broker_proxy, tasks, start_worker, each_runs_once, locks, how
):
    direct = make_app(replace(config, broker=broker))  # the connections of the other app are lost too
    worker = start_worker(2)
    with in_line(tasks.work, worker) as results:
        rank = rank_in_line(tasks.work, locks)
        # Amid a reply to a control command it would wait for its broker without a word.
        wait_until(lambda: waits_for_events(worker.process.pid), "its main process does nothing else")
        getattr(broker_proxy, how)()
        wait_until(lambda: "Connection to broker lost" in worker.output(), "the worker knows")
        if how == "refuse":
            wait_until(lambda: "Cannot connect to" in worker.output(), "it cannot connect")
            broker_proxy.mend()
        wait_until(lambda: waiting_in(worker) >= 10 and kept(direct) == 5, "they wait again")
        wait_until(lambda: rank_in_line(tasks.work, locks) == rank, "each with its rank")
    each_runs_once(results)
    direct.close()


def test_a_message_that_is_called_as_its_connection_is_lost_passes_its_call_on(
    broker, config, broker_proxy, start_worker, ledger, gate
):
    """Its worker gives it to the pool only when it is connected again. Calls last for a minute here."""
    config.settings |= {"lab_begins_late": str(gate), "lab_long_offers": True}
    app, other = make_app(config), f"{config.queue}-other"
    direct = replace(config, broker=broker, settings={"lab_long_offers": True})
    worker = start_worker(1)
    start_worker(1, "-Q", other, config=direct)
    app_of_other = make_app(direct)
    work = app_of_other.tasks["lab.work"]
    with work.lock_for("k"):
        first = work.delay("k", "first")
        wait_until(lambda: waiting_in(worker) == 1, "it waits")
        following = work.apply_async(("k", "next"), queue=other)
        wait_until(lambda: work.lock_info("k").waiting_processes == 2, "both stand in line")
    wait_until(lambda: work.lock_info("k").waiting_processes == 1, "the first is called")
    broker_proxy.refuse()
    wait_until(lambda: "Cannot connect to" in worker.output(), "it cannot connect")
    broker_proxy.mend()
    wait_until(lambda: worker.output().count("Connected to") == 2, "the worker is back")
    assert app.tasks["lab.plain"].delay().get(timeout=20) == "plain"
    gate.open()
    assert following.get(timeout=20) == "next"
    assert first.get(timeout=20) == "first"
    assert [run.item for run in ledger.runs() if run.key == "k"] == ["next", "first"]
    app.close()
    app_of_other.close()


@pytest.fixture
def own_broker(tmp_path, config):
    """A Redis broker of the test's own."""
    folder = tmp_path / "broker"
    folder.mkdir()
    with Valkey(folder).serve() as server:
        config.broker = server.celery_url()
        yield server


def test_a_worker_in_which_messages_wait_comes_back_by_itself_when_its_redis_broker_restarts(
    own_broker, app, config, tasks, start_worker, ledger
):
    """The broker has lost the messages; the worker must not end for them."""
    worker = start_worker(2)
    with in_line(tasks.work, worker):
        own_broker.restart()
        wait_until(lambda: consumes_again(app, config.queue), "the worker is back")
        following = tasks.work.delay("k", "next")
        wait_until(lambda: waiting_in(worker) >= 6, "the next one waits")
    assert following.get(timeout=10) == "next"
    assert ledger.items() == ["next"]


@pytest.mark.parametrize("is_held", [True, False], ids=["it must wait", "it runs"])
def test_a_run_whose_connection_is_lost_before_it_asks_for_its_key_does_not_end_the_worker(
    own_broker, app, config, tasks, start_worker, ledger, is_held
):
    """Kombu cannot ack the message of a connection that it could not close, such as one with messages that wait."""
    worker = start_worker(1)
    task = tasks.stands_still
    with in_line(tasks.work, worker, key="l"), task.lock_for("k") if is_held else nullcontext():
        task.delay("k", "old")
        (child,) = worker.children()
        wait_until_stopped(child.pid)
        own_broker.restart()
        wait_until(lambda: consumes_again(app, config.queue), "the worker is back")
        worker.resume_child(child.pid)
        if is_held:
            wait_until(lambda: waiting_in(worker) >= 6, "it would wait")
        following = task.delay("k", "next")
        if is_held:
            wait_until(lambda: waiting_in(worker) >= 7, "the next one waits")
    assert following.get(timeout=10) == "next"
    assert ledger.items() == (["next"] if is_held else ["old", "next"])
    assert tasks.plain.delay().get(timeout=20) == "plain"
    assert "Unrecoverable" not in worker.output()


@on_every_queue
def test_a_message_whose_connection_is_lost_before_it_waits_is_delivered_again_at_once(
    broker_proxy, app, config, tasks, start_worker, each_runs_once
):
    worker = start_worker(1)
    with tasks.stands_still.lock_for("k"):
        result = tasks.stands_still.delay("k", 0)
        (child,) = worker.children()
        wait_until_stopped(child.pid)
        broker_proxy.refuse()
        wait_until(lambda: "Cannot connect to" in worker.output(), "it cannot connect")
        broker_proxy.mend()
        wait_until(lambda: consumes_again(app, config.queue), "the worker is back")
        worker.resume_child(child.pid)
        wait_until(lambda: waiting_in(worker) >= 2, "it is delivered again, and waits")
    each_runs_once([result])


# The lock server goes away.


def test_those_who_wait_survive_a_lock_server_that_restarts_empty(private_locks, tasks, start_worker, each_runs_once):
    worker = start_worker(2)
    with suppress(LockLost), in_line(tasks.work, worker) as results:
        private_locks.restart()
    each_runs_once(results)


def test_those_who_wait_survive_a_lock_server_that_is_silent_when_the_key_becomes_free(
    private_locks, tasks, start_worker, each_runs_once, running, gate
):
    workers = [start_worker(2), start_worker(2)]
    holder = tasks.work.delay("k", -1, gate)
    running(-1)
    results = [tasks.work.delay("k", number) for number in range(5)]
    wait_until(lambda: kept(tasks.work.app, 2) == 5, "all wait")
    private_locks.pause()
    gate.open()
    wait_until(lambda: any(CANNOT in worker.output() for worker in workers), "the release is not answered")
    time.sleep(2)
    private_locks.resume()
    assert holder.get(timeout=10) == -1
    each_runs_once(results, in_order=False)


@pytest.mark.parametrize("policy", ["run", "raise"])
def test_in_an_outage_those_who_wait_do_what_lock_on_outage_says_and_leave_room_for_others(
    lock_proxy, config, start_worker, ledger, gate, policy
):
    config.settings |= {"redislock_on_outage": policy, "lab_hesitates": True}
    app = make_app(config)
    worker = start_worker(1)
    task = app.tasks["lab.work"]
    with in_line(task, worker, seconds=gate) as results:
        lock_proxy.refuse()
        try:
            wait_until(lambda: ledger.runs() or results[0].ready(), "the first runs, or has failed")
            stranger = app.tasks["lab.plain"].delay()
            wait_until(lambda: f"[{stranger.id}] received" in worker.output(), "the worker has the stranger", 10)
            gate.open()
            assert stranger.get(timeout=20) == "plain"
            for number, result in enumerate(results):
                if policy == "run":
                    assert result.get(timeout=20) == number
                else:
                    with pytest.raises(LockUnavailable):
                        result.get(timeout=20)
        finally:
            lock_proxy.mend()
    ran = [run.item for run in ledger.runs() if run.key == "k"]
    assert sorted(ran) == ([str(number) for number in range(5)] if policy == "run" else [])
    app.close()


@counts_on_wake_ups("a lease of 2 s is too short for its time-outs")
def test_in_an_outage_messages_for_different_keys_leave_their_lines_one_for_each_slot(
    lock_proxy, config, start_worker, ledger
):
    config.settings["redislock_on_outage"] = "run"
    app = make_app(config)
    start_worker(1)
    task, keys = app.tasks["lab.work"], [f"k{number}" for number in range(12)]
    under_way = 0
    with ExitStack() as held:
        for key in keys:
            held.enter_context(task.lock_for(key))
        results = [task.delay(key, 0, 0.3) for key in keys]
        wait_until(lambda: kept(app) == len(keys), "all wait")
        lock_proxy.refuse()
        try:
            while waiting := kept(app):
                under_way = max(under_way, len(keys) - waiting - len(ledger.runs()))
            assert [result.get(timeout=20) for result in results] == [0] * len(keys)
        finally:
            lock_proxy.mend()
    assert under_way <= 2, "one that begins, and one that goes back"
    app.close()


def test_messages_for_a_key_whose_line_is_refused_leave_the_slots_to_others(config, start_worker, locks):
    """Their runs find the key held: they must not come back at once, again and again."""
    config.settings["redislock_on_outage"] = "run"
    app = make_app(config)
    worker = start_worker(1)
    task = app.tasks["lab.work"]
    with task.lock_for("k"):
        locks.client.set(keys_of(task.lock_for("k").key).line, "no line")
        waiting = [task.delay("k", number) for number in range(3)]
        wait_until(lambda: worker.output().count("; waiting in line (") >= 3, "all have met the key")
        try:
            for _ in range(20):
                assert app.tasks["lab.plain"].delay().get(timeout=10) == "plain"
            met = worker.output().count("; waiting in line (")
        finally:
            locks.client.delete(keys_of(task.lock_for("k").key).line)
    assert [one.get(timeout=40) for one in waiting] == [0, 1, 2]
    assert met < 15
    app.close()


@counts_on_wake_ups("a lease of 2 s is too short for its time-outs")
def test_messages_that_are_revoked_while_the_lock_server_is_silent_end_once(lock_proxy, config, start_worker):
    config.settings |= {"redislock_on_outage": "run", "redislock_client_options": {**OPTIONS, "socket_timeout": 2.0}}
    app = make_app(config)
    worker = start_worker(1, "--prefetch-multiplier=8")
    before = prefetched(app)
    with in_line(app.tasks["lab.work"], worker) as (first, *revoked, last):
        assert prefetched(app) == before + 5
        lock_proxy.blackhole()
        try:
            first.revoke()  # the room stands for the next one, and waits for an answer
            wait_until(first.ready, "the first has ended")
            for one in revoked:
                one.revoke()
            wait_until(lambda: all(one.ready() for one in revoked), "the others have ended")
            assert last.get(timeout=20) == 4
        finally:
            lock_proxy.mend()
    wait_until(lambda: prefetched(app) == before, "each has given up its place in the window once")
    app.close()


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_after_a_lost_connection_the_prefetch_count_still_grows_with_what_waits(
    broker, broker_proxy, config, tasks, start_worker, gate, ledger
):
    """Celery reduces it while runs go on, and restores it with each ack."""
    config.settings["worker_prefetch_multiplier"] = 4
    start_worker(2)
    with make_app(replace(config, broker=broker)) as app:  # the test's own connection is not cut
        wait_until(lambda: prefetched(app) == 8, "it has begun")
        running = app.tasks["lab.late"].delay("running", "running", gate)
        wait_until(ledger.runs, "one runs")
        with tasks.work.lock_for("k"):
            waiting = [app.tasks["lab.work"].delay("k", number) for number in range(10)]
            wait_until(lambda: kept(app) == 10, "they wait")
            broker_proxy.cut()
            wait_until(lambda: kept(app) >= 10 and prefetched(app) >= 18, "they wait again")
        assert [result.get(timeout=20) for result in waiting] == [*range(10)]
        gate.open()
        assert running.get(timeout=20) == "running"
        wait_until(lambda: prefetched(app) == 8, "it is what it was")


@needs_one_server("its user is made at one node")
@pytest.mark.usefixtures("private_locks")
def test_a_worker_whose_user_has_no_right_to_channels_runs_all_in_order(config, start_worker, each_runs_once, locks):
    locks.client.acl_setuser(
        "quiet", enabled=True, passwords=["+secret"], keys=["*"], categories=["+@all"], reset_channels=True
    )
    url = config.locks.replace("unix://", "unix://quiet:secret@")
    app = make_app(replace(config, locks=url))
    worker = start_worker(2, config=replace(config, locks=url))
    with in_line(app.tasks["lab.work"], worker, 3) as results:
        pass
    begin = time.monotonic()
    each_runs_once(results)
    assert time.monotonic() - begin < 20  # it looks every second; else it would look when the lease of 30 s ends
    assert worker.output().count("no right to subscribe") == 1
    app.close()


@left_out("another user is forbidden to PUBLISH", "acl")
@pytest.mark.usefixtures("private_locks")
def test_those_who_wait_run_in_order_where_every_publish_is_dropped(config, start_worker, each_runs_once, locks):
    """A taste of `make matrix`: who waits looks when the lease ends, and five seconds after it has called another."""
    locks.client.execute_command("ACL", "SETUSER", "default", "-publish")
    config.settings["redislock_lease"] = 5.0
    app = make_app(config)
    worker = start_worker(2)
    with in_line(app.tasks["lab.work"], worker, 2) as results:
        pass
    each_runs_once(results)
    assert locks.client.info("commandstats").get("cmdstat_publish", {}).get("calls", 0) == 0
    app.close()


# The worker has limits.


def test_messages_that_wait_for_longer_than_the_visibility_timeout_run_once(
    config, tasks, start_worker, each_runs_once, ledger
):
    config.settings["broker_transport_options"] = IMPATIENT
    worker = start_worker(2)
    with tasks.work.lock_for("k"), tasks.restarted.lock_for("late"):
        early = [tasks.work.delay("k", number, 0.02) for number in range(5)]
        late = [tasks.restarted.delay("late", number, 0.02) for number in range(10)]
        # At no moment need all of them wait: one or another is always on its way through the broker.
        for begins in [f"[{result.id}]: lock " for result in early + late]:
            wait_until(lambda text=begins: worker.output().count(text) >= 3, "the timeout has struck it twice")
    each_runs_once(early, in_order=False)
    for result in late:
        result.get(timeout=20)
    assert len(ledger.items()) == 15
    assert ledger.overlaps() == []


@counts_on_wake_ups(A_MINUTE)
@pytest.mark.parametrize("limit", ["worker_eta_task_limit", "redislock_waiting_limit"])
def test_the_message_that_owns_the_key_gets_through_where_more_wait_than_the_worker_may_keep(
    config, start_worker, ledger, limit
):
    config.settings[limit] = 3
    config.settings["task_annotations"] = {"lab.shared_job": {"lock_key": "stock:{key}"}}
    app = make_app(config)
    others = [app.tasks["lab.keyed"].delay("k", number) for number in range(12)]
    owner = app.tasks["lab.shared_job"].delay("k")
    assert app.tasks["lab.keyed"].lock_info("k").task_id == owner.id
    start_worker(1)
    assert owner.get(timeout=20) == "shared_job"
    for number, result in enumerate(others):
        assert result.get(timeout=40) == number
    assert ledger.items()[0] == "shared_job"
    assert sorted(ledger.items()[1:], key=int) == [str(number) for number in range(12)]
    app.close()


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"worker_disable_prefetch": True}, []),
        ({}, ["--autoscale=4,1"]),
        ({"task_annotations": {"lab.work": {"rate_limit": "50/s"}}}, []),
    ],
    ids=["worker_disable_prefetch", "autoscale", "rate_limit"],
)
def test_those_who_wait_run_in_order_whatever_limits_the_worker(
    config, start_worker, each_runs_once, settings, options
):
    config.settings.update(settings)
    app = make_app(config)
    worker = start_worker(1, *options)
    with in_line(app.tasks["lab.work"], worker, few(20)) as results:
        assert app.tasks["lab.plain"].delay().get(timeout=10) == "plain"
    each_runs_once(results)
    app.close()


# Other policies and scopes.


def test_all_who_join_end_with_the_outcome_of_the_run_that_they_have_joined(tasks, start_worker, ledger):
    start_worker(2)
    first = tasks.on_join.delay("k", "first", "waits for five")
    wait_until(ledger.runs, "it runs")
    joiners = [tasks.on_join.delay("k", "joiner") for _ in range(5)]
    assert first.get(timeout=10) == "first"
    assert [result.get(timeout=10) for result in joiners] == ["first"] * 5
    assert ledger.items() == ["first"]


def test_the_one_that_waits_in_the_queue_runs_as_soon_as_the_key_is_free(tasks, start_worker, ledger, nothing_is_left):
    worker = start_worker(1)
    with tasks.queued.lock_for("k"):
        waits = tasks.queued.delay("k", "waits")
        wait_until(lambda: waiting_in(worker) == 1, "it waits")
        assert tasks.queued.delay("k", "duplicate").id == waits.id
    assert waits.get(timeout=20) == "waits"
    assert ledger.items() == ["waits"]
    nothing_is_left()


# What does not make sense.


ODD = [-5, 0, "first", 2**80, 1.5, float("inf"), None, [1], {"a": 1}, True]


@counts_on_wake_ups("forty messages have their turn, one every five seconds")
def test_a_message_that_claims_an_odd_rank_waits_and_runs(app, tasks, start_worker, ledger):
    worker = start_worker(2)
    with tasks.work.lock_for("k"):
        results = [
            app.send_task("lab.work", ("k", f"{field} {number}"), headers={"redislock": {field: odd}})
            for field in ("rank", "published", "since", "times")
            for number, odd in enumerate(ODD)
        ]
        wait_until(lambda: waiting_in(worker) == len(results), "all wait")
    for result in results:
        result.get(timeout=20)
    assert len(ledger.items()) == len(set(ledger.items())) == len(results)
    assert ledger.overlaps() == []
    assert "Traceback" not in worker.output()


def test_rubbish_in_a_line_and_unknown_rooms_cost_a_moment(tasks, start_worker, each_runs_once, locks):
    worker = start_worker(2)
    with in_line(tasks.work, worker) as results:
        lock = tasks.work.lock_for("k").key
        locks.client.zadd(keys_of(lock).line, {b"\xff\x00": 0, f"?{'x' * 22} * 1 nowhere *": 1})
    each_runs_once(results)
    assert "Traceback" not in worker.output()
