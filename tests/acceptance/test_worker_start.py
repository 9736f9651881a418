"""A lock server that is wrong from the start: the worker starts, says so once, and goes on saying so."""

from __future__ import annotations

import re
import sys

import pytest

from celery_redislock.protocol.names import keys_of
from tests.conftest import in_pools
from tests.lab.app import make_app
from tests.lab.kinds import needs_one_server
from tests.lab.servers import Valkey, free_port, need_pool, running, wait_until
from tests.lab.spawning import spawning_app
from tests.lab.versions import BEFORE_5_7
from tests.lab.workers import ROOT, kept, worker

READY = "w0@lab ready."


def lines_of(worker, level: str) -> list[str]:
    """What the worker's main process has logged of its lock server."""
    return re.findall(rf"^\[.*: {level}/MainProcess\] (.*lock server.*)$", worker.output(), re.MULTILINE)


@needs_one_server("its URL is another")
@in_pools("prefork", "threads", "gevent", others=["solo", "eventlet"])
def test_a_wrong_password_is_an_error_before_the_worker_is_ready(config, private_locks, start_worker, pool):
    need_pool(pool)
    private_locks.client.config_set("requirepass", "right")
    config.locks = config.locks.replace("unix://", "unix://:hunter2@")
    worker = start_worker(2, "-P", pool)
    (line,) = lines_of(worker, "ERROR")
    assert line == (
        f"the lock server unix://{private_locks.socket}?db=0 cannot be used: AuthenticationError: invalid "
        "username-password pair or user is disabled; check the user and the password in redislock_url or "
        "redislock_client_options; until then, runs follow lock_on_outage"
    )
    wait_until(lambda: READY in worker.output(), "it is ready all the same")
    assert worker.output().index(line) < worker.output().index(READY)
    assert "hunter2" not in worker.output()


@needs_one_server("its URL is another")
def test_locks_on_the_broker_have_the_login_that_celery_has_for_it_beside_its_url(config, tmp_path, start_worker):
    """`broker_user`, `broker_password` and `broker_port`: kombu takes what the URL does not say from them."""
    with Valkey(tmp_path, free_port()).serve() as server:
        server.client.execute_command("ACL", "SETUSER", "shop", "on", ">hunter2", "~*", "&*", "+@all")
        server.client.execute_command("ACL", "SETUSER", "default", "off")
        config.broker = "redis://127.0.0.1"
        config.settings = {"broker_user": "shop", "broker_password": "hunter2", "broker_port": server.port}
        config.settings["redislock_url"] = None
        worker, app = start_worker(1), make_app(config)
        assert f"locks on redis://shop@127.0.0.1:{server.port}/0" in worker.output()
        assert lines_of(worker, "ERROR") == []
        assert app.tasks["lab.job"].delay("k", "runs").get(timeout=20) == "runs"
        assert "hunter2" not in worker.output()
        app.close()


def test_nobody_listens_there_is_a_warning_and_what_is_sent_runs_later(config, start_worker, tasks, ledger):
    config.locks = f"redis://127.0.0.1:{free_port()}/3"
    worker = start_worker(1)
    (line,) = lines_of(worker, "WARNING")
    assert line.startswith(f"the lock server {config.locks} cannot be used: ConnectionError: Error 111 connecting to")
    assert "; nothing listens there" in line


@needs_one_server("its clients are counted")
@pytest.mark.parametrize("settings", [{}, {"redislock_enabled": False}], ids=["right", "switched off"])
def test_a_worker_that_needs_no_warning_gives_none(config, private_locks, locks, start_worker, settings):
    config.settings = settings
    config.tasks = None  # all tasks, which have several leases
    if settings:
        config.locks = f"redis://127.0.0.1:{free_port()}/0"
    worker = start_worker(1)
    assert "lock server" not in worker.output()
    introduction = re.compile(
        r": INFO/MainProcess\] \d+ tasks take locks on (\S+), with the prefix 'redislock' and leases of "
    )
    assert introduction.findall(worker.output()) == ([] if settings else [config.locks])
    assert locks.client.keys() == []
    wait_until(lambda: locks.client.info("clients")["connected_clients"] == 1, "only the test's own is connected")


def test_while_runs_are_sent_back_the_main_process_says_how_many(config, lock_proxy, tasks, start_worker):
    config.settings.update({"lab_reminder": 1.0})
    worker = start_worker(2)
    lock_proxy.refuse()
    results = [tasks.work.delay(number, number) for number in range(3)]
    wait_until(lambda: len(lines_of(worker, "WARNING")) >= 2, "it is said twice")
    for line in lines_of(worker, "WARNING"):
        assert line.startswith("the lock server cannot be used: ")
        count, seconds = re.findall(r": messages went back to the broker (\d+) times in (\d+) s, to run", line)[0]
        assert int(count) >= 1
        assert 1 <= int(seconds) < 20
    lock_proxy.mend()
    assert [result.get(timeout=20) for result in results] == [0, 1, 2]


def test_debounced_messages_that_sleep_until_they_are_due_are_not_said_to_be_sent_back(
    config, tasks, start_worker, locks
):
    config.settings.update({"lab_reminder": 0.5, "lab_look_again": 0.5})
    for item in ("first", "last"):
        tasks.debounced.delay("k", item)
    locks.client.hincrby(keys_of(tasks.debounced.lock_for("k").name).pending, "due", 3_600_000_000)
    worker = start_worker(1)
    wait_until(lambda: worker.output().count("not due yet") >= 4, "it has looked several times")
    assert lines_of(worker, "WARNING") == []


def test_an_option_of_another_plugin_is_said_once_in_the_log_file_of_a_worker(config, tmp_path):
    """Its task is bound before Celery has set up its logging."""
    log = tmp_path / "log.txt"
    (tmp_path / "moved.py").write_text(
        f"""from celery import Celery
from celery_redislock import LockedTask

app = Celery("moved", broker="memory://")
app.conf.redislock_url = {config.locks!r}


@app.task(base=LockedTask, lock_args=[], once={{"keys": []}}, lazy=False)
def moved(): ...
"""
    )
    command = [sys.executable, "-m", "celery", "-A", "moved", "worker", "-l", "INFO", "-P", "solo", "-f", str(log)]
    with running(command, tmp_path / "printed.txt", {"PYTHONPATH": f"{tmp_path}:{ROOT}"}):
        wait_until(lambda: log.exists() and " ready." in log.read_text(), "it is ready")
    assert log.read_text().count("the option 'once' belongs to celery-once and has no effect here") == 1


@pytest.mark.skipif(BEFORE_5_7, reason="children are spawned from Celery 5.7 on")
def test_children_that_are_spawned_run_all_and_leave_nothing_unacked(config, broker_server, tmp_path):
    """They inherit no pipe over which they could tell that a run begins."""
    config.settings["worker_pool_start_method"] = "spawn"
    with spawning_app(config) as app, worker(config, tmp_path, 2, app="tests.lab.spawning") as started:
        work = app.tasks["tests.lab.spawning.work"]
        assert "worker_pool_start_method is spawn: set acks_late" in started.output()
        results = [work.delay(number, number) for number in range(10)]
        wait_until(lambda: all(result.ready() for result in results), "all have run")
        with work.lock_for("k"):
            waiting = [work.delay("k", number) for number in range(3)]
            wait_until(lambda: kept(app) == 3, "they wait")
        assert [result.get(timeout=20) for result in waiting] == [0, 1, 2]
        wait_until(lambda: not broker_server.client.exists("unacked"), "each message is acked")
