"""What Celery shows of an app's settings holds no password of the lock server."""

from __future__ import annotations

import json
import os

import pytest
from celery import Celery
from celery.app import utils

from celery_redislock.celery_port import hide_setting
from tests.lab import nursery
from tests.lab.app import make_app
from tests.lab.kinds import needs_one_server
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT

SECRET = "hunter2"  # noqa: S105 - the test server's


@pytest.fixture
def config(config, private_locks):
    """The lock server wants a password; the app has it twice."""
    private_locks.client.config_set("requirepass", SECRET)
    config.locks = config.locks.replace("unix://", f"unix://:{SECRET}@")
    options = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5, "password": SECRET}
    config.settings["redislock_client_options"] = options
    return config


def test_celery_report_shows_none(config):
    env = {**os.environ, "LAB_CONFIG": config.dump(), "PYTHONPATH": str(ROOT)}
    report = nursery.run("celery", "-A", "tests.lab.worker", "report", env=env)
    assert report.returncode == 0, report.stderr
    assert SECRET not in report.stdout + report.stderr
    assert "redislock_url: '********'" in report.stdout
    assert "redislock_client_options" in report.stdout


@needs_one_server("its URL is another")
def test_what_a_worker_tells_of_itself_shows_none_and_its_locks_work(app, config, tasks, start_worker):
    worker = start_worker(1)
    # Redis forgets a command that is sent before the worker has subscribed, which it does a moment after it is ready.
    wait_until(app.control.inspect(timeout=1, limit=1).ping, "the worker hears commands")
    inspect = app.control.inspect(timeout=10, limit=1)
    (conf,) = inspect.conf().values()
    assert conf["redislock_url"] == "********"
    assert conf["redislock_client_options"] == {
        "socket_timeout": 0.5,
        "socket_connect_timeout": 0.5,
        "password": "********",
    }
    for answer in (conf, inspect.conf(with_defaults=True), inspect.report(), inspect.stats()):
        assert SECRET not in json.dumps(answer)
    assert tasks.work.delay("k", "item").get(timeout=10) == "item"
    assert SECRET not in worker.output()


def test_the_users_own_code_reads_what_it_has_set(config):
    assert make_app(config).conf.redislock_url == config.locks


def test_the_sentinels_own_password_is_hidden_too():
    app = Celery(set_as_current=False)
    options = {"master_name": "mymaster", "sentinel_kwargs": {"password": SECRET}}
    app.conf.update(redislock_client_options=options, redislock_url=f"sentinel://:{SECRET}@one;sentinel://two")
    assert "mymaster" in app.conf.humanize()
    assert SECRET not in app.conf.humanize()


def test_in_a_namespace_it_is_hidden_too(config):
    app = Celery(set_as_current=False)
    app.config_from_object({"CELERY_REDISLOCK_URL": config.locks, "CELERY_REDISLOCK_PREFIX": "p"}, namespace="CELERY")
    assert SECRET not in app.conf.humanize()
    assert "redislock" in app.conf.humanize().lower()


def test_celerys_pattern_is_extended_once():
    hide_setting("redislock_url")
    pattern = utils.HIDDEN_SETTINGS
    assert pattern.search("redislock_url")
    hide_setting("redislock_url")
    assert utils.HIDDEN_SETTINGS is pattern
