"""No two runs with one key at once, none lost, nothing left behind: on two workers, with either broker."""

from __future__ import annotations

from celery import chain

from tests.conftest import on_every_broker
from tests.lab.servers import wait_until

pytestmark = on_every_broker


def test_120_messages_for_3_keys_run_once_each_without_overlap(tasks, start_worker, ledger, locks):
    start_worker(4)
    start_worker(4)
    results = [tasks.work.delay(n % 3, n, 0.02) for n in range(120)]
    assert sorted(result.get(timeout=60) for result in results) == list(range(120))
    assert sorted(map(int, ledger.items())) == list(range(120))
    assert ledger.overlaps() == []
    wait_until(lambda: locks.held() == [], "the last lock is free")  # a result is stored before the release


def in_batches(signatures):
    """Their outcomes, four at a time, so that the messages that they cause find a free child."""
    outcomes = []
    for start in range(0, len(signatures), 4):
        results = [signature.delay() for signature in signatures[start : start + 4]]
        for result in results:  # asked for, for Celery's client may miss what it is told just as it begins to listen
            wait_until(result.ready, "it has ended", timeout=60)
        outcomes += [result.get(timeout=60) for result in results]
    return outcomes


def all_came_back(ledger, count):
    """Whether so many messages met the lock of their own cause, none of them a policy."""
    conflicts = ledger.conflicts()
    return len(conflicts) >= count and {conflict["policy"] for conflict in conflicts} == {"always waits"}


def test_30_of_30_tasks_that_retry_at_once_finish(tasks, start_worker, ledger, locks):
    start_worker(8)
    assert in_batches([tasks.again.si(n, 2) for n in range(30)]) == [2] * 30
    assert len(ledger.runs()) == 90
    assert all_came_back(ledger, 60)
    assert ledger.overlaps() == []
    wait_until(lambda: locks.held() == [], "the last lock is free")


def test_40_of_40_tasks_that_replace_themselves_finish(tasks, start_worker, ledger, locks):
    start_worker(8)
    assert in_batches([tasks.becomes.si(n, 2) for n in range(40)]) == [0] * 40
    assert len(ledger.runs()) == 120
    assert all_came_back(ledger, 80)
    assert ledger.overlaps() == []
    wait_until(lambda: locks.held() == [], "the last lock is free")


def test_60_of_60_three_step_chains_on_one_key_finish_with_skip(tasks, start_worker, ledger, locks):
    start_worker(8)
    chains = [chain(tasks.link.si(n, 1), tasks.link.si(n, 2), tasks.link.si(n, 3)) for n in range(60)]
    assert in_batches(chains) == [3] * 60
    assert len(ledger.runs()) == 180
    assert all_came_back(ledger, 120)
    assert ledger.overlaps() == []
    wait_until(lambda: locks.held() == [], "the last lock is free")


def test_330_of_330_pages_of_a_task_that_sends_its_own_next_page_run(tasks, start_worker, ledger, locks):
    start_worker(8)
    for streams in (range(4), range(4, 8), range(8, 11)):
        for stream in streams:
            tasks.page.delay(stream, 1, 30)
        done = 30 * (streams[-1] + 1)
        wait_until(lambda done=done: sum(run.end < float("inf") for run in ledger.runs()) == done, "all pages ran", 60)
    assert all_came_back(ledger, 319)
    assert ledger.overlaps() == []
    wait_until(lambda: locks.held() == [], "the last lock is free")
