"""A worker in a thread of the user's tests, by `celery.contrib.testing`; in a process of its own, whose default app and
logging it changes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.lab.workers import ROOT

PROGRAM = """
import os
import time
from threading import Barrier

from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.utils.timer2 import Timer

from celery_redislock import LockedTask
from celery_redislock.signals import lock_conflict
from celery_redislock.testing import busy

SLOTS = 8
app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redislock_url = os.environ["REDIS_URL"]
at_once = Barrier(SLOTS)

starts = []
is_alive, start = Timer.is_alive, Timer.start


def seen_late(timer):
    alive = is_alive(timer)
    time.sleep(0.01)
    return alive


def counted(timer):
    starts.append(timer)
    start(timer)


Timer.is_alive, Timer.start = seen_late, counted


@app.task(base=LockedTask, rate_limit=os.environ["RATE_LIMIT"] or None)
def task(item): ...


@lock_conflict.connect
def wait_for_the_others(**_):
    at_once.wait(10)


with start_worker(app, pool="threads", concurrency=SLOTS, perform_ping_check=False), busy(task.lock_for(7)):
    skipped = [task.delay(7) for _ in range(SLOTS)]
    for result in skipped:
        result.get(timeout=20, propagate=False)
print({result.state for result in skipped}, len(starts) <= 1)
"""


@pytest.mark.parametrize("rate_limit", ["", "1000000/s"])
def test_threads_that_refuse_runs_at_the_same_time_start_one_timer(locks, tmp_path, rate_limit):
    """Where Celery has no event loop, its timer is a thread, which the first call to it starts, and no lock guards."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "REDIS_URL": locks.url(), "RATE_LIMIT": rate_limit, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'REVOKED'} True\n"
