"""What users of other plugins complain about, each by its number in the list that this project was built against."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError
from redis.exceptions import LockError

from celery_redislock import LockConflict, LockUnavailable
from tests.conftest import in_pools
from tests.lab.app import make_app
from tests.lab.kinds import OPTIONS, TIME_OUTS, left_out, needs_one_server
from tests.lab.servers import free_port, need_pool, wait_until
from tests.lab.tls import Certificates, tls_server
from tests.lab.topologies import WATCHED, cluster, sentinel
from tests.lab.workers import kept

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


@contextmanager
def expired_on_the_way():
    """What is published in the block has expired long before a worker has it. Its publisher counts on an hour."""

    def expire(headers, **_):
        headers["expires"] = "2026-01-01T00:00:00+00:00"

    before_task_publish.connect(expire)
    try:
        yield {"expires": 3600}
    finally:
        before_task_publish.disconnect(expire)


def test_complaint_1_no_key_is_stuck_after_a_crash_a_kill_or_a_hard_time_limit(tasks, start_worker, ledger):
    """The lease is 30 s: what runs before that found a released key."""
    start_worker(6)
    for key, sig in {"crash": signal.SIGSEGV, "kill": signal.SIGKILL}.items():
        tasks.work.delay(key, key, 60)
        os.kill(pid_of(ledger, key), sig)
    limited = tasks.work.apply_async(("limit", "limit", 60), time_limit=1)
    following = [tasks.work.delay("crash", "next"), tasks.work.delay("kill", "next")]
    assert [result.get(timeout=15) for result in following] == ["next", "next"]
    with pytest.raises(TimeLimitExceeded):
        limited.get(timeout=15)
    assert tasks.work.delay("limit", "next").get(timeout=15) == "next"


def test_complaint_2_a_retry_neither_loses_its_task_nor_is_stopped_by_its_own_lock(tasks, start_worker, ledger):
    """Each attempt arrives while the one before it still holds the key; a stranger's hold does not skip it either."""
    start_worker(3)
    own = tasks.again.delay("k", 3)
    assert own.get(timeout=20) == 3
    assert ledger.items() == ["0", "1", "2", "3"]
    met = ledger.conflicts()
    assert len(met) >= 3
    assert {(one["holder"], one["policy"]) for one in met} == {(own.id, "always waits")}
    with tasks.again.lock_for("l", 0):
        begun = tasks.again.apply_async(("l", 2), retries=1)
        wait_until(lambda: len(ledger.conflicts()) > len(met), "the retry has met a stranger's lock")
        assert len(ledger.runs()) == 4
    assert begun.get(timeout=20) == 2
    assert ledger.items()[4:] == ["1", "2"]
    assert {one["policy"] for one in ledger.conflicts()} == {"always waits"}
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
    queued = [tasks.work.delay("l", "revoked")]
    with expired_on_the_way() as options:
        queued.append(tasks.work.apply_async(("l", "expired"), **options))
    app.control.revoke(queued[0].id)
    wait_until(lambda: f"Tasks flagged as revoked: {queued[0].id}" in worker.output(), "the worker knows")
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
    queued = [task.delay("k", "revoked")]
    with expired_on_the_way() as options:
        queued.append(task.apply_async(("l", "expired"), **options))
    assert len(locks.held()) == 2
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
    config, app, start_worker, tasks, ledger, gate
):
    """The message is given again every two seconds. Its first run dies with its worker; its key lives for a lease."""
    config.settings["task_annotations"] = {"lab.once_late": {"lock_lease": 12.0}}
    config.settings["broker_transport_options"] = {
        "visibility_timeout": 2,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    dying, survivor = start_worker(2), start_worker(3, "-Q", "nothing")
    result = tasks.once_late.delay("k", "item", str(gate))
    pid_of(ledger, "item")
    dying.process.send_signal(signal.SIGKILL)
    app.control.add_consumer(config.queue, destination=["w1@lab"])
    for worker, copy in {"w0": "a copy has met the dead run's lock", "w1": "another has met the second run's"}.items():
        met = f"{result.id} on {worker}@lab; waiting in line (always waits)"
        wait_until(lambda met=met: met in survivor.output(), copy)
    gate.open()
    assert result.get(timeout=20) == "item"
    dropped = f"[{result.id}]: dropped: it already finished in another delivery"
    wait_until(lambda: dropped in survivor.output(), "a copy of the second run is dropped")
    assert ledger.items() == ["item", "item"]
    first, second = ledger.runs()
    assert first.end > second.end  # it never ended


def test_complaint_6_a_run_that_outlived_its_lock_does_not_free_the_next_ones(
    config, start_worker, tasks, ledger, tmp_path
):
    config.settings["redislock_lease"] = 6.0
    worker = start_worker(3)
    gates = {item: tmp_path / item for item in ("old", "new")}
    old = tasks.work.delay("k", "old", file=str(gates["old"]))
    child = pid_of(ledger, "old")
    os.kill(child, signal.SIGSTOP)  # as on a host that swaps, or in a virtual machine that is moved
    try:
        new = tasks.work.delay("k", "new", file=str(gates["new"]))
        pid_of(ledger, "new")
    finally:
        os.kill(child, signal.SIGCONT)
    lost = f"task lab.work[{old.id}]: the lock {tasks.work.lock_for('k').name} is lost: "
    third = tasks.work.delay("k", "third")
    wait_until(lambda: lost in worker.output(), "the old one says that it has lost the lock")
    gates["old"].touch()
    assert old.get(timeout=10) == "old"
    assert tasks.work.lock_info("k").task_id == new.id
    gates["new"].touch()
    assert third.get(timeout=10) == "third"
    assert [run.item for run in sorted(ledger.runs(), key=lambda run: run.end)] == ["old", "new", "third"]
    _, middle, last = ledger.runs()
    assert middle.end < last.start


def test_complaint_8_beat_sends_one_message_while_a_job_waits_and_a_conflict_does_not_break_it(
    config, tasks, start_worker, start_beat, ledger, broker_server
):
    config.settings["beat_schedule"] = {"often": {"task": "lab.job", "schedule": 1.0, "args": ["k", "tick"]}}
    beat = start_beat()
    wait_until(lambda: beat().count("; not sent: the caller gets") >= 3, "beat has come by four times")
    assert broker_server.client.llen(config.queue) == 1
    assert "Traceback" not in beat()
    start_worker(1)
    wait_until(lambda: len(ledger.runs()) >= 3, "they run one after another")
    assert ledger.overlaps() == []


def test_complaint_8_what_bypasses_apply_async_meets_the_lock_at_its_start(tasks, app, start_worker, ledger, gate):
    """`send_task` never reaches the task class: neither that of this app nor that of one without the task."""
    worker = start_worker(2)
    first = tasks.job.delay("k", "first", file=str(gate))
    pid_of(ledger, "first")
    bypassing = app.send_task("lab.job", ("k", "second"))
    with pytest.raises(TaskRevokedError, match=f"duplicate of {first.id}"):
        bypassing.get(timeout=10)
    holding = app.send_task("lab.job", ("l", "third"), {"file": str(gate)})
    pid_of(ledger, "third")
    assert tasks.job.delay("l", "fourth").id == holding.id  # from its start on it is a job like any other
    gate.open()
    queued = [app.send_task("lab.queued", ("m", item, 0.2)) for item in ("fifth", "sixth", "seventh")]
    assert sorted(result.get(timeout=20) for result in queued) == ["fifth", "seventh", "sixth"]
    assert ledger.overlaps() == []
    assert "Traceback" not in worker.output()


def test_complaint_9_positional_and_keyword_calls_are_one_call(holding, tasks, gate):
    file = str(gate)
    result = holding(tasks.whole, 7, file=file)
    for call in [((7, False, file), {}), ((), {"file": file, "account": 7}), ((7,), {"full": False, "file": file})]:
        assert tasks.whole.lock_info(*call[0], **call[1]).task_id == result.id
        assert tasks.whole.apply_async(*call).get(timeout=10, propagate=False).args == (f"duplicate of {result.id}",)


@pytest.mark.parametrize(("one", "other"), [(7, "7"), (7, 7.5), (7, [7]), (7, None), (1, True)], ids=repr)
def test_complaint_9_values_of_other_types_are_other_calls(holding, tasks, ledger, gate, one, other):
    results = [holding(tasks.whole, account, file=str(gate)) for account in (one, other)]
    assert len(ledger.running()) == 2
    gate.open()
    assert [result.get(timeout=10) for result in results] == [None, None]


@pytest.mark.parametrize("kind", RICH)
def test_complaint_10_rich_arguments_make_the_same_key_before_and_after_the_broker(holding, tasks, gate, kind):
    result = holding(tasks.whole, RICH[kind], file=str(gate))
    assert tasks.whole.lock_info(RICH[kind], file=str(gate)).task_id == result.id


def test_complaint_10_pydantic_models_make_the_same_key_before_and_after_the_broker(holding, tasks, gate):
    from tests.lab.tasks.turns import Order

    order = Order(number=7, lines=("a", "b"), file=str(gate))
    result = holding(tasks.model, order)
    assert tasks.model.lock_info(order).task_id == result.id
    gate.open()
    assert result.get(timeout=10) == 7


def test_complaint_11_a_bound_task_locks_on_the_parameters_that_it_names(holding, tasks, gate):
    result = holding(tasks.bound, 100, 7, file=str(gate))
    assert tasks.bound.lock_info(200, account=7).task_id == result.id
    assert tasks.bound.lock_info(100, account=8) is None
    skipped = tasks.bound.delay(200, 7).get(timeout=10, propagate=False)
    assert skipped.args == (f"duplicate of {result.id}",)


def test_complaint_12_no_argument_is_readable_in_redis_or_in_the_log(tasks, start_worker, locks, ledger, gate):
    worker = start_worker(2)
    call = {"args": ("k-secret", "i-secret"), "kwargs": {"file": str(gate)}}
    first = tasks.once.apply_async(**call, argsrepr="(hidden)", kwargsrepr="(hidden)")
    wait_until(ledger.runs, "it runs")
    duplicate = tasks.once.apply_async(**call, argsrepr="(hidden)", kwargsrepr="(hidden)")
    duplicate.get(timeout=10, propagate=False)
    (key,) = locks.client.keys()
    assert b"secret" not in key + locks.client.get(key)
    gate.open()
    first.get(timeout=10)
    wait_until(lambda: f"[{first.id}] succeeded in" in worker.output(), "Celery has told of its end")
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


def test_complaint_16_a_fast_task_never_meets_its_own_lock_nor_waits_for_it(config, tasks, start_worker, ledger, locks):
    """Twenty runs of one key, one after another: each is asked for once, and sent once."""
    config.settings["redislock_client_options"] = {"socket_timeout": 10.0, "socket_connect_timeout": 10.0}
    config.settings["task_annotations"] = {"*": {"lock_lease": 90.0}}  # which such time-outs need
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


@in_pools("prefork", "threads", "gevent", others=["eventlet"])
def test_complaint_17_renewal_survives_lost_connections(lock_proxy, config, tasks, start_worker, ledger, gate, pool):
    """Its first two renewals lose their connections, later every connection is cut; the run outlasts its lease."""
    need_pool(pool)
    config.settings["redislock_lease"] = 6.0
    start_worker(4, "-P", pool)
    key = tasks.watches.lock_for("k", "any").name.encode()
    faults = [lock_proxy.drop_reply(to=b"EVALSHA", where=key, nth=nth) for nth in (2, 3)]  # the first one takes it
    beside = [tasks.work.delay(number, number, file=str(gate)) for number in range(2)]
    long_run = tasks.watches.delay("k", "long", 60, str(gate))
    wait_until(lambda: all(fault.struck for fault in faults), "two renewals have failed")
    lock_proxy.cut()
    following = tasks.watches.delay("k", "next")
    wait_until(ledger.conflicts, "the next one has met the long one")

    def outlasts_its_lease():
        deadlines = [line["at"] for line in ledger.lines() if line["event"] == "deadline" and line["item"] == "long"]
        return deadlines[-1] - deadlines[0] > 6.0

    wait_until(outlasts_its_lease, "it was renewed beyond its first lease")
    gate.open()
    assert [result.get(timeout=20) for result in (*beside, long_run, following)] == [0, 1, None, None]
    (first, second) = [run for run in ledger.runs() if run.key == "k"]
    assert first.end <= second.start
    assert ledger.losses() == []


@left_out("its user may use one prefix alone", "acl")
def test_complaint_19_each_app_of_a_process_has_its_own_settings(config, broker_server, locks):
    urls = locks.url(), broker_server.url(2)
    own = [{"redislock_url": url, "redislock_prefix": name} for url, name in zip(urls, ("one", "two"), strict=True)]
    apps = [make_app(replace(config, settings=settings)) for settings in own]
    first, second = (app.tasks["lab.work"].lock_for("k") for app in apps)
    with first, second, broker_server.connect(2) as other:
        assert [key.split(b":")[0] for key in (*locks.client.keys(), *other.keys())] == [b"one", b"two"]
    for app in apps:
        app.close()


@needs_one_server("its URL is another")
def test_complaint_19_the_user_of_the_url_is_the_one_who_locks(config, private_locks, tasks, start_worker):
    server = private_locks.client
    server.acl_setuser("shop", enabled=True, passwords=["+hunter2"], keys=["*"], channels=["*"], categories=["+@all"])
    config.locks = config.locks.replace("unix://", "unix://shop:hunter2@")
    tasks.work.app.conf.redislock_url = config.locks
    start_worker(1)
    with tasks.work.lock_for("k"):
        result = tasks.work.delay("k", "item")
        wait_until(lambda: kept(tasks.work.app) == 1, "it waits")
        users = [client["user"] for client in server.client_list() if client["cmd"] in {"evalsha", "subscribe"}]
        assert {*users} == {"shop"}
    assert result.get(timeout=10) == "item"


@contextmanager
def _locks_behind(kind, folder):
    """A lock server of this kind: its URL, and its `redislock_client_options`."""
    match kind:
        case "Sentinel":
            with sentinel(folder, WATCHED) as port:
                yield f"sentinel://127.0.0.1:{port}", {"master_name": WATCHED, **TIME_OUTS}
        case "Cluster":
            with cluster(folder) as port:
                yield f"redis+cluster://127.0.0.1:{port}", TIME_OUTS
        case "TLS":
            certificates = Certificates.for_server(folder / "certificates")
            with tls_server(folder / "server", certificates) as port:
                yield f"rediss://localhost:{port}", {**certificates.of_client, **OPTIONS}


@pytest.mark.parametrize("kind", ["Sentinel", "Cluster", "TLS"])
def test_complaint_19_locks_are_behind_sentinels_in_a_cluster_or_over_tls(config, start_worker, ledger, tmp_path, kind):
    with _locks_behind(kind, tmp_path) as (url, options):
        config.settings.update(redislock_url=url, redislock_client_options=options)
        app = make_app(config)
        worker = start_worker(2)
        assert "lock server" not in worker.output()
        with app.tasks["lab.work"].lock_for("k"):
            results = [app.tasks["lab.work"].delay("k", number) for number in range(3)]
            wait_until(lambda: kept(app) == 3, "all wait")
        assert [result.get(timeout=40) for result in results] == [0, 1, 2]
        # Not in which order: with time-outs as short as the leases here, a busy machine has outages, which mix them up.
        assert sorted(ledger.items()) == ["0", "1", "2"]
        assert ledger.overlaps() == []
        app.close()


def test_complaint_20_one_runs_and_one_is_queued_so_that_the_last_change_is_not_lost(tasks, start_worker, ledger, gate):
    """Each change is written before its publish; the last run began after the last change."""
    start_worker(3)
    changes, results = [], [tasks.queued.delay("k", "sync", file=str(gate))]
    wait_until(ledger.runs, "the first one runs")

    def change():
        changes.append(time.monotonic())
        results.append(tasks.queued.delay("k", "sync", 0.1))

    for _ in range(30):
        change()
    assert len({result.id for result in results}) == 2
    gate.open()
    for _ in range(30):
        change()
        time.sleep(0.02)
    for result in results:
        assert result.get(timeout=20) == "sync"
    runs = ledger.runs()
    assert runs[-1].start > changes[-1]
    assert len(runs) == len({result.id for result in results})
    assert ledger.overlaps() == []
