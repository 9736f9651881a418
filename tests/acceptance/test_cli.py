"""The command line: who holds what, who waits, why a task has not run; with real workers."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery.bin.base import CLIContext
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from celery_redislock import Lock, LockConfigError, LockLost
from celery_redislock.app import server_of
from celery_redislock.cli import workers
from celery_redislock.cli.commands import locks as group
from celery_redislock.protocol import tokens
from celery_redislock.protocol.tokens import Attempt
from tests.lab import nursery
from tests.lab.app import make_app
from tests.lab.kinds import left_out, needs_one_server
from tests.lab.servers import need, wait_until
from tests.lab.workers import ROOT, acked, kept

#: What click sends to clear a terminal.
CLEAR = b"\x1b[2J\x1b[1;1H"
FIELDS = ["key", "task", "task_id", "hostname", "since", "ttl", "state", "scope", "waiting"]

Cli = Callable[..., Result]


@pytest.fixture
def cli(app) -> Cli:
    """Runs a command in this process: ``cli("list", "--json")``; there is no terminal."""

    def run(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(group, arguments, obj=CLIContext(app, no_color=True, workdir=None), **options)

    return run


def told(result: Result) -> list[dict[str, Any]]:
    """What a command has printed as JSON."""
    assert result.exception is None, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def program(config, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line as a process of its own."""

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        how = process(config, tmp_path)
        if module == "celery":  # it looks for installed commands as it is imported
            run = subprocess.run([sys.executable, "-m", module, *arguments], **how, check=False)
        else:
            run = nursery.run(module, *arguments, env=how["env"])
        assert "Traceback" not in run.stderr, run.stderr
        return run

    return run


def process(config, folder: Path) -> dict[str, Any]:
    """How the command line is started, with the entry points that pyproject.toml tells of, installed or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "as_installed-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: as-installed\nVersion: 1\n")
    entries = [
        f"[{name}]\n{key} = {value}\n"
        for name, group in project["entry-points"].items()
        for key, value in group.items()
    ]
    (info / "entry_points.txt").write_text("".join(entries))
    env = {**os.environ, "LAB_CONFIG": config.dump(), "PYTHONPATH": f"{folder}:{ROOT}"}
    return {"env": env, "text": True, "stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 60}


@pytest.fixture
def at_a_terminal(config, tmp_path) -> Callable[..., int]:
    """Runs the command line at a terminal, and gives an answer to its question; returns its exit code."""

    def run(answer: str, *arguments: str, meanwhile: Callable[[], None] = lambda: None) -> int:
        command = ["-A", "tests.lab.worker", *arguments, "--timeout", "0.1"]
        env = process(config, tmp_path)["env"]
        ours, terminal = pty.openpty()
        streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
        with closing(nursery.start("celery_redislock", command, env=env, **streams)) as asking:
            os.close(terminal)
            shown = b""
            try:
                while b"[y/N]" not in shown:
                    shown += os.read(ours, 1000)
                meanwhile()
                os.write(ours, f"{answer}\n".encode())
                return asking.wait(30)
            finally:
                asking.send_signal(signal.SIGKILL)
                os.close(ours)

    return run


@pytest.fixture
def cli_says(cli) -> Callable[..., str]:
    """Asks until a command prints these words, for a worker may be too busy to answer in time; returns all it printed.

    ``cli_says("no lock", "why", task_id)``
    """

    def ask(words: str, *arguments: str) -> str:
        said = [""]

        def is_said() -> bool:
            said.append(cli(*arguments).stdout)
            return words in said[-1]

        wait_until(is_said, f"{words!r} from {arguments[0]}")
        return said[-1]

    return ask


def asked(app, command: str) -> list[Any]:
    """What the only worker answers."""
    replies = app.control.broadcast(command, reply=True, limit=1, timeout=5)
    return [answer for reply in replies for answer in reply.values()]


# Its two ways in.


both_ways_in = pytest.mark.parametrize(
    "way_in",
    [("celery", "-A", "tests.lab.worker", "locks"), ("celery_redislock", "-A", "tests.lab.worker")],
    ids=["celery", "python -m"],
)


@both_ways_in
def test_both_ways_in_list_the_same_and_ask_for_a_terminal(program, tasks, way_in):
    with tasks.keyed.lock_for("A1") as lock:
        listed = program(*way_in, "list", "--json")
        assert listed.returncode == 0, listed.stderr
        (one,) = map(json.loads, listed.stdout.splitlines())
        assert list(one) == FIELDS
        assert one["key"] == lock.name
        refused = program(*way_in, "release", lock.name)
        assert refused.returncode == 3
        assert "no terminal to confirm at" in refused.stderr
        assert lock.owned()


@both_ways_in
def test_both_ways_in_end_with_the_same_codes(program, way_in):
    assert program(*way_in, "list").returncode == 1
    usage = program(*way_in, "show")
    assert (usage.returncode, "Usage: " in usage.stderr) == (2, True)
    no_app = program(*(one for one in way_in if one not in {"-A", "tests.lab.worker"}), "list")
    assert (no_app.returncode, "name the app" in no_app.stderr) == (2, True)


def test_a_lock_server_that_is_away_is_named_in_one_line(app, cli, program, config):
    app.conf.redislock_url = config.locks = "redis://127.0.0.1:1/0"
    for arguments in (
        ["list"],
        ["show", "k"],
        ["why", "x", "--timeout", "0.1"],
        ["export"],
        ["release", "k", "--yes"],
        ["drop", "k", "--yes"],
    ):
        result = cli(*arguments)
        assert (result.exit_code, len(result.stderr.splitlines())) == (69, 1), result.stderr
        assert "could not reach the lock server redis://127.0.0.1:1/0: " in result.stderr
        assert "onnection" in result.stderr
    assert program("celery_redislock", "-A", "tests.lab.worker", "list").returncode == 69


# What it shows.


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_the_list_tells_of_a_run_what_its_worker_tells_of_it_too(tasks, app, cli, start_worker, running, pool):
    if pool == "gevent":
        need(pool)
    start_worker(1, "-P", pool)
    run = tasks.work.delay("k", "secret", 60)
    running("secret")
    wait_until(lambda: acked(app, "lab.work") == 1, "the worker knows that it runs")
    (listed,) = told(cli("list", "--json"))
    inspected = []

    def knows_all():
        """A worker waits half a second for the lock server."""
        inspected[:] = asked(app, "locks")[0]
        return [one["state"] for one in inspected] == ["held"]

    wait_until(knows_all, "the worker knows what it holds")
    assert [list(one) for one in (listed, *inspected)] == [FIELDS, FIELDS]
    same = [{name: one[name] for name in FIELDS if name != "ttl"} for one in (listed, *inspected)]
    assert same[0] == same[1]
    assert same[0]["task"] == "lab.work"
    assert same[0]["task_id"] == run.id
    assert same[0]["hostname"] == "w0@lab"
    assert (same[0]["state"], same[0]["scope"], same[0]["waiting"]) == ("held", "run", 0)
    assert "secret" not in str((listed, inspected))
    table = cli("list").stdout.splitlines()
    assert table[0].split()[:4] == ["STATE", "AGE", "WAITING", "KEY"]
    assert table[1].split()[3] == listed["key"]


def test_a_worker_answers_at_once_though_the_lock_server_is_silent_and_says_that_it_does_not_know(
    lock_proxy, tasks, app, start_worker, running
):
    start_worker(1)
    run = tasks.work.delay("k", "first", 60)
    running("first")
    wait_until(lambda: acked(app, "lab.work") == 1, "the worker knows that it runs")
    lock_proxy.blackhole()
    (inspected,) = asked(app, "locks")
    assert [(one["task_id"], one["state"], one["ttl"]) for one in inspected] == [(run.id, "unknown", None)]


def test_a_worker_tells_what_waits_in_it_in_the_same_words(tasks, app, cli, cli_says, program, start_worker):
    start_worker(1)
    with tasks.work.lock_for("k") as lock:
        waiting = tasks.work.delay("k", "secret")
        wait_until(lambda: kept(app) == 1, "it waits")
        wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 1, "its room stands in line")
        inspect = ("celery", "-A", "tests.lab.worker", "inspect", "locks", "--json", "--timeout", "5")
        answers = json.loads(program(*inspect, "--destination", "w0@lab").stdout)
        (one,) = answers["w0@lab"]
        assert list(one) == FIELDS
        assert (one["key"], one["task_id"], one["state"], one["hostname"]) == (
            lock.name,
            waiting.id,
            "waiting",
            "w0@lab",
        )
        assert told(cli("list", "--waiting", "--json"))[0]["waiting"] == 1
        shown = cli_says("Waiting: 1 message in 1 worker.", "show", lock.name)
        assert f"1. task {waiting.id}" in shown
        assert "secret" not in shown
    waiting.get(timeout=20)


def test_each_message_that_waits_is_counted_though_its_worker_stands_in_line_once(
    tasks, app, cli, cli_says, start_worker
):
    start_worker(1)
    with tasks.work.lock_for("k") as lock:
        waiting = [tasks.work.delay("k") for _ in range(30)]
        wait_until(lambda: kept(app) == 30, "they wait")
        assert "  and 20 more" in cli_says("Waiting: 30 messages in 1 worker.", "show", lock.name)

        def are_listed():
            listed = cli("list", "--json")
            return ([one["waiting"] for one in told(listed)], listed.stderr) == ([30], "")

        wait_until(are_listed, "the list counts them, too")
        cli_says('"waiting": 30', "show", lock.name, "--json")
        assert tasks.work.lock_info("k").waiting_processes == 1
        lines = cli_says('celery_redislock_waiting{task="lab.work"} 30', "export").splitlines()
        assert 'celery_redislock_held{task=""} 1' in lines
        app.control.revoke([one.id for one in waiting])
        with ThreadPoolExecutor() as threads, tasks.work.lock_for("j"):
            other = tasks.work.lock_for("j")
            blocks = threads.submit(other.acquire, blocking_timeout=60)
            wait_until(lambda: tasks.work.lock_info("j").waiting_processes == 1, "a process stands in line")
            (one,) = told(cli("list", "--json", "--waiting", "--match", other.name))
            assert one["waiting"] == 1
            assert "Waiting: 1 other process in line." in cli("show", other.name).stdout
        assert blocks.result()
        other.release()


@left_out("its user may read no such key", "acl")
def test_the_list_is_in_the_order_that_is_asked_for_and_may_leave_out_what_is_young(tasks, app, locks, cli):
    key = tasks.keyed.lock_for("b").name
    old = tokens.mint(tokens.mint_nonce(), Attempt("an-id", 0, 0), tokens.origin("w@host", "lab.work"))
    fields = old.value.split(b" ")
    fields[2] = b"%d" % ((datetime.now(UTC).timestamp() - 500) * 1000)
    locks.client.set("redislock:{z}", b" ".join(fields), px=60_000)
    with tasks.keyed.lock_for("b"), tasks.once.lock_for("c") as other:
        by = {order: [one["key"] for one in told(cli("list", "--json", "--sort", order))] for order in ("age", "key")}
        assert by["key"] == sorted([key, other.name, "redislock:{z}"])
        assert by["age"][0] == "redislock:{z}"  # the others may be of the same millisecond
        assert [one["key"] for one in told(cli("list", "--json", "--older-than", "400"))] == ["redislock:{z}"]
        assert "No lock on" in cli("list", "--older-than", "1e12").stderr  # before there were years
        waiting = ThreadPoolExecutor(1).submit(Lock(server_of(app).client, other.name).acquire, blocking_timeout=20)
        wait_until(lambda: locks.client.exists(f"{other.name}:line"), "another waits for it")
        assert told(cli("list", "--json", "--sort", "waiting"))[0]["key"] == other.name
    assert waiting.result(30)
    assert cli("list", "--sort", "size").exit_code == 2


def test_a_shell_completes_commands_options_and_keys(app, config, tasks, tmp_path):
    def completed(*words: str) -> list[str]:
        of_locks = ShellComplete(group, {"obj": CLIContext(app, no_color=True, workdir=None)}, "locks", "")
        return [item.value for item in of_locks.get_completions(list(words[:-1]), words[-1])]

    def completed_by_bash(*words: str) -> list[str]:
        options = process(config, tmp_path)
        line = {
            "COMP_WORDS": " ".join(["celery", "-A", "tests.lab.worker", "locks", *words]),
            "COMP_CWORD": str(3 + len(words)),
        }
        options["env"] |= {**line, "_CELERY_COMPLETE": "bash_complete"}
        run = subprocess.run([Path(sys.executable).parent / "celery"], **options, check=False)
        return [line.partition(",")[2] for line in run.stdout.split()]

    with tasks.keyed.lock_for("A1") as lock, tasks.keyed.lock_for("B1"):
        assert completed_by_bash("show", "redislock:{stock:A") == [lock.name]
        assert len(completed_by_bash("release", "redislock:")) == 2
    assert "drop" in completed("dr")
    assert "--older-than" in completed("list", "--")
    config.locks = "redis://127.0.0.1:1/0"
    assert completed_by_bash("show", "redislock:") == []


@left_out("its user may read no key without the prefix", "acl")
def test_the_list_can_be_narrowed_and_is_in_the_order_of_age(tasks, locks, cli):
    with tasks.keyed.lock_for("A1") as old, tasks.keyed.lock_for("B1") as new:
        locks.client.set("redislock:{not ours}:fence", 7)
        locks.client.set("something else", "a value")
        assert cli("show", "redislock:{not ours}:fence").exit_code == 1
        assert [one["key"] for one in told(cli("list", "--json"))] == [old.name, new.name]
        assert [one["key"] for one in told(cli("list", "--match", "*B1*", "--json"))] == [new.name]
        assert [one["key"] for one in told(cli("list", "--match", "*", "--json"))] == [old.name, new.name]
        none = cli("list", "--task", "lab.work")
        assert (none.exit_code, "matches; there may be others." in none.stderr) == (1, True)
        assert cli("list", "--waiting").exit_code == 1


@left_out("its user may use no such name", "acl")
def test_a_lock_of_any_name_and_one_of_another_library_are_found_by_a_pattern_and_shown_for_what_they_are(
    app, locks, cli
):
    with Lock(server_of(app).client, "report", timeout=30):
        (one,) = told(cli("list", "--match", "rep*", "--json"))
        assert (one["key"], one["task"], one["state"]) == ("report", None, "held")
        assert "Its run" not in cli("release", "report", "--dry-run").stdout
    locks.client.set("redislock:{theirs}", "0c1d2e", px=30_000)
    (one,) = told(cli("list", "--json"))
    assert (one["key"], one["hostname"], one["since"]) == ("redislock:{theirs}", None, None)
    assert "held by another library's lock" in cli("show", "redislock:{theirs}").stdout


def test_a_call_of_a_task_is_shown_by_its_arguments(tasks, cli):
    with tasks.keyed.lock_for("A1") as lock:
        assert lock.name in cli("show", "--task", "lab.keyed", "--args", '["A1"]').stdout
        assert lock.name in cli("show", "--task", "lab.keyed", "--kwargs", '{"sku": "A1"}').stdout
    free = cli("show", "--task", "lab.keyed", "--args", '["A1"]')
    assert (free.exit_code, "is free." in free.stderr) == (1, True)


def test_a_call_that_needs_several_keys_is_shown_with_each_of_them(tasks, app, cli, cli_says, start_worker):
    start_worker(1)
    show = ("show", "--task", "lab.transfer", "--args", "[1, 7]", "--timeout", "3")
    with tasks.account_only.lock_for(7) as held:
        waits = tasks.transfer.delay(1, 7)
        wait_until(lambda: kept(app) == 1, "it waits")
        shown = cli_says("Waiting: 1 message in 1 worker.", *show)
        assert f"{held.name} is held by a lock outside tasks on " in shown
        assert f"1. task {waits.id}" in shown
        result = cli(*show)
        assert (result.exit_code, result.stderr) == (0, "redislock:{account:1} is free.\n")
        assert [one["key"] for one in told(cli(*show, "--json"))] == [held.name]
    waits.get(timeout=20)
    free = cli(*show)
    keys = "redislock:{account:1} is free.\nredislock:{account:7} is free.\n"
    assert (free.exit_code, free.stderr) == (1, keys)


def test_a_call_is_shown_with_what_it_also_needs(tasks, app, cli):
    with Lock(server_of(app).client, "redislock:{machine:m1}", timeout=30) as held:
        shown = cli("show", "--task", "lab.job_of_machine", "--args", '["c1", "m1"]')
    assert f"{held.name} is held by a lock outside tasks on " in shown.stdout
    assert (shown.exit_code, shown.stderr) == (0, "redislock:{customer:c1} is free.\n")


def test_a_call_whose_runs_have_a_rate_is_shown_too(tasks, cli, start_worker):
    start_worker(1)
    show = ("show", "--task", "lab.rated_slowly", "--args", '["k"]')
    assert cli(*show).exit_code == 1
    for _ in range(2):
        tasks.rated_slowly.delay("k").get(timeout=20)
    shown = cli(*show)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert re.match(r"The rate of redislock:\{lab\.rated_slowly:\w+\}, 2/m, is used up until ", shown.stdout)


def test_a_setting_of_a_task_that_is_found_wrong_only_in_its_call_is_an_error_of_use(app, cli, monkeypatch):
    def demands(*_):
        raise LockConfigError("wrong in this call")

    monkeypatch.setattr(app.tasks["lab.keyed"].lock_plan, "demand", demands)
    result = cli("show", "--task", "lab.keyed", "--args", '["A1"]')
    assert (result.exit_code, "Error: wrong in this call" in result.stderr) == (2, True)


@left_out("its user may read no key without the prefix", "acl")
def test_a_key_that_is_named_without_its_prefix_is_told_from_a_free_one(tasks, cli):
    with tasks.keyed.lock_for("A1") as lock:
        name = lock.name.rstrip("}").split("{")[1]
        answer = f"{name} is free; the keys of tasks look like {lock.name}.\n"
        for command in ("show", "release"):
            assert (found := cli(command, name)).exit_code == 1
            assert found.stderr == answer
        shortened = cli("show", f"{lock.name[:14]}…").stderr
        assert shortened.endswith("… is free; `celery locks list | cat` shows whole keys.\n")
        assert "it is a task's name: try `celery locks show --task`.\n" in cli("show", "lab.keyed").stderr


def test_what_is_shown_of_a_lock_says_if_no_worker_answered(tasks, app, cli, start_worker):
    with tasks.work.lock_for("k") as lock:
        assert "No worker answered.\nNothing waits for it.\n" in cli("show", lock.name).stdout
        start_worker(1)
        assert "answered" not in cli("show", lock.name, "--timeout", "3").stdout


def test_a_shortened_task_id_is_recognized(cli):
    assert "is unknown; an id that ends in … is shortened.\n" in cli("why", "0b5c7a3e-…").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "lab.nothing"], "is not a task of this app"),
        (["--task", "lab.plain"], "is not a LockedTask"),
        (["--task", "lab.keyed", "--args", "secret"], "is not a JSON array"),
        (["--task", "lab.keyed", "--args", '{"secret": 1}'], "is not a JSON array"),
        (["--task", "lab.keyed", "--args", '["secret", "", 0, 0]'], "too many positional arguments"),
        ([], "give either a KEY or a --task"),
    ],
)
def test_what_cannot_be_shown_is_an_error_of_use_that_shows_no_argument(cli, arguments, message):
    result = cli("show", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "secret" not in result.output


def test_an_empty_key_as_of_a_variable_that_is_not_set_is_no_call_of_a_task(cli):
    result = cli("show", "")
    assert (result.exit_code, "--task" in result.stderr, " is free" in result.stderr) == (1, False, True)


def test_where_locks_are_switched_off_a_call_of_a_task_has_none_to_show(app, cli):
    app.conf.redislock_enabled = False
    result = cli("show", "--task", "lab.keyed", "--args", '["A1"]')
    assert (result.exit_code, "redislock_enabled is False" in result.stderr) == (2, True)


def test_a_key_that_nobody_holds_is_listed_while_messages_wait_for_it(tasks, app, cli, start_worker, running, gate):
    start_worker(2)
    with tasks.work.lock_for("k"):
        waits = tasks.work.delay("k", "waits")
        wait_until(lambda: kept(app) == 1, "it waits")
        assert [(one["state"], one["waiting"]) for one in asked(app, "locks")[0]] == [("waiting", 0)]
        for item in ("one", "another"):
            tasks.work.delay(item, item, gate)
            running(item)
    key = tasks.work.lock_for("k").name
    (free,) = told(cli("list", "--waiting", "--json", "--match", key, "--timeout", "3"))
    assert (free["key"], free["state"], free["waiting"], free["task_id"]) == (key, "free", 1, None)
    assert told(cli("list", "--task", "lab.work", "--waiting", "--json", "--timeout", "3")) == [free]
    shown = cli("show", key, "--timeout", "3")
    assert (shown.exit_code, "Waiting: 1 message in 1 worker." in shown.stdout) == (1, True)
    lines = cli("export", "--timeout", "3").stdout.splitlines()
    assert 'celery_redislock_held{task="lab.work"} 2' in lines
    assert 'celery_redislock_waiting{task="lab.work"} 1' in lines
    with tasks.work.lock_for("k"):  # the worker was offered the key, and stands in line no more
        (held,) = told(cli("list", "--waiting", "--json", "--timeout", "3"))
        assert (held["state"], held["waiting"]) == ("held", 1)
    gate.open()
    assert waits.get(timeout=20) == "waits"


def test_calls_that_are_merged_are_counted_at_the_message_that_waits_and_their_arguments_are_not_shown(
    tasks, cli, start_worker, running, gate
):
    start_worker(1)
    tasks.latest.delay("k", "holder", str(gate))
    running("holder")
    ticket, *_ = [tasks.latest.delay("k", f"secret {number}") for number in range(3)]
    rows = told(cli("list", "--json"))
    assert [(one["key"].rpartition("}")[2], one["state"], one.get("calls")) for one in rows] == [
        ("", "held", None),
        (":queued", "queued", 3),
    ]
    shown = cli("show", rows[0]["key"])
    assert f"is kept for task {ticket.id}, queued by " in shown.stdout
    assert "So far it stands for 3 calls." in shown.stdout
    table = cli("list").stdout
    assert table.splitlines()[-1].endswith("  lab.latest (3 calls)")
    assert "secret" not in table + shown.stdout + str(rows)
    gate.open()
    assert ticket.get(timeout=20) == "secret 2"


@needs_one_server("all its keys are read")
def test_a_call_is_counted_until_it_is_due_and_no_other_key_of_its_lock_is_taken_for_a_lock(tasks, cli, locks):
    for number in range(2):
        tasks.collected_debounced.delay("k", number)
    (row,) = told(cli("list", "--json", "--match", "*"))
    assert (row["state"], row["calls"]) == ("queued", 2)
    due_in = (datetime.fromisoformat(row["due"]) - datetime.now(UTC)).total_seconds()
    assert 500 < due_in <= 601
    assert len(locks.client.keys("redislock:*")) > 1
    assert re.search(r"So far it stands for 2 calls, due in (9m..|10m00)s\.", cli("show", row["key"]).stdout)
    assert re.search(r"lab\.collected_debounced \(2 calls, due in (9m..|10m00)s\)$", cli("list").stdout.rstrip())


# To release a key.


def test_a_holder_whose_worker_is_dead_is_shown_as_one_that_does_not_answer_and_does_not_run_in_the_next_of_its_name(
    config, tasks, app, cli, cli_says, start_worker, running
):
    config.settings["redislock_lease"] = 120.0  # so long that all answers come before its end
    worker = start_worker(2)
    tasks.work.delay("k", "first", 90)
    running("first")
    tasks.work.delay("k", "second")
    wait_until(lambda: kept(app) == 1, "the second waits")
    wait_until(lambda: tasks.work.lock_info("k").waiting_processes == 1, "its room stands in line")
    (held,) = told(cli("list", "--json", "--timeout", "3"))
    assert [(one["state"], one["waiting"]) for one in asked(app, "locks")[0]] == [("held", 1), ("waiting", 0)]
    worker.kill()
    silent = cli("list", "--json")
    assert [one["waiting"] for one in told(silent)] == [1]
    assert silent.stderr == "Each counts as one message: 1 other process in line.\n"
    assert "Its worker w0@lab does NOT ANSWER" in cli("show", held["key"]).stdout
    assert "Its worker w0@lab does NOT ANSWER" in cli("release", held["key"]).stdout
    start_worker(1, "-n", "w0@lab")
    cli_says("Its worker w0@lab answers: the task does not run there.", "release", held["key"])


def test_the_silence_of_a_worker_is_said_to_mean_that_it_may_have_no_remote_control(
    config, tasks, app, cli, start_worker, running, gate
):
    config.settings["worker_enable_remote_control"] = False
    start_worker(2)
    tasks.work.delay("k", "first", gate)
    running("first")
    waits = tasks.work.delay("k", "second")
    wait_until(lambda: waits.state == "RETRY", "it waits")
    key = tasks.work.lock_for("k").name
    silence = (
        "Its worker w0@lab does NOT ANSWER: it is shutting down, busy, cut off or dead, uses another broker, or has"
    )
    for arguments in (("show", key), ("release", key), ("why", waits.id)):
        assert f"{silence} no remote control.\n" in cli(*arguments).stdout
    assert "too busy, cut off or without remote control; or" in cli("why", waits.id).stdout
    gate.open()
    assert waits.get(timeout=20) == "second"


def test_where_the_broker_is_away_the_lock_server_is_asked_all_the_same(config, tasks, locks, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.3)  # Celery goes on trying
    config.broker = "redis://127.0.0.1:1/0"
    away = CLIContext(make_app(config), no_color=True, workdir=None)

    def cli(*arguments: str) -> str:
        return CliRunner().invoke(group, [*arguments, "--timeout", "0.1"], obj=away).output

    with tasks.keyed.lock_for("A1") as lock:
        shown = cli("show", lock.name)
    assert f"{lock.name} is held by a lock outside tasks" in shown
    assert "Could not ask the workers: " in shown
    held = tokens.mint(tokens.mint_nonce(), Attempt("an-id", 0, 0), tokens.origin("w@host", "lab.work"))
    locks.client.set("redislock:{k}", held.value)
    shown = cli("release", "redislock:{k}", "--dry-run")
    assert "does NOT ANSWER" not in shown, "nobody has asked it"
    assert "; check broker_url." in shown


def test_a_key_that_is_released_is_the_next_ones_and_its_holder_is_told_of_the_loss(
    tasks, app, config, cli, cli_says, start_worker, running, ledger
):
    config.settings["redislock_lease"] = 6.0
    start_worker(2)
    first = tasks.work.delay("k", "first", 90)
    running("first")
    wait_until(lambda: acked(app, "lab.work") == 1, "the worker knows that it runs")
    second = tasks.work.delay("k", "second")
    (held,) = told(cli("list", "--json"))
    released = cli("release", held["key"], "--yes", "--timeout", "20")  # a worker that answers ends that
    assert released.exit_code == 0, released.output
    assert f"held by task {first.id} on w0@lab" in released.stdout
    assert "Its worker w0@lab answers: the task RUNS there now." in released.stdout
    assert "released: 1" in released.stdout
    assert second.get(timeout=20) == "second"
    cli_says(f"It does not hold {held['key']}", "why", first.id)
    wait_until(lambda: [loss["task_id"] for loss in ledger.losses()] == [first.id], "the first is told", 10)


def test_a_dry_run_and_a_release_that_nobody_can_be_asked_about_leave_the_key(tasks, cli):
    with tasks.keyed.lock_for("A1") as lock:
        assert cli("release", lock.name).exit_code == 3
        dry = cli("release", "--match", "redislock:*", "--dry-run")
        assert (dry.exit_code, "1 would be released; nothing was" in dry.stdout) == (0, True)
        assert lock.owned()
    assert cli("release").exit_code == 2
    assert cli("release", lock.name, "--yes").exit_code == 1
    assert cli("release", "--match", "redislock:*", "--yes").exit_code == 1


@pytest.mark.parametrize(("answer", "code"), [("n", 3), ("y", 0)])
def test_at_a_terminal_a_release_asks_and_does_what_it_is_told(tasks, at_a_terminal, answer, code):
    told_of_the_loss = pytest.raises(LockLost) if answer == "y" else nullcontext()
    with told_of_the_loss, tasks.keyed.lock_for("A1") as lock:
        assert at_a_terminal(answer, "release", lock.name) == code
        assert lock.owned() is (answer == "n")
        assert (tasks.keyed.lock_info("A1") is None) is (answer == "y")


def test_a_key_whose_holder_changes_while_somebody_thinks_is_not_released(tasks, at_a_terminal):
    first, second = (tasks.keyed.lock_for("A1") for _ in range(2))
    assert first.acquire(blocking=False)

    def another_comes() -> None:
        first.release()
        assert second.acquire(blocking=False)

    assert at_a_terminal("y", "release", first.name, meanwhile=another_comes) == 3
    assert second.owned()
    second.release()


def test_each_kind_of_holder_can_be_released_alone(app, tasks, cli, locks):
    """A job whose message has not come, the place in a queue, and two permits."""
    tasks.job.delay("k")
    tasks.queued.delay("k")
    permits = [Lock(server_of(app).client, "redislock:{seats}", timeout=30, limit=3) for _ in range(2)]
    assert all(permit.acquire(blocking=False) for permit in permits)
    keys = [one["key"] for one in told(cli("list", "--json"))]
    assert [key.rpartition("}")[2] for key in keys] == ["", ":queued", "", ":permit:2"]
    assert [one["key"] for one in told(cli("show", "redislock:{seats}", "--json"))] == keys[2:]
    every = cli("release", "--match", "redislock:*", "--dry-run").stdout.splitlines()
    assert [line.split()[3] for line in every[1:5]] == keys
    assert every[5:] == ["4 would be released; nothing was."]
    for key in (keys[2], keys[1], keys[0]):
        assert cli("release", key, "--yes").exit_code == 0
        assert cli("release", key, "--yes").exit_code == 1
        assert key.encode() not in locks.held()
    assert [permit.owned() for permit in permits] == [False, True]
    assert f"are held: {keys[3]}. Name one of them" in cli("release", "redislock:{seats}", "--yes").stderr
    assert cli("release", keys[3], "--yes").exit_code == 0
    assert locks.held() == []


# To watch.


def test_the_totals_are_exported_as_prometheus_takes_them(tasks, app, cli_says, start_worker):
    start_worker(1)
    with tasks.work.lock_for("k"):
        waiting = tasks.work.delay("k")
        wait_until(lambda: kept(app) == 1, "it waits")
        lines = cli_says('celery_redislock_waiting{task="lab.work"} 1', "export").splitlines()
        assert 'celery_redislock_held{task=""} 1' in lines
        (oldest,) = [line for line in lines if line.startswith('celery_redislock_oldest_wait_seconds{task="lab.work"}')]
        assert 0 < float(oldest.split()[1]) < 60
    waiting.get(timeout=20)


def test_watch_shows_what_is_held_until_it_is_interrupted(tasks, config, tmp_path):
    how = process(config, tmp_path)
    command = [sys.executable, "-m", "celery_redislock", "-A", "tests.lab.worker", "watch", "--timeout", "0.1"]
    # A shell that runs the tests in the background has SIGINT ignored, and what they start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tasks.keyed.lock_for("A1") as lock:
        options = {"env": how["env"], "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([*command, "--interval", "0.2"], **options) as watching:
            try:
                head, names, row = (watching.stdout.readline() for _ in range(3))
                watching.send_signal(signal.SIGINT)
                _, errors = watching.communicate(timeout=20)
            finally:
                watching.kill()
    assert "1 held, 0 kept, 0 waiting, 0 conflicts in 0 workers" in head
    assert names.startswith("STATE")
    assert row.split()[3] == lock.name
    assert (watching.returncode, errors) == (0, "")


@pytest.mark.parametrize("columns", ["40", "80"])
def test_at_a_terminal_watch_clears_the_screen_for_each_picture_and_no_line_is_wider_than_it(
    tasks, config, tmp_path, columns
):
    command = ["-A", "tests.lab.worker", "watch", "--timeout", "0.1", "--interval", "0.1"]
    env = {**process(config, tmp_path)["env"], "COLUMNS": columns, "LINES": "10"}
    ours, terminal = pty.openpty()
    drawn = b""
    lock = tasks.keyed.lock_for("A1")
    with lock, closing(nursery.start("celery_redislock", command, env=env, stdout=terminal)) as it:
        os.close(terminal)
        try:
            while drawn.count(CLEAR) < 3:
                drawn += os.read(ours, 1000)
            it.send_signal(signal.SIGINT)
            assert it.wait(30) == 0
        finally:
            it.send_signal(signal.SIGKILL)
            os.close(ours)
    _, first, second = drawn.split(CLEAR)[:3]
    for picture in (first, second):
        lines = picture.decode().split("\r\n")[:-1]
        assert max(map(len, lines)) <= int(columns)
        assert "1 held" in lines[0]
        (names, row) = lines[-2:]
        assert names.startswith("STATE")
        assert row.startswith("held")
        if columns == "80":
            assert row.split()[3] == lock.name
