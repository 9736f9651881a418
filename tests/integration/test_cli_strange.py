"""The command line amid what others have stored: keys of other programs, and names that would steer a terminal."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_redislock import Lock
from celery_redislock.app import server_of
from celery_redislock.cli import workers
from celery_redislock.cli.commands import locks as group
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import keys_of
from celery_redislock.protocol.tokens import Attempt
from celery_redislock.web.snapshot import Snapshots
from tests.lab.app import make_app
from tests.lab.kinds import left_out
from tests.lab.servers import wait_until

#: Clears the screen of a terminal.
EVIL = "\x1b[2J"
KEY = f"redislock:{{{EVIL}}}"

Cli = Callable[..., Result]


@pytest.fixture
def cli(app) -> Cli:
    """Runs a command in this process: ``cli("list")``; there is no terminal."""

    def run(command: str, *arguments: str, of: Celery = app) -> Result:
        context = CLIContext(of, no_color=True, workdir=None)
        return CliRunner().invoke(group, [command, "--timeout", "0.3", *arguments], obj=context)

    return run


@contextmanager
def answering(app: Celery, name: str, handlers: dict[str, Callable[..., object]]) -> Iterator[None]:
    """Something on the broker answers like a worker."""
    stop = threading.Event()

    def answer() -> None:
        with app.connection() as connection:
            node = app.control.mailbox.Node(name, None, handlers=handlers, channel=connection.default_channel)
            with node.listen():
                while not stop.is_set():
                    try:
                        connection.drain_events(timeout=0.1)
                    except TimeoutError:
                        continue

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.fixture
def evil_worker(app) -> Iterator[None]:
    """It has put an escape into every name."""
    message = {"id": EVIL, "name": EVIL, "lock": KEY, "waited": 1.0, "rank": 1}
    handlers = {
        "redislock_counts": lambda _: {"lines": [[KEY, EVIL, 2, 1]], "rooms": [EVIL], "conflicts": 1},
        "redislock_waiting": lambda _, **__: [message],
        "redislock_task": lambda _, **__: [{"is": "reserved", **message}],
    }
    with answering(app, f"w{EVIL}@lab", handlers):
        yield


def test_nothing_that_was_stored_or_answered_reaches_the_terminal_unescaped(app, cli, locks, evil_worker):
    origin = tokens.origin(f"w{EVIL}@lab", EVIL)
    locks.client.set(KEY, tokens.mint(tokens.mint_nonce(), Attempt(EVIL, 0, 0), origin).value, px=60_000)
    locks.client.set(keys_of(KEY).permit(2), EVIL)
    room = tokens.of_room(tokens.mint_nonce(), EVIL)
    locks.client.zadd(keys_of(KEY).line, {room.value: 1})
    wait_until(lambda: "Waiting: 2 messages in 1 worker, and 1 other process" in cli("show", KEY).stdout, "it answers")
    printed = [
        cli(*command)
        for command in (
            ["list"],
            ["list", "--json"],
            ["list", "--match", f"*{EVIL[-1]}*", "--waiting"],
            ["show", KEY],
            ["show", KEY, "--json"],
            ["export"],
            ["release", KEY],
            ["release", "--match", "*"],
            ["release", keys_of(KEY).permit(2), "--dry-run"],
            ["release", f"{EVIL} nothing"],
        )
    ]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.5)  # as Ctrl-C, while it rests
    printed.append(cli("watch", "--interval", "60"))
    assert [result.exit_code for result in printed] == [0, 0, 0, 0, 0, 0, 3, 3, 0, 1, 0]
    for result in printed:
        assert all(character.isprintable() or character == "\n" for character in result.output), result.output
    assert sum(r"\x1b[2J" in result.output for result in printed) == 9, "as text; JSON has its own escapes"


MESSAGE = {"id": "i", "name": "shop.bill", "lock": "redislock:{a}", "waited": 1.0, "rank": 1}
COUNTS = {"lines": [["redislock:{a}", "shop.bill", 1, 1]], "rooms": [], "conflicts": 0}
#: What other programs answer to any of the questions.
NONSENSE = {
    "nothing": None,
    "a number": 7.5,
    "text": "pong",
    "a list of others": [7, "pong", [], None],
    "a dict without names": {},
    "no list": {**COUNTS, "lines": 7},
    "no lines": {**COUNTS, "lines": [7, "four"]},
    "a short line": {**COUNTS, "lines": [["redislock:{a}", "shop.bill"]]},
    "words for numbers": {**COUNTS, "lines": [["redislock:{a}", "shop.bill", "many", "late"]]},
    "a message without a rank": [{"is": "reserved", "id": "i", "name": "shop.bill", "lock": "redislock:{a}"}, {}],
    "a message with a word for its rank": [{**MESSAGE, "rank": "first"}],
    "a message that is in no known state": [{**MESSAGE, "is": ["waiting"]}],
    "a message that waits for nothing": [{**MESSAGE, "is": "waiting"}],
    "a message that runs since a word": [{"is": "running", "name": "shop.bill", "lock": None, "since": "noon"}],
    "a message with a list for a lock": [{"is": "reserved", "name": "shop.bill", "lock": ["a"]}],
    "a dead message of which no more is known": [{"is": "dead", "name": "shop.bill", "lock": None}],
    "a message with a list for a reservation": [
        {"is": "reserved", "name": "shop.bill", "lock": None, "reserved": ["a"]},
    ],
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_an_answer_that_no_worker_of_this_package_gives_counts_as_none(app, cli, locks, nonsense):
    told = []

    def answer(*_, **__):
        told.append(nonsense)
        return nonsense

    questions = ("redislock_counts", "redislock_waiting", "redislock_task", "redislock_drop")
    origin = tokens.origin("w0@lab", "shop.bill")
    locks.client.set("redislock:{a}", tokens.mint(tokens.mint_nonce(), Attempt("i", 0, 0), origin).value, px=60_000)
    with answering(app, "w0@lab", dict.fromkeys(questions, answer)):
        wait_until(lambda: (cli("list"), told)[1], "it answers")
        commands = (
            ["list"],
            ["show", "redislock:{a}"],
            ["export"],
            ["why", "i"],
            ["release", "redislock:{a}", "--dry-run"],
            ["drop", "redislock:{a}", "--yes"],
        )
        results = [cli(*command) for command in commands]
        snapshots = Snapshots(app, 0.3)
        snapshots.start()
        snapshot = snapshots.fresh()
        snapshots.stop()
    for result in results:
        assert isinstance(result.exception, SystemExit | None), result.exception
    assert (snapshot.problem, snapshot.waiting) == (None, [])
    assert "w0@lab does NOT ANSWER" in results[1].stdout


def test_a_key_that_is_no_string_is_not_said_to_be_free(cli, locks):
    locks.client.rpush("redislock:{k}", "another program's")
    shown = cli("show", "redislock:{k}")
    assert (shown.exit_code, " is free" in shown.output) == (0, False)
    assert "redislock:{k} is held by another library's lock" in shown.stdout


@left_out("its user may use no such name", "acl")
def test_a_key_of_another_program_is_released_only_by_those_who_say_that_they_know_it(app, cli, locks):
    locks.client.set("counter", "4711")
    locks.client.set("redislock:{theirs}", "0c1d2e", px=30_000)
    own = Lock(server_of(app).client, "report", timeout=30)
    assert own.acquire(blocking=False)
    refused = cli("release", "counter", "--yes")
    assert refused.exit_code == 3
    assert (
        "counter is not a lock of this app. Its value (4 characters) is not a token of this package" in refused.stderr
    )
    assert "does not begin with redislock:{" in refused.stderr
    assert "add --foreign" in refused.stderr
    assert "4711" not in refused.output
    assert cli("release", "counter", "--dry-run").exit_code == 3

    some = cli("release", "--match", "*", "--dry-run")
    assert some.exit_code == 0
    assert "Left out 1 key of other programs; add --foreign to include such keys." in some.stdout
    assert "1 key without a token of this package: make sure that each is a lock." in some.stdout
    assert "2 would be released" in some.stdout
    assert "3 would be released" in cli("release", "--match", "*", "--dry-run", "--foreign").stdout
    assert cli("release", "--match", "count*", "--yes").exit_code == 1

    assert "value is not a token of this package: make sure" in cli("release", "redislock:{theirs}", "--dry-run").stdout
    assert cli("release", "redislock:{theirs}", "--yes").exit_code == 0
    assert cli("release", "report", "--yes").exit_code == 0
    assert not own.owned()
    assert locks.client.get("counter") == b"4711"
    assert cli("release", "counter", "--foreign", "--yes").exit_code == 0
    assert not locks.client.exists("counter")


@pytest.mark.parametrize("kind", ["", ":line"])
def test_where_something_else_is_stored_a_release_names_the_key_and_what_to_do(cli, locks, kind):
    if kind:
        origin = tokens.origin("w0@lab", "shop.bill")
        locks.client.set("redislock:{a}", tokens.mint(tokens.mint_nonce(), None, origin).value, px=60_000)
    locks.client.rpush(f"redislock:{{a}}{kind}", "not ours")
    refused = cli("release", "redislock:{a}", "--yes")
    assert refused.exit_code == 69
    assert "redislock:{a}: ResponseError: WRONGTYPE" in refused.stderr
    assert "another program uses this key, or one that belongs to it" in refused.stderr
    assert locks.client.lrange(f"redislock:{{a}}{kind}", 0, -1) == [b"not ours"]


def test_a_key_that_is_not_utf_8_is_listed_and_not_released(cli, locks):
    locks.client.set(b"redislock:{\xff}", "4711")
    assert r"redislock:{\udcff}" in cli("list").stdout
    for which in (["redislock:{\udcff}"], ["--match", "*"]):
        refused = cli("release", "--yes", *which)
        assert (refused.exit_code, refused.stderr.splitlines()[-1]) == (
            3,
            "Not released: a key that is not UTF-8 is not a lock. Delete it with redis-cli.",
        )
    assert locks.client.get(b"redislock:{\xff}") == b"4711"


@left_out("its user may use no such name", "acl")
def test_where_the_output_cannot_show_a_character_it_is_escaped(app):
    """As with LC_ALL=en_US.ISO-8859-1."""
    context = CLIContext(app, no_color=True, workdir=None)
    with Lock(server_of(app).client, "redislock:{caf\xe9 \u2615}", timeout=30):
        listed = CliRunner(charset="iso-8859-1").invoke(group, ["list", "--timeout", "0.3"], obj=context)
    assert listed.exit_code == 0, listed.stderr
    assert "redislock:{caf\xe9 \\u2615}" in listed.stdout_bytes.decode("iso-8859-1")


@left_out("its user may use no such name", "acl")
def test_a_lock_with_a_token_that_its_owner_has_chosen_is_foreign(app, cli):
    own = Lock(server_of(app).client, "report", timeout=30)
    assert own.acquire(blocking=False, token="chosen")  # noqa: S106
    assert cli("release", "report", "--yes").exit_code == 3
    assert own.owned()
    assert cli("release", "report", "--yes", "--foreign").exit_code == 0
    assert not own.owned()


def test_where_no_worker_can_be_asked_processes_are_counted_and_that_is_said(config, cli, locks, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.3)  # Celery goes on trying
    locks.client.set("redislock:{a}", tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None)).value)
    for _ in range(2):
        room = tokens.of_room(tokens.mint_nonce(), "host")
        locks.client.zadd(keys_of("redislock:{a}").line, {room.value: 1})
    outside = "2 other processes in line."
    assert cli("list").stderr == f"Each counts as one message: {outside}\n"
    config.broker = "redis://127.0.0.1:1/0"
    away = make_app(config)
    listed = cli("list", "--json", of=away)
    assert (json.loads(listed.stdout)["waiting"], len(listed.stderr.splitlines())) == (2, 1)
    for command in (["list"], ["export"]):
        result = cli(*command, of=away)
        assert (result.exit_code, "Could not ask the workers: " in result.stderr) == (0, True)
    assert 'celery_redislock_waiting{task=""} 2' in result.stdout
    assert f"Waiting: {outside}" in cli("show", "redislock:{a}", of=away).stdout
    away.close()
    unasked = cli("list", "--timeout", "0").stderr
    assert unasked == "Could not ask the workers: --timeout is 0. Each process in line counts as one message.\n"
