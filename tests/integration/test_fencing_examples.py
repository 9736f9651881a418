"""The examples of docs/fencing.md, taken from the page, keep an overtaken holder out of PostgreSQL and SQLite."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import psycopg
import pytest
import redis

from celery_redislock import Lock
from tests.lab.pages import python_of
from tests.lab.servers import postgresql, wait_until, wait_until_stopped
from tests.lab.workers import ROOT

PAGE = ROOT / "docs" / "fencing.md"
EXAMPLES = ("Three examples", "A conditional UPDATE", "An upsert", "A journal with a unique constraint")
NAME = "shop"

#: Their functions; what uses them in a task is another block of the page, and runs in test_doc_examples.py.
FUNCTIONS = "\n".join(python_of(PAGE, section).split("\n@app.task")[0] for section in EXAMPLES)
DEFINITIONS = f"import sqlite3\n{FUNCTIONS}"


@pytest.fixture(scope="module")
def page():
    names = {}
    exec(DEFINITIONS, names)  # noqa: S102
    return SimpleNamespace(**names)


class Psycopg(psycopg.Connection):
    """Takes ``:fence`` as the page has it for ``%(fence)s``."""

    def execute(self, query, params=None, **options):
        return super().execute(re.sub(r":(\w+)", r"%(\1)s", query), params, **options)


@pytest.fixture(scope="session")
def postgresql_server():
    with postgresql() as address:
        yield address


@pytest.fixture(params=["sqlite", "postgresql"])
def connect(request, tmp_path):
    """Connections to an empty database; each statement is a transaction."""
    if request.param == "sqlite":
        yield lambda: closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None))
        return
    address = request.getfixturevalue("postgresql_server")
    yield lambda: closing(Psycopg.connect(address, autocommit=True))
    with psycopg.connect(address, autocommit=True) as db:
        db.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


@pytest.fixture
def db(connect, page):
    with connect() as db:
        for table in (page.ACCOUNT, page.STOCK, page.JOURNAL):
            db.execute(table)
        db.execute("INSERT INTO account (id, balance) VALUES ('7', 100)")
        yield db


@pytest.fixture
def client(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield client


@pytest.fixture
def holders(client):
    """The fences of two holders of one key; the first was overtaken, as after a pause."""
    older, newer = Lock(client, NAME, timeout=10, fence=True), Lock(client, NAME, timeout=10, fence=True)
    older.acquire()
    client.delete(NAME)  # its lease has ended
    newer.acquire()
    return older.fence, newer.fence


#: How one holder writes twice, and what is there then.
WRITES = {
    "update": (
        lambda page, db, value, fence: page.write(db, "7", value, fence),
        "SELECT balance FROM account",
    ),
    "upsert": (
        lambda page, db, value, fence: page.put(db, "7", value, fence),
        "SELECT quantity FROM stock",
    ),
    "journal": (
        lambda page, db, value, fence: page.append(db, "7", str(value), fence),
        "SELECT CAST(entry AS BIGINT) FROM journal ORDER BY number",
    ),
}
every_example = pytest.mark.parametrize("example", WRITES)


@pytest.fixture
def write(example, page):
    return lambda db, value, fence: WRITES[example][0](page, db, value, fence)


@pytest.fixture
def values(example, db):
    """What the table has: the last value, or in the journal all of them."""
    return lambda: [value for (value,) in db.execute(WRITES[example][1]).fetchall()]


@every_example
def test_a_holder_writes_as_often_as_it_likes(write, values, db, holders, example):
    _, fence = holders
    for value in (1, 2, 3):
        write(db, value, fence)
    assert values() == ([1, 2, 3] if example == "journal" else [3])


@every_example
def test_the_next_holder_goes_on_where_the_last_one_ended(write, values, db, holders, example):
    older, newer = holders
    write(db, 1, older)
    write(db, 2, newer)
    assert values() == ([1, 2] if example == "journal" else [2])


@every_example
def test_a_holder_that_was_overtaken_is_refused_and_told_so(write, values, db, holders, page):
    older, newer = holders
    write(db, 2, newer)
    for _ in range(2):
        with pytest.raises(page.Overtaken, match=f"seen a later holder than {older}"):
            write(db, 1, older)
    assert values() == [2]


@every_example
def test_the_newer_holder_may_go_on_after_the_older_one_was_refused(write, values, db, holders, page, example):
    older, newer = holders
    write(db, 2, newer)
    with pytest.raises(page.Overtaken):
        write(db, 1, older)
    write(db, 3, newer)
    assert values() == ([2, 3] if example == "journal" else [3])


@every_example
def test_without_a_fence_nothing_is_written(write, values, db, holders, page, example):
    """As where `redislock_enabled` is False: a fence of None."""
    before = values()
    with pytest.raises((page.Overtaken, db.IntegrityError)):
        write(db, 1, None)
    assert values() == before


def test_who_announced_itself_before_it_read_loses_no_write(page, db, holders):
    """The table of the page: the older holder writes between what the newer one reads and writes."""
    older, newer = holders
    assert page.announce(db, "7", older) == 100
    assert page.announce(db, "7", newer) == 100
    with pytest.raises(page.Overtaken):
        page.write(db, "7", 101, older)
    with pytest.raises(page.Overtaken):
        page.announce(db, "7", older)
    page.write(db, "7", 102, newer)
    assert page.announce(db, "7", newer) == 102


def test_without_it_the_older_holders_write_is_lost(page, db, holders):
    older, newer = holders
    page.write(db, "7", 101, older)  # the newer one has read 100 before
    page.write(db, "7", 102, newer)
    assert page.announce(db, "7", newer) == 102


def test_an_account_that_is_not_there_is_no_success(page, db, holders):
    for call in (lambda: page.announce(db, "8", holders[1]), lambda: page.write(db, "8", 1, holders[1])):
        with pytest.raises(page.Overtaken, match="account 8 is not there, or"):
            call()


@pytest.mark.parametrize("connect", ["postgresql"], indirect=True)
class TestAtTheSameTime:
    """On PostgreSQL two transactions do run side by side; SQLite has one writer at a time."""

    @pytest.mark.parametrize("example", ["update", "upsert"])
    def test_the_older_one_waits_for_the_newer_ones_transaction_and_is_refused(
        self, write, values, db, connect, holders, page
    ):
        older, newer = holders
        write(db, 1, older)
        with connect() as other, ThreadPoolExecutor() as pool:
            with other.transaction():
                write(other, 2, newer)
                waiting = pool.submit(write, db, 3, older)
                wait_until(lambda: waits(other, db), "the older one waits")
            with pytest.raises(page.Overtaken):
                waiting.result(10)
        assert values() == [2]

    @pytest.mark.parametrize("example", ["journal"])
    def test_two_that_append_at_once_do_not_both_pass(self, write, values, db, connect, holders, page):
        older, newer = holders
        with connect() as other, ThreadPoolExecutor() as pool:
            with other.transaction():
                write(other, 2, newer)
                waiting = pool.submit(write, db, 1, older)
                wait_until(lambda: waits(other, db), "the older one waits")
            with pytest.raises(db.IntegrityError):
                waiting.result(10)
        with pytest.raises(page.Overtaken):
            write(db, 1, older)
        assert values() == [2]

    @pytest.mark.parametrize("example", ["journal"])
    def test_a_newer_one_that_appends_at_the_same_time_asks_again_and_passes(self, write, values, db, connect, holders):
        older, newer = holders
        with connect() as other, ThreadPoolExecutor() as pool:
            with other.transaction():
                write(other, 1, older)
                waiting = pool.submit(write, db, 2, newer)
                wait_until(lambda: waits(other, db), "the newer one waits")
            with pytest.raises(db.IntegrityError):
                waiting.result(10)
        write(db, 2, newer)
        assert values() == [1, 2]

    @pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
    @every_example
    def test_under_stricter_isolation_the_database_refuses_it_and_then_so_do_we(
        self, write, values, db, connect, holders, page, level, example
    ):
        older, newer = holders
        write(db, 1, older)
        with connect() as other:
            other.autocommit, other.isolation_level = False, level
            other.execute("SELECT 1 FROM account")  # it sees the tables as they are now
            write(db, 2, newer)
            with pytest.raises((psycopg.errors.SerializationFailure, psycopg.IntegrityError)):
                write(other, 3, older)
            other.rollback()
            with pytest.raises(page.Overtaken):
                write(other, 3, older)
        assert values() == ([1, 2] if example == "journal" else [2])


def waits(other, db):
    """Whether the statement that `db` runs waits for a lock."""
    return other.execute(
        "SELECT 1 FROM pg_stat_activity WHERE pid = :pid AND wait_event_type = 'Lock'", {"pid": db.info.backend_pid}
    ).fetchone()


HOLDER = """
import sys
import redis
from celery_redislock import Lock
lock = Lock(redis.Redis(unix_socket_path=sys.argv[1]), "shop", timeout=1, renew=True, fence=True)
lock.acquire()
lock.check()
print("checked", flush=True)
sys.stdin.readline()
try:
    put(sqlite3.connect("shop.db", isolation_level=None), "7", 1, lock.fence)
except Overtaken as error:
    print(error)
print("over", flush=True)
"""


@pytest.mark.parametrize("connect", ["sqlite"], indirect=True)
def test_a_process_that_was_paused_after_it_checked_its_lock_is_refused(page, db, client, locks, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", f"{DEFINITIONS}\n{HOLDER}", str(locks.socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout.readline() == "checked\n"
        process.send_signal(signal.SIGSTOP)
        wait_until_stopped(process.pid)
        with Lock(client, NAME, timeout=10, fence=True, blocking_timeout=10) as lock:
            page.put(db, "7", 2, lock.fence)
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate("go on\n", timeout=10)
    finally:
        process.kill()
        process.wait()
    assert said.startswith("the stock of 7 has seen a later holder than")
    assert db.execute("SELECT quantity FROM stock").fetchall() == [(2,)]
