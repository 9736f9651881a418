"""Runs that need several locks, many at once and amid faults, as a recorder sees them that knows nothing of locks."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter

import pytest

from tests.conftest import IS_MATRIX
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups

#: How many transfers there are between how many accounts, how long each takes, and in how many workers of ten slots.
TRANSFERS, ACCOUNTS, LASTS, WORKERS = (2000, 40, 0.5, 2) if IS_MATRIX else (120, 12, 0.3, 1)
#: How many children are killed, how often a worker is replaced, and for how long the lock server is away.
KILLS, SHUTDOWNS, AWAY = (30, 2, 5.0) if IS_MATRIX else (4, 1, 2.0)
#: How many jobs there are, half of them of one customer, and how long each takes.
JOBS, JOB_LASTS = (300, 1.0) if IS_MATRIX else (60, 0.1)
PATIENCE = 300
SLOTS = 10


def ends(ledger):
    """How often each transfer has reached its end, once for each of its accounts."""
    return Counter(line["item"] for line in ledger.lines() if line["event"] == "end")


def bodies_that_have_just_begun(ledger):
    """The pids of bodies that have begun in the first half of their time. Only the end of the ledger is read."""
    with ledger.path.open("rb") as file:
        file.seek(max(0, ledger.path.stat().st_size - 20_000))
        lines = [json.loads(line) for line in file.read().split(b"\n")[1:-1]]
    over = {(line["pid"], line["start"]) for line in lines if line["event"] == "end"}
    begun = [line for line in lines if line["event"] == "start" and (line["pid"], line["start"]) not in over]
    return [line["pid"] for line in begun if time.monotonic() - line["start"] < LASTS / 2]


@pytest.mark.timeout(900)
class TestTransfersBetweenAccounts:
    @counts_on_wake_ups("each message has its turn, one every five seconds")
    def test_no_account_is_in_two_at_once_and_each_reaches_its_end_once_though_children_workers_and_redis_fail(
        self, tasks, lock_proxy, start_worker, ledger, nothing_is_left
    ):
        workers = [start_worker(SLOTS) for _ in range(WORKERS)]
        dice = random.Random(TRANSFERS)
        pairs = [dice.sample(range(ACCOUNTS), 2) for _ in range(TRANSFERS)]
        began, kills = time.monotonic(), 0
        results = [tasks.transfer.delay(*pair, number, LASTS) for number, pair in enumerate(pairs)]
        faults = ["kill"] * KILLS + ["shutdown"] * SHUTDOWNS + ["outage"]
        dice.shuffle(faults)
        leaving = []
        for number, fault in enumerate(faults):
            due = 2 * TRANSFERS * (number + 1) / (len(faults) + 2)  # while there is work
            wait_until(lambda due=due: sum(ends(ledger).values()) >= due, "work goes on", PATIENCE)
            match fault:
                case "kill":
                    kills += self.kill(workers, ledger)
                case "shutdown":
                    leaving.append(workers.pop(0))
                    leaving[-1].begin_to_stop(signal.SIGTERM)
                    workers.append(start_worker(SLOTS))
                case "outage":
                    lock_proxy.refuse()
                    time.sleep(AWAY)
                    lock_proxy.mend()
        assert [result.get(timeout=PATIENCE) for result in results] == list(range(TRANSFERS))
        took = time.monotonic() - began
        for worker in leaving:
            worker.wait()
        busiest = max(Counter(account for pair in pairs for account in pair).values())
        ideal = LASTS * max(busiest, TRANSFERS / (SLOTS * WORKERS))
        print(f"{TRANSFERS} transfers in {took:.1f} s, ideal {ideal:.1f} s; {kills} killed, {len(leaving)} shutdowns")
        assert kills == KILLS
        assert ledger.overlaps() == []
        assert ends(ledger) == {str(number): 2 for number in range(TRANSFERS)}
        nothing_is_left()

    def kill(self, workers, ledger):
        """Kill a child amid a body that has just begun; return whether there was one."""
        found = []

        def look():
            of_us = {child.pid: worker for worker in workers for child in worker.children()}
            found[:] = [(of_us[pid], pid) for pid in bodies_that_have_just_begun(ledger) if pid in of_us]
            return found

        wait_until(look, "a body begins", PATIENCE)
        worker, pid = found[-1]
        worker.kill_child(pid)
        return 1


@pytest.mark.timeout(900)
class TestAFarmOfFive:
    @counts_on_wake_ups("each message has its turn, one every five seconds")
    def test_a_customer_with_half_of_the_jobs_does_not_keep_the_others_waiting(
        self, tasks, start_worker, ledger, nothing_is_left
    ):
        start_worker(SLOTS)
        began = time.monotonic()
        results = [
            tasks.job_of_customer.delay("big" if number % 2 else f"small {number}", number, JOB_LASTS)
            for number in range(JOBS)
        ]
        assert [result.get(timeout=PATIENCE) for result in results] == list(range(JOBS))
        runs = [run for run in ledger.runs() if run.key != "all"]
        others = max(run.end for run in runs if run.key != "customer:big") - began
        took = time.monotonic() - began
        print(f"the jobs of the other customers were done after {others:.1f} s, all after {took:.1f} s")
        assert Counter(ledger.items()) == {str(number): 2 for number in range(JOBS)}
        last = max(number for number, run in enumerate(runs) if run.key != "customer:big")
        assert last < 0.8 * JOBS
        assert [pair for pair in ledger.overlaps() if pair[0].key != "all"] == []
        assert ledger.most_at_once() <= 10, "each run is there twice: with its customer, and among all"
        nothing_is_left()
