"""The stage on which the state machines play."""

from __future__ import annotations

import logging

import pytest

from celery_redislock.connection import sender
from tests.lab.proxy import Proxy
from tests.lab.servers import Valkey

from .clients import Stage
from .steps import COMMANDS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how many commands the state machines have sent."""
    passed = terminalreporter.getreports("passed")
    told = [value for report in passed for name, value in report.user_properties if name == COMMANDS]
    if told:
        seeds = sorted(seed for _, seed in told if seed is not None)
        of_seeds = f", by the seeds {', '.join(map(str, seeds))}" if seeds else ""
        terminalreporter.write_line(f"{sum(count for count, _ in told):,} commands went through the proxy{of_seeds}")


@pytest.fixture
def stage(
    private_locks: Valkey, lock_proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    """A lock server of the test's own, behind a proxy."""
    monkeypatch.setattr(sender, "MAX_PAUSE", 0.002)  # it is there for many clients that all send once more
    caplog.set_level(logging.CRITICAL, "celery_redislock")  # a failure shows its steps, and not hundreds of outages
    return Stage(private_locks, lock_proxy)
