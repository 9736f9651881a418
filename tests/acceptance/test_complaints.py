"""What users of other plugins complain about, each by its number in the list that this project was built against."""

from __future__ import annotations

import os
import signal
import time
from contextvars import Context
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pytest
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError
from redis.exceptions import LockError

from celery_redislock import LockConflict, LockUnavailable
from tests.lab.app import make_app
from tests.lab.servers import free_port, need_pool, wait_until

RICH = {
    "uuid": UUID(int=7),
    "datetime": datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
    "naive": datetime(2026, 1, 2, 3, 4, 5),
    "date": date(2026, 1, 2),
    "decimal": Decimal("1.10"),
    "bytes": b"\xff\x00",
    "tuple": (1, (2, 3)),
    "keys": {1: "one", False: "no", None: "none"},
}


@pytest.fixture
def holding(tasks, start_worker, ledger):
    """Starts a run that holds its key, and waits until it does."""
    start_worker(2)

    def hold(task, *args, **kwargs):
        runs = len(ledger.runs())
        result = task.delay(*args, **kwargs)
        wait_until(lambda: len(ledger.runs()) > runs, "it runs")
        return result

    return hold


def pid_of(ledger, item):
    """The child that runs this item, once it does."""
    wait_until(lambda: item in ledger.items(), f"{item} runs")
    return [run.pid for run in ledger.runs() if run.item == item][-1]


def test_complaint_1_no_key_is_stuck_after_a_crash_a_kill_or_a_hard_time_limit(tasks, start_worker, ledger):
    """The lease is 30 s: what runs before that found a released key."""
    start_worker(6)
    for key, sig in {"crash": signal.SIGSEGV, "kill": signal.SIGKILL}.items():
        tasks.work.delay(key, key, 60)
        os.kill(pid_of(ledger, key), sig)
    tasks.work.apply_async(("limit", "", 30), time_limit=1)
    wait_until(lambda: "limit" in [run.key for run in ledger.runs()], "it runs into its time limit")
    following = [tasks.work.delay("crash", "next"), tasks.work.delay("kill", "next")]
    assert [result.get(timeout=10) for result in following] == ["next", "next"]
    tasks.work.apply_async(("limit", "", 30), time_limit=1)
    wait_until(lambda: [run.key for run in ledger.runs()].count("limit") == 2, "the next one runs", 10)


def test_complaint_2_a_retry_neither_loses_its_task_nor_is_stopped_by_its_own_lock(tasks, start_worker, ledger):
    """Each attempt arrives while the one before it still holds the key; a stranger's hold does not skip it either."""
    start_worker(3)
    own = tasks.again.delay("k", 3)
    assert own.get(timeout=20) == 3
    assert ledger.items() == ["0", "1", "2", "3"]
    met = ledger.conflicts()
    assert len(met) >= 3
    assert {(one["holder"], one["policy"]) for one in met} == {(own.id, "come back")}
    with tasks.again.lock_for("l", 0):
        begun = tasks.again.apply_async(("l", 2), retries=1)
        wait_until(lambda: len(ledger.conflicts()) > len(met), "the retry has met a stranger's lock")
        assert len(ledger.runs()) == 4
    assert begun.get(timeout=20) == 2
    assert ledger.items()[4:] == ["1", "2"]
    assert {one["policy"] for one in ledger.conflicts()} == {"come back"}
    assert ledger.overlaps() == []


def test_complaint_3_no_key_is_stuck_after_ignore(tasks, start_worker, ledger, locks):
    start_worker(1)
    tasks.ends.delay("k", "ignore")
    assert tasks.ends.delay("k", "success").get(timeout=10) == "success"
    assert ledger.items() == ["ignore", "success"]
    wait_until(lambda: locks.held() == [], "nothing is left")


def test_complaint_4_no_key_is_stuck_after_a_revoke_or_an_expiry(tasks, app, start_worker, ledger, locks):
    worker = start_worker(1)
    terminated = tasks.work.delay("k", "terminated", 60)
    pid_of(ledger, "terminated")
    expires = time.time() + 0.5
    queued = [tasks.work.delay("l", "revoked"), tasks.work.apply_async(("l", "expired"), expires=0.5)]
    app.control.revoke(queued[0].id)
    wait_until(lambda: f"Tasks flagged as revoked: {queued[0].id}" in worker.output(), "the worker knows")
    wait_until(lambda: time.time() > expires, "the other one has expired")
    app.control.revoke(terminated.id, terminate=True)
    for result in (terminated, *queued):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
    for key in "kl":
        assert tasks.work.delay(key, "next").get(timeout=10) == "next"
    assert ledger.items() == ["terminated", "next", "next"]
    wait_until(lambda: locks.held() == [], "nothing is left")


@pytest.mark.parametrize("name", ["job", "queued"])
def test_complaint_4_no_key_of_a_unique_job_is_stuck_after_a_revoke_or_an_expiry_while_it_was_queued(
    tasks, app, start_worker, ledger, locks, name
):
    """Its key would live for `lock_queue_ttl`, an hour, and every publish would be a duplicate."""
    task = getattr(tasks, name)
    expires = time.time() + 0.5
    queued = [task.delay("k", "revoked"), task.apply_async(("l", "expired"), expires=0.5)]
    kept = locks.client.keys()
    assert [locks.client.persist(key) for key in kept] == [True, True]  # else one would be gone before a worker looks
    wait_until(lambda: time.time() > expires, "the other one has expired")
    worker = start_worker(1, "-Q", "nothing")
    app.control.revoke(queued[0].id)
    wait_until(lambda: f"Tasks flagged as revoked: {queued[0].id}" in worker.output(), "the worker knows")
    app.control.add_consumer(app.conf.task_default_queue)
    for result in queued:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
    wait_until(lambda: locks.held() == [], "nothing is left")
    assert [task.delay(key, "next").get(timeout=10) for key in "kl"] == ["next", "next"]
    assert ledger.items() == ["next", "next"]


def test_complaint_5_copies_neither_run_beside_the_first_run_nor_are_lost_when_it_dies(
    config, start_worker, tasks, ledger
):
    """The message is given again every two seconds. Its first run dies with its worker; its key lives for a lease."""
    config.settings["broker_transport_options"] = {
        "visibility_timeout": 2,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    dying = start_worker(2)
    result = tasks.once_late.delay("k", "item", 3.0)
    pid_of(ledger, "item")
    dying.process.send_signal(signal.SIGKILL)
    survivor = start_worker(3)
    wait_until(lambda: f"{result.id} on w0@lab: come back" in survivor.output(), "a copy has met the dead run's lock")
    assert result.get(timeout=20) == "item"
    dropped = f"[{result.id}]: dropped, it has finished in another delivery"
    wait_until(lambda: dropped in survivor.output(), "a copy of the second run is dropped")
    assert f"{result.id} on w1@lab: come back" in survivor.output()
    assert ledger.items() == ["item", "item"]
    first, second = ledger.runs()
    assert first.end > second.end  # it never ended


def test_complaint_6_a_run_that_outlived_its_lock_does_not_free_the_next_ones(config, start_worker, tasks, ledger):
    config.settings["redislock_lease"] = 2.0
    worker = start_worker(3)
    old = tasks.work.delay("k", "old", 1.0)
    child = pid_of(ledger, "old")
    os.kill(child, signal.SIGSTOP)  # as on a host that swaps, or in a virtual machine that is moved
    try:
        new = tasks.work.delay("k", "new", 3.0)
        pid_of(ledger, "new")
    finally:
        os.kill(child, signal.SIGCONT)
    lost = f"task lab.work[{old.id}]: the lock {tasks.work.lock_for('k').name} is lost: "
    third = tasks.work.delay("k", "third")
    wait_until(lambda: lost in worker.output(), "the old one says that it has lost the lock", 3)
    assert old.get(timeout=3) == "old"
    assert tasks.work.lock_info("k").task_id == new.id
    assert third.get(timeout=10) == "third"
    assert [run.item for run in sorted(ledger.runs(), key=lambda run: run.end)] == ["old", "new", "third"]
    _, middle, last = ledger.runs()
    assert middle.end < last.start


def test_complaint_8_beat_sends_one_message_while_a_job_waits_and_a_conflict_does_not_break_it(
    config, tasks, start_worker, start_beat, ledger, broker_server
):
    config.settings["beat_schedule"] = {"often": {"task": "lab.job", "schedule": 1.0, "args": ["k", "tick"]}}
    beat = start_beat()
    wait_until(lambda: beat().count("is not sent: lock") >= 3, "beat has come by four times")
    assert broker_server.client.llen(config.queue) == 1
    assert "Traceback" not in beat()
    start_worker(1)
    wait_until(lambda: len(ledger.runs()) >= 3, "they run one after another")
    assert ledger.overlaps() == []


def test_complaint_8_what_bypasses_apply_async_meets_the_lock_at_its_start(tasks, app, start_worker, ledger):
    """`send_task` never reaches the task class: neither that of this app nor that of one without the task."""
    worker = start_worker(2)
    first = tasks.job.delay("k", "first", 2.0)
    pid_of(ledger, "first")
    bypassing = app.send_task("lab.job", ("k", "second"))
    with pytest.raises(TaskRevokedError, match=f"duplicate of {first.id}"):
        bypassing.get(timeout=10)
    holding = app.send_task("lab.job", ("l", "third", 2.0))
    pid_of(ledger, "third")
    assert tasks.job.delay("l", "fourth").id == holding.id  # from its start on it is a job like any other
    queued = [app.send_task("lab.queued", ("m", item, 0.2)) for item in ("fifth", "sixth", "seventh")]
    assert sorted(result.get(timeout=20) for result in queued) == ["fifth", "seventh", "sixth"]
    assert ledger.overlaps() == []
    assert "Traceback" not in worker.output()


def test_complaint_9_positional_and_keyword_calls_are_one_call(holding, tasks):
    result = holding(tasks.whole, 7, seconds=1.5)
    for call in [((7, False, 1.5), {}), ((), {"seconds": 1.5, "account": 7}), ((7,), {"full": False, "seconds": 1.5})]:
        assert tasks.whole.lock_info(*call[0], **call[1]).task_id == result.id
        assert tasks.whole.apply_async(*call).get(timeout=1, propagate=False).args == (f"duplicate of {result.id}",)


@pytest.mark.parametrize("other", ["7", 7.5, [7], None])
def test_complaint_9_values_of_other_types_are_other_calls(holding, tasks, other):
    holding(tasks.whole, 7, seconds=1.5)
    assert tasks.whole.lock_info(7, seconds=1.5)
    assert tasks.whole.delay(other, seconds=0.0).get(timeout=1) is None


def test_complaint_9_true_is_not_1(holding, tasks):
    holding(tasks.whole, 1, seconds=1.5)
    assert tasks.whole.delay(True, seconds=1.5).get(timeout=5) is None


@pytest.mark.parametrize("kind", RICH)
def test_complaint_10_rich_arguments_make_the_same_key_before_and_after_the_broker(holding, tasks, kind):
    result = holding(tasks.whole, RICH[kind], seconds=0.5)
    assert tasks.whole.lock_info(RICH[kind], seconds=0.5).task_id == result.id


def test_complaint_10_pydantic_models_make_the_same_key_before_and_after_the_broker(holding, tasks):
    from tests.lab.tasks.turns import Order

    order = Order(number=7, lines=("a", "b"))
    result = holding(tasks.model, order)
    assert tasks.model.lock_info(order).task_id == result.id
    assert result.get(timeout=5) == 7


def test_complaint_11_a_bound_task_locks_on_the_parameters_that_it_names(holding, tasks):
    result = holding(tasks.bound, 100, 7, seconds=1.5)
    assert tasks.bound.lock_info(200, account=7).task_id == result.id
    assert tasks.bound.lock_info(100, account=8) is None
    skipped = tasks.bound.delay(200, 7).get(timeout=1, propagate=False)
    assert skipped.args == (f"duplicate of {result.id}",)


def test_complaint_12_no_argument_is_readable_in_redis_or_in_the_log(tasks, start_worker, locks, ledger):
    worker = start_worker(2)
    tasks.once.apply_async(("k-secret", "i-secret", 1.0), argsrepr="(hidden)", kwargsrepr="(hidden)")
    wait_until(ledger.runs, "it runs")
    duplicate = tasks.once.apply_async(("k-secret", "i-secret", 1.0), argsrepr="(hidden)", kwargsrepr="(hidden)")
    duplicate.get(timeout=5, propagate=False)
    (key,) = locks.client.keys()
    assert b"secret" not in key + locks.client.get(key)
    assert "lock redislock:{lab.once:" in worker.output()
    assert "secret" not in worker.output().replace("succeeded in", "").split("Task lab.once")[0]
    assert all("secret" not in line for line in worker.output().splitlines() if "succeeded in" not in line)


@pytest.mark.parametrize("name", ["job", "queued"])
def test_complaint_13_a_failed_publish_leaves_no_lock(config, locks, start_worker, ledger, name):
    broker = config.broker
    config.broker = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(OperationalError):
        make_app(config).tasks[f"lab.{name}"].delay("k", "failed")
    assert locks.held() == []
    config.broker = broker
    start_worker(1)
    assert make_app(config).tasks[f"lab.{name}"].delay("k", "next").get(timeout=10) == "next"


def test_complaint_14_an_outage_never_looks_like_a_held_lock_and_delay_raises_when_the_broker_is_away(
    lock_proxy, broker_proxy, tasks, start_worker, ledger
):
    worker = start_worker(1)
    second = tasks.once.lock_for("k")
    with tasks.once.lock_for("k"):
        held = tasks.once.delay("k", "held")
        with pytest.raises(TaskRevokedError, match="duplicate of a lock outside tasks"):
            held.get(timeout=10)
        assert Context().run(second.acquire, blocking=False) is False  # in this one it would be held already
        assert tasks.once.lock_info("k") is not None
    assert tasks.once.lock_info("k") is None
    lock_proxy.refuse()
    with pytest.raises(LockUnavailable) as outage:
        second.acquire(blocking=False)
    with pytest.raises(LockUnavailable):
        tasks.once.lock_info("k")  # None would say that it is free
    assert not isinstance(outage.value, LockConflict | LockError)
    away = tasks.once.delay("k", "away")
    wait_until(lambda: worker.output().count(f"[{away.id}] received") > 1, "it has met the outage and come back")
    assert away.state == "PENDING"
    lock_proxy.mend()
    assert away.get(timeout=20) == "away"
    assert ledger.items() == ["away"]
    assert [conflict["policy"] for conflict in ledger.conflicts()] == ["skip"]
    broker_proxy.refuse()
    with pytest.raises(OperationalError):
        tasks.once.delay("k", "nobody gets it")


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_complaint_15_no_state_leaks_between_runs_of_one_task_object(tasks, start_worker, pool):
    start_worker(8, "-P", pool)
    results = [(n, tasks.threaded.delay(n, 0.05)) for n in range(40)]
    for number, result in results:
        expected = tasks.threaded.lock_for(number, 0).name
        assert result.get(timeout=20) == [expected, expected]


def test_complaint_16_a_fast_task_never_meets_its_own_lock_nor_waits_for_it(tasks, start_worker, ledger, locks):
    """Twenty runs of one key, one after another: each is asked for once, and sent once."""
    worker = start_worker(1)

    def is_free():
        return locks.held() == []

    tasks.once.delay("warm-up").get(timeout=10)  # connects, and loads the scripts
    wait_until(is_free, "the warm-up has ended")
    locks.calls()
    for number in range(20):
        result = tasks.once.delay("k", number)
        assert result.get(timeout=10) == number
        wait_until(is_free, "its key is free")
        assert worker.output().count(f"[{result.id}] received") == 1
    assert ledger.conflicts() == []
    calls = locks.calls()
    assert calls.pop("evalsha") == 40
    # What the two scripts do, and nothing else.
    assert calls == {"set": 20, "get": 20, "del": 20, "exists": 40}


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_complaint_17_renewal_survives_lost_connections(lock_proxy, config, tasks, start_worker, ledger, pool):
    """Its first two renewals lose their connections, later every connection is cut; the run takes three leases."""
    need_pool(pool)
    config.settings["redislock_lease"] = 1.5
    start_worker(4, "-P", pool)
    key = tasks.watches.lock_for("k", "any").name.encode()
    faults = [lock_proxy.drop_reply(to=b"EVALSHA", where=key, nth=nth) for nth in (2, 3)]  # the first one takes it
    beside = [tasks.work.delay(number, number, 4.5) for number in range(2)]
    long_run = tasks.watches.delay("k", "long", 4.5)
    wait_until(lambda: all(fault.struck for fault in faults), "two renewals have failed", 10)
    lock_proxy.cut()
    following = tasks.watches.delay("k", "next")
    wait_until(ledger.conflicts, "the next one has met the long one", 10)
    assert [result.get(timeout=20) for result in (*beside, long_run, following)] == [0, 1, None, None]
    (first, second) = [run for run in ledger.runs() if run.key == "k"]
    assert first.end <= second.start
    assert ledger.losses() == []
    deadlines = [line["at"] for line in ledger.lines() if line["event"] == "deadline" and line["item"] == "long"]
    assert deadlines[-1] - deadlines[0] > 1.5, "it was renewed beyond its first lease"


def test_complaint_20_one_runs_and_one_is_queued_so_that_the_last_change_is_not_lost(tasks, start_worker, ledger, app):
    """Each change is written before its publish; the last run began after the last change."""
    start_worker(3)
    changes, results = [], []
    for _ in range(60):
        changes.append(time.monotonic())
        results.append(tasks.queued.delay("k", "sync", 0.1))
        time.sleep(0.02)
    for result in results:
        assert result.get(timeout=20) == "sync"
    runs = ledger.runs()
    assert runs[-1].start > changes[-1]
    assert len(runs) < 30
    assert len(runs) == len({result.id for result in results})
    assert ledger.overlaps() == []
