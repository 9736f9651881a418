"""The command budget: all that the lock server is sent, by whomever, in each scenario, and what the scripts call.

A scenario that takes one command more fails here. Whoever has a reason for it changes the table, which is what users
pay. No scenario depends on time: a holder ends when the test says so, and no lease is renewed within ten seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery, Task

from celery_redislock import LockConflict
from celery_redislock.app import server_of
from celery_redislock.message.header import HEADER, Header
from celery_redislock.server import tokens
from celery_redislock.server.held import HeldLock
from celery_redislock.server.tokens import mint_publish
from tests.lab.cluster_locks import needs_one_server
from tests.lab.recorder import load_scripts, recording
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept

#: A key that is free is granted, and released where nobody waits.
GRANTED, RELEASED = "acquire: EXISTS SET", "release: EXISTS GET DEL"
#: A key that is held is refused.
REFUSED = "acquire: EXISTS 2 SET GET MGET PTTL TIME"
#: A worker's room stands in line; a release offers it the key; it takes the offer, and calls the message.
STANDS = "stand: 2 MGET ZADD PEXPIRE PTTL TIME"
OFFERED = "release: EXISTS GET DEL 2 ZRANGE ZREM SET PUBLISH"
TAKES = "stand: MGET ZADD PEXPIRE SET ZREM"
#: A message that was called is granted the key; its release leaves nobody behind in line.
IN_ITS_TURN = ["acquire: EXISTS MGET 2 SET GET", "release: GET DEL SET ZRANGE"]
#: From the arrival of a message that waits to its end; the third command is the release of the holder.
WAITED = [REFUSED, STANDS, OFFERED, TAKES, *IN_ITS_TURN]

#: What the lock server is sent in each scenario: each line is one script, and what that calls inside the server. Of the
#: holder of a key only the end is counted, and only where somebody waits for it.
BUDGET = {
    "a run": [GRANTED, RELEASED],
    "a run with lock_limit=3": ["acquire_slot: MGET ZRANGE SET", "release: MGET GET DEL ZRANGE"],
    "a duplicate is skipped": [REFUSED],
    "a duplicate raises": [REFUSED],
    "a duplicate waits for its turn, and runs": WAITED,
    "a successor waits for its holder, and runs": WAITED,
    "a duplicate joins, and has its holder's result": [
        *(REFUSED, STANDS, OFFERED, TAKES),
        "release: EXISTS 2 GET DEL ZRANGE",  # it does not run, so it passes the key on
    ],
    "a copy waits, and is dropped": [
        "acquire: EXISTS 2 SET GET SETRANGE MGET PTTL TIME",  # marks the holder's key
        STANDS,
        "release: EXISTS GET DEL 2 SET 2 ZRANGE ZREM PUBLISH",  # leaves a note
        TAKES,
        "acquire: EXISTS GET DEL ZRANGE",  # finds the note
    ],
    "self.retry() with the key held: both runs": [
        GRANTED,
        "release: GET 2 DEL SET ZRANGE",  # hands the key over
        "acquire: 2 SET 2 GET",
        RELEASED,
    ],
    "a publish in scope run": [],
    "a second publish in scope run": [],
    "a publish in scope job": [GRANTED, "renew: GET PEXPIRE"],
    "a duplicate publish in scope job": [REFUSED],
    "a run in scope job": ["acquire: 2 SET 2 GET", RELEASED],
    "a publish in scope queue": [GRANTED, "renew: GET PEXPIRE"],
    "a duplicate publish in scope queue": [REFUSED],
    "a run in scope queue": ["acquire: SET EXISTS GET DEL", RELEASED],
    "a renewal of 1,000 locks": 2 * ["renew: 500 GET 500 PEXPIRE"],
}

#: The queue of the worker in which holders run, and one that no worker consumes until it is told to.
OTHER, NOBODYS = "lab-other", "lab-nobodys"


class Holder(NamedTuple):
    """A run that holds its key until it is told to end."""

    id: str
    end: Callable[[], object]


class Lab:
    """Two workers of one child each: one runs what a scenario is about, and the other one the holder of its key."""

    def __init__(self, app: Celery, locks: Any, ledger: Any, folder: Path) -> None:
        self.app, self.locks, self.ledger, self.folder = app, locks, ledger, folder
        self.seen: dict[str, list[str]] = {}

    def task(self, name: str) -> Any:
        return self.app.tasks[f"lab.{name}"]

    @contextmanager
    def record(self, scenario: str) -> Iterator[None]:
        with recording(self.locks) as commands:
            yield
        self.seen[scenario] = commands

    def holder(self, key: str, **options: Any) -> Holder:
        """A run of `lab.until` in the other worker."""
        end = self.folder / f"end-{key}"
        result = Task.apply_async(self.task("until"), (key, key, str(end)), queue=OTHER, **options)
        wait_until(lambda: key in self.ledger.items(), "the holder runs")
        return Holder(result.id, end.touch)

    def stands_in_line(self) -> None:
        """Wait until a message waits, and its room stands in line: the holder may end."""
        wait_until(lambda: any(key.endswith(b":line") for key in self.locks.held()), "a room stands in line")

    def all_is_free(self) -> None:
        wait_until(lambda: self.locks.held() == [], "nothing is held any more")


@pytest.fixture
def lab(config, app, locks, ledger, start_worker, tmp_path, monkeypatch):
    load_scripts(locks)
    lab = Lab(app, locks, ledger, tmp_path)
    start_worker(1)
    start_worker(1, config=replace(config, queue=OTHER))
    with lab.task("work").lock_for("k"):  # both connect, and open their rooms
        warm_up = [lab.task("work").apply_async(("k", queue), queue=queue) for queue in (config.queue, OTHER)]
        wait_until(lambda: kept(app, 2) == 2, "both wait")
    for result in warm_up:
        result.get(timeout=20)
    lab.all_is_free()
    return lab


def an_uncontended_run(lab: Lab) -> None:
    for scenario, name in {"a run": "work", "a run with lock_limit=3": "three"}.items():
        with lab.record(scenario):
            lab.task(name).delay("k", "alone").get(timeout=20)
            lab.all_is_free()


def a_duplicate_that_ends(lab: Lab) -> None:
    with lab.task("on_skip").lock_for("k"), lab.record("a duplicate is skipped"):
        result = lab.task("on_skip").delay("k")
        wait_until(result.ready, "it is skipped")
    with lab.task("on_raise").lock_for("k"), lab.record("a duplicate raises"), pytest.raises(LockConflict):
        lab.task("on_raise").delay("k").get(timeout=20)


def a_message_that_waits(lab: Lab) -> None:
    holder = lab.holder("waits")
    with lab.record("a duplicate waits for its turn, and runs"):
        result = lab.task("on_wait").delay("waits", "its turn")
        lab.stands_in_line()
        holder.end()
        assert result.get(timeout=20) == "its turn"
        lab.all_is_free()


def a_message_that_joins(lab: Lab) -> None:
    holder = lab.holder("joins")
    with lab.record("a duplicate joins, and has its holder's result"):
        result = lab.task("on_join").delay("joins", "not run")
        lab.stands_in_line()
        holder.end()
        assert result.get(timeout=20) == "joins"
        lab.all_is_free()


def a_copy(lab: Lab) -> None:
    header = {HEADER: Header(mint_publish()).wire}
    holder = lab.holder("copied", task_id="one-id", headers=header)
    with lab.record("a copy waits, and is dropped"):
        arguments = ("copied", "copied", "")
        Task.apply_async(lab.task("until"), arguments, task_id="one-id", headers=header)
        lab.stands_in_line()
        holder.end()
        lab.all_is_free()


def a_successor(lab: Lab) -> None:
    holder = lab.holder("succeeds")
    with lab.record("a successor waits for its holder, and runs"):
        result = lab.task("on_skip").apply_async(("succeeds", "next"), parent_id=holder.id, root_id=holder.id)
        lab.stands_in_line()
        holder.end()
        assert result.get(timeout=20) == "next"
        lab.all_is_free()


def a_retry(lab: Lab) -> None:
    """Both attempts have one child, so that the second one cannot begin before the first one has ended."""
    with lab.record("self.retry() with the key held: both runs"):
        assert lab.task("held_again").delay("k", "again", 1).get(timeout=20) == "again"
        lab.all_is_free()


def publishes(lab: Lab) -> None:
    for scope, name in {"run": "work", "job": "job", "queue": "queued"}.items():
        with lab.record(f"a publish in scope {scope}"):
            first = lab.task(name).apply_async(("published",), queue=NOBODYS)
        again = "second" if scope == "run" else "duplicate"
        with lab.record(f"a {again} publish in scope {scope}"):
            duplicate = lab.task(name).apply_async(("published",), queue=NOBODYS)
        assert (duplicate.id == first.id) == (scope != "run")


def runs_of_what_was_published(lab: Lab) -> None:
    for scope, name in {"job": "job", "queue": "queued"}.items():
        result = lab.task(name).apply_async(("runs",), queue=scope)
        with lab.record(f"a run in scope {scope}"):
            lab.app.control.add_consumer(scope, destination=["w0@lab"], reply=True, limit=1)
            result.get(timeout=20)
            lab.all_is_free()


def renewal(lab: Lab) -> None:
    server = server_of(lab.app)
    held = []
    for number in range(1000):
        token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
        held.append(HeldLock(server.store, f"held-{number}", token, 30.0))
        held[-1].granted(server.store.acquire(held[-1].key, token, 30.0))
        held[-1].renew_at = math.inf
    with lab.record("a renewal of 1,000 locks"):
        for lock in held[1:]:
            server.keeper.add(lock)
        for lock in held:  # all are due before the keeper looks again: it is woken by the last one
            lock.renew_at = 0.0
        server.keeper.add(held[0])
        wait_until(lambda: all(lock.renew_at for lock in held), "all are renewed")
    for lock in held:
        server.keeper.remove(lock)
    lab.locks.client.flushall()


SCENARIOS = [
    an_uncontended_run,
    a_duplicate_that_ends,
    a_message_that_waits,
    a_message_that_joins,
    a_copy,
    a_successor,
    a_retry,
    runs_of_what_was_published,
    publishes,
    renewal,
]


@needs_one_server("its time-outs and what one connection sends are the table's")
@counts_on_wake_ups("the commands of those who are woken up are counted")
def test_each_scenario_sends_the_lock_server_what_the_table_says_and_nothing_else(lab):
    for scenario in SCENARIOS:
        scenario(lab)
    changed = {name: commands for name, commands in lab.seen.items() if commands != BUDGET.get(name)}
    assert changed == {name: BUDGET.get(name) for name in changed}
    assert lab.seen.keys() == BUDGET.keys()
