"""Threads that use a task for the first time at the same moment: whoever comes second finds it locked, too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

from celery_redislock import LockedTask


@pytest.fixture
def app(locks):
    with Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        app.conf.redislock_url = locks.url()
        yield app


@pytest.fixture
def half_bound(app):
    """A task that another thread is about to bind: Celery counts it as bound, and its lock is not made yet."""
    reached, goes_on = threading.Event(), threading.Event()

    class Slow(LockedTask):
        abstract = True

        @classmethod
        def on_bound(cls, app):
            if threading.current_thread() is not threading.main_thread():
                reached.set()
                goes_on.wait(20)

    @app.task(base=Slow, name="shop.report", lock_scope="job", shared=False)
    def report(day):
        return day

    with ThreadPoolExecutor(1) as other:
        binds = other.submit(lambda: report.name)
        assert reached.wait(20)
        yield report
        goes_on.set()
        binds.result()


def test_a_lock_is_found_while_another_thread_still_binds_its_task(half_bound):
    with half_bound.lock_for("monday"):
        assert half_bound.lock_info("monday") is not None


def test_a_job_is_sent_once_while_another_thread_still_binds_its_task(half_bound):
    assert [half_bound.delay("monday").duplicate for _ in range(2)] == [False, True]
