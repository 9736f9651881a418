"""Redis away: nothing is lost, nothing overlaps, nothing counts as a retry, and the log says so once."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import redis

from celery_redislock import LockUnavailable
from tests.lab.app import make_app
from tests.lab.servers import wait_until
from tests.lab.workers import acked, known

OUTAGE = 6.0
CANNOT, ANSWERS = " is unavailable: ", " is available again after "


def said_in_turn(worker):
    """Whether each process of `worker` says in turn that a server is unavailable and that it is available again."""
    said = {}
    for process, server, text in re.findall(rf"/([\w-]+)\].*lock server(.*?)({CANNOT}|{ANSWERS})", worker.output()):
        said.setdefault((process, server), []).append(text)
    return all(texts == ([CANNOT, ANSWERS] * len(texts))[: len(texts)] for texts in said.values())


def send_seventy(task, gate):
    """Ten messages for each of seven keys; the work stops at the gate."""
    return [task.delay(number % 7, number, 0.05 if number < 20 else gate) for number in range(70)]


def all_ran_once(results, ledger):
    for number, result in enumerate(results):
        assert result.get(timeout=60) == [number, 0]  # no retries
    assert sorted(ledger.items(), key=int) == [str(number) for number in range(70)]
    assert ledger.overlaps() == []
    return True


def consumes_again(app, queue):
    with suppress(redis.ConnectionError, OSError):  # the test's own connections were cut too
        return app.control.add_consumer(queue, reply=True, timeout=1)


@pytest.mark.parametrize("kind", ["refuse", "blackhole"])
def test_seventy_tasks_come_through_an_outage_of_the_lock_server(
    lock_proxy, tasks, start_worker, ledger, locks, gate, kind
):
    worker = start_worker(4)
    results = send_seventy(tasks.counted, gate)
    wait_until(lambda: len(ledger.runs()) > 5, "some have run")
    getattr(lock_proxy, kind)()
    gate.open()
    time.sleep(OUTAGE)
    ran = len(ledger.runs())
    assert ran < 70
    lock_proxy.mend()
    assert all_ran_once(results, ledger)
    assert CANNOT in worker.output()
    assert said_in_turn(worker), "once an outage, not once a try"
    wait_until(lambda: locks.client.keys("*}") == [], "no lock is left, but notes", 20)  # the lease is 30 s


@pytest.mark.parametrize("acks", ["early", "late"])
def test_seventy_tasks_come_through_an_outage_of_a_redis_that_is_broker_and_lock_server(
    broker_proxy, config, start_worker, ledger, gate, acks
):
    config = replace(config, locks=broker_proxy.url)
    # Celery leaves what was delivered on a lost connection to the visibility timeout.
    config.settings["broker_transport_options"] = {
        "visibility_timeout": 8,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    app = make_app(config)
    worker = start_worker(4, config=config)
    task = app.tasks["lab.counted" if acks == "early" else "lab.counted_late"]
    results = send_seventy(task, gate)
    wait_until(lambda: sum(int(run.item) >= 20 for run in ledger.running()) == 4, "four stand at the gate")
    # Kombu loses what it has taken from the queue when the answer is lost: it must not be taking at the cut.
    app.control.cancel_consumer(config.queue, reply=True, timeout=10, limit=1)
    app.control.ping(timeout=10, limit=1)  # by now it has given back what it was taking when it was told
    wait_until(lambda: known(app) == 4, "the main process has heard of the ends of all others, and acked these")
    if acks == "early":
        wait_until(lambda: acked(app, task.name) == 4, "those that run are acked")
    broker_proxy.refuse()
    gate.open()
    time.sleep(OUTAGE)
    assert len(ledger.runs()) < 70
    broker_proxy.mend()
    wait_until(lambda: consumes_again(app, config.queue), "the worker is back")
    for number, result in enumerate(results):
        assert result.get(timeout=60) == [number, 0]
    assert ledger.overlaps() == []
    assert sorted(ledger.items(), key=int) == [str(number) for number in range(70)]
    assert "Trying to re-establish the connection" in worker.output()
    app.close()


def test_an_outage_shorter_than_the_lease_costs_a_run_nothing(lock_proxy, tasks, start_worker, ledger, locks, gate):
    worker = start_worker(1)
    result = tasks.late.delay("k", "item", gate)
    wait_until(ledger.runs, "it runs")
    lock_proxy.refuse()
    wait_until(lambda: CANNOT in worker.output(), "a renewal failed")
    lock_proxy.mend()
    wait_until(lambda: "is available again" in worker.output(), "the renewals go on")
    gate.open()
    assert result.get(timeout=20) == "item"
    assert ledger.losses() == []
    wait_until(lambda: locks.client.keys() == [], "the key is free")


def test_an_outage_at_the_end_of_a_run_leaves_its_outcome_and_its_key_is_free_when_redis_answers(
    lock_proxy, tasks, start_worker, ledger, locks, gate
):
    worker = start_worker(1)
    result = tasks.work.delay("k", "first", gate)
    wait_until(ledger.runs, "it runs")
    lock_proxy.refuse()
    gate.open()
    assert result.get(timeout=10) == "first"
    wait_until(lambda: f"task lab.work[{result.id}] has ended, but the lock" in worker.output(), "it is said")
    lock_proxy.mend()
    assert tasks.work.delay("k", "second").get(timeout=20) == "second"  # the lease is 30 s
    wait_until(lambda: locks.client.keys("*}") == [], "the lock is free")


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("policy", ["raise", "run"])
def test_a_reservation_that_was_given_up_in_an_outage_is_free_unless_its_process_ends_first(
    lock_proxy, locks, config, start_worker, policy, ends
):
    config.settings |= {"redislock_on_outage": policy, "redislock_scope": "job"}
    app = make_app(config)
    worker = start_worker(1)
    result = app.tasks["lab.work"].apply_async(("k", "item"), countdown=1)
    lock_proxy.refuse()
    result.get(timeout=20, propagate=False)
    if ends:
        worker.stop()
    lock_proxy.mend()
    if ends:
        (key,) = locks.client.keys("*}")
        assert locks.client.ttl(key) > 3500  # lock_queue_ttl is an hour
    else:
        wait_until(lambda: locks.client.keys("*}") == [], "the key is free")
    app.close()


@pytest.mark.parametrize(("policy", "ran"), [("raise", 0), ("run", 1)])
def test_the_other_outage_policies_do_what_they_say(lock_proxy, config, start_worker, ledger, policy, ran):
    config.settings["redislock_on_outage"] = policy
    app = make_app(config)
    worker = start_worker(1)
    lock_proxy.refuse()
    result = app.tasks["lab.work"].delay("k", "item")
    if policy == "raise":
        with pytest.raises(LockUnavailable) as caught:
            result.get(timeout=20)
        assert caught.value.key == app.tasks["lab.work"].lock_for("k").name
    else:
        assert result.get(timeout=20) == "item"
        assert f"task lab.work[{result.id}] runs without its lock (lock_on_outage=" in worker.output()
    assert len(ledger.runs()) == ran
    app.close()
