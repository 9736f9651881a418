"""What the command line prints: times, tables, totals; and which keys are places of a lock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from celery_redislock.cli.scan import Row
from celery_redislock.cli.sentences import Say
from celery_redislock.cli.summary import Total, prometheus, totals
from celery_redislock.cli.table import age, duration, moment, table
from celery_redislock.cli.watch import screen
from celery_redislock.server.names import LimitedKey, LockKeys, Place
from celery_redislock.server.tokens import COOLING, Attempt, Token, mint, mint_nonce, origin
from tests.lab.workers import ROOT

NOW = datetime(2026, 11, 22, 3, 4, 5, tzinfo=UTC)


def row(
    key: str = "redislock:{shop.bill:7}", task: str | None = "shop.bill", waiting: int = 0, **fields: object
) -> Row:
    attempt = Attempt("an-id", 0, 0) if task else None
    token = mint(mint_nonce(), attempt, origin("w@host", task))
    place = Place.of(key)
    assert place is not None
    return Row(place, token, 12.0, waiting, 30.0 if waiting else None)._replace(**fields)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (0.44, "0.4s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (7500, "2h05m"),
        (273600, "3d04h"),
    ],
)
def test_a_duration_is_short(seconds, text):
    assert duration(seconds) == text


def test_a_moment_is_in_utc_and_tells_how_long_ago_it_was():
    assert moment(NOW - timedelta(minutes=3), NOW) == "2026-11-22 03:01:05 UTC (3m00s ago)"
    assert moment(None, NOW) == "an unknown time"
    assert age(NOW + timedelta(minutes=3), NOW) == "0.0s"  # the holder's clock is ahead


def test_the_table_has_its_columns_below_each_other_and_nothing_unprintable():
    lines = [*table([row(waiting=2), row("redislock:{\x1b[31m}", None)], NOW)]
    places = {line.index(word) for line, word in zip(lines, ["KEY", "redislock", "redislock"], strict=True)}
    assert len(places) == 1
    assert "\x1b" not in "".join(lines)
    assert lines[1].split()[:4:3] == ["held", "2"]


def test_totals_count_a_line_once_however_many_slots_its_lock_has():
    lock = "redislock:{shop.bill:7}"
    slots = [row(lock, waiting=2), row(LockKeys(lock).slot(2), waiting=2), row("redislock:{x}", None)]
    assert totals(slots) == {"shop.bill": Total(2, 0, 2, 30.0), "": Total(1)}
    cooling = row()
    assert totals([cooling._replace(token=Token.of(COOLING + cooling.token[1:]))]) == {"shop.bill": Total(0, 1)}


def test_prometheus_gets_a_gauge_for_each_total_with_the_task_as_its_label():
    lines = [*prometheus({'a"\n': Total(1, 2, 3, 4.5)})]
    assert [line for line in lines if not line.startswith("#")] == [
        'celery_redislock_held{task="a\\"\\n"} 1',
        'celery_redislock_kept{task="a\\"\\n"} 2',
        'celery_redislock_waiting{task="a\\"\\n"} 3',
        'celery_redislock_oldest_wait_seconds{task="a\\"\\n"} 4.5',
    ]
    assert [line.split()[:3] for line in lines[:2]] == [
        ["#", "HELP", "celery_redislock_held"],
        ["#", "TYPE", "celery_redislock_held"],
    ]


def test_watch_shows_what_is_waited_for_first():
    head, _, first, _ = screen([row(), row("redislock:{b}", waiting=1)], "0.0 conflicts/s in 1 workers", 0.1)
    assert "2 held, 0 kept, 1 in line, oldest wait 30s, 0.0 conflicts/s in 1 workers" in head
    assert first.endswith("redislock:{b}")


@pytest.mark.parametrize("lock", ["redislock:{shop.bill:7}", "report"])
def test_a_place_of_a_lock_is_known_by_its_key_and_what_is_none_too(lock):
    keys = LockKeys(lock)
    assert Place.of(lock) == Place(lock, lock)
    assert Place.of(keys.slot(2)) == Place(keys.slot(2), lock, "slot")
    assert Place.of(keys.queued) == Place(keys.queued, lock, "queued")
    assert {Place.of(key) for key in (keys.line, keys.fence, keys.note("a/0/0"), keys.gone("x"))} == {None}


def test_a_place_of_a_lock_with_a_limit_is_named_as_any():
    assert Place.of(LimitedKey("redislock:{a}", 3)) == Place("redislock:{a}", "redislock:{a}")


def test_every_sentence_of_why_has_a_test_that_reaches_it():
    tests = (ROOT / "tests" / "acceptance" / "test_why.py").read_text(encoding="utf-8")
    assert [one.name for one in Say if f"Say.{one.name}" not in tests] == []


def test_a_sentence_escapes_what_is_filled_in():
    assert Say.RESERVED(task="\x1b[31m", worker="w\n@host").startswith(
        "Task \\x1b[31m has NOT STARTED: worker w\\n@host "
    )
