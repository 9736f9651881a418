"""Where a task has no lock: direct calls, outages, `redislock_enabled = False`; and a key that somebody else has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery
from celery.app.trace import trace_task
from celery.exceptions import TaskRevokedError

from celery_redislock import LockConfigError, LockConflict, LockedTask, locked
from celery_redislock.testing import busy
from tests.lab.app import make_app


@pytest.fixture
def rebuild(app):
    """The README's task with `self.lock`."""

    @app.task(base=LockedTask, bind=True, shared=False, name="shop.rebuild", lock_key="rebuild:{index}")
    def rebuild(self, index):
        self.lock.check()
        self.lock.extend()
        return {name: getattr(self.lock, name) for name in ("state", "remaining", "token", "fence", "key")}

    return rebuild


NO_LOCK = {"state": "none", "remaining": 0.0, "token": None, "fence": None, "key": ""}


class TestNoLock:
    def test_a_direct_call_has_an_object_in_its_place_that_answers_and_asks_nobody(self, rebuild, locks):
        locks.calls()
        assert rebuild("products") == NO_LOCK
        assert locks.calls() == {}

    def test_so_has_a_direct_call_inside_a_run_that_holds_its_own_key(self, app, rebuild):
        @app.task(base=LockedTask, bind=True, shared=False, name="shop.outer")
        def outer(self):
            return self.lock.state, rebuild("products"), self.lock.state

        assert outer.apply().get() == ("held", NO_LOCK, "held")

    def test_so_has_a_call_of_the_body_while_another_thread_runs_the_task_outside_a_worker(self, app):
        @app.task(base=LockedTask, bind=True, shared=False, name="shop.outer", lock_args=["how"])
        def outer(self, how):
            self.lock.check()
            if how == "in a thread":
                with ThreadPoolExecutor(1) as threads:
                    return self.lock.state, threads.submit(self.run, "directly").result()
            return self.lock.state

        assert outer.apply(("in a thread",)).get() == ("held", "none")

    def test_outside_of_runs_it_says_that_there_is_none(self, rebuild):
        assert rebuild.lock.state == "none"
        assert repr(rebuild.lock) == "<NoLock>"

    def test_what_code_does_with_a_lock_it_does_with_none_and_goes_on(self, rebuild):
        lock = rebuild.lock
        assert lock.acquire(blocking=False)
        assert lock.reacquire()
        assert lock.owned()
        assert not lock.locked()
        with lock as entered:
            assert entered is lock
        lock.release()

    def test_a_run_that_an_outage_lets_go_without_knows_its_key(self, config, tmp_path):
        config.locks = f"unix://{tmp_path}/nobody.sock"
        app = make_app(config)

        @app.task(base=LockedTask, bind=True, shared=False, lock_key="x:{key}", lock_on_outage="run")
        def task(self, key):
            self.lock.check()
            return self.lock.state, self.lock.key

        assert task.apply((7,)).get() == ("none", "redislock:{x:7}")
        app.close()


class TestSwitchedOff:
    """`redislock_enabled` counts whenever it is set, as a fixture sets it after the tasks have been imported."""

    @pytest.fixture(autouse=True)
    def _bound(self, rebuild):
        assert rebuild.apply(("products",)).get()["state"] == "held"

    @pytest.fixture
    def off(self, app, locks):
        app.conf.redislock_enabled = False
        locks.calls()
        yield
        assert locks.calls() == {}

    @pytest.mark.usefixtures("off")
    def test_a_run_asks_for_no_key(self, rebuild):
        assert rebuild.apply(("products",)).get() == NO_LOCK

    @pytest.mark.usefixtures("off")
    def test_so_does_lock_for_and_nobody_is_seen(self, rebuild):
        with rebuild.lock_for("products") as lock, rebuild.lock_for("products"):
            assert lock.state == "none"
        assert rebuild.lock_info("products") is None

    @pytest.mark.usefixtures("off")
    def test_nothing_is_a_duplicate(self, tasks):
        assert [tasks.job.delay("k").duplicate for _ in range(2)] == [False, False]

    def test_locked_is_a_no_op_from_then_on(self, app, locks):
        block = locked("stock:7", app=app)

        @locked("stock:{sku}", app=app)
        def count(sku):
            return locks.client.dbsize()

        with block:
            assert (locks.client.dbsize(), count(8)) == (1, 2)
        app.conf.redislock_enabled = False
        with block as lock:
            assert (lock.state, locks.client.dbsize(), count(8)) == ("none", 0, 0)

    @pytest.mark.usefixtures("off")
    @pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
    def test_a_delivered_message_runs_without_and_shows_that_it_has_started(self, app):
        @app.task(base=LockedTask, bind=True, shared=False, name="shop.tracked", track_started=True)
        def tracked(self):
            return self.AsyncResult(self.request.id).state

        request = {"id": "id", "hostname": "w@host"}
        assert trace_task(tracked, "id", (), {}, request, app=app).retval == "STARTED"

    def test_switched_on_again_it_is_locked_again(self, app, rebuild):
        app.conf.redislock_enabled = False
        rebuild.apply(("products",)).get()
        app.conf.redislock_enabled = True
        assert rebuild.apply(("products",)).get()["state"] == "held"

    def test_what_was_off_when_it_was_bound_is_locked_and_checked_once_it_is_on(self, config):
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.redislock_enabled = False

        @app.task(base=LockedTask, bind=True, shared=False)
        def task(self):
            return self.lock.state

        assert task.apply().get() == "none"
        app.conf.redislock_enabled = True
        with pytest.raises(LockConfigError, match="set redislock_url"):
            task.apply().get()
        app.conf.redislock_url = config.locks
        assert task.apply().get() == "held"

    def test_a_run_that_switches_it_off_gives_its_key_back(self, app, locks):
        @app.task(base=LockedTask, shared=False, name="shop.switch")
        def switch():
            app.conf.redislock_enabled = False

        switch.apply().get()
        assert locks.client.keys() == []

    def test_a_value_that_is_neither_is_refused(self, app, rebuild):
        app.conf.redislock_enabled = "no"
        with pytest.raises(LockConfigError, match="redislock_enabled = 'no' is not allowed; allowed: True or False"):
            rebuild.apply(("products",)).get()

    @pytest.mark.parametrize("name", ["redislock_enabled", "CELERY_REDISLOCK_ENABLED"])
    def test_in_a_namespace_both_names_count(self, config, name):
        class Settings:
            CELERY_BROKER_URL = config.broker
            CELERY_REDISLOCK_URL = config.locks
            CELERY_REDISLOCK_ENABLED = True

        app = Celery("shop", set_as_current=False)
        app.config_from_object(Settings, namespace="CELERY")

        @app.task(base=LockedTask, bind=True, shared=False)
        def task(self):
            return self.lock.state

        assert task.apply().get() == "held"
        app.conf[name] = False
        assert task.apply().get() == "none"

    def test_what_the_settings_object_says_now_counts(self, config):
        """Django's `override_settings` changes the object behind the app's configuration."""

        class Settings:
            CELERY_BROKER_URL = config.broker
            CELERY_REDISLOCK_URL = config.locks

        app = Celery("shop", set_as_current=False)
        app.config_from_object(Settings, namespace="CELERY")

        @app.task(base=LockedTask, bind=True, shared=False)
        def task(self):
            return self.lock.state

        assert task.apply().get() == "held"
        Settings.CELERY_REDISLOCK_ENABLED = False
        assert task.apply().get() == "none"


class TestBusy:
    def test_an_eager_run_meets_it(self, tasks, ledger):
        with busy(tasks.once.lock_for("k")):
            with pytest.raises(TaskRevokedError, match="duplicate of a lock outside tasks"):
                tasks.once.apply(("k",)).get()
            tasks.once.apply(("another",)).get()
        tasks.once.apply(("k", "later")).get()
        assert ledger.items() == ["", "later"]

    def test_the_block_alone_does_not_for_its_code_holds_the_key_already(self, tasks, ledger):
        with tasks.once.lock_for("k"):
            tasks.once.apply(("k", "inside")).get()
        assert ledger.items() == ["inside"]

    def test_of_locked_it_holds_the_key_too(self, app, locks):
        with busy(locked("stock:7", app=app)) as lock:
            assert locks.client.get(lock.name)
            with pytest.raises(LockConflict):
                locked("stock:7", block_for=0, app=app).__enter__()
        assert locks.client.keys() == []

    def test_a_key_that_is_busy_already_is_a_conflict(self, app):
        with (
            busy(locked("stock:7", app=app)),
            pytest.raises(LockConflict),
            busy(locked("stock:7", block_for=0, app=app)),
        ):
            pass

    def test_it_is_given_back_after_an_error(self, app, locks):
        with pytest.raises(ZeroDivisionError), busy(locked("stock:7", app=app)):
            raise ZeroDivisionError
        assert locks.client.keys() == []
