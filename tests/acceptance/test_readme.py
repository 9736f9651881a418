"""The README's example works as pasted, and its table of options is the code's own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from celery_redislock.options import KEY_OPTIONS, OPTIONS, SETTINGS
from tests.lab.servers import running
from tests.lab.workers import ROOT

README = (ROOT / "README.md").read_text()
CALLS = """
from shop import bill, reserve, sync_account
print(sync_account.delay(1).get(timeout=20), bill.delay(1, 2).get(timeout=20), reserve.delay("a", 3).get(timeout=20))
"""


def test_the_example_works_as_pasted(tmp_path, config):
    (example,) = re.findall(r"```python\n(# shop\.py\n.*?)```", README, re.DOTALL)
    (tmp_path / "shop.py").write_text(example)
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-c", "2"]
    # Celery's own variables, so that the example need not be changed to find the test's servers.
    servers = {"CELERY_BROKER_URL": config.broker, "CELERY_RESULT_BACKEND": config.backend}
    log = tmp_path / "worker.log"
    with running(command, log, {**servers, "PYTHONPATH": str(tmp_path)}):
        called = subprocess.run(
            [sys.executable, "-c", CALLS],
            env={**servers, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert called.stdout == "None None None\n", called.stderr
    for line in ("syncing 1", "billing 1: 2", "reserving 3 of a"):
        assert line in log.read_text()


def test_the_promise_is_there_word_for_word():
    flat = " ".join(README.split())
    assert "At most one holder per key while one Redis primary keeps its data, its clock does not jump" in flat
    assert "the resource itself must check the fencing number." in flat


def _table_rows(prefix):
    return {
        name: default
        for names, default in re.findall(rf"^\| (`{prefix}[^|]*) \| ([^|]+) \|", README, re.MULTILINE)
        for name, default in zip(re.findall(r"`(\w+)`", names), default.split(", "), strict=False)
    }


@pytest.mark.parametrize("prefix", ["lock_", "redislock_"])
def test_the_tables_show_the_defaults_of_the_code(prefix):
    rules = {**KEY_OPTIONS, **OPTIONS} if prefix == "lock_" else SETTINGS
    rows = _table_rows(prefix)
    assert len(rows) >= len(SETTINGS)
    for name, shown in rows.items():
        default = rules[name.removeprefix(prefix)].default
        if "`" in shown:
            shown_default = shown.strip("` ")
            assert shown_default.replace('"', "'") == repr(default), name
