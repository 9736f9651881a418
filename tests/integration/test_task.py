"""LockedTask on a real app and a real lock server, without a worker: binding, settings and eager mode."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from types import SimpleNamespace

import pytest
from celery import Celery, Task, _state, shared_task
from celery.exceptions import TaskRevokedError
from celery.signals import task_postrun

from celery_redislock import Lock, LockConfigError, LockConflict, LockedTask, LockUnavailable
from celery_redislock.protocol.names import keys_of
from celery_redislock.signals import lock_acquired, lock_conflict, lock_released
from celery_redislock.testing import busy
from tests.lab.servers import wait_until


@pytest.fixture
def make_app(config):
    """A bare app on the test's servers."""
    made = []

    def make(**options):
        app = Celery("shop", broker=config.broker, backend=config.backend, set_as_current=False, **options)
        app.conf.update(redislock_url=config.locks)
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


class TestEager:
    def test_a_failure_that_is_raised_leaves_nothing_held_whoever_has_heard_of_ends_before(self, make_app, locks):
        """Celery 5.6 makes a new list of receivers after one is gone, and a tracer keeps the list that it has found."""

        class Listener:
            def hear(self, **_):
                """Hear of the end of a task."""

        @make_app().task(base=LockedTask, shared=False)
        def fails():
            raise ValueError("no")

        listener = Listener()
        task_postrun.connect(listener.hear)
        task_postrun.disconnect(listener.hear)
        del listener
        gc.collect()
        with pytest.raises(ValueError, match="no"):
            fails.apply(throw=True)
        wait_until(lambda: locks.client.keys("*}") == [], "nothing is held")

    def test_a_run_that_passes_our_apply_by_leaves_nothing_held(self, make_app, locks):
        @make_app().task(base=LockedTask, shared=False)
        def fails():
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            Task.apply(fails, throw=True)
        wait_until(lambda: locks.client.keys("*}") == [], "nothing is held")

    @pytest.mark.parametrize("where", ["in the body", "in a thread"])
    def test_what_shares_a_blocks_lock_knows_when_the_block_has_released_it(self, make_app, locks, where):
        @make_app().task(base=LockedTask, bind=True, shared=False, lock_key="k", lock_on_conflict="raise")
        def task(self, depth):
            if not depth:
                return "ran"
            if where == "in the body":
                lock.release()
            else:
                with ThreadPoolExecutor() as pool:
                    pool.submit(lock.release).result()
            with Lock(locks.client, lock.name, timeout=30):
                assert self.lock.state == "none"
                with pytest.raises(LockConflict):
                    self.apply((0,), throw=True)
            return "ends"

        lock = task.lock_for(1)
        lock.acquire()
        assert task.apply((1,), throw=True).get() == "ends"

    def test_the_end_of_what_is_no_task_is_none_of_its_business(self, make_app):
        @make_app().task(base=LockedTask, shared=False)
        def task(): ...

        task.apply()
        assert [answer for _, answer in task_postrun.send(sender="a plugin's")] == [None]

    def test_a_process_that_its_body_has_forked_leaves_the_lock_to_its_parent(self, make_app, locks):
        me, held = os.getpid(), []

        @make_app().task(base=LockedTask, shared=False)
        def task():
            if child := os.fork():
                os.waitpid(child, 0)
                held.append(task.lock_info().state)

        try:
            task.apply()
        finally:
            if os.getpid() != me:
                os._exit(0)
        assert held == ["held"]
        assert locks.client.keys() == []

    def test_apply_runs_under_the_lock_and_frees_it(self, tasks, locks):
        assert tasks.bound.apply((1, 7)).get()["state"] == "held"
        assert locks.client.keys() == []

    def test_skip_raises_task_revoked_error(self, tasks, ledger):
        with (
            busy(tasks.once.lock_for("k")),
            pytest.raises(TaskRevokedError, match="duplicate of a lock outside tasks"),
        ):
            tasks.once.apply(("k",)).get()
        assert ledger.runs() == []

    def test_it_gives_up_after_lock_block_for_and_publishes_nothing(self, make_app, config, broker_server):
        app = make_app()

        @app.task(base=LockedTask, shared=False, lock_args=["key"], lock_block_for=0.2)
        def task(key, item): ...

        with busy(task.lock_for("k", 1)), pytest.raises(LockConflict, match="a lock outside tasks"):
            task.apply(("k", 2)).get()
        assert broker_server.client.llen("celery") == 0

    def test_raise_does_not_block(self, tasks, ledger):
        with busy(tasks.on_raise.lock_for("k")), pytest.raises(LockConflict, match="a lock outside tasks"):
            tasks.on_raise.apply(("k",)).get()
        assert ledger.runs() == []

    @pytest.mark.parametrize("policy", ["wait", "join"])
    def test_wait_and_join_block_for_the_key(self, tasks, locks, ledger, policy):
        task = getattr(tasks, f"on_{policy}")
        with ThreadPoolExecutor() as elsewhere:
            lock = task.lock_for("k")
            assert Context().run(lock.acquire)
            run = elsewhere.submit(lambda: task.apply(("k", "item")).get())
            wait_until(lambda: locks.client.exists(keys_of(lock.name).line), "it waits")
            assert ledger.runs() == []
            lock.release()
            assert run.result() == "item"

    @pytest.mark.parametrize(
        ("policy", "error", "says"),
        [("skip", TaskRevokedError, "cooling down after id"), ("wait", LockConflict, "task id")],
    )
    def test_the_callers_own_id_again_meets_its_cooldown(self, config, policy, error, says):
        from tests.lab.app import make_app

        app = make_app(config)

        @app.task(base=LockedTask, shared=False, lock_cooldown=60, lock_on_conflict=policy, lock_block_for=0.2)
        def task(): ...

        assert task.apply(task_id="id").state == "SUCCESS"
        with pytest.raises(error, match=says):
            task.apply(task_id="id").get()
        app.close()

    def test_always_eager_takes_the_lock_too(self, config, ledger):
        from tests.lab.app import make_app

        config.settings["task_always_eager"] = True
        app = make_app(config)
        once = app.tasks["lab.once"]
        with busy(once.lock_for("k")):
            assert once.delay("k").state == "FAILURE"
        assert once.delay("k", "item").get() == "item"

    def test_self_retry_runs_again_under_a_new_lock(self, tasks, ledger):
        assert tasks.ends.apply(("k", "retry")).get() == "retry"
        assert ledger.items() == ["retry", "retry"]


class TestBinding:
    def test_options_come_from_the_decorator_a_subclass_annotations_and_the_app(self, make_app):
        app = make_app()
        app.conf.redislock_lease = 11
        app.conf.task_annotations = {"annotated": {"lock_lease": 44}}

        class Base(LockedTask):
            lock_lease = 22

        @app.task(base=LockedTask, shared=False)
        def app_wide(): ...

        @app.task(base=Base, shared=False)
        def subclass(): ...

        @app.task(base=Base, shared=False, lock_lease=33)
        def decorator(): ...

        @app.task(name="annotated", base=Base, shared=False)
        def annotated(): ...

        tasks = (app_wide, subclass, decorator, annotated)
        assert [task.lock_for().timeout for task in tasks] == [11, 22, 33, 44]

    def test_what_only_another_plugins_task_class_knows_is_no_option_of_ours(self, make_app):
        """Celery-singleton's class has `lock_expiry` and `lock_and_run`; a base of the user's may have options."""

        class Other(Task):
            lock_expiry = None
            lock_lease = 22

            def lock_and_run(self): ...

        class Both(Other, LockedTask): ...

        @make_app().task(base=Both, shared=False)
        def task(): ...

        assert task.lock_for().timeout == 22

    @pytest.mark.parametrize("namespace", ["CELERY", "CELERY_", "celery", None])
    def test_settings_follow_celerys_namespaces(self, config, namespace):
        prefix = f"{namespace.rstrip('_')}_" if namespace else ""
        settings = {"broker_url": config.broker, "redislock_lease": 12.0, "redislock_url": config.locks}
        names = {f"{prefix}{name}".upper() if prefix.isupper() else prefix + name for name in settings}
        assert len(names) == 3
        values = {
            (f"{prefix}{name}".upper() if prefix.isupper() else prefix + name): value
            for name, value in settings.items()
        }
        app = Celery("shop", set_as_current=False)
        app.config_from_object(SimpleNamespace(**values), namespace=namespace)

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        assert task.lock_for().timeout == 12.0
        with task.lock_for() as lock:
            assert lock.state == "held"

    def test_what_else_the_settings_object_has_is_not_read(self, config):
        """Django's raises ImproperlyConfigured for a SECRET_KEY that is not set, and warns of what is deprecated."""

        class Settings:
            CELERY_BROKER_URL = config.broker
            CELERY_REDISLOCK_LEASE = 12

            @property
            def SECRET_KEY(self):
                raise ValueError("The SECRET_KEY setting must not be empty.")

        app = Celery("shop", set_as_current=False)
        app.config_from_object(Settings(), namespace="CELERY")

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        assert task.lock_for().timeout == 12

    @pytest.mark.parametrize(
        ("namespace", "given", "read"),
        [
            (None, "REDISLOCK_URL", "redislock_url"),
            (None, "Redislock_Lease", "redislock_lease"),
            (None, "CELERY_REDISLOCK_URL", "redislock_url"),
            ("CELERY", "REDISLOCK_ENABLED", "CELERY_REDISLOCK_ENABLED"),
            ("CELERY", "CELERY_redislock_lease", "CELERY_REDISLOCK_LEASE"),
            ("celery", "REDISLOCK_LEASE", "celery_redislock_lease"),
        ],
    )
    def test_a_setting_that_celery_does_not_read_is_refused_with_the_spelling_that_it_reads(
        self, config, namespace, given, read
    ):
        app = Celery("shop", set_as_current=False)
        app.config_from_object(SimpleNamespace(**{given: config.locks}), namespace=namespace)

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        with pytest.raises(LockConfigError, match=f"^{given} is not read: write {read}$"):
            task.name  # noqa: B018

    def test_what_only_resembles_a_setting_or_is_there_in_both_spellings_is_not_refused(self, config):
        unrelated = {"REDISLOCK_WEB_TOKEN": "x" * 16, "MY_REDISLOCK_URL": "x", "REDIS_LOCK_URL": "x"}
        both = {"REDISLOCK_URL": config.locks, "CELERY_REDISLOCK_URL": config.locks}
        app = Celery("shop", set_as_current=False)
        app.config_from_object(SimpleNamespace(**unrelated, **both), namespace="CELERY")

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        with task.lock_for() as lock:
            assert lock.state == "held"

    def test_an_unknown_setting_in_a_namespace_is_refused(self, config):
        app = Celery("shop", set_as_current=False)
        app.config_from_object(
            SimpleNamespace(CELERY_REDISLOCK_LEAS=12, CELERY_BROKER_URL="redis://"), namespace="CELERY"
        )

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        with pytest.raises(LockConfigError, match="redislock_leas is not known; did you mean redislock_lease"):
            task.name  # noqa: B018

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"lock_leas": 5}, "shop.task: lock_leas is not known; did you mean lock_lease"),
            ({"lock_args": ["nope"]}, "names 'nope', which is not one of its parameters: key, item"),
            ({"lock_args": "key"}, "lock_args = 'key' is not allowed"),
            ({"lock_args": ["key"], "lock_key": "{key}"}, "lock_key and lock_args are both set"),
            ({"lock_key": "{}"}, "only plain parameter names"),
            (
                {"lock_scope": "queue", "lock_on_conflict": "skip"},
                "the queued message must run; allowed: 'wait'",
            ),
            ({"lock_on_conflict": "queue"}, "allowed: 'skip', 'wait', 'raise', 'join' or 'replace'"),
            ({"lock_fence": "yes"}, "allowed: True or False"),
            ({"Request": dict}, "shop.task: Request = <class 'dict'> is not allowed; allowed: a subclass of <class"),
        ],
    )
    def test_a_bad_option_fails_when_the_task_is_bound_and_locks_nothing(self, make_app, locks, options, said):
        app = make_app()

        @app.task(name="shop.task", base=LockedTask, shared=False, **options)
        def task(key, item): ...

        for _ in range(2):
            with pytest.raises(LockConfigError) as caught:
                task.delay(1, 2)
            assert said in str(caught.value)
        assert locks.client.keys() == []

    def test_a_body_that_runs_after_its_call_has_returned_is_refused(self, make_app):
        """Its lock would be held while its coroutine is made, and no longer."""

        async def coroutine(key): ...

        async def async_generator(key):
            yield key

        def generator(key):
            yield key

        for body in (coroutine, async_generator, generator):
            task = make_app().task(base=LockedTask, shared=False, name="shop.task")(body)
            with pytest.raises(LockConfigError, match=r"shop\.task: its body is async or a generator"):
                task.delay(1)

    def test_an_async_body_of_a_class_is_refused(self, make_app):
        class Coroutine(LockedTask):
            name = "shop.coroutine"

            async def run(self, key): ...

        with pytest.raises(LockConfigError, match=r"shop\.coroutine: its body is async or a generator"):
            make_app().register_task(Coroutine)

    def test_a_class_that_runs_its_body_by_a_strategy_of_its_own_is_refused(self, make_app, locks):
        """As `Batches` of celery-batches does: its worker calls the body for many messages, and none of their hooks."""

        class Batches(Task):
            abstract = True

            def Strategy(self, task, app, consumer): ...

        class LockedFirst(LockedTask, Batches):
            abstract = True

        class LockedLast(Batches, LockedTask):
            abstract = True

        for base in (LockedFirst, LockedLast):

            @make_app().task(name="shop.task", base=base, shared=False, lock_scope="job")
            def task(calls): ...

            with pytest.raises(LockConfigError, match=r"shop\.task: its Strategy is a method, like celery-batches'"):
                task.delay(1)
        assert locks.client.keys() == []

    def test_a_strategy_that_is_named_as_celery_names_its_own_is_allowed(self, make_app):
        @make_app().task(name="shop.task", base=LockedTask, shared=False, Strategy="celery.worker.strategy:default")
        def task(key):
            return key

        assert task.apply((1,)).get() == 1

    def test_a_method_of_a_base_is_no_option_though_its_name_begins_so(self, make_app, locks):
        class Accounts:
            def lock_account(self): ...

            @classmethod
            def lock_all(cls): ...

            @staticmethod
            def lock_none(): ...

            @property
            def lock_count(self): ...

        class Base(Accounts, LockedTask):
            abstract = True

        app = make_app()

        @app.task(base=Base, shared=False, lock_key="{key}")
        def task(key): ...

        assert task.lock_for(7).name == "redislock:{7}"

    @pytest.mark.parametrize("value", [["key"], 5, None, "{key}"], ids=repr)
    def test_a_misspelt_option_of_a_base_is_refused_where_it_has_a_value(self, make_app, value):
        class Base(LockedTask):
            abstract = True
            lock_keys = value

        @make_app().task(base=Base, shared=False)
        def task(key): ...

        with pytest.raises(LockConfigError, match="lock_keys is not known; did you mean lock_key"):
            task.delay(1)

    def test_a_misspelt_option_of_the_decorator_is_refused_though_it_is_a_function(self, make_app):
        @make_app().task(base=LockedTask, shared=False, lock_keys=lambda arguments: arguments["key"])
        def task(key): ...

        with pytest.raises(LockConfigError, match="lock_keys is not known; did you mean lock_key"):
            task.delay(1)

    def test_a_request_class_that_is_named_is_looked_at_when_the_worker_needs_it(self, make_app):
        app = make_app()

        @app.task(base=LockedTask, shared=False, Request="builtins:dict")
        def task(): ...

        task.delay()
        with pytest.raises(LockConfigError, match="Request = <class 'dict'> is not allowed"):
            task.start_strategy(app, None)

    @pytest.mark.parametrize(
        ("backend", "ignore_result", "why"),
        [
            ("rpc://", False, "other processes cannot read result_backend = 'rpc'"),
            ("cache+memory://", False, "other processes cannot read result_backend = 'cache\\+memory'"),
            (None, False, "other processes cannot read result_backend = 'disabled'"),
            ("redis://", True, "its results are ignored"),
        ],
    )
    def test_join_is_refused_where_nobody_could_read_the_holders_result(self, config, backend, ignore_result, why):
        app = Celery("shop", broker="memory://", backend=backend, set_as_current=False)
        app.conf.redislock_url = config.locks

        @app.task(base=LockedTask, shared=False, lock_on_conflict="join", ignore_result=ignore_result)
        def task(): ...

        with pytest.raises(LockConfigError, match=why):
            task.name  # noqa: B018

    def test_a_bad_option_of_an_annotation_fails_too(self, make_app):
        app = make_app()
        app.conf.task_annotations = {"*": {"lock_leas": 44}}

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        with pytest.raises(LockConfigError, match="lock_leas"):
            task.delay()

    def test_a_class_based_task_with_autoretry_runs_under_its_lock(self, make_app):
        app = make_app()
        seen = []

        class Flaky(LockedTask):
            autoretry_for = (ZeroDivisionError,)
            retry_backoff = False
            default_retry_delay = 0
            lock_args = ("key",)

            def run(self, key):
                seen.append(self.lock.state)
                if len(seen) < 3:
                    raise ZeroDivisionError
                return key

        task = app.register_task(Flaky())
        assert task.apply(("k",)).get() == "k"
        assert seen == ["held"] * 3

    @pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
    @pytest.mark.parametrize("autoretry_for", [(), (ValueError,)], ids=["", "autoretry"])
    def test_a_task_that_is_named_in_its_init_has_a_guarded_body_and_a_key_of_its_own_name(
        self, make_app, locks, deliver, autoretry_for
    ):
        class Named(LockedTask):
            def __init__(self, name):
                self.name, self.autoretry_for = name, autoretry_for

            def run(self, key):
                return self.lock.key, self.run.__name__

        class TakesNoLock(Named):
            def before_start(self, *_): ...

        app = make_app()
        for task in (Named("shop.named"), TakesNoLock("shop.takes_no_lock")):
            app.register_task(task)
        assert deliver(app, "shop.named", 7) == ("SUCCESS", (app.tasks["shop.named"].lock_for(7).name, "run"))
        assert app.tasks["shop.named"].lock_for(7).name.startswith("redislock:{shop.named:")
        state, info = deliver(app, "shop.takes_no_lock", 7)
        assert (state, type(info.exception)) == ("FAILURE", LockConfigError)
        assert "its before_start was overridden" in str(info.exception)

    def test_a_second_task_of_a_class_is_refused_and_the_first_keeps_its_lock(self, make_app):
        class Sync(LockedTask):
            def __init__(self, name):
                self.name = name

            def run(self, key):
                return self.lock.key

        app = make_app()
        users = app.register_task(Sync("shop.users"))
        with pytest.raises(LockConfigError, match=r"^shop\.orders: shop\.users is a task of the same class"):
            app.register_task(Sync("shop.orders"))
        app.tasks["shop.alias"] = users
        app.finalize()
        users.bind(app)
        assert "shop.orders" not in app.tasks
        assert users.apply((7,)).get() == users.lock_for(7).name

    def test_an_option_that_is_set_on_the_task_itself_is_refused(self, make_app):
        class OptionInInit(LockedTask):
            name = "shop.task"

            def __init__(self):
                self.lock_on_conflict, self.lock_client = "wait", "an attribute of its own"

            def run(self, key): ...

        app = make_app()
        with pytest.raises(LockConfigError, match=r"^shop\.task: set lock_on_conflict on the task's class, not on"):
            app.register_task(OptionInInit())
        assert "shop.task" not in app.tasks

    @pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
    @pytest.mark.parametrize("where", ["decorator", "abstract base", "task_cls"])
    def test_a_copy_of_a_task_that_has_ended_never_stores_started_wherever_track_started_is_set(
        self, make_app, deliver, where
    ):
        class Base(LockedTask):
            abstract = True
            track_started = True

        def fails():
            states.append(app.AsyncResult("id").state)
            raise ValueError

        states = []
        app = make_app(task_cls=Base) if where == "task_cls" else make_app()
        app.conf.redislock_on_conflict = "skip"
        options = {"decorator": {"base": LockedTask, "track_started": True}, "abstract base": {"base": Base}}
        app.task(name="shop.task", shared=False, **options.get(where, {}))(fails)
        assert [deliver(app, "shop.task", redelivered=True)[0] for _ in range(2)] == ["FAILURE", "IGNORED"]
        assert (states, app.AsyncResult("id").state) == (["STARTED"], "FAILURE")

    @pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # of redis-py, to Celery
    def test_a_subclass_of_a_bound_task_has_its_own_word_on_track_started(self, make_app, deliver):
        app = make_app()
        app.conf.task_track_started = True

        def body():
            return app.AsyncResult("id").state

        def bound(name, base, **options):
            app.task(name=name, base=base, shared=False, **options)(body)
            task = app.tasks[name]
            type(task).bind(app)  # once more: nothing changes
            return task

        base = bound("base", LockedTask)
        tasks = [base, bound("inherits", type(base)), bound("refuses", type(base), track_started=False)]
        assert [task.track_started for task in tasks] == [False] * 3  # else Celery would store it too
        seen = []
        for task in tasks:
            seen.append(deliver(app, task.name)[1])
            app.AsyncResult("id").forget()
        assert seen == ["STARTED", "STARTED", "PENDING"]

    def test_a_shared_task_has_its_own_lock_settings_in_every_app(self, make_app, monkeypatch):
        # Else the task would belong to every app that a later test of this process makes.
        monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
        apps = [make_app(), make_app()]
        apps[0].conf.redislock_prefix = "one"
        apps[1].conf.redislock_prefix = "two"

        @shared_task(name="shop.shared", base=LockedTask)
        def shared(): ...

        names = [app.tasks["shop.shared"].lock_for().name.split(":")[0] for app in apps]
        assert names == ["one", "two"]

    def test_a_signature_still_shows_the_bodys_parameters(self, make_app):
        import inspect

        app = make_app()

        @app.task(base=LockedTask, shared=False)
        def task(key, *, item=1): ...

        assert list(inspect.signature(task.run).parameters) == ["key", "item"]
        assert task.__wrapped__ is not None

    def test_celerys_own_tasks_stay_unlocked_when_locked_task_is_the_apps_base(self, make_app, locks):
        app = make_app(task_cls=LockedTask)

        @app.task(shared=False)
        def task(): ...

        locks.calls()
        own = [t for name, t in app.tasks.items() if name.startswith("celery.")]
        assert len(own) > 5
        for celerys in own:
            with pytest.raises(LockConfigError, match="has no lock"):
                celerys.lock_for()
        app.tasks["celery.accumulate"].apply((1, 2), {"index": 0}).get()
        assert locks.calls() == {}
        task.apply().get()
        assert locks.calls()

    def test_no_redis_anywhere_is_said_at_once(self):
        app = Celery("shop", broker="amqp://", set_as_current=False)

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        with pytest.raises(LockConfigError, match='set redislock_url, for instance "redis://localhost:6379/0"'):
            task.delay()

    def test_the_brokers_redis_is_the_defaultlock_server(self, config, broker_server):
        app = Celery("shop", broker=config.broker, set_as_current=False)

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        with task.lock_for() as lock:
            assert broker_server.client.get(lock.name)


class TestOutage:
    @pytest.fixture
    def task(self, make_app, tmp_path):
        def make(policy):
            app = make_app()
            app.conf.redislock_url = f"unix://{tmp_path}/nobody.sock"

            @app.task(bind=True, base=LockedTask, shared=False, lock_on_outage=policy)
            def task(self):
                return self.lock.state

            return task

        return make

    def test_run_runs_without_the_lock(self, task):
        assert task("run").apply().get() == "none"

    @pytest.mark.parametrize("policy", ["raise", "retry"])
    def test_an_outage_in_eager_mode_is_lock_unavailable(self, task, policy):
        with pytest.raises(LockUnavailable, match="the lock server is unavailable for lock"):
            task(policy).apply().get()

    @pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
    def test_an_eager_run_names_the_way_to_test_without_redis_and_a_workers_run_does_not(self, task, deliver):
        task = task("raise")
        eager = task.apply()
        task.app.conf.task_always_eager = True
        by_delay = task.delay()
        for error in (eager.result, by_delay.result):
            assert isinstance(error, LockUnavailable)
            assert str(error).count("redislock_enabled = False") == 1
        _, info = deliver(task.app, task.name)
        assert isinstance(info.exception, LockUnavailable)
        assert "redislock_enabled" not in str(info.exception)

    @pytest.mark.parametrize("eager", [True, False])
    def test_so_does_the_error_where_no_setting_names_a_server_and_all_is_eager(self, make_app, eager):
        app = make_app()
        app.conf.update(redislock_url=None, broker_url="memory://", result_backend=None, task_always_eager=eager)

        @app.task(base=LockedTask, shared=False)
        def task(): ...

        with pytest.raises(LockConfigError, match="so there is no server for the locks") as caught:
            task.delay()
        assert ("redislock_enabled = False" in str(caught.value)) is eager


def test_signals_tell_of_every_lock(tasks):
    told = []
    receivers = [
        (signal, lambda name=name, **info: told.append((name, info["sender"].name if info["sender"] else None)))
        for name, signal in [("acquired", lock_acquired), ("released", lock_released), ("conflict", lock_conflict)]
    ]
    for signal, receiver in receivers:
        signal.connect(receiver, weak=False)
    try:
        tasks.once.apply(("k",)).get()
        with busy(tasks.once.lock_for("k")):
            tasks.once.apply(("k",))
    finally:
        for signal, receiver in receivers:
            signal.disconnect(receiver)
    assert told == [("acquired", "lab.once"), ("released", "lab.once"), ("conflict", "lab.once")]
