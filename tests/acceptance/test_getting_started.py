"""Each step of docs/getting-started.md works as pasted, and prints what the page shows."""

from __future__ import annotations

import re
import sys

import pytest

from tests.lab.readme import GETTING_STARTED, Shell, alike, celerys_own
from tests.lab.workers import ROOT

PAGE = GETTING_STARTED


@pytest.fixture
def shell(tmp_path, broker_server):
    broker_server.client.flushall()
    shell = Shell(sys.executable, tmp_path, {**celerys_own(broker_server), "PYTHONPATH": str(ROOT)})
    shell.write(**{name: PAGE.module(f"{name}.py") for name in ("shop", "calls", "report")})
    return shell


def test_each_step_shows_what_comes_as_pasted(shell):
    worker = "celery -A shop worker"
    with shell.worker(f"{worker} {PAGE.console(worker)[0]}"):
        assert shell.type("python calls.py") == PAGE.console("python calls.py")[1]
        (skipped, *_) = re.findall(r"task shop\.sync_account\[(\S+)\]: lock .*; skipped", shell.log)
        why = "celery -A shop locks why"
        assert alike(shell.type(f"{why} {skipped}")) == alike(PAGE.console(why)[1])
        assert shell.type("python report.py") == PAGE.console("python report.py")[1]
    assert alike(PAGE.log_lines()) <= alike(shell.log)


def test_the_page_shows_two_lines_of_the_log():
    """So that the comparison above has something to compare."""
    assert len(PAGE.log_lines().splitlines()) == 2
