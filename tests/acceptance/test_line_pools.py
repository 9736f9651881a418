"""The line in every pool, and under every setting by which a worker takes its messages."""

from __future__ import annotations

import re

import pytest

from tests.lab.servers import need, need_pool, wait_until
from tests.lab.wake_ups import few
from tests.lab.workers import kept, waiting_in


def who_waited(worker):
    return set(re.findall(r"\[([0-9a-f-]+)\]: lock .* waiting in line", worker.output()))


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet", "solo"])
def test_in_every_pool_those_who_wait_run_in_order_acked_early_and_late(tasks, start_worker, ledger, locks, pool):
    need_pool(pool)
    worker = start_worker(4, "-P", pool)
    with tasks.work.lock_for("early"), tasks.late.lock_for("late"):
        early = [tasks.work.delay("early", f"e{number}", 0.05) for number in range(few(10))]
        late = [tasks.late.delay("late", f"l{number}", 0.05) for number in range(few(10))]
        wait_until(lambda: kept(tasks.work.app) == len(early + late), "all wait")
        assert ledger.items() == []
    for result in early + late:
        result.get(timeout=20)
    for first in "el":
        assert [item for item in ledger.items() if item[0] == first] == [
            f"{first}{number}" for number in range(few(10))
        ]
    assert ledger.overlaps() == []
    assert "Traceback" not in worker.output()
    wait_until(lambda: locks.held() == [], "nothing is left")


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet", "solo"])
def test_in_every_pool_customers_take_turns_and_a_full_room_sends_back_the_last(
    config, tasks, start_worker, ledger, pool
):
    need_pool(pool)
    config.settings["redislock_waiting_limit"] = 8
    worker = start_worker(4, "-P", pool)
    with tasks.one_by_turns.lock_for("k"):
        results = [tasks.one_by_turns.delay("k", "A", number) for number in range(12)]
        wait_until(lambda: "republished the messages" in worker.output(), "the room is full")
        results += [tasks.one_by_turns.delay("k", "B", number) for number in range(2)]
        # One that is sent back waits anew, so lines are no count of messages.
        wait_until(lambda: len(who_waited(worker)) == 14, "each message has asked")
    for result in results:
        result.get(timeout=60)
    assert [place for place, item in enumerate(ledger.items()) if item.startswith("B")][-1] <= 6
    assert len(ledger.items()) == 14
    assert "Traceback" not in worker.output()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_in_every_pool_a_body_that_waits_for_a_key_goes_before_messages_that_lack_its_slot(
    tasks, start_worker, running, pool
):
    need_pool(pool)
    worker = start_worker(1, "-P", pool)
    with tasks.work.lock_for("k"):
        earlier = [tasks.work.delay("k", number) for number in range(2)]
        wait_until(lambda: waiting_in(worker) == 2, "they wait")
        body = tasks.takes_another.delay(1, "k")
        running()
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 2, "all wait")
    wait_until(body.ready, "it has the key", 8)  # it waits for ten seconds at most
    assert body.successful()
    assert [result.get(timeout=20) for result in earlier] == [0, 1]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_fetches_on_as_soon_as_a_message_waits(tasks, start_worker, pool):
    """It may have one message beyond those that wait; so it fetches them one after the other.

    If it looked for the next one once a second, thirty would take half a minute.
    """
    worker = start_worker(1, "-P", pool)
    with tasks.work.lock_for("k"):
        for number in range(30):
            tasks.work.delay("k", number)
        wait_until(lambda: waiting_in(worker) == 30, "all wait", 25)


def test_under_gevent_what_waits_when_redis_as_the_broker_goes_away_waits_again_when_it_is_back(
    broker_proxy, tasks, start_worker, ledger
):
    need("gevent")
    worker = start_worker(2, "-P", "gevent")
    with tasks.work.lock_for("k"):
        results = [tasks.work.delay("k", number) for number in range(2)]
        wait_until(lambda: waiting_in(worker) == 2, "all wait")
        broker_proxy.refuse()
        wait_until(lambda: "Cannot connect to" in worker.output(), "it cannot connect")
        broker_proxy.mend()
        wait_until(lambda: waiting_in(worker) >= 4, "they wait again")
    for result in results:
        result.get(timeout=10)
    assert ledger.overlaps() == []
    assert len(ledger.items()) == 2
