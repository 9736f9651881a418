"""What is counted of runs in one process, in prometheus_client's own registry: that of a publisher or of threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import REGISTRY

from celery_redislock import metrics, signals
from celery_redislock.hold import held_lock
from celery_redislock.testing import busy
from tests.lab.workers import ROOT

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

SIGNALS = [getattr(signals, name) for name in signals.__all__]


@pytest.fixture
def counted() -> Iterator[Callable[..., float]]:
    """How much a sample has grown in this test, whose process counts."""
    before = [signal.receivers[:] for signal in SIGNALS]
    metrics.connect()
    begin = {(s.name, *sorted(s.labels.items())): s.value for metric in REGISTRY.collect() for s in metric.samples}

    def grown(name: str, **labels: str) -> float:
        now = REGISTRY.get_sample_value(f"celery_redislock_{name}", labels) or 0.0
        return now - begin.get((f"celery_redislock_{name}", *sorted(labels.items())), 0.0)

    yield grown
    for signal, receivers in zip(SIGNALS, before, strict=True):
        signal.receivers[:] = receivers
        signal.sender_receivers_cache.clear()


def test_a_run_is_counted_once_however_often_connect_is_called(tasks, counted):
    metrics.connect()
    tasks.once.apply(("k",)).get()
    assert counted("acquired_total", task="lab.once") == 1
    assert counted("hold_seconds_count", task="lab.once") == 1
    assert counted("wait_seconds_count", task="lab.once") == 0


def test_a_refused_run_holds_nothing(tasks, counted):
    with busy(tasks.once.lock_for("k")):
        tasks.once.apply(("k",))
    assert counted("conflicts_total", task="lab.once", policy="skip") == 1
    assert counted("acquired_total", task="lab.once") == 0


def test_a_publish_that_is_answered_with_an_existing_job_is_counted(tasks, counted):
    tasks.job.delay("k")
    assert tasks.job.delay("k").duplicate
    assert counted("conflicts_total", task="lab.job", policy="return existing") == 1


def test_a_call_that_is_merged_into_a_waiting_message_is_counted_and_is_no_conflict(tasks, counted):
    tasks.latest.delay("k", 1)
    assert tasks.latest.delay("k", 2).duplicate
    assert counted("merged_total", task="lab.latest") == 1
    assert counted("conflicts_total", task="lab.latest", policy="return existing") == 0


def test_a_run_that_a_newer_call_has_overtaken_is_counted(app, tasks, deliver, counted):
    deliver(app, "lab.latest", "k", id="newer", redislock={"number": 2})
    deliver(app, "lab.latest", "k", id="stale", redislock={"number": 1})
    assert counted("superseded_total", task="lab.latest") == 1
    assert counted("acquired_total", task="lab.latest") == 1


def test_a_run_that_a_newer_call_has_replaced_is_counted(app, tasks, deliver, locks, counted):
    locks.client.set(f"{tasks.newest.lock_for('k').name}:replaced:stale", "2 newer stale/0/0")
    deliver(app, "lab.newest", "k", id="stale", redislock={"number": 1})
    assert counted("replaced_total", task="lab.newest") == 1
    assert counted("acquired_total", task="lab.newest") == 0


def test_every_way_to_lose_a_lock_has_its_word():
    ways = {value for name, value in vars(held_lock).items() if name.isupper() and isinstance(value, str)}
    assert len(ways) == 4
    assert metrics.REASONS.keys() == ways
    assert all(re.fullmatch(r"[a-z_]+", word) for word in metrics.REASONS.values())


def test_a_process_that_does_not_ask_for_them_does_not_load_prometheus_client():
    code = "import sys, celery_redislock.worker.request; assert 'prometheus_client' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_without_prometheus_client_the_error_names_the_extra():
    code = "import sys; sys.modules['prometheus_client'] = None; import celery_redislock.metrics"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install 'celery-redislock[prometheus]'" in done.stderr.splitlines()[-1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name.split(">")[0] for name in extras["prometheus"]] == ["prometheus_client"]
