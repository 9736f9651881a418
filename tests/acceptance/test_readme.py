"""The README's example works as pasted."""

from __future__ import annotations

import sys

import pytest

from tests.lab.readme import README, alike, celerys_own, try_it
from tests.lab.workers import ROOT

CALLS_MORE = """
from shop import bill, reserve

print(bill.delay(1, 2).get(timeout=20), reserve.delay("a", 3).get(timeout=20))
"""


@pytest.fixture
def variables(broker_server):
    broker_server.client.flushall()
    return {**celerys_own(broker_server), "PYTHONPATH": str(ROOT)}


def test_the_first_screen_shows_what_comes_as_pasted(tmp_path, variables):
    printed, log = try_it(sys.executable, tmp_path, variables)
    assert printed == README.console("python calls.py")[1]
    assert README.log_lines()
    assert alike(README.log_lines()) <= alike(log)


def test_what_waits_in_the_queue_is_no_duplicate_yet(tmp_path, variables):
    """With one child no two of five equal calls meet, so all run: as the page "Getting started" says."""
    calls = """
from shop import sync_account

calls = [sync_account.delay(7) for _ in range(5)]
print([call.get() for call in calls])
"""
    instant = README.module("shop.py").replace("time.sleep(2)", "time.sleep(0.1)")
    printed, _ = try_it(sys.executable, tmp_path, variables, shop=instant, calls=calls, concurrency=1)
    assert printed == f"{['synced 7'] * 5}\n"


def test_the_keys_that_it_shows_work_as_pasted(tmp_path, variables):
    shop = README.module("shop.py") + README.block_with("lock_key=")
    printed, log = try_it(sys.executable, tmp_path, variables, shop=shop, calls=CALLS_MORE)
    assert printed == "None None\n"
    for line in ("billing 1: 2", "reserving 3 of a"):
        assert line in log
