"""What the command line prints: times, tables, totals; and which keys are parts of a lock."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from celery_redislock.cli import rows
from celery_redislock.cli.commands import screen
from celery_redislock.cli.locks import matcher
from celery_redislock.cli.rows import FREE, ORDERS, Calls, Row, Total, prometheus, table, totals
from celery_redislock.cli.sentences import Say, age, duration, moment
from celery_redislock.cli.workers import Counts, Waits
from celery_redislock.protocol.names import LockKeys, LockPart
from celery_redislock.protocol.tokens import COOLING, RESERVED, SENDING, Attempt, Token, mint, mint_nonce, origin
from tests.lab.workers import ROOT

NOW = datetime(2026, 11, 22, 3, 4, 5, tzinfo=UTC)


def row(
    key: str = "redislock:{shop.bill:7}", task: str | None = "shop.bill", waiting: int = 0, **fields: object
) -> Row:
    attempt = Attempt("an-id", 0, 0) if task else None
    token = mint(mint_nonce(), attempt, origin("w@host", task))
    part = LockPart.of(key)
    assert part is not None
    waits = {task or "": Waits(waiting, (time.time() - 30) * 1e6)} if waiting else {}
    outside = {f"room {number}" for number in range(waiting)}
    return Row(part, token, 12.0, waits, outside)._replace(**fields)


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


@pytest.mark.parametrize(("number", "due"), [(b"x", b"1"), (b"1", b"x"), (None, b"1"), (b"1", None), (b"1", b"9" * 30)])
def test_damaged_calls_are_not_shown(number, due):
    token = mint(mint_nonce(), None, origin("host", "task"))
    assert Calls.of(token, token.nonce.encode(), b"1", b"0") is not None
    assert Calls.of(token, token.nonce.encode(), number, due) is None


def test_calls_that_need_not_wait_are_due_at_once_whatever_the_clock_says():
    token = mint(mint_nonce(), None, origin("host", "task"))
    ahead = int((NOW + timedelta(hours=1)).timestamp() * 1e6)  # the server's clock was set back since
    at_once, later = (Calls.of(token, token.nonce.encode(), b"2", b"%d" % due) for due in (-ahead, ahead))
    assert (at_once.said(NOW), at_once.to_json()) == ("2 calls", {"calls": 2, "due": None})
    assert later.said(NOW) == "2 calls, due in 1h00m"


def test_a_moment_is_in_utc_and_tells_how_long_ago_it_was():
    assert moment(NOW - timedelta(minutes=3), NOW) == "2026-11-22 03:01:05 UTC (3m00s ago)"
    assert moment(None, NOW) == "an unknown time"
    assert age(NOW + timedelta(minutes=3), NOW) == "0.0s"  # the holder's clock is ahead


def test_a_row_tells_what_calls_its_message_has_and_when_they_are_due():
    token = mint(mint_nonce(), Attempt("an-id", 0, 0), origin("w@host", "shop.bill"), RESERVED)
    due = NOW + timedelta(seconds=90)
    calls = Calls.of(token, token.nonce.encode(), b"3", str(int(due.timestamp() * 1e6)).encode())
    assert calls == (3, due)
    lines = [*table([row(token=token, calls=calls), row(token=token, calls=calls._replace(due=NOW)), row()], NOW)]
    ends = ["12s      shop.bill (3 calls, due in 1m30s)", "12s      shop.bill (3 calls)", "12s      shop.bill"]
    assert [line[line.index("12s") :] for line in lines[1:]] == ends
    assert "-        shop.bill" in [*table([row(ttl=None)], NOW)][1]


def test_rows_are_sorted_by_age_by_task_by_key_and_by_what_waits():
    def held_for(seconds, key, task, waiting=0):
        since = int((NOW - timedelta(seconds=seconds)).timestamp() * 1000)
        token = Token.of(f">{mint_nonce()} an-id/0/0 {since} host {task}")
        return row(f"redislock:{{{key}}}", task, waiting, token=token)

    listed = [
        held_for(5, "c", "b", 2),
        held_for(9, "b", "a"),
        held_for(9, "a", "b"),
        row("redislock:{d}", None, token=Token.of("x")),
    ]
    keys = {name: "".join(one.part.key[-2] for one in sorted(listed, key=order)) for name, order in ORDERS.items()}
    assert keys == {"age": "abcd", "waiting": "cabd", "key": "abcd", "task": "dbac"}


def test_a_free_row_says_so_and_a_free_lock_has_the_name_of_nothing():
    free = row(token=FREE, ttl=None)
    assert (free.state, free.info.state, free.info.ttl, row().info.ttl) == ("free", "free", None, 12.0)


@pytest.mark.parametrize("width", [None, 80])
def test_twice_as_many_rows_are_twice_as_much_work(monkeypatch, width):
    def work(number):
        looked_at = []

        def counting_max(values):
            values = [*values]
            looked_at.extend(values)
            return max(values)

        monkeypatch.setattr(rows, "max", counting_max, raising=False)
        assert len([*table([row()] * number, NOW, width)]) == number + 1
        return len(looked_at)

    assert 0 < work(100) < 2.2 * work(50)


def test_the_table_has_its_columns_below_each_other_and_nothing_unprintable():
    lines = [*table([row(waiting=2), row("redislock:{\x1b[31m}", None)], NOW)]
    columns = {line.index(word) for line, word in zip(lines, ["KEY", "redislock", "redislock"], strict=True)}
    assert len(columns) == 1
    assert "\x1b" not in "".join(lines)
    assert lines[1].split()[:3:2] == ["held", "2"]


LONG = f"redislock:{{shop.bill.send:{'0123456789abcdef' * 2}}}"


@pytest.mark.parametrize("host", ["w1@shop", "celery@worker-01.eu.example.com"])
@pytest.mark.parametrize("key", ["redislock:{stock:A1}", LONG])
@pytest.mark.parametrize("width", [80, 100, 200])
def test_in_a_terminal_each_row_is_one_line_with_the_state_the_age_what_waits_the_key_and_the_host(width, key, host):
    token = mint(mint_nonce(), Attempt("109d6949-eb3d-40eb-acec-ea7f16ee6db2", 0, 0), origin(host, "shop.bill"))
    head, line = table([row(key, waiting=500, token=token)], token.since, width)
    assert len(line) <= width
    assert head.split()[:5] == ["STATE", "AGE", "WAITING", "KEY", "HOST"]
    state, age, waiting, shown_key, shown_host, *_ = line.split()
    assert (state, age, waiting) == ("held", "0.0s", "500")
    for shown, whole, shortest in ((shown_key, key, 32), (shown_host, host, 16)):
        first, _, last = shown.partition("…")
        assert whole.startswith(first)
        assert whole.endswith(last)
        assert len(shown) >= min(len(whole), shortest)


def test_a_narrow_table_has_as_much_of_the_rest_as_there_is_room_for_and_a_wide_one_and_a_pipe_all_of_it():
    rows = [row(token=mint(mint_nonce(), Attempt("109d6949-eb3d-40eb", 0, 0), origin("w@host", "shop.bill")))]
    heads = {width: next(table(rows, NOW, width)).split()[5:] for width in (60, 70, 80, 90, 100, None)}
    everything = ["TASK", "ID", "ENDS", "IN", "TASK"]
    assert heads == {
        60: [],
        70: ["TASK", "ID"],
        80: ["TASK", "ID", "ENDS", "IN"],
        90: everything,
        100: everything,
        None: everything,
    }
    assert "109d6949…" in [*table(rows, NOW, 80)][1]
    assert "109d6949-eb3d-40eb" in [*table(rows, NOW)][1]
    assert "109d6949…" in [*table([*rows, row(LONG)], NOW, 80)][1], "a long key makes room for it"


def test_the_head_of_the_watch_is_broken_where_the_terminal_is_narrow():
    *head, names, _ = screen([row(waiting=1)], Counts(), 0.1, 80)
    assert len(head) == 3
    assert max(map(len, head)) <= 80
    assert head[0].endswith("0 conflicts in 0")
    assert head[2].startswith("Each counts as one message: 1 other process ")
    assert names.startswith("STATE")


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("redislock:*", ["redislock:{a}", "redislock:"], ["other:{a}"]),
        ("h?llo[^a-c]", ["hellod", "hxllo!"], ["helloa", "hllod"]),
        (r"\*\[a\]\\?", ["*[a]\\x"], ["x[a]\\x", "*a\\x"]),
    ],
)
def test_a_free_key_matches_a_pattern_as_the_server_matches_the_others(pattern, matched, others):
    matches = matcher(pattern)
    assert all(matches(key) for key in matched)
    assert not any(matches(key) for key in others)


def test_messages_are_counted_for_their_own_task():
    waits = {"shop.refund": Waits(500, 1e6), "": Waits(1, 2e6)}
    found = totals([row(waits=waits), row("redislock:{b}", None, token=FREE, waits=waits)])
    assert {task: (total.held, total.waiting) for task, total in found.items()} == {
        "shop.bill": (1, 0),
        "shop.refund": (0, 1000),
        "": (0, 2),
    }


def test_totals_count_a_line_once_however_many_permits_its_lock_has():
    lock = "redislock:{shop.bill:7}"
    permits = [row(lock, waiting=2), row(LockKeys(lock).permit(2), waiting=2), row("redislock:{x}", None)]
    found = totals(permits)
    assert found["shop.bill"][:4] == (2, 0, 0, 2)
    assert found["shop.bill"].oldest_wait_seconds == pytest.approx(30, abs=5)
    assert found[""].held == 1


@pytest.mark.parametrize(("state", "reserved"), [(COOLING, 0), (RESERVED, 1), (SENDING, 1)])
def test_a_key_without_a_holder_is_kept_and_counts_as_reserved_if_it_is_for_a_message(state, reserved):
    kept = row()
    kept = kept._replace(token=Token.of(state + kept.token[1:]))
    assert totals([kept]) == {"shop.bill": Total(kept=1, reserved=reserved)}


def test_the_longest_hold_is_that_of_the_holder_who_came_first():
    since = {"redislock:{a}": 100, "redislock:{b}": 500, "redislock:{c}": 30}
    rows = [row(key)._replace(token=Token.of(taken(row(key).token, seconds))) for key, seconds in since.items()]
    assert totals(rows)["shop.bill"].longest_hold_seconds == pytest.approx(500, abs=5)


def taken(token: Token, seconds: int) -> bytes:
    """The value of a token that was minted so many seconds ago."""
    nonce, attempt, _, *origin_ = token.value.split(b" ")
    return b" ".join([nonce, attempt, b"%d" % ((time.time() - seconds) * 1000), *origin_])


def test_prometheus_gets_a_gauge_for_each_total_with_the_task_as_its_label():
    lines = [*prometheus({'a"\n\x1b': Total(1, 2, 1, 3, 4.5, 6.5)})]
    assert [line for line in lines if not line.startswith("#")] == [
        'celery_redislock_held{task="a\\"\\\\n\\\\x1b"} 1',
        'celery_redislock_kept{task="a\\"\\\\n\\\\x1b"} 2',
        'celery_redislock_reserved{task="a\\"\\\\n\\\\x1b"} 1',
        'celery_redislock_waiting{task="a\\"\\\\n\\\\x1b"} 3',
        'celery_redislock_oldest_wait_seconds{task="a\\"\\\\n\\\\x1b"} 4.5',
        'celery_redislock_longest_hold_seconds{task="a\\"\\\\n\\\\x1b"} 6.5',
    ]
    assert [line.split()[:3] for line in lines[:2]] == [
        ["#", "HELP", "celery_redislock_held"],
        ["#", "TYPE", "celery_redislock_held"],
    ]


def test_watch_shows_what_is_waited_for_first():
    counts = Counts()
    counts.conflicts = {"w1": 2, "w2": 3}
    head, _, _, first, _ = screen([row(), row("redislock:{b}", waiting=1)], counts, 0.1)
    assert "2 held, 0 kept, 1 waiting, oldest wait 30s, 5 conflicts in 2 workers" in head
    assert first.split()[3] == "redislock:{b}"


@pytest.mark.parametrize("lock", ["redislock:{shop.bill:7}", "report"])
def test_a_part_of_a_lock_is_known_by_its_key_and_what_is_none_too(lock):
    keys = LockKeys(lock)
    assert LockPart.of(lock) == LockPart(lock, lock)
    assert LockPart.of(keys.permit(2)) == LockPart(keys.permit(2), lock, "permit")
    assert LockPart.of(keys.queued) == LockPart(keys.queued, lock, "queued")
    others = (keys.line, keys.fence, keys.note("a/0/0"), keys.gone("x"), keys.pending, keys.given("a/0"))
    stem = keys.queued.removesuffix(":queued")
    assert {LockPart.of(key) for key in (*others, f"{stem}:newest", f"{stem}:merged:x")} == {None}


def test_every_sentence_of_why_has_a_test_that_reaches_it():
    tests = (ROOT / "tests" / "acceptance" / "test_why.py").read_text(encoding="utf-8")
    assert [one.name for one in Say if f"Say.{one.name}" not in tests] == []


def test_a_sentence_escapes_what_is_filled_in():
    assert Say.RESERVED(task="\x1b[31m", worker="w\n@host").startswith(
        "Task \\x1b[31m has NOT STARTED: worker w\\n@host "
    )
