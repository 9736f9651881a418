"""No two runs with one key at once, none lost, nothing left behind: on two workers, with either broker."""

from __future__ import annotations

from celery import chain, group

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
    assert locks.client.keys() == []


def test_30_of_30_tasks_that_retry_at_once_finish(tasks, start_worker, ledger, locks):
    start_worker(4)
    results = [tasks.again.delay(n, 2) for n in range(30)]
    assert [result.get(timeout=60) for result in results] == [2] * 30
    assert len(ledger.runs()) == 90
    assert ledger.overlaps() == []
    assert locks.client.keys() == []


def test_40_of_40_tasks_that_replace_themselves_finish(tasks, start_worker, ledger, locks):
    start_worker(4)
    results = [tasks.becomes.delay(n, 2) for n in range(40)]
    assert [result.get(timeout=60) for result in results] == [0] * 40
    assert len(ledger.runs()) == 120
    assert ledger.overlaps() == []
    assert locks.client.keys() == []


def test_60_of_60_three_step_chains_on_one_key_finish_with_skip(tasks, start_worker, ledger, locks):
    start_worker(4)
    step = tasks.step
    results = [chain(step.si(n, 1), step.si(n, 2), step.si(n, 3)).delay() for n in range(60)]
    assert [result.get(timeout=60) for result in results] == [3] * 60
    assert len(ledger.runs()) == 180
    assert ledger.overlaps() == []
    assert locks.client.keys() == []


def test_330_of_330_pages_of_a_task_that_sends_its_own_next_page_run(tasks, start_worker, ledger, locks):
    start_worker(4)
    group(tasks.page.si(n, 1, 30) for n in range(11)).delay().get(timeout=60)
    wait_until(lambda: len([r for r in ledger.runs() if r.end < float("inf")]) == 330, "330 pages ran", 60)
    assert ledger.overlaps() == []
    wait_until(lambda: locks.client.keys() == [], "the last lock is free")
