"""docs/runbook.md, followed with real workers: each way to be stuck is told from the terminal alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_redislock import Lock
from celery_redislock.app import server_of
from celery_redislock.cli import deadline
from celery_redislock.cli.commands import locks as group
from tests.lab.app import make_app
from tests.lab.kinds import left_out
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT, kept

PAGE = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
FIELDS = ["key", "task", "task_id", "hostname", "since", "ttl", "state", "scope", "waiting", "reason"]

Run = Callable[..., Result]
#: A worker on a busy machine may take longer than the usual second to answer.
PATIENTLY = ("--timeout", "3")

HOLDER = """
import sys, time
from celery_redislock import Lock
from celery_redislock.app import server_of
from tests.lab.worker import app

lock = Lock(server_of(app).client, "redislock:{nightly}", timeout=float(sys.argv[1]) or None, renew=False)
assert lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def locks_(app) -> Run:
    """Runs ``celery locks`` in this process."""

    def run(*arguments: str, of: Any = app) -> Result:
        return CliRunner().invoke(group, arguments, obj=CLIContext(of, no_color=True, workdir=None))

    return run


def why(run: Run, task_id: str) -> str:
    """What `why` says; as JSON it says the same, in one schema, of the task first."""
    said = run("why", task_id, *PATIENTLY)
    assert said.exit_code == 0, said.output
    return said.stdout


def states(run: Run, task_id: str, code: int = 0) -> list[str]:
    said = run("why", task_id, "--json", *PATIENTLY)
    assert said.exit_code == code, said.output
    told = [json.loads(line) for line in said.stdout.splitlines()]
    assert [list(one) for one in told] == [FIELDS] * len(told)
    assert told[0]["task_id"] == task_id
    return [one["state"] for one in told]


def test_what_the_page_says_that_why_says_is_what_it_says():
    """Each upper-case word of the first column is in the code."""
    code = "".join(path.read_text() for path in (ROOT / "celery_redislock" / "cli").glob("*.py"))
    table = PAGE.split("| it says |")[1].split("\n\n")[0]
    words = {word for row in table.splitlines()[2:] for word in re.findall(r"\b[A-Z]{3,}\b", row.split("|")[1])}
    assert {"WAITS", "SKIPPED", "HOLDS", "DIED"} <= words
    assert {word for word in words if word not in code} == set()


def test_one_that_waits_behind_a_live_holder_is_told_for_whom_and_how_many_are_before_it(
    tasks, app, locks_, start_worker, running
):
    start_worker(3)
    first = tasks.work.delay("k", "first", 30)
    running("first")
    second, third = (tasks.work.delay("k", number) for number in range(2))
    wait_until(lambda: kept(app) == 2, "both wait")
    later = third if "Before it: 1" in why(locks_, third.id) else second
    said = why(locks_, later.id)
    assert "WAITS in line" in said
    assert f"is held by task {first.id} on w0@lab" in said
    assert "NOT ANSWER" not in said
    assert states(locks_, later.id) == ["waiting", "held"]


def test_a_holder_whose_worker_was_killed_is_seen_in_the_first_answer_and_its_key_ends_by_itself(
    config, tasks, app, locks_, start_worker, running
):
    config.settings["redislock_lease"] = 16.0  # so long that the two answers come before its end
    dead = start_worker(1)
    first = tasks.work.delay("k", "first", 60)
    running("first")
    assert app.control.cancel_consumer(config.queue, reply=True, limit=1, timeout=10)  # the next one goes to the other
    start_worker(1)
    second = tasks.work.delay("k", "second")
    wait_until(lambda: kept(app, 2) == 1, "it waits in the second worker")
    dead.kill()
    said = why(locks_, second.id)
    assert "Its worker w0@lab does NOT ANSWER" in said
    assert "it is free when that time is over" in said
    assert states(locks_, first.id) == ["held"]
    assert second.get(timeout=40) == "second"
    wait_until(lambda: states(locks_, second.id) == ["done"], "its end is noted, after its result")
    assert states(locks_, first.id, 1) == ["unknown"]
    unknown = locks_("why", first.id)
    assert "have died with its worker" in unknown.stdout
    assert f"with the prefix {app.conf.get('redislock_prefix', 'redislock')!r}" in unknown.stdout


def test_a_run_whose_process_was_killed_is_not_said_to_run_nor_to_have_failed_by_itself(
    tasks, locks_, start_worker, running
):
    worker = start_worker(1)
    run = tasks.work.delay("k", "first", 60)
    os.kill(running("first"), signal.SIGKILL)
    wait_until(lambda: tasks.work.lock_info("k") is None, "its worker has released the key")
    said = why(locks_, run.id)
    assert re.search(r"process HAS DIED|WAS CUT SHORT", said)
    assert "RUNS" not in said
    wait_until(lambda: run.state == "FAILURE", "Celery has noticed", 20)
    assert "WAS CUT SHORT at 20" in (said := why(locks_, run.id))
    assert "its process has died (WorkerLostError)" in said
    assert "the body's own error" not in said
    assert worker.process.poll() is None


def test_skipped_and_cooling_down_are_told_apart_and_the_list_tells_until_when(
    config, tasks, locks_, start_worker, running
):
    config.settings["task_annotations"] = {"lab.cools_skip": {"lock_cooldown": 60.0}}
    start_worker(2)
    with tasks.once.lock_for("held"):
        skipped = tasks.once.delay("held")
        wait_until(lambda: skipped.state == "REVOKED", "it is skipped")
    ran = tasks.cools_skip.delay("c")
    ran.get(timeout=20)
    wait_until(lambda: "cooling" in locks_("list").stdout, "its key cools down")
    cooled = tasks.cools_skip.delay("c")
    wait_until(lambda: cooled.state == "REVOKED", "it is skipped")
    assert re.search(r"WAS SKIPPED at .*: duplicate of", why(locks_, skipped.id))
    assert f": cooling down after {ran.id}" in why(locks_, cooled.id)
    assert [states(locks_, one.id) for one in (skipped, cooled)] == [["skipped"], ["skipped"]]


def test_where_a_limit_is_reached_all_holders_are_named(tasks, app, locks_, start_worker):
    start_worker(3)
    slots = [Lock(server_of(app).client, tasks.three.lock_for("k").name, timeout=30, limit=3) for _ in range(3)]
    assert all(slot.acquire(blocking=False) for slot in slots)
    fourth = tasks.three.delay("k")
    wait_until(lambda: kept(app) == 1, "it waits")
    assert re.findall(r"(:slot:\d)? is held by", why(locks_, fourth.id)) == ["", ":slot:2", ":slot:3"]
    assert states(locks_, fourth.id) == ["waiting", "held", "held", "held"]
    for slot in slots:
        slot.release()
    fourth.get(timeout=20)


@pytest.mark.parametrize("timeout", ["30", "0"])
def test_a_key_whose_process_has_left_ends_by_itself_or_says_that_it_never_does_and_is_released(
    config, locks_, timeout
):
    env = {**os.environ, "LAB_CONFIG": config.dump(), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOLDER, timeout], env=env, stdout=subprocess.PIPE, text=True) as gone:
        assert gone.stdout.readline() == "held\n"
        gone.kill()
    shown = locks_("show", "redislock:{nightly}").stdout
    assert "is held by a lock outside tasks on" in shown
    assert ("it never ends by itself" in shown) is (timeout == "0")
    assert "Nobody waits for it." in shown
    assert locks_("release", "redislock:{nightly}", "--yes").exit_code == 0
    free = locks_("show", "redislock:{nightly}")
    assert (free.exit_code, free.stdout, free.stderr) == (1, "", "redislock:{nightly} is free.\n")


@left_out("it is the broker too", "cluster")
def test_where_lock_server_broker_and_results_are_silent_every_command_ends_and_says_so(
    config, private_locks, locks_, monkeypatch
):
    """They are one server, as in the README. Celery's own commands wait for it for ever."""
    monkeypatch.setattr(deadline, "PATIENCE", 0.3)
    config.broker, config.backend, config.locks = private_locks.celery_url(0), private_locks.celery_url(1), None
    app = make_app(config)
    app.conf.redislock_client_options = {"socket_timeout": 0.5}
    private_locks.pause()
    try:
        for arguments in (["list"], ["why", "x", "--timeout", "0.1"]):
            result = locks_(*arguments, of=app)
            assert (result.exit_code, len(result.stderr.splitlines())) == (69, 1), result.output
            assert re.search(r"^Error: the lock server \S+ cannot be asked: TimeoutError: Timeout", result.stderr)
    finally:
        private_locks.resume()
        server_of(app).stop()
        app.close()


@left_out("its user may use one prefix alone", "acl")
def test_a_publisher_with_another_prefix_sees_its_keys_and_is_told_where_it_looks(config, app, tasks, locks_):
    publisher = make_app(config)
    publisher.conf.redislock_prefix = "web"
    job = publisher.tasks["lab.job"].delay("k")
    assert locks_("list", of=publisher).stdout.splitlines()[1].split()[0] == "queued"
    empty = locks_("list")
    assert empty.exit_code == 1
    assert empty.stderr.startswith("No lock is held on ")
    assert "with the prefix 'redislock'" in empty.stderr
    assert states(locks_, job.id, 1) == ["unknown"]
    server_of(publisher).stop()
    publisher.close()
