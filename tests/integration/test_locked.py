"""`locked`: a lock for any function or block, on the app's connection and settings."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest
from celery import Celery, _state
from redis.exceptions import LockError

from celery_redislock import Lock, LockConfigError, LockConflict, LockedTask, LockKeyError, locked
from celery_redislock.protocol.names import keys_of
from celery_redislock.testing import busy
from tests.lab.renewals import begin_renewal
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT

KEY = "redislock:{stock:7}"


@pytest.fixture(autouse=True)
def current(app):
    """The app of the test is the current one, as in a web process that never has a worker."""
    before = _state._tls.current_app
    app.set_current()
    yield
    _state._tls.current_app = before


@pytest.fixture
def keys(locks):
    return lambda: {key.decode() for key in locks.client.scan_iter()}


class TestBlock:
    def test_it_is_held_inside_and_free_after_it(self, keys):
        with locked("stock:7") as lock:
            assert isinstance(lock, Lock)
            assert lock.state == "held"
            assert keys() == {lock.name} == {KEY}
        assert keys() == set()

    def test_a_block_that_makes_another_app_current_gives_its_key_back(self, keys):
        """As the first import of a module that has one does."""
        kept = locked("stock:7")
        with kept:
            other = Celery("other")
            assert _state.get_current_app() is other
        assert keys() == set()

    def test_a_generator_that_ends_in_another_thread_needs_a_lock_that_any_thread_may_release(self, app, keys, tasks):
        """As a response that FastAPI streams. With `locked`, the key ends with its lease."""

        def stream(lock):
            with lock:
                yield "begins"
                yield "ends"

        def rest_elsewhere(begun):
            with ThreadPoolExecutor(1, initializer=app.set_current) as another:
                return another.submit(list, begun).result()

        begun = stream(tasks.keyed.lock_for(7))
        assert (next(begun), rest_elsewhere(begun)) == ("begins", ["ends"])
        assert keys() == set()
        begun = stream(locked("stock:7", lease=4.6))
        assert next(begun) == "begins"
        with pytest.raises(LockError, match="Cannot release a lock that's not owned"):
            rest_elsewhere(begun)
        del begun
        wait_until(lambda: keys() == set(), "its lease has ended")

    def test_values_make_the_key_of_a_template(self):
        with locked("stock:{sku}", values={"sku": 7}) as lock:
            assert lock.name == KEY

    def test_values_are_escaped_as_a_tasks_are(self, tasks):
        with locked("stock:{sku}", values={"sku": "a:b {c}"}) as lock:
            assert lock.name == tasks.keyed.lock_for("a:b {c}").name

    def test_it_shares_its_key_with_tasks(self, tasks):
        with locked("stock:{sku}", values={"sku": 7}):
            assert tasks.keyed.lock_info(7).task_id is None
            assert tasks.keyed_too.lock_info(1, sku=7)
        with busy(tasks.keyed.lock_for(7)), pytest.raises(LockConflict):
            locked("stock:7", block_for=0.05).__enter__()

    def test_wait_0_looks_once(self, locks, tasks):
        guard = locked("stock:7", block_for=0)
        with guard:
            pass
        with busy(tasks.keyed.lock_for(7)):
            locks.calls()
            with pytest.raises(LockConflict):
                guard.__enter__()
            assert locks.calls()["evalsha"] == 1

    def test_it_is_renewed(self, locks):
        with locked("stock:7", lease=30) as lock:
            locks.client.pexpire(KEY, 15_000)
            begin_renewal(lock)
            wait_until(lambda: locks.client.pttl(KEY) > 15_000, "it is renewed")
            assert lock.state == "held"

    def test_its_settings_are_the_apps(self, config, locks):
        from tests.lab.app import make_app

        config.settings.update(redislock_prefix="shop", redislock_lease=50, redislock_fence=True)
        with locked("stock:7", app=make_app(config)) as lock:
            assert lock.name == "shop:{stock:7}"
            assert 40 < lock.remaining <= 50
            assert lock.fence

    def test_it_hands_out_a_fence(self):
        with locked("stock:7", fence=True) as one:
            first = one.fence
        with locked("stock:7", fence=True) as two:
            assert two.fence > first

    def test_a_block_inside_a_block_holds_it_already(self, keys):
        with locked("stock:7") as outer:
            with locked("stock:{sku}", values={"sku": 7}) as inner:
                assert inner.token == outer.token
            assert keys() == {KEY}
        assert keys() == set()

    def test_inside_a_task_with_that_key_it_is_held_already(self, app, keys):
        @app.task(bind=True, base=LockedTask, lock_key="stock:{sku}", shared=False)
        def task(self, sku):
            with locked("stock:7", block_for=0) as lock:
                return lock.token == self.lock.token

        assert task.apply((7,)).get() is True
        assert keys() == set()

    def test_one_object_serves_many_threads(self, app, keys):
        guard, inside = locked("stock:7", app=app), threading.Semaphore(1)

        def work():
            for _ in range(10):
                with guard, guard:
                    assert inside.acquire(blocking=False)
                    inside.release()

        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(work) for _ in range(6)]:
                done.result()
        wait_until(lambda: keys() == set(), "the last wake-up, which may be for nobody, expires")

    def test_an_error_in_the_block_releases(self, keys):
        with pytest.raises(ZeroDivisionError), locked("stock:7"):
            1 / 0  # noqa: B018
        assert keys() == set()

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: locked().__enter__(), 'a block needs a template, as in locked("stock:7")'),
            (lambda: locked("stock:{sku}").__enter__(), "values lacks sku"),
            (lambda: locked("stock:{a}:{b}", values={"b": 1}).__enter__(), "values lacks a"),
            (lambda: locked("stock:{sku.x}"), "only plain parameter names"),
            (lambda: locked(""), "it is empty"),
            (lambda: locked("x", block_for=-1).__enter__(), "): block_for = -1 is not allowed"),
            (lambda: locked("x", block_for=True).__enter__(), "): block_for = True is not allowed"),
            (lambda: locked("x", lease=0).__enter__(), "): lease = 0 is not allowed"),
            (lambda: locked("x", lease=1).__enter__(), "): lease = 1 is too short"),
        ],
    )
    def test_a_mistake_is_said(self, make, said):
        with pytest.raises(LockConfigError) as caught:
            make()
        assert said in str(caught.value)

    def test_a_value_that_no_template_takes_is_a_key_error_that_does_not_show_it(self):
        with pytest.raises(LockKeyError) as caught:
            locked("stock:{sku}", values={"sku": ["secret"]}).__enter__()
        assert "secret" not in str(caught.value)
        assert "convert it" in str(caught.value)  # a block has no callable lock_key

    def test_without_a_server_it_says_what_to_set(self):
        with pytest.raises(LockConfigError, match="set redislock_url"):
            locked("x", app=Celery("bare", broker="amqp://", set_as_current=False)).__enter__()

    def test_in_a_thread_without_a_current_app_it_uses_the_only_one(self, config, monkeypatch):
        """As in the threads of a web server, where Celery's own current_app is one without settings."""

        monkeypatch.setattr(_state, "_apps", WeakSet())  # other tests have apps too

        def enter():
            with locked("x") as lock:
                return lock.name

        one = Celery("one", broker=config.broker)
        one.conf.update(redislock_url=config.locks, redislock_prefix="one")
        with ThreadPoolExecutor() as pool:
            assert pool.submit(enter).result() == "one:{x}"
            two = Celery("two")
            with pytest.raises(LockConfigError, match="this process has several Celery apps"):
                pool.submit(enter).result()
        one.close()
        two.close()


class TestDecorator:
    def test_the_key_is_of_the_function_and_all_its_arguments(self, keys):
        seen = []

        @locked
        def sync(account, full=False):
            seen.append(keys())
            return account

        assert sync(1) == 1
        sync(account=1, full=False)
        sync(2)
        sync("1")
        assert seen[0] == seen[1]
        assert len({frozenset(k) for k in seen}) == 3
        (key,) = seen[0]
        assert key.startswith(f"redislock:{{{__name__}.TestDecorator.test_the_key")
        assert keys() == set()

    def test_with_and_without_brackets_it_is_the_same(self, keys):
        @locked()
        def sync(account):
            return keys()

        assert len(sync(1)) == 1

    def test_a_template_names_parameters(self, keys):
        @locked("stock:{sku}")
        def reserve(quantity, sku=7):
            return keys()

        assert reserve(1) == reserve(2, sku=7) == {KEY}

    def test_it_waits_for_its_turn(self, app, tasks, locks):
        @locked("stock:{sku}", block_for=20, app=app)
        def reserve(sku):
            return "done"

        with ThreadPoolExecutor() as pool:
            with busy(tasks.keyed.lock_for(7)):
                waiting = pool.submit(reserve, 7)
                wait_until(lambda: locks.client.exists(keys_of(KEY).line), "it waits")
                assert not waiting.done()
            assert waiting.result(5) == "done"

    def test_it_raises_what_names_the_holder_when_it_cannot_have_it(self, tasks):
        ran = []

        @locked("stock:{sku}", block_for=0.05)
        def reserve(sku):
            ran.append(sku)

        with busy(tasks.keyed.lock_for(7)), pytest.raises(LockConflict, match="a lock outside tasks"):
            reserve(7)
        assert ran == []

    def test_a_function_that_is_cached_in_c_has_the_signature_inside(self, keys):
        @locked("stock:{sku}")
        @functools.cache
        def reserve(sku):
            return keys()

        assert reserve(7) == {KEY}

    def test_a_recursive_function_holds_its_key_already(self):
        @locked("count")
        def count(number):
            return number if not number else count(number - 1)

        assert count(3) == 0

    def test_a_method_needs_a_template(self, keys):
        class Shop:
            @locked("stock:{sku}")
            def reserve(self, sku):
                return keys()

            @locked
            def bare(self): ...

        assert Shop().reserve(7) == {KEY}
        with pytest.raises(LockKeyError, match=r"parameter 'self' .* give locked\(\) a template"):
            Shop().bare()

    def test_it_looks_like_the_function(self):
        @locked("stock:{sku}")
        def reserve(sku: int) -> str:
            """Reserve."""

        assert (reserve.__name__, reserve.__doc__) == ("reserve", "Reserve.")
        assert list(inspect.signature(reserve).parameters) == ["sku"]

    def test_a_call_that_does_not_fit_is_a_type_error(self):
        @locked
        def sync(account): ...

        with pytest.raises(TypeError, match="missing a required argument: 'account'"):
            sync()

    @pytest.mark.parametrize("how", [locked, locked(), locked("x")], ids=["bare", "empty", "template"])
    def test_what_runs_after_its_call_has_returned_is_refused(self, how):
        async def async_generator():
            yield

        def generator():
            yield

        class Callable:
            async def __call__(self): ...

        for function in (async_generator, generator, functools.partial(generator), Callable()):
            with pytest.raises(LockConfigError, match="async or a generator"):
                how(function)

    @pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
    def test_a_plain_wrapper_of_what_runs_later_is_refused_when_it_is_called(self, keys):
        def plain(function):
            return functools.wraps(function)(lambda *args: function(*args))

        @locked("stock:{sku}")
        @plain
        async def reserve(sku): ...

        @locked("stock:{sku}")
        @plain
        def generate(sku):
            yield

        @locked("stock:{sku}")
        @plain
        async def generate_async(sku):
            yield

        returned = r"locked\('stock:{sku}'\): \S+ returned a (coroutine|generator|async_generator), which runs after"
        for function in (reserve, generate, generate_async):
            with pytest.raises(LockConfigError, match=returned):
                function(7)
            assert keys() == set()

    @pytest.mark.parametrize(
        ("function", "said"),
        [
            (int, "neither a function"),
            (classmethod(lambda cls: None), "below @classmethod"),
            (7, r"int is neither a function nor a template such as \"stock:7\""),
            (functools.partial(print), "has no name to make a key from: pass a template"),
        ],
    )
    def test_what_is_no_function_is_refused(self, function, said):
        with pytest.raises(LockConfigError, match=said):
            locked(function)

    def test_a_template_that_does_not_fit_the_function_is_refused_at_once(self):
        with pytest.raises(LockConfigError, match="names 'nope', which is not one of its parameters"):
            locked("stock:{nope}")(lambda sku: None)
        with pytest.raises(LockConfigError, match="values are only for a block"):
            locked("stock:{sku}", values={"sku": 7})(lambda sku: None)

    def test_it_asks_for_no_app_before_it_is_called(self):
        """Modules are imported before the app is configured."""

        @locked("x", app=Celery("bare", broker="amqp://", set_as_current=False))
        def function(): ...

        with pytest.raises(LockConfigError, match="set redislock_url"):
            function()


#: A script that is run, is imported by other processes, and has children that import it once more.
SCRIPT = """
import os, subprocess, sys
from multiprocessing import get_context
from celery import Celery
from celery_redislock import LockConflict, locked

app = Celery("shop")
app.conf.redislock_url = os.environ["LOCKS"]

@locked(block_for=0)
def nightly():
    if "other" not in sys.argv[0] and __name__ == "__main__":
        subprocess.run([sys.executable, "-c", "import jobs; jobs.say()"], check=True)
        child = get_context("spawn").Process(target=say)
        child.start()
        child.join()
        subprocess.run([sys.executable, "other.py"], check=True)

def say():
    try:
        nightly()
    except LockConflict:
        print("held", flush=True)
    else:
        print("free", flush=True)

if __name__ == "__main__":
    say()
"""


@pytest.mark.parametrize("started", [["jobs.py"], ["-m", "jobs"]], ids=["by its path", "as a module"])
def test_a_function_of_a_script_has_one_key_in_all_processes_and_another_than_one_of_another_script(
    started, tmp_path, config
):
    for script in ("jobs.py", "other.py"):
        (tmp_path / script).write_text(SCRIPT)
    env = {**os.environ, "LOCKS": config.locks, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *started], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    # One that imports it and its child process find the key held, and the other script has a key of its own.
    assert done.stdout.split() == ["held", "held", "free", "free"], done.stderr
