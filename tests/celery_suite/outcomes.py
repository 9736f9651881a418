"""A plugin of pytest that writes the outcome of each phase of each test to a file, one line of JSON for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

#: The worst phase of a test is its outcome: one that passes, and fails when it is torn down, has failed.
BY_WEIGHT = ["passed", "skipped", "failed"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("--outcomes")))


class Recorder:
    """Writes a line as soon as it is known: a process that is killed leaves what has ended before."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome in BY_WEIGHT:  # pytest-rerunfailures also reports each attempt before the last
            self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:  # a module that cannot be imported, or is skipped as a whole
            self._write(report)

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def read(file: Path) -> dict[str, str]:
    """The outcome of each test by its name."""
    outcomes: dict[str, str] = {}
    for line in file.read_text().splitlines():
        name, outcome = json.loads(line)
        outcomes[name] = max(outcomes.get(name, "passed"), outcome, key=BY_WEIGHT.index)
    return outcomes
