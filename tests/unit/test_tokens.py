"""Tokens: what the holder writes is what everybody reads."""

from __future__ import annotations

import hashlib
import string
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_redislock.errors import LockInfo
from celery_redislock.protocol.replies import info_of
from celery_redislock.protocol.tokens import (
    CALLED,
    COOLING,
    OFFERED,
    RESERVED,
    RUNS,
    SEEN,
    SENDING,
    Attempt,
    Token,
    call,
    call_at,
    cooling,
    escape,
    for_capacity,
    is_nonce,
    known_as,
    known_by,
    known_in_line,
    mint,
    mint_nonce,
    mint_publish,
    of_room,
    origin,
)

from .wire import hostile_text

NONCE = "AAAAAAAAAAAAAAAAAAAAAA"

#: Any text that JSON can carry, lone surrogates too, with what tokens are made of among it.
_hostile = hostile_text(" %/-{}:\n\x00\x1b\ud800é", st.characters(exclude_categories=()))
_counts = st.integers(0, 10**6)


def read(token: Token) -> Token:
    """As Redis gives it to somebody else."""
    return Token.of(token.value)


@given(
    attempt=st.builds(Attempt, _hostile, _counts, _counts, st.just("") | st.builds(mint_publish)),
    hostname=_hostile,
    task=_hostile.filter(lambda task: task not in {"", "-"}),
)
@example(Attempt("", 0, 0), "", " ")
@example(Attempt("a/1/2 copy", 3, 4), "celery@host 1", "tasks.bill copy")
def test_whatever_the_ids_and_names_are_a_token_is_parsed_as_it_was_minted(
    attempt: Attempt, hostname: str, task: str
) -> None:
    token = read(mint(NONCE, attempt, origin(hostname, task)))
    assert (token.nonce, token.attempt, token.hostname, token.task) == (NONCE, attempt, hostname, task)


@given(_hostile, _hostile)
def test_a_field_is_one_printable_ascii_word(task_id: str, hostname: str) -> None:
    """The scripts split at spaces; a token is shown in log lines."""
    value = mint(NONCE, Attempt(task_id, 0, 0), origin(hostname, "t"))
    assert value.isascii()
    assert value.isprintable()
    assert len(value.split(" ")) == 5


@given(st.builds(Attempt, _hostile, _counts, _counts), st.builds(Attempt, _hostile, _counts, _counts))
def test_different_attempts_are_written_differently(one: Attempt, other: Attempt) -> None:
    """The name of a note is made of it."""
    assert (str(one) == str(other)) == (one == other)


def test_an_attempt_is_told_from_its_retries_and_replacements() -> None:
    assert len({str(Attempt("id", retries, replaced)) for retries in range(2) for replaced in range(2)}) == 4
    assert str(Attempt("id", 0, 0, mint_publish())) != str(Attempt("id", 0, 0, mint_publish()))


def test_each_ask_has_a_later_time_even_if_the_clock_stands_still() -> None:
    first, later = (mint(NONCE, None, origin("host", "t"), RUNS, asks).since for asks in (0, 60_000))
    assert first is not None
    assert later is not None
    assert later - first >= timedelta(seconds=60)


LONG = "x" * 1_000_000


def test_a_token_is_short_however_long_its_names_are() -> None:
    value = mint(NONCE, Attempt("é" + LONG, 0, 0), origin(LONG, LONG))
    assert len(value) < 1000
    token = read(value)
    assert (token.nonce, len(token.hostname or ""), len(token.task or "")) == (NONCE, 200, 200)


def test_attempts_with_long_ids_are_still_told_apart() -> None:
    one, other = Attempt(f"{LONG}1", 0, 0), Attempt(f"{LONG}2", 0, 0)
    assert str(one) != str(other)
    (again,) = {read(mint(NONCE, one, origin("host", "t"))).attempt for _ in range(2)}
    assert str(again) == str(one)
    assert again is not None
    assert again.task_id == known_as(one.task_id) == known_as(again.task_id)


def test_versions_of_this_package_cut_a_long_name_in_the_same_place() -> None:
    digest = hashlib.sha256(b"x" * 201).hexdigest()
    assert known_as("x" * 200) == "x" * 200
    assert known_as("x" * 201) == f"{'x' * 167}~{digest[:32]}"
    assert len(known_as("\ud800" * 201)) == 200


def test_a_token_outside_tasks_has_no_attempt_and_no_task() -> None:
    token = read(mint(NONCE, None, origin("host", None)))
    assert (token.attempt, token.hostname, token.task) == (None, "host", None)


def test_a_task_named_like_the_mark_of_a_missing_field_is_not_missing() -> None:
    assert read(mint(NONCE, None, origin("host", "-"))).task == "-"


def test_since_is_the_time_of_minting_and_aware() -> None:
    token = read(mint(NONCE, None, origin("host", None)))
    assert token.since is not None
    assert token.since.tzinfo is UTC
    assert abs(token.since - datetime.now(UTC)) < timedelta(seconds=5)


STATES = {RUNS: "held", SEEN: "held", RESERVED: "queued", SENDING: "sending", COOLING: "cooling"}


@pytest.mark.parametrize("state", STATES)
def test_the_state_comes_first_and_changes_nothing_else_that_is_read(state: str) -> None:
    runs = mint(NONCE, Attempt("id", 1, 2), origin("host", "task"))
    token = Token.of(state + runs[1:])
    assert token.state == STATES[state]
    for field in ("nonce", "attempt", "since", "hostname", "task"):
        assert getattr(token, field) == getattr(runs, field)


@pytest.mark.parametrize("state", [OFFERED, CALLED])
def test_a_key_that_is_offered_to_a_room_belongs_to_no_attempt(state: str) -> None:
    token = Token.of(state + of_room(NONCE, "host")[1:])
    assert (token.state, token.attempt, token.hostname, token.task, token.is_running) == (
        *("offered", None, "host", None),
        False,
    )
    assert token.owner == of_room(NONCE, "host").owner


def test_a_token_is_shown_without_its_nonce() -> None:
    token = mint(NONCE, Attempt("id", 1, 2), origin("host", "task"), RESERVED)
    assert repr(token) == "<Token queued id/1/2>"
    assert (token.is_reserved, Token.of(RUNS + token[1:]).is_reserved) == (True, False)
    assert Token.of(SENDING + token[1:]).is_reserved


def test_a_room_is_known_by_its_host_and_stands_in_line_under_a_token_for_each_capacity() -> None:
    room = of_room(NONCE, "celery@host 1", "shop:")
    assert (room.hostname, room.task, room.attempt, room.task_field) == ("celery@host 1", None, None, "*shop:")
    assert for_capacity(room, 1) is room
    assert for_capacity(room, 12) == f"{room} 12"
    assert for_capacity(room, 12).owner == room.owner


def test_the_call_of_a_waiter_names_it_by_its_rank_and_belongs_to_its_room() -> None:
    room = of_room(NONCE, "host")
    assert call(room, 77) == f"{CALLED}{room[1:]} 77"
    assert call(room, 77, 3) == f"{CALLED}{room[1:]} 77-3"
    assert call(room, 77).owner == room.owner
    assert (known_in_line(77, 0), known_in_line(77, 3)) == ("77", "77-3")


@pytest.mark.parametrize("capacity", [1, 12])
@pytest.mark.parametrize("asked", [1, 50])
def test_the_call_to_one_key_is_the_call_to_another_key_of_the_run_with_its_capacity(capacity: int, asked: int) -> None:
    room = of_room(NONCE, "host")
    called = call(for_capacity(room, asked), 77, 3)
    assert call_at(called.value, capacity) == call(for_capacity(room, capacity), 77, 3).value


def test_an_attempts_calls_are_kept_under_its_id_and_its_retries() -> None:
    assert Attempt("an id", 3, 2, mint_publish()).job == "an%20id/3"


def test_a_holder_that_is_asked_to_stop_names_the_task_that_asks() -> None:
    runs = mint(NONCE, Attempt("id", 1, 2), origin("host", "task"))
    asked = Token.of(f"{runs} <new%20er")
    assert (runs.state, runs.asked_by) == ("held", None)
    assert (asked.state, asked.asked_by, asked.is_running) == ("stopping", "new er", True)
    for field in ("nonce", "owner", "attempt", "since", "hostname", "task"):
        assert getattr(asked, field) == getattr(runs, field)
    assert Token.of(f"{runs} newer").asked_by is None


def test_a_key_cools_down_with_the_fields_of_its_last_run() -> None:
    runs = mint(NONCE, Attempt("id", 1, 2), origin("host", "task"))
    assert cooling(runs) == COOLING + runs[1:]


def test_a_text_and_its_bytes_are_the_same_token_even_if_they_are_no_utf_8() -> None:
    assert Token.of("\udcff").value == b"\xff"
    assert Token.of(b"\xff") == "\udcff"


def test_a_key_has_one_owner_until_it_is_left_to_a_message_or_cools_down() -> None:
    token = mint(NONCE, Attempt("id", 1, 2), origin("host", "task"))
    seen = Token.of(SEEN + token[1:])
    assert seen.owner == token.owner == known_by(NONCE).owner
    reserved = mint(NONCE, Attempt("id", 1, 2), origin("host", "task"), RESERVED)
    assert reserved.owner == known_by(NONCE, RESERVED).owner
    sending = mint(NONCE, Attempt("id", 1, 2), origin("host", "task"), SENDING)
    assert sending.owner == Token.of(sending).owner == reserved.owner
    assert len({token.owner, reserved.owner, cooling(token).owner, cooling(seen).owner}) == 3


def test_no_value_of_another_library_begins_with_a_state() -> None:
    """Hexadecimal, a UUID, a number and base64, whose alphabets have 64 and 2 times 2 characters in all."""
    alphabets = set(string.ascii_letters + string.digits + "+/")
    assert alphabets.isdisjoint(STATES)


FOREIGN = {
    "redis-py's own token": "c2f8d5a4b1e64b3f9d0a7c6e5f4d3b2a",
    "empty": "",
    "a blank": " ",
    "four blanks": "    ",
    "a nonce alone": NONCE,
    "binary": b"\xff\x00\xfe",
    "control characters": "\x00\x01\n\r\x1b[2J",
    "a pickle, nearly": "\x80\x04\x95 \x00 a b c d",
    "JSON": '{"holder": "host", "pid": 1, "since": 1.5}',
    "five words": "my lock is not yours",
    "a redlock with a time": "uuid 1700000000000",
    "attempt with too few parts": f"{NONCE} id/0 1700000000000 host task",
    "attempt with too many parts": f"{NONCE} id/0/0/0 1700000000000 host task",
    "attempt with two publishes": f"{NONCE} id/0/0/eightbyt/eightbyt 1700000000000 host task",
    "attempt without numbers": f"{NONCE} id/x/y 1700000000000 host task",
    "no time": f"{NONCE} id/0/0 soon host task",
    "a time out of range": f"{NONCE} id/0/0 {10**30} host task",
    "a time before the year 1": f"{NONCE} id/0/0 -{10**17} host task",
    "a time longer than text": f"{NONCE} id/0/0 {'9' * 5000} host task",
    "a time longer than a float": f"{NONCE} id/0/0 {'9' * 400} host task",
    "broken escapes": f"{NONCE} %ff/0/0 1700000000000 host task",
    "a broken host": f"{NONCE} id/0/0 1700000000000 %ff task",
}


@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_value_is_its_own_nonce_and_nobodys_attempt(value: str | bytes) -> None:
    token = Token.of(value)
    assert token.value == token.owner == (value if isinstance(value, bytes) else value.encode())
    assert token.nonce == token
    assert (token.state, token.attempt, token.since, token.hostname, token.task) == ("held", None, None, None, None)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("value", [value for value in FOREIGN.values() if isinstance(value, str)])
def test_a_value_that_is_nearly_ours_is_nobodys_attempt(state: str, value: str) -> None:
    token = Token.of(state + value)
    assert (token.state, token.attempt, token.since, token.hostname, token.task) == ("held", None, None, None, None)
    assert token.owner == (
        token.value[:23] if value.startswith(NONCE) and state not in {SEEN, SENDING} else token.owner
    )


@pytest.mark.parametrize(
    "value", [f"{NONCE} id/0/0 1 host task", "> id/0/0 1 host task", f">{NONCE} id/0/0 1 host tâsk"]
)
def test_a_value_with_our_fields_is_foreign_without_a_state_and_a_nonce_or_beyond_ascii(value: str) -> None:
    token = Token.of(value)
    assert (token.attempt, token.since, token.hostname, token.task) == (None, None, None, None)


@given(st.binary() | st.lists(st.text(max_size=8), min_size=5, max_size=6).map(lambda words: " ".join(words).encode()))
def test_no_value_of_a_key_makes_parsing_raise(value: bytes) -> None:
    token = Token.of(value)
    assert (token.value, token.attempt) == (value, None)
    assert token.nonce in token


def test_only_a_nonce_has_the_form_of_one() -> None:
    """A message brings its claim along."""
    assert is_nonce(mint_nonce())
    for other in (
        "",
        "short",
        f"~{NONCE[1:]}",
        f"{NONCE}A",
        f"{NONCE[1:]} ",
        f"{NONCE}\n",
        NONCE.encode(),
        None,
        1,
        [NONCE],
    ):
        assert not is_nonce(other)


def test_nonces_are_unique_words() -> None:
    nonces = {mint_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) for nonce in nonces} == {22}
    assert all(escape(nonce) == nonce for nonce in nonces)


def test_the_holder_is_described_by_its_token() -> None:
    token = read(mint(NONCE, Attempt("an id", 1, 0), origin("celery@host", "shop.bill")))
    assert info_of(token, "redislock:{x}", 1.5) == LockInfo(
        "redislock:{x}", "an id", "shop.bill", "celery@host", token.since, 1.5
    )


@pytest.mark.parametrize(
    ("info", "who"),
    [
        (LockInfo("k", "an id", "t", "host", None, None), "task an id on host"),
        (LockInfo("k", None, None, "host", None, None), "a lock outside tasks on host"),
        (LockInfo("k", None, None, None, None, None), "a lock outside tasks on an unknown host"),
        (LockInfo("k", "i\nd\x1b", "t", "h\r\nERROR", None, None), r"task i\nd\x1b on h\r\nERROR"),
        (LockInfo("k", "i" * 1000, "t", "host", None, None), f"task {'i' * 199}… on host"),
    ],
)
def test_the_holder_in_words(info: LockInfo, who: str) -> None:
    assert info.who == who


def test_a_token_is_short_enough_for_320_bytes_a_lock() -> None:
    """A task id is a UUID; Redis adds some 100 bytes to a key, its value and its expiry."""
    attempt = Attempt("123e4567-e89b-12d3-a456-426614174000", 0, 0)
    assert len(mint(mint_nonce(), attempt, origin("celery@worker-1", "shop.tasks.bill"))) < 128
