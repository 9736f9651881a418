"""The command budget: all that the lock server is sent, by whomever, in each scenario, and what the scripts call.

A scenario that takes one command more fails here. Whoever has a reason for it changes the table, which is what users
pay. A holder ends when the test says so, and no lease is renewed within half a minute. One thing goes by time: a key is
kept for a second for the room to which it is offered. Where the machine stood still, a scenario is played once more.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
from celery import Celery, Task
from redis.crc import key_slot

from celery_redislock import LockConflict
from celery_redislock.app import server_of
from celery_redislock.hold.held_lock import HeldLock
from celery_redislock.hold.keeper import Keeper
from celery_redislock.line.lines import OFFERED_FOR
from celery_redislock.message.header import HEADER, Header
from celery_redislock.protocol import tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import mint_publish
from tests.lab.app import make_app
from tests.lab.asking import acquire
from tests.lab.kinds import ON_A_CLUSTER
from tests.lab.recorder import load_scripts, recording
from tests.lab.servers import wait_until
from tests.lab.wake_ups import counts_on_wake_ups
from tests.lab.workers import kept

#: A key that is free is granted, and released where nobody waits.
GRANTED, RELEASED = "acquire: EXISTS SET", "release: EXISTS GET DEL"
#: A key that is held is refused.
REFUSED = "acquire: EXISTS SET MGET PTTL TIME"
#: A worker's room stands in line; a release offers it the key; it takes the offer, and calls the message.
STANDS = "stand: ZADD PEXPIRE MGET PTTL TIME"
OFFERED = "release: EXISTS GET DEL 2 ZRANGE SET ZREM PUBLISH"
TAKES = "stand: ZADD PEXPIRE MGET ZRANGE SET ZREM TIME"
#: A message that was called is granted the key; its release leaves nobody behind in line.
IN_ITS_TURN = ["acquire: MGET SET", RELEASED]
#: From the arrival of a message that waits to its end; the third command is the release of the holder.
WAITED = [REFUSED, STANDS, OFFERED, TAKES, *IN_ITS_TURN]

#: What a publisher sends once its message is out: its reservation lives longer, and nobody takes it over any more.
SENT = "renew: GET SETRANGE PEXPIRE"

#: What the lock server is sent in each scenario: each line is one script, and what that calls inside the server. Of the
#: holder of a key only the end is counted, and only where somebody waits for it.
BUDGET = {
    "a run": [GRANTED, RELEASED],
    "a run with lock_limit=3": ["acquire: MGET ZRANGE SET", "release: MGET DEL ZRANGE"],
    "a run with lock_rate": ["acquire: MGET ZRANGE SET"],
    "a duplicate is skipped": [REFUSED],
    "a duplicate raises": [REFUSED],
    "a duplicate waits for its turn, and runs": WAITED,
    "a duplicate waits for its group's turn, and runs": [
        "acquire: MGET ZMSCORE 2 TIME ZADD ZREMRANGEBYSCORE PEXPIRE PTTL",
        *(STANDS, OFFERED, TAKES),
        *("acquire: MGET ZMSCORE ZADD SET", RELEASED),
    ],
    "a successor waits for its holder, and runs": WAITED,
    "a duplicate joins, and has its holder's result": [
        *(REFUSED, STANDS, OFFERED, TAKES),
        "release: EXISTS 2 GET DEL ZRANGE",  # it does not run, so it passes the key on
    ],
    "a copy waits, and is dropped": [
        "acquire: EXISTS SET MGET SETRANGE PTTL TIME",  # marks the holder's key
        STANDS,
        "release: EXISTS GET DEL 2 SET 2 ZRANGE ZREM PUBLISH",  # leaves a note
        TAKES,
        "acquire: MGET EXISTS DEL ZRANGE",  # finds the note
    ],
    "self.retry() with the key held: both runs": [
        GRANTED,
        "release: GET 2 DEL SET ZRANGE",  # hands the key over
        "acquire: 2 GET SET",
        RELEASED,
    ],
    "a publish in scope run": [],
    "a second publish in scope run": [],
    "a publish in scope job": ["reserve: EXISTS SET", SENT],
    "a duplicate publish in scope job": ["reserve: EXISTS SET 2 GET PTTL"],
    "a run in scope job": ["acquire: 2 GET SET", RELEASED],
    "a publish that opens a window": ["reserve: EXISTS 2 SET", "renew: 2 GET 2 SETRANGE PEXPIRE"],
    "a duplicate publish in that window": ["reserve: EXISTS 3 GET PTTL"],
    "a publish in scope queue": ["reserve: GET SET", SENT],
    "a duplicate publish in scope queue": ["reserve: GET PTTL"],
    "a run in scope queue": ["acquire: 2 GET EXISTS SET DEL", RELEASED],
    "a publish whose call sets scope job": ["reserve: EXISTS SET", SENT],
    "a duplicate publish whose call sets scope job": ["reserve: EXISTS SET 2 GET PTTL"],
    "a run whose call sets scope job": ["acquire: 2 GET SET", RELEASED],
    "a run whose call sets other options": [GRANTED, RELEASED],
    "a publish with lock_arguments": ["merge: 5 TIME 3 GET HGET 2 HSET PTTL PEXPIRE SET", SENT],
    "a publish that is merged": ["merge: 4 TIME 3 GET HGET HMGET HSET 2 PTTL PEXPIRE SET"],
    "a run of merged calls": [
        "acquire: MGET 3 HGET 2 GET 3 TIME 2 HMGET ZRANGE 2 SET 2 DEL RENAME PTTL HSET",
        "release: GET 2 DEL ZRANGE",
    ],
    "a renewal of 1,000 locks": 2 * ["renew: 500 GET 500 PEXPIRE"],
}
HELD = [f"redislock:{{held-{number}}}" for number in range(1000)]
#: A Cluster is sent the same, but one renewal for each hash slot among the 500 locks that are renewed together.
if ON_A_CLUSTER:
    hash_slots = [key_slot(key.encode()) for key in HELD]
    counts = [*Counter(hash_slots[:500]).values(), *Counter(hash_slots[500:]).values()]
    BUDGET["a renewal of 1,000 locks"] = sorted(
        "renew: GET PEXPIRE" if count == 1 else f"renew: {count} GET {count} PEXPIRE" for count in counts
    )

#: The queue of the worker in which holders run, and one that no worker consumes until it is told to.
OTHER, NOBODYS = "lab-other", "lab-nobodys"


class Holder(NamedTuple):
    """A run that holds its key until it is told to end."""

    id: str
    end: Callable[[], object]


class Lab:
    """Two workers of one child each: one runs what a scenario is about, and the other one the holder of its key."""

    def __init__(self, app: Celery, locks: Any, ledger: Any, folder: Path) -> None:
        self.app, self.locks, self.ledger, self.folder, self.turn = app, locks, ledger, folder, 0
        self.seen: dict[str, list[str]] = {}

    def play(self, scenario: Callable[[Lab], None]) -> None:
        """Play a scenario, and once more where an offer may have ended meanwhile, so that more was sent."""
        for self.turn in range(5):
            before, began = self.seen.copy(), time.monotonic()
            scenario(self)
            was_quick = time.monotonic() - began < OFFERED_FOR
            if was_quick or all(BUDGET.get(name) == self.seen[name] for name in self.seen.keys() - before.keys()):
                return
            self.seen = before

    def key(self, name: str) -> str:
        """A key of this turn's own."""
        return f"{name}-{self.turn}"

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
def lab(config, locks, ledger, start_worker, tmp_path):
    load_scripts(locks)
    config.settings["redislock_client_options"] = {"socket_timeout": 10.0, "socket_connect_timeout": 10.0}
    config.settings["task_annotations"] = {
        "*": {"lock_lease": 90.0},  # so long that nobody renews it
        "lab.cooling_job": {"lock_window": 3600.0},
    }
    app = make_app(config)
    lab = Lab(app, locks, ledger, tmp_path)
    start_worker(1)
    start_worker(1, config=replace(config, queue=OTHER))
    with lab.task("work").lock_for("k"):  # both connect, and open their rooms
        warm_up = [lab.task("work").apply_async(("k", queue), queue=queue) for queue in (config.queue, OTHER)]
        wait_until(lambda: kept(app, 2) == 2, "both wait")
    for result in warm_up:
        result.get(timeout=20)
    lab.all_is_free()
    yield lab
    app.close()


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
    holder = lab.holder(key := lab.key("waits"))
    with lab.record("a duplicate waits for its turn, and runs"):
        result = lab.task("on_wait").delay(key, "its turn")
        lab.stands_in_line()
        holder.end()
        assert result.get(timeout=20) == "its turn"
        lab.all_is_free()


def a_message_that_takes_turns(lab: Lab) -> None:
    """It sends as many commands as one that waits otherwise."""
    key, gate = lab.key("turns"), lab.folder / f"end-turns-{lab.turn}"
    holder = lab.task("one_by_turns").apply_async((key, "A", "holds", str(gate)), queue=OTHER)
    wait_until(lambda: "Aholds" in lab.ledger.items()[-1:], "the holder runs")
    with lab.record("a duplicate waits for its group's turn, and runs"):
        result = lab.task("one_by_turns").delay(key, "B", "its turn")
        lab.stands_in_line()
        gate.touch()
        assert result.get(timeout=20) == "its turn"
        lab.all_is_free()
    holder.get(timeout=20)


def a_message_that_joins(lab: Lab) -> None:
    holder = lab.holder(key := lab.key("joins"))
    with lab.record("a duplicate joins, and has its holder's result"):
        result = lab.task("on_join").delay(key, "not run")
        lab.stands_in_line()
        holder.end()
        assert result.get(timeout=20) == key
        lab.all_is_free()


def a_copy(lab: Lab) -> None:
    header = {HEADER: Header(mint_publish()).wire}
    key = lab.key("copied")
    holder = lab.holder(key, task_id=key, headers=header)
    with lab.record("a copy waits, and is dropped"):
        Task.apply_async(lab.task("until"), (key, key, ""), task_id=key, headers=header)
        lab.stands_in_line()
        holder.end()
        lab.all_is_free()


def a_successor(lab: Lab) -> None:
    holder = lab.holder(key := lab.key("succeeds"))
    with lab.record("a successor waits for its holder, and runs"):
        result = lab.task("on_skip").apply_async((key, "next"), parent_id=holder.id, root_id=holder.id)
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
            first = lab.task(name).apply_async((lab.key("published"),), queue=NOBODYS)
        again = "second" if scope == "run" else "duplicate"
        with lab.record(f"a {again} publish in scope {scope}"):
            duplicate = lab.task(name).apply_async((lab.key("published"),), queue=NOBODYS)
        assert (duplicate.id == first.id) == (scope != "run")
    with lab.record("a publish that opens a window"):
        first = lab.task("cooling_job").apply_async((lab.key("window"),), queue=NOBODYS)
    with lab.record("a duplicate publish in that window"):
        assert lab.task("cooling_job").apply_async((lab.key("window"),), queue=NOBODYS).id == first.id


def runs_of_what_was_published(lab: Lab) -> None:
    for scope, name in {"job": "job", "queue": "queued"}.items():
        result = lab.task(name).apply_async(("runs",), queue=scope)
        with lab.record(f"a run in scope {scope}"):
            lab.app.control.add_consumer(scope, destination=["w0@lab"], reply=True, limit=1)
            result.get(timeout=20)
            lab.all_is_free()


def merged_calls(lab: Lab) -> None:
    key = lab.key("merged")
    for scenario in ("a publish with lock_arguments", "a publish that is merged"):
        with lab.record(scenario):
            result = lab.task("latest").apply_async((key, scenario), queue=key)
    with lab.record("a run of merged calls"):
        lab.app.control.add_consumer(key, destination=["w0@lab"], reply=True, limit=1)
        result.get(timeout=20)
        lab.all_is_free()


def a_rate(lab: Lab) -> None:
    with lab.record("a run with lock_rate"):
        lab.task("rated").delay("k").get(timeout=20)


def options_of_calls(lab: Lab) -> None:
    """They cost no command more than the same options of the task."""
    call, key = lab.task("work").apply_async, lab.key("of a call")
    job = {"queue": key, "lock_scope": "job"}
    with lab.record("a publish whose call sets scope job"):
        result = call((key,), **job)
    with lab.record("a duplicate publish whose call sets scope job"):
        assert call((key,), **job).id == result.id
    with lab.record("a run whose call sets scope job"):
        lab.app.control.add_consumer(key, destination=["w0@lab"], reply=True, limit=1)
        result.get(timeout=20)
        lab.all_is_free()
    with lab.record("a run whose call sets other options"):
        call((key,), lock_on_conflict="raise", lock_wait_for=5).get(timeout=20)
        lab.all_is_free()


@contextmanager
def standing_still(keeper: Keeper) -> Iterator[None]:
    """In the block, the keeper's thread does nothing."""
    stands, goes_on = Event(), Event()

    def stand(_: object) -> None:
        stands.set()
        goes_on.wait()

    keeper.later("standing still", math.inf, stand)
    stands.wait()
    try:
        yield
    finally:
        goes_on.set()


def renewal(lab: Lab) -> None:
    server = server_of(lab.app)
    held = []
    for key in HELD:
        token = tokens.mint(tokens.mint_nonce(), None, tokens.origin("host", None))
        held.append(HeldLock(server.store, Hold(Demand(key), token), 30.0))
        held[-1].granted(acquire(server.store, held[-1].demand, token, 30.0))
        held[-1].renew_at = 0.0
    with lab.record("a renewal of 1,000 locks"):
        with standing_still(server.keeper):  # it looks when all are due, and not amid them
            for lock in held:
                server.keeper.add(lock)
        wait_until(lambda: all(lock.renew_at for lock in held), "all are renewed")
    lab.seen["a renewal of 1,000 locks"].sort()
    for lock in held:
        server.keeper.remove(lock)
    lab.locks.client.flushall()


SCENARIOS = [
    an_uncontended_run,
    a_duplicate_that_ends,
    a_message_that_waits,
    a_message_that_takes_turns,
    a_message_that_joins,
    a_copy,
    a_successor,
    a_retry,
    runs_of_what_was_published,
    options_of_calls,
    merged_calls,
    a_rate,
    publishes,
    renewal,
]


@counts_on_wake_ups("the commands of those who are woken up are counted")
def test_each_scenario_sends_the_lock_server_what_the_table_says_and_nothing_else(lab):
    for scenario in SCENARIOS:
        lab.play(scenario)
    changed = {name: commands for name, commands in lab.seen.items() if commands != BUDGET.get(name)}
    assert changed == {name: BUDGET.get(name) for name in changed}
    assert lab.seen.keys() == BUDGET.keys()
