"""What scripts and tokens.py both know of a value, they know alike; on a real server."""

from __future__ import annotations

import re

import pytest

from celery_redislock.protocol import tokens
from celery_redislock.protocol.scripts import PRELUDE
from celery_redislock.protocol.tokens import (
    CALLED,
    COOLING,
    OFFERED,
    RESERVED,
    RUNS,
    SEEN,
    SENDING,
    SPENT,
    Attempt,
    Token,
    known_by,
)
from tests.integration.conftest import KEY

NONCES = ["A" * 22, "A" * 21 + "B", "-" * 22]
STATES = [RUNS, SEEN, RESERVED, SENDING, COOLING, SPENT, OFFERED, CALLED]
MINTED = [
    tokens.mint(nonce, attempt, tokens.origin("host", "t"))
    for nonce in NONCES
    for attempt in (Attempt("id", 0, 0), None)
]
#: Of tasks, of locks outside tasks, of other libraries, and of callers who know what ours look like.
VALUES = [
    *(Token.of(state + token[1:]) for token in MINTED for state in STATES),
    *(known_by(nonce, state) for nonce in NONCES for state in STATES),
    *map(
        Token.of, ["", "mine", "mine too", ">mine", "&mine", ">mine too", "&mine too", "=", "A" * 23, "A" * 23 + " x"]
    ),
    *map(Token.of, [f"&{NONCES[0]}x", f"&{NONCES[0]}x x", f">{NONCES[0]}x x", f"&{NONCES[0]} x"]),
    *map(Token.of, [b"\xff\xfe", b">\xff " + b"A" * 22, f">{NONCES[0]}x", f">{NONCES[0]} x", f" {NONCES[0]} x"]),
]
of_each_value = pytest.mark.parametrize("token", VALUES, ids=map(str, range(len(VALUES))))  # they tell the time


@pytest.fixture
def run(client):
    """Runs Lua behind what the scripts share: ``run("return is_owned_by(ARGV[1], ARGV[2])", owner, value)``."""
    return lambda code, *values: client.eval(f"{PRELUDE}\n{code}", 1, KEY, *values)


def test_they_name_the_states_by_the_same_letters():
    letters = re.search(
        r"^local RUNS, SEEN, RESERVED, SENDING, COOLING, SPENT, OFFERED, CALLED = (.+)$", PRELUDE, re.M
    )[1]
    assert letters == ", ".join(f"'{state}'" for state in STATES)


@of_each_value
def test_they_agree_whose_a_value_is(run, token):
    code = """
local owned = {}
for i = 2, #ARGV do
  owned[i - 1] = is_owned_by(ARGV[1], ARGV[i]) and 1 or 0
end
return owned"""
    owned = run(code, token.owner, *(other.value for other in VALUES))
    assert [other for other, mine in zip(VALUES, owned, strict=True) if mine] == [
        other for other in VALUES if other.owner == token.owner
    ]


@of_each_value
def test_a_whole_token_owns_itself_alone_and_where_it_is_marked(run, token):
    owned = [other for other in VALUES if run("return is_owned_by(ARGV[1], ARGV[2])", token.value, other.value)]
    assert token in owned
    if " " in token and token.state in {"held", "queued"}:
        plain = str.maketrans(SEEN + SENDING, RUNS + RESERVED)
        assert {other.translate(plain) for other in owned} == {token.translate(plain)}


def test_a_key_that_is_free_is_nobodys(run):
    assert not run("return is_owned_by(ARGV[1], redis.call('GET', KEYS[1]))", known_by(NONCES[0]).owner)


@of_each_value
def test_they_read_the_same_attempt(run, token):
    """But to the scripts a permit that is spent is no attempt, so that no message is taken for a copy."""
    attempt = run("return attempt_of(ARGV[1])", token.value)
    assert (attempt or b"").decode() == (str(token.attempt or "") if token.state != "spent" else "")


@of_each_value
def test_a_mark_is_left_on_a_run_alone_and_keeps_its_lease(run, client, token):
    client.set(KEY, token.value, px=60_000)
    for _ in range(2):  # sent twice, it counts once
        run("mark(KEYS[1], redis.call('GET', KEYS[1]))")
    is_run = token.value[:1] == RUNS.encode()
    assert client.get(KEY) == (SEEN.encode() + token.value[1:] if is_run else token.value)
    assert 0 < client.pttl(KEY) <= 60_000


def test_options_are_read_behind_what_is_given_in_the_order_of_their_letters(client):
    code = """
local given = options(2, 2)
return {given.a or 'none', given.B or 'none', given.c or 'none', given.D or 'none', given.b or 'none'}"""
    keys = [f"{KEY}{number}" for number in range(1, 5)]
    assert client.eval(f"{PRELUDE}\n{code}", 4, *keys, "cDaB", "required", "first", "second") == [
        keys[3].encode(),
        b"second",
        keys[2].encode(),
        b"first",
        b"none",
    ]


def test_without_letters_no_option_is_read(client):
    code = f"{PRELUDE}\nreturn next(options(1, 1)) or 'none'"
    assert client.eval(code, 2, KEY, "beyond", "", "beyond") == b"none"
