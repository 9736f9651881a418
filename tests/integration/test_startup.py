"""What a worker says of its lock server at its start, one line for each way to be wrong; and nothing is left there."""

from __future__ import annotations

import http.server
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from celery_redislock import LockedTask
from celery_redislock.worker.server_check import try_lock_server, warn_of_broker
from tests.integration.test_refusals import (
    let_in,
    locked_out,
    out_of_memory,
    read_only,
    with_memory,
    with_rights,
    without_rights,
    writable,
)
from tests.lab.app import make_app
from tests.lab.kinds import OPTIONS
from tests.lab.servers import free_port, wait_until
from tests.lab.tls import debian_redis


@pytest.fixture
def said(log):
    """Asks for an app with these settings: its warnings and errors, as level and text."""

    def ask_and_look(config):
        log.clear()
        config.tasks = None  # all tasks, which have several leases
        try_lock_server(make_app(config))
        # The keeper of an earlier test may still have something to send.
        heard = [record for record in log.records if record.levelno > logging.INFO and "keeper" not in record.name]
        return [(record.levelno, record.getMessage()) for record in heard]

    return ask_and_look


@pytest.fixture
def server(private_locks):
    """The test's own connection, opened before the trouble begins."""
    client = private_locks.connect()
    client.ping()
    yield client
    client.close()


def without_keys(server):
    server.execute_command("ACL", "SETUSER", "default", "resetkeys", "~other:*")


def with_keys(server):
    server.execute_command("ACL", "SETUSER", "default", "~*")


def unsaved(server):
    dump(server).mkdir()  # so it cannot be written
    server.config_set("save", "3600 1000000")
    server.bgsave()
    wait_until(lambda: server.info("persistence")["rdb_last_bgsave_status"] == "err", "it could not save")


def saved(server):
    dump(server).rmdir()
    server.config_set("save", "")


def dump(server):
    return Path(server.config_get("dir")["dir"], server.config_get("dbfilename")["dbfilename"])


def without_replicas(server):
    server.config_set("min-replicas-to-write", 1)


def with_replicas(server):
    server.config_set("min-replicas-to-write", 0)


def without_set(server):
    server.execute_command("ACL", "SETUSER", "default", "-set")  # a script may be called, and this it may not


@pytest.mark.parametrize(
    ("trouble", "cure", "level", "words"),
    [
        (read_only, writable, logging.ERROR, "it is a replica: name its primary"),
        (out_of_memory, with_memory, logging.WARNING, "it is full"),
        (unsaved, saved, logging.WARNING, "it cannot save to disk"),
        (without_replicas, with_replicas, logging.WARNING, "too few of its replicas are connected"),
        (locked_out, let_in, logging.ERROR, "check the user and the password"),
        (without_rights, with_rights, logging.ERROR, "its user lacks permissions"),
        (without_keys, with_keys, logging.ERROR, "its user lacks permissions"),
        (without_set, with_rights, logging.ERROR, "its user lacks permissions"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_server_that_refuses(server, config, said, trouble, cure, level, words):
    trouble(server)
    try:
        ((said_level, line),) = said(config)
    finally:
        cure(server)
    assert said_level == level
    assert line.startswith(f"the lock server {config.locks} cannot be used: ")
    assert f"; {words}" in line
    assert server.keys() == []


def test_a_user_who_may_not_renew_a_key_lacks_a_permission(server, config, said):
    server.execute_command("ACL", "SETUSER", "default", "-pexpire")
    ((level, line),) = said(config)
    with_rights(server)
    assert level == logging.ERROR
    assert "; its user lacks permissions" in line


def test_a_user_of_debians_redis_who_may_not_do_what_a_script_does_lacks_a_permission(tmp_path, config, said):
    with debian_redis(tmp_path / "redis", "--port", "0") as server:
        server.execute_command("ACL", "SETUSER", "default", "-set")
        config.locks = f"unix://{tmp_path}/redis/redis.sock"
        ((level, line),) = said(config)
    assert level == logging.ERROR
    assert "; its user lacks permissions" in line


def test_a_server_in_which_a_script_runs_for_long_may_be_used_once_it_has_ended(server, private_locks, config, said):
    server.config_set("busy-reply-threshold", 10)
    script = threading.Thread(target=_run_until_killed, args=(private_locks,))
    script.start()
    wait_until(lambda: _is_busy(server), "the script keeps others out")
    ((level, line),) = said(config)
    server.script_kill()
    script.join()
    assert level == logging.WARNING
    assert "; a script or a function has run for long there: wait, or end it with SCRIPT KILL" in line


def test_a_credential_provider_that_fails_is_named_whatever_its_error(config, said):
    class Closed(redis.CredentialProvider):
        def get_credentials(self):
            raise ConnectionRefusedError("the vault is closed")

    config.settings["redislock_client_options"] = {**OPTIONS, "credential_provider": Closed()}
    ((level, line),) = said(config)
    assert level == logging.WARNING
    assert "the credential provider failed: ConnectionRefusedError: the vault is closed" in line
    assert "; check the provider, and the service that it asks" in line


def _run_until_killed(valkey):
    with valkey.connect() as client, pytest.raises(redis.ResponseError):
        client.eval("while true do end", 0)


def _is_busy(server):
    try:
        return not server.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")


def test_a_server_that_loads_its_data_may_be_used_once_it_is_done(server, config, said):
    for name, value in [("key-load-delay", 5000), ("loading-process-events-interval-bytes", 1024)]:
        server.config_set(name, value)
    server.execute_command("DEBUG", "POPULATE", 10000)
    reload = threading.Thread(target=server.execute_command, args=("DEBUG", "RELOAD"))
    reload.start()
    wait_until(lambda: _loads(config), "it loads its data")
    lines = []

    def is_told():  # while it loads on a busy machine, it may not answer in time
        lines[:] = said(config)
        return any("Timeout" not in line for _, line in lines)

    wait_until(is_told, "it answers while it loads")
    server.config_set("key-load-delay", 0)
    reload.join()
    ((level, line),) = lines
    assert level == logging.WARNING
    assert "; it is loading its data: wait" in line


def _loads(config):
    with redis.Redis.from_url(config.locks) as client:
        try:
            return not client.ping()
        except redis.BusyLoadingError:
            return True


def test_a_server_that_will_do_is_asked_in_seven_round_trips_and_left_as_it_was(config, locks, said):
    said(config)
    locks.calls()
    assert said(config) == []
    calls = locks.calls()
    assert (calls["evalsha"], calls["config|get"]) == (4, 1)  # and INFO, and TIME, which the scripts call too
    assert locks.client.keys() == []


@pytest.mark.parametrize(
    ("url", "level", "words"),
    [
        ("redis://user:hunter2@no-such-host.invalid:6379/0", logging.WARNING, "the host name cannot be resolved"),
        ("redis://:hunter2@127.0.0.1:1/0", logging.WARNING, "nothing listens there"),
        ("unix:///no/such.sock?password=hunter2", logging.WARNING, "nothing listens there"),
    ],
)
def test_a_server_that_is_not_there(config, said, url, level, words):
    config.locks = url
    ((said_level, line),) = said(config)
    assert said_level == level
    assert f"; {words}" in line
    assert "hunter2" not in line


def test_the_url_is_shown_with_its_user_and_without_its_password(config, said):
    port = free_port()
    config.locks = f"rediss://user:hunter2@127.0.0.1:{port}/3?ssl_cert_reqs=none"
    ((_, line),) = said(config)
    assert f"the lock server rediss://user@127.0.0.1:{port}/3 cannot be used" in line


def test_a_server_that_is_silent_is_asked_for_one_time_out(config, lock_proxy, said):
    lock_proxy.blackhole()
    ((level, line),) = said(config)
    assert level == logging.WARNING
    assert "; it did not answer in time" in line


def test_a_database_that_is_not_there(config, locks, said):
    config.locks = locks.url(99)
    ((level, line),) = said(config)
    assert level == logging.ERROR
    assert "out of range; check redislock_url" in line


def test_what_answers_is_no_redis(config, said):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        config.locks = f"redis://127.0.0.1:{web.server_address[1]}/0"
        ((level, line),) = said(config)
        web.shutdown()
    assert level == logging.ERROR
    assert "; the server there is not Redis" in line


def test_a_server_without_tls_where_the_url_asks_for_it(config, locks, lock_proxy, said):
    config.locks = lock_proxy.url.replace("redis://", "rediss://")
    ((level, line),) = said(config)
    assert level in {logging.ERROR, logging.WARNING}
    assert "rediss://127.0.0.1:" in line


def test_a_server_that_evicts_keys_is_warned_of(server, config, said):
    server.config_set("maxmemory-policy", "volatile-lru")
    assert said(config) == []  # it has no limit, and so evicts nothing
    server.config_set("maxmemory", "100mb")
    ((level, line),) = said(config)
    assert level == logging.WARNING
    assert line.startswith(f"the lock server {config.locks} evicts keys (maxmemory-policy volatile-lru)")
    server.execute_command("ACL", "SETUSER", "default", "-info")
    assert said(config) == []  # it may not be asked for it


UNTESTED = (
    logging.WARNING,
    (
        "{} is Redis {}, older than the versions that the locks are tested with; upgrade it to at least Redis 7.0 or "
        "Valkey 8, or name another server in redislock_url"
    ),
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.2.6", UNTESTED), ("6.2.9", UNTESTED), ("7.0.0", None)],
)
def test_a_server_that_says_it_is_an_old_one_is_named_with_the_setting_and_the_remedy(
    config, lock_proxy, said, version, expected
):
    """It is a new one that passes for an old one; what real old ones can do is in docs/compatibility.md."""
    lock_proxy.instead = b"redis_version:7.2.4", f"redis_version:{version}".encode()
    where = f"the lock server {config.locks}"
    assert said(config) == ([(expected[0], expected[1].format(where, version))] if expected else [])


def test_a_server_that_closes_idle_connections_is_warned_of(server, config, said):
    server.config_set("timeout", 60)
    try:
        ((level, line),) = said(config)
        assert level == logging.WARNING
        assert line.startswith(f"the lock server {config.locks} closes connections that are idle for 60 s: ")
        server.execute_command("ACL", "SETUSER", "default", "-config")
        assert said(config) == []  # it may not be asked for it
    finally:
        server.execute_command("ACL", "SETUSER", "default", "+config")
        server.config_set("timeout", 0)


@pytest.mark.parametrize(("ahead", "words"), [(60, "60 s behind"), (-60, "60 s ahead of"), (1, None)])
def test_a_clock_that_is_far_off_is_warned_of(config, said, monkeypatch, ahead, words):
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead)  # this host's clock is the one that is wrong
    warnings = [line for level, line in said(config) if level == logging.WARNING]
    expected = f"the clock of the lock server {config.locks} is {words} this host's"
    assert [line.startswith(expected) for line in warnings] == [True] * bool(words)


def test_one_line_tells_where_the_tasks_lock_and_shows_no_password(config, log):
    config.locks = config.locks.replace("unix://", "unix://user:hunter2@")
    config.settings["redislock_prefix"] = "shop"
    config.tasks = None  # all tasks, which have several leases
    app = make_app(config)
    try_lock_server(app)
    locked = [task for task in app.tasks.values() if isinstance(task, LockedTask)]
    (line,) = (record.getMessage() for record in log.records if record.levelno == logging.INFO)
    where = config.locks.replace("user:hunter2@", "user@")
    assert re.fullmatch(
        re.escape(f"{len(locked)} tasks take locks on {where}, with the prefix 'shop' and ")
        + r"leases of \d\S* to \d\S* s",
        line,
    )


def nothing(): ...


@pytest.mark.parametrize(("timeout", "warned"), [(20, True), (3600, False)])
def test_a_visibility_timeout_shorter_than_a_lease_is_warned_of(config, log, timeout, warned):
    config.settings["broker_transport_options"] = {"visibility_timeout": timeout}
    app = make_app(config)
    app.task(name="lab.a_late", base=LockedTask, shared=False, acks_late=True)(nothing)
    app.task(name="lab.an_early", base=LockedTask, shared=False)(nothing)
    warn_of_broker(app)
    lines = [record.getMessage() for record in log.records]
    assert len(lines) == warned
    if warned:
        assert "unacked messages again after 20 s (visibility_timeout), less than the lease of" in lines[0]
        assert "lab.a_late (30 s)" in lines[0]
        assert "lab.an_early" not in lines[0]


def test_no_connection_and_no_thread_is_left(config, locks, said):
    threads = threading.active_count()
    connections = locks.client.info("clients")["connected_clients"]
    said(config)
    assert threading.active_count() == threads
    assert locks.client.info("clients")["connected_clients"] == connections


def test_what_nobody_expects_is_said_and_not_raised(config, said, monkeypatch):
    def broken(*args: object) -> None:
        raise RuntimeError("unheard of")

    monkeypatch.setattr(socket, "socket", broken)
    ((level, line),) = said(config)
    assert level == logging.ERROR
    assert "RuntimeError: unheard of" in line


LEFT_AS_IT_IS = """
from types import SimpleNamespace
from celery import Celery
import celery_redislock.worker.start

app = Celery("plain", broker="amqp://")


@app.task
def plain(): ...


before = {*app.steps["consumer"]}
celery_redislock.worker.start.prepare(SimpleNamespace(app=app))
assert {*app.steps["consumer"]} == before
"""


def test_a_worker_without_locked_tasks_is_left_as_it_is():
    """The command `celery locks` makes every worker of an environment load the package."""
    subprocess.run([sys.executable, "-c", LEFT_AS_IT_IS], check=True, timeout=30)
