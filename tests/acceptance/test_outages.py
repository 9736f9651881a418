"""Redis away: nothing is lost, nothing overlaps, nothing counts as a retry, and the log says so once."""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import redis
from kombu.exceptions import OperationalError

from celery_redislock import LockUnavailable
from tests.lab.app import make_app
from tests.lab.cluster_locks import ON_A_CLUSTER
from tests.lab.servers import wait_until

OUTAGE = 6.0
CANNOT, ANSWERS = " cannot be asked: ", " answers again, after "
#: How often a process may say each: of a Cluster once for each node.
SAID = {1, 2, 3} if ON_A_CLUSTER else {1}


def each_process(worker, text):
    """How often each process of `worker` that says `text` says it."""
    said = (re.search(r"\[\S+ \S+ \w+/([\w-]+)\]", line) for line in worker.output().splitlines() if text in line)
    return Counter(found[1] for found in said if found).values()


def send_seventy(task):
    """Ten messages for each of seven keys."""
    return [task.delay(number % 7, number, 0.05) for number in range(70)]


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
def test_seventy_tasks_come_through_an_outage_of_the_lock_server(lock_proxy, tasks, start_worker, ledger, locks, kind):
    worker = start_worker(4)
    results = send_seventy(tasks.counted)
    wait_until(lambda: len(ledger.runs()) > 5, "some have run")
    getattr(lock_proxy, kind)()
    time.sleep(OUTAGE)
    ran = len(ledger.runs())
    assert ran < 70
    lock_proxy.mend()
    assert all_ran_once(results, ledger)
    assert set(each_process(worker, CANNOT)) <= SAID  # once, not once a try
    assert set(each_process(worker, ANSWERS)) <= SAID
    assert CANNOT in worker.output()
    wait_until(lambda: locks.client.keys("*}") == [], "no lock is left, but notes", 20)  # the lease is 30 s


@pytest.mark.parametrize("acks", ["early", "late"])
def test_seventy_tasks_come_through_an_outage_of_a_redis_that_is_broker_and_lock_server(
    broker_proxy, config, start_worker, ledger, acks
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
    results = send_seventy(app.tasks["lab.counted" if acks == "early" else "lab.counted_late"])
    wait_until(lambda: len(ledger.runs()) > 5, "some have run")
    # Kombu loses what it has taken from the queue when the answer is lost: it must not be taking at the cut.
    app.control.cancel_consumer(config.queue, reply=True, timeout=10, limit=1)
    app.control.ping(timeout=10, limit=1)  # by now it has given back what it was taking when it was told
    cut = time.monotonic()
    broker_proxy.refuse()
    time.sleep(OUTAGE)
    assert len(ledger.runs()) < 70
    broker_proxy.mend()
    wait_until(lambda: consumes_again(app, config.queue), "the worker is back")
    for number, result in enumerate(results):
        assert result.get(timeout=60) == [number, 0]
    assert ledger.overlaps() == []
    assert set(ledger.items()) == {str(number) for number in range(70)}
    again = [run for number, run in enumerate(ledger.runs()) if run.item in ledger.items()[:number]]
    # What had ended just before the cut, its ack still on the way, is the broker's to deliver again.
    ended = [run.item for run in ledger.runs() if cut - 1 < run.end < cut + 0.2]
    assert {run.item for run in again} <= set(ended)
    assert len(again) <= 4
    assert "Trying to re-establish the connection" in worker.output()
    app.close()


def test_an_outage_shorter_than_the_lease_costs_a_run_nothing(lock_proxy, tasks, start_worker, ledger, locks):
    worker = start_worker(1)
    result = tasks.late.delay("k", "item", 5.0)
    wait_until(ledger.runs, "it runs")
    lock_proxy.refuse()
    wait_until(lambda: CANNOT in worker.output(), "a renewal failed")
    lock_proxy.mend()
    wait_until(lambda: "answers again" in worker.output(), "the renewals go on")
    assert result.get(timeout=20) == "item"
    assert ledger.losses() == []
    wait_until(lambda: locks.client.keys() == [], "the key is free")


def test_an_outage_at_the_end_of_a_run_leaves_its_outcome_and_its_key_is_free_when_redis_answers(
    lock_proxy, tasks, start_worker, ledger, locks
):
    worker = start_worker(1)
    result = tasks.work.delay("k", "first", 0.3)
    wait_until(ledger.runs, "it runs")
    lock_proxy.refuse()
    assert result.get(timeout=10) == "first"
    wait_until(lambda: f"task lab.work[{result.id}] has ended, but the lock" in worker.output(), "it is said")
    lock_proxy.mend()
    assert tasks.work.delay("k", "second").get(timeout=20) == "second"  # the lease is 30 s
    wait_until(lambda: locks.client.keys("*}") == [], "the lock is free")


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
        assert f"task lab.work[{result.id}] runs without its lock, by lock_on_outage" in worker.output()
    assert len(ledger.runs()) == ran
    app.close()


def test_a_publish_that_fails_says_so(broker_proxy, tasks):
    broker_proxy.refuse()
    with pytest.raises(OperationalError):
        tasks.work.delay("k")
