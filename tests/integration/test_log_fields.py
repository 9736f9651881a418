"""The fields of the log's lines, by which a collector of logs finds what concerns one task, one run or one key."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest
from celery.result import AsyncResult

import celery_redislock
from celery_redislock import Lock, LockConflict, LockLost, LockUnavailable, signals
from celery_redislock.errors import describe
from celery_redislock.testing import busy
from tests.lab.measured import MEASURED
from tests.lab.servers import wait_until
from tests.lab.workers import ROOT

# Of redis-py, to Celery's result backend.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

PACKAGE = Path(celery_redislock.__file__).parent
FORGED = "a\n[2026-11-21 00:00:00,000: ERROR/MainProcess] forged \x1b[2J"


@pytest.fixture
def fields(log):
    """The fields of each line that this package has logged."""

    def look():
        ours = [vars(record) for record in log.records if record.name.startswith("celery_redislock.")]
        return [
            {name.removeprefix("redislock_"): value for name, value in one.items() if name.startswith("redislock_")}
            for one in ours
        ]

    return look


def test_a_conflict_tells_task_id_key_and_holder(app, tasks, deliver, fields):
    with busy(tasks.once.lock_for("k")) as lock:
        deliver(app, "lab.once", "k", id="mine")
        key, who = lock.name, tasks.once.lock_info("k").who
    assert fields() == [{"event": "conflict", "task": "lab.once", "task_id": "mine", "key": key, "holder": who}]


def test_a_holder_that_is_a_task_is_told_by_its_id_too(tasks, fields):
    first = tasks.job.delay("k")
    tasks.job.delay("k")
    (told,) = fields()
    assert told["event"] == "not_sent"
    assert told["task"] == "lab.job"
    assert told["key"] == tasks.job.lock_for("k").name
    assert told["holder_id"] == first.id
    assert told["holder"].startswith(f"task {first.id}, queued by ")
    assert isinstance(first, AsyncResult)


def test_a_run_that_is_superseded_tells_by_which_task(app, tasks, deliver, fields):
    deliver(app, "lab.latest", "k", id="newer", redislock={"number": 2})
    deliver(app, "lab.latest", "k", id="mine", redislock={"number": 1})
    key = tasks.latest.lock_for("k").name
    assert fields() == [
        {"event": "superseded", "task": "lab.latest", "task_id": "mine", "key": key, "holder_id": "newer"}
    ]


def test_a_run_that_is_replaced_tells_by_which_task(app, tasks, deliver, locks, fields):
    key = tasks.newest.lock_for("k").name
    locks.client.set(f"{key}:replaced:mine", "2 newer mine/0/0")
    deliver(app, "lab.newest", "k", id="mine", redislock={"number": 1})
    assert fields() == [
        {"event": "replaced", "task": "lab.newest", "task_id": "mine", "key": key, "holder_id": "newer"}
    ]


@pytest.mark.skipif(MEASURED, reason="on CPython 3.11 it may stand still inside coverage.py's trace function")
def test_a_loss_tells_whose_lock_it_was_and_why(app, tasks, deliver, fields, locks):
    key = tasks.aborted.lock_for("k").name

    def delete(**_):
        locks.client.delete(key)

    signals.lock_acquired.connect(delete)
    deliver(app, "lab.aborted", "k", id="mine")
    reason = "its key was deleted, expired or taken"
    (lost,) = (one for one in fields() if one.get("event") == "lost")
    assert lost == {"event": "lost", "task": "lab.aborted", "task_id": "mine", "key": key, "reason": reason}


def test_an_outage_tells_which_run_it_concerns(app, tasks, deliver, fields, lock_proxy):
    lock_proxy.refuse()
    deliver(app, "lab.work", "k", id="mine")
    (told,) = (one for one in fields() if one.get("event") == "unavailable")
    assert (told["task"], told["task_id"], told["key"]) == ("lab.work", "mine", tasks.work.lock_for("k").name)


def test_a_field_breaks_no_line_either(app, tasks, deliver, fields):
    with busy(tasks.once.lock_for("k")):
        deliver(app, "lab.once", "k", id=FORGED)
    (told,) = fields()
    assert all(value.isprintable() for value in told.values())


def test_a_lock_outside_tasks_forges_no_line_by_its_name(client, log):
    for lose in (lambda lock: client.delete(lock.name), None):
        with Lock(client, FORGED, timeout=3.0, raise_on_release_error=False) as lock:
            if lose:
                lose(lock)
    wait_until(lambda: "is lost" in log.text, "the loss is told")
    lines = [record.getMessage() for record in log.records]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    "error", [LockLost(FORGED), LockConflict(FORGED), LockUnavailable(FORGED), LockUnavailable("key", FORGED)]
)
def test_an_error_is_one_line_whatever_the_name_of_the_lock(error):
    assert str(error).isprintable()
    assert FORGED in error.args, "what code reads is as it is"


def test_an_error_of_another_library_is_one_line():
    assert describe(RuntimeError("first\nsecond")) == r"RuntimeError: first\nsecond"
    assert len(describe(RuntimeError("x" * 1_000_000))) < 2000


#: Lines that concern no single run and no single key.
OF_THE_PROCESS = {
    "keeper", "connections", "outage", "listener", "waiters", "room", "children", "handover",
    "remote_control", "binding", "handle", "server_check", "start", "sender", "requeue", "starter",
    "snapshot", "timeline", "worker_port",
}  # fmt: skip


def calls_of_the_log():
    """Each call of the log: module, level, the text that it begins with, and whether it gives fields."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level)) if level.islower():
                    given = [one for one in node.args if isinstance(one, ast.Name) and one.id == "text"]
                    texts = texts_in(assigned_before(tree, node) if given else node)
                    yield path.stem, level, next(texts, ""), any(keyword.arg == "extra" for keyword in node.keywords)


def assigned_before(tree, call):
    """The last assignment to `text` before a call."""
    return max(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and node.lineno < call.lineno and "text" in names_in(node.targets)
        ),
        key=lambda node: node.lineno,
    )


def names_in(targets):
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def texts_in(node):
    return (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def test_every_line_that_names_a_run_gives_its_fields():
    calls = [*calls_of_the_log()]
    assert len(calls) > 30
    without = [call for call in calls if not call[3]]
    assert [call for call in without if call[0] not in OF_THE_PROCESS] == []
    assert [call for call in without if call[2].startswith(("%s", "task %s[", "task %s is"))] == []


def test_the_page_lists_every_event_and_every_field():
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    table = page.split("## The log")[1].split("## Signals")[0]
    fields_of_the_page = set(re.findall(r"`redislock_(\w+)`", table))
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert fields_of_the_page == {"event", "task", "task_id", "key", "holder", "holder_id", "reason"}
    (row,) = (line for line in table.splitlines() if line.startswith("| `redislock_event`"))
    events = re.findall(r"\bfields\(\s*\"(\w+)\"(?: if \w+ else \"(\w+)\")?", code)
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == {*sum(events, ())} - {""}


def test_the_page_tells_the_arguments_of_every_signal():
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(lock_\w+)` \|.*\| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == set(signals.__all__)
    for name, told in rows.items():
        arguments = {re.match(r"`(\w+)`", part)[1] for part in told.split("; ")}
        assert arguments == getattr(signals, name).providing_args


def test_no_field_has_a_name_of_the_logs_own():
    record = logging.LogRecord("name", logging.INFO, "path", 1, "message", (), None)
    assert [name for name in vars(record) if name.startswith("redislock_")] == []
