"""docs/troubleshooting.md, followed with real workers: each way to be stuck is told from the terminal alone.

The commands of docs/changing-a-key.md run here too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery.bin.base import CLIContext
from celery.bin.control import control, inspect, status
from click.testing import CliRunner, Result

from celery_redislock import LockConflict, LockLost, LockUnavailable
from celery_redislock.app import server_of
from celery_redislock.cli import workers
from celery_redislock.cli.commands import locks as group
from celery_redislock.cli.sentences import Say
from celery_redislock.errors import LockInfo
from tests.lab.app import make_app
from tests.lab.kinds import left_out
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT, kept

ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
#: What the page quotes that is no sentence of `why`.
ERRORS = (
    str(LockConflict("k")),
    str(LockLost("k")),
    str(LockUnavailable("k")),
    "the lock server",
    "could not reach the lock server",
    "cannot be asked",
    "duplicate of",
    "cooling down after",
    "expired revoked terminated",
)
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ALSO = (ROOT / "docs" / "changing-a-key.md").read_text(encoding="utf-8")
AGO = "3.1s"
FIELDS = ["key", "task", "task_id", "hostname", "since", "ttl", "state", "scope", "waiting", "reason"]

Run = Callable[..., Result]
#: What is asked here is in the result, so no worker need answer.
SHORTLY = ("--timeout", "0.1")

HOLDER = """
import sys, time
from celery_redislock import Lock, LockConflict, LockLost, LockUnavailable
from celery_redislock import LockConflict, LockLost, LockUnavailable
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
    said = run("why", task_id, *SHORTLY)
    assert said.exit_code == 0, said.output
    return said.stdout


def states(run: Run, task_id: str, code: int = 0) -> list[str]:
    said = run("why", task_id, "--json", *SHORTLY)
    assert said.exit_code == code, said.output
    told = [json.loads(line) for line in said.stdout.splitlines()]
    assert [list(one) for one in told] == [FIELDS] * len(told)
    assert told[0]["task_id"] == task_id
    return [one["state"] for one in told]


def test_what_the_page_says_that_why_says_is_what_it_says():
    """Each quotation of the first column is part of a sentence, or of an error."""
    quotations = {one for row in rows_below("`why` says") for one in re.findall(r"`([^`]+)`", row)}
    known = "\n".join([*(say.value for say in Say), *ERRORS])
    assert {"WAITS in line", "HAS DIED"} <= quotations
    assert [one for one in quotations if not is_said(one, re.sub(r"\{\w+\}", "", known))] == []


@pytest.mark.parametrize("page", [PAGE, ALSO], ids=["troubleshooting", "changing-a-key"])
def test_what_a_page_says_that_an_empty_list_says_is_what_it_says(page, locks_):
    ((arguments, shown),) = re.findall(r"\$ celery -A shop locks (list.*)\n *(No .*)", page)
    said = locks_(*arguments.split()).stderr
    assert re.sub(r"[a-z]+://[^,]+", "...", shown) + "\n" == re.sub(r"[a-z]+://[^,]+", "...", said)


def rows_below(head: str) -> list[str]:
    """The first column of the tables whose first column has this head."""
    tables = [text.split("\n\n")[0] for text in PAGE.split(f"| {head} |")[1:]]
    return [row.split("|")[1] for table in tables for row in table.splitlines()[2:]]


def test_what_the_page_says_that_show_says_is_what_it_says():
    """Each row quotes a line for one state of a key, with ids, hosts and times of its own."""
    who = [held_by(state, "w1@shop-a").who for state in ("held", "queued", "sending", "cooling", "offered")]
    ends = [one(ago=AGO, ttl=AGO, every=AGO) for one in (Say.RENEWED, Say.NOT_RENEWED, Say.HELD_TOO_LONG, Say.ENDS)]
    lines = [Say.HELD(key="k", who=who[0], since=AGO, ends=one) for one in ends[:-1]]
    lines += [Say.KEPT(key="k", who=one, since=AGO, ttl=AGO) for one in who[1:]]
    outside = held_by("held", "web-1", task_id=None).who
    lines += [Say.HELD(key="k", who=outside, since=AGO, ends=one) for one in (ends[-1], Say.NEVER_ENDS())]
    quoted = [re.findall(r"`([^`]+)`", row)[0] for row in rows_below("`show` says")]
    assert quoted.pop() == "is free."
    for line, quotation in zip(lines, quoted, strict=True):
        assert re.search(".*".join(map(re.escape, shape(quotation).split("…"))), shape(line))


def held_by(state: str, host: str, task_id: str | None = "939542a4-304f-4acd-a93e-5f38df969fdd") -> LockInfo:
    return LockInfo("k", task_id, "shop.sync_account", host, None, None, state)


def shape(line: str) -> str:
    """A line without its own id, host and times."""
    line = re.sub(rf"{ID}|\b[0-9a-f]{{8}}(?=…)…", "ID", line)
    return re.sub(r"\b(?:w\d@shop-\w|web-1)", "HOST", re.sub(r"\b(?:\d+m)?[\d.]+s\b", "TIME", line))


def is_said(quotation: str, known: str) -> bool:
    """Whether `known` has each part of a quotation: a sentence may be filled with what another one says."""
    return all(part.strip() in known for part in re.split("…|: ", quotation))


def commands() -> list[str]:
    """The commands of both pages, each once; of a pipeline those of Celery. The worker is told to end at last."""
    found = re.findall(r"celery -A shop ([a-z][^`|\n]+)", PAGE + ALSO)
    every = dict.fromkeys(re.sub(ID, "ID", one.strip()) for one in found)
    return sorted(every, key=lambda one: "shutdown" in one)


def test_every_command_of_the_pages_runs(tasks, app, config, start_worker, running):
    """In its order, against a worker in which one runs and three wait."""
    worker = start_worker(2)
    first = tasks.work.delay("A1", "first", 60)
    running("first")
    waiting = [tasks.work.delay("A1", number, 60) for number in range(3)]
    wait_until(lambda: kept(app) == len(waiting), "the others wait")
    here = {
        "shop.sync_account --args '[7]'": """lab.work --args '["A1"]'""",
        "shop.refresh": "lab.work",
        "redislock:{stock:A1}": tasks.work.lock_for("A1").name,
        "w1@shop-a": "w0@lab",
        "consumer celery": f"consumer {config.queue}",
    }
    for line in commands():
        command = re.sub(r"redislock:\{shop\.sync:\w+\}", here["redislock:{stock:A1}"], line)
        for there, name in here.items():
            command = command.replace(there, name)
        program, *arguments = shlex.split(command.replace("ID", (first if "terminate" in line else waiting[1]).id))
        results = []

        def is_answered():
            """A worker may be too busy to answer within Celery's second."""
            results.append(run_celery(app, program, list(arguments)))  # noqa: B023
            return "shutdown" in line or "No nodes replied" not in results[-1].output  # noqa: B023

        wait_until(is_answered, line)
        result = results[-1]
        if "shutdown" not in line:  # a worker that shuts down does not reply, and the page says so
            assert (result.exit_code, "Error" in result.output) == (0, False), f"{line}:\n{result.output}"
    assert {"control terminate SIGTERM ID", "locks watch", "status"} <= {*commands()}
    assert [one.state for one in (first, *waiting)] == ["REVOKED", "RETRY", "REVOKED", "RETRY"]
    running(0)
    worker.kill_child()
    worker.wait()


def run_celery(app: Any, program: str, arguments: list[str]) -> Result:
    """Run a command of Celery, or of its group ``locks``, in this process."""
    obj = CLIContext(app, no_color=True, workdir=None)
    if program != "locks":
        its = {"control": control, "inspect": inspect, "status": status}
        return CliRunner().invoke(its[program], arguments, obj=obj)
    # They would ask, and not end: test_cli and test_drop have them.
    more = {"release": ["--dry-run"], "watch": ["--help"], "drop": ["--help"]}
    arguments += more.get(arguments[0], [])
    return CliRunner().invoke(group, arguments, obj=obj)


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
    assert ("it never expires" in shown) is (timeout == "0")
    assert "Nothing waits for it." in shown
    assert locks_("release", "redislock:{nightly}", "--yes").exit_code == 0
    free = locks_("show", "redislock:{nightly}")
    assert (free.exit_code, free.stdout, free.stderr) == (1, "No worker answered.\n", "redislock:{nightly} is free.\n")


@left_out("it is the broker too", "cluster")
def test_where_lock_server_broker_and_results_are_silent_every_command_ends_and_says_so(
    config, private_locks, locks_, monkeypatch
):
    """They are one server, as in the README. Celery's own commands wait for it for ever."""
    monkeypatch.setattr(workers, "PATIENCE", 0.3)
    config.broker, config.backend, config.locks = private_locks.celery_url(0), private_locks.celery_url(1), None
    app = make_app(config)
    app.conf.redislock_client_options = {"socket_timeout": 0.5}
    private_locks.pause()
    try:
        for arguments in (["list"], ["why", "x", "--timeout", "0.1"]):
            result = locks_(*arguments, of=app)
            assert (result.exit_code, len(result.stderr.splitlines())) == (69, 1), result.output
            assert re.search(r"^Error: could not reach the lock server \S+: TimeoutError: Timeout", result.stderr)
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
