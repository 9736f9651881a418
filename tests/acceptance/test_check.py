"""``celery locks check``: what is wrong is reported before anything runs, with an exit code and JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.lab import nursery
from tests.lab.servers import Valkey, free_port
from tests.lab.workers import ROOT

Check = Callable[..., subprocess.CompletedProcess[str]]

RIGHT = """
import os
from celery import Celery
from celery_redislock import LockedTask, locked_task

app = Celery("shop", broker=os.environ["REDIS_URL"])

@locked_task(app, lock_scope="job")
def report(day): ...

@app.task
def unlocked(day): ...
"""
WRONG = """
from celery import shared_task

@locked_task(app, lock_scop="job")
def misspelt(day): ...

@app.task(base=LockedTask, lock_scope="jobs")
def wrong_value(day): ...

@locked_task(app, lock_args=["date"])
def no_parameter(day): ...

@shared_task(base=LockedTask, lock_key="report:{date}")
def no_field(day): ...

@locked_task(app, lock_limit=2, lock_fence=True)
def combination(day): ...

@locked_task(app)
async def coroutine(day): ...

@app.task(lock_scope="job")
def no_lock(day): ...

@locked_task(app, once={"keys": ["day"]})
def leftover(day): ...
"""

#: About the wrong tasks, in lines of any length.
SAID = """
error: shop.combination: lock_limit = 2 is not allowed with lock_fence: a fence orders successive holders, not
    simultaneous ones
error: shop.coroutine: its body is async or a generator: it would run after its call has returned and released the lock;
    let a plain body run it: asyncio.run()
error: shop.misspelt: lock_scop is not known; did you mean lock_scope?
error: shop.no_field: lock_key names 'date', which is not one of its parameters: day
error: shop.no_parameter: lock_args names 'date', which is not one of its parameters: day
error: shop.wrong_value: lock_scope = 'jobs' is not allowed; allowed: 'run' or 'job' or 'queue'; did you mean 'job'?
warning: task shop.no_lock has lock_scope but no lock: add base=LockedTask
warning: task shop.leftover: the option 'once' belongs to celery-once and has no effect here; instead, set
    lock_args=['day'], lock_scope='job'. Until then, its key is made of all its arguments.
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path, free_port()).serve() as server:
        yield server


@pytest.fixture
def check(tmp_path: Path, server: Valkey) -> Check:
    """Writes a module, and checks its app as its user would."""

    def run(module: str, *options: str, url: str = server.url()) -> subprocess.CompletedProcess[str]:
        (tmp_path / "shop.py").write_text(module)
        env = {**os.environ, "REDIS_URL": url, "PYTHONPATH": str(ROOT)}
        return nursery.run("celery_redislock", "-A", "shop", "check", *options, env=env, cwd=tmp_path)

    return run


def test_an_app_with_nothing_wrong_passes(check: Check, server: Valkey) -> None:
    done = check(RIGHT)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "Checked 1 locked task: 0 errors, 0 warnings.\n"
    with redis.Redis.from_url(server.url()) as client:
        assert client.keys("redislock*") == []


def test_an_app_without_a_locked_task_is_warned_about(check: Check) -> None:
    done = check("import celery\n\napp = celery.Celery(broker='memory://')\n", "--offline")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "warning")
    assert done.stderr == "Checked 0 locked tasks: 0 errors, 1 warning.\n"


def test_every_mistake_is_reported_and_not_only_the_first(check: Check) -> None:
    done = check(RIGHT + WRONG)
    assert done.returncode == 1
    assert done.stdout.split() == SAID.split()
    assert done.stderr == "Checked 8 locked tasks: 6 errors, 2 warnings.\n"


def test_a_program_reads_the_same_as_json(check: Check) -> None:
    done = check(RIGHT + WRONG, "--json", "--offline", url="redis://nowhere.invalid")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert found[2] == {
        "level": "error",
        "text": "shop.misspelt: lock_scop is not known; did you mean lock_scope?",
        "task": "shop.misspelt",
    }
    assert [one["level"] for one in found] == ["error"] * 6 + ["warning"] * 2


def test_a_wrong_setting_is_reported_once(check: Check) -> None:
    done = check(RIGHT + "\napp.conf.redislock_leas = 5\n@locked_task(app)\ndef other(): ...\n")
    assert done.returncode == 1
    assert done.stdout == "error: redislock_leas is not known; did you mean redislock_lease?\n"


def test_an_app_without_a_lock_server_is_an_error_and_is_said_once(check: Check) -> None:
    done = check(RIGHT, "--offline", url="memory://")
    assert done.returncode == 1
    assert done.stdout.startswith("error: neither the broker nor the result backend is Redis")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("redislock_url = 'http://localhost'", "redislock_url has the scheme 'http' and cannot be used"),
        ("redislock_url = 'redis://localhost?tcp=no'", "redislock_url: redis-py has no option 'tcp'"),
        ("redislock_client_options = {'socket_timeout': None}", "redislock_client_options: socket_timeout = None"),
    ],
)
def test_a_lock_server_that_no_client_can_be_made_for_is_an_error_and_is_said_once(
    check: Check, setting: str, said: str
) -> None:
    done = check(f"{RIGHT}\napp.conf.{setting}\n@locked_task(app)\ndef other(): ...\n")
    assert done.returncode == 1
    assert done.stdout.startswith(f"error: {said}")
    assert len(done.stdout.splitlines()) == 1
    assert "lock_on_outage" not in done.stdout, "the tasks raise this error"


def test_an_app_whose_only_locked_task_is_wrong_has_one_error(check: Check) -> None:
    done = check(RIGHT.replace("lock_scope", "lock_scop"))
    assert done.returncode == 1
    assert done.stdout == "error: shop.report: lock_scop is not known; did you mean lock_scope?\n"


def test_what_a_worker_would_warn_of_is_a_warning(check: Check, server: Valkey) -> None:
    with redis.Redis.from_url(server.url()) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    done = check(RIGHT)
    assert done.returncode == 0
    assert "evicts keys (maxmemory-policy allkeys-lru) when it is full" in done.stdout
    assert done.stderr == "Checked 1 locked task: 0 errors, 1 warning.\n"


def test_servers_that_cannot_be_used_are_errors_and_passwords_are_not_shown(check: Check, server: Valkey) -> None:
    with redis.Redis.from_url(server.url()) as client:
        client.config_set("requirepass", "right")
    done = check(RIGHT, url=server.url().replace("redis://", "redis://:hunter2@"))
    assert done.returncode == 1
    locks, broker = done.stdout.splitlines()
    assert locks.startswith("error: the lock server redis://")
    assert "check the user and the password in broker_url or redislock_client_options" in locks
    assert broker.startswith("error: the broker redis://:**@")
    assert "hunter2" not in done.stdout + done.stderr


def test_offline_no_server_is_asked(check: Check) -> None:
    done = check(RIGHT, "--offline", url=f"redis://127.0.0.1:{free_port()}/0")
    assert (done.returncode, done.stdout) == (0, "")
    done = check(RIGHT, url=f"redis://127.0.0.1:{free_port()}/0")
    assert done.returncode == 1
    assert ["nothing listens there" in line or "the broker" in line for line in done.stdout.splitlines()] == [True] * 2


def test_locks_that_are_switched_off_need_no_lock_server(check: Check) -> None:
    module = f"{RIGHT}\napp.conf.update(redislock_enabled=False, redislock_url='redis://127.0.0.1:{free_port()}/0')\n"
    assert check(module).returncode == 0
