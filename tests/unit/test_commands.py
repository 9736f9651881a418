"""Commands: what is sent to each script, letter by letter. Workers of two versions read and write the same keys."""

from __future__ import annotations

import math

import pytest

from celery_redislock.protocol import commands, scripts
from celery_redislock.protocol.names import Demand, Share
from celery_redislock.protocol.scripts import Call, Claim, Note, Numbered, Passed
from celery_redislock.protocol.tokens import RESERVED, Token

KEY = "redislock:{x}"
LINE, QUEUED = f"{KEY}:line", f"{KEY}:queued"
NONCE, CLAIM = "n" * 22, "c" * 22
TEXT = f"{NONCE} id/0 17 host:shop.pay"
TOKEN, HEIR = Token.of(f">{TEXT}"), Token.of(f"~{'h' * 22} id/1 18 host:shop.pay")
RESERVES, ROOM = Token.of(RESERVED + TEXT), Token.of(f"?{NONCE} * 17 host *")
OWNER, VALUE, OF_CLAIM = b">" + NONCE.encode(), f">{TEXT}".encode(), b"~" + CLAIM.encode()
#: A day, which a note lives.
DAY = "86400000"
ONE, THREE, RATE = Demand(KEY), Demand(KEY, 3), Demand(KEY, 2, 60.0, 100)
FAIR = Demand(KEY, share=Share("acme", "digest", 500, 7))
PASSED = Passed(frozenset({"a b"}), frozenset({"p"}), frozenset({"u"}))
CALLED = Call(b"body", "rooms", 2.0, 3.0, 4.0, 5.0, 6, is_retry=True, stops_but=frozenset({"s"}))


@pytest.mark.parametrize(
    ("command", "keys", "values"),
    [
        (lambda: commands.acquire(ONE, TOKEN, 1.5), (), ("", VALUE, "1500")),
        (lambda: commands.acquire(THREE, TOKEN, 1.5), (), ("S", VALUE, "1500", "3")),
        (lambda: commands.acquire(RATE, TOKEN, 1.5), (), ("S", VALUE, "60000", "100")),
        (lambda: commands.acquire(FAIR, TOKEN, 1.5), (), ("FHY", VALUE, "1500", "digest", "500", "7")),
        (
            lambda: commands.acquire(FAIR._replace(share=Share("acme", "digest", 500)), TOKEN, 1.5),
            (),
            ("FHY", VALUE, "1500", "digest", "500", ""),
        ),
        (lambda: commands.acquire(ONE, TOKEN, 1.5, note="note"), ("note",), ("n", VALUE, "1500")),
        (lambda: commands.acquire(ONE, TOKEN, 1.5, fence=True), (f"{KEY}:fence",), ("f", VALUE, "1500")),
        (lambda: commands.acquire(ONE, TOKEN, 1.5, call=b"call"), (), ("W", VALUE, "1500", b"call")),
        (
            lambda: commands.acquire(ONE, TOKEN, 1.5, claim=Claim(CLAIM, 7.25)),
            (QUEUED,),
            ("CpP", VALUE, "1500", OF_CLAIM, "7250"),
        ),
        (
            lambda: commands.acquire(THREE, TOKEN, 1.5, claim=Claim(CLAIM, 7.25)),
            (QUEUED, f"{KEY}:gone:{CLAIM}"),
            ("CpPgGS", VALUE, "1500", OF_CLAIM, "7250", DAY, "3"),
        ),
        (lambda: commands.acquire(ONE, TOKEN, 1.5, numbered=Numbered(0)), (), ("M", VALUE, "1500", "")),
        (
            lambda: commands.acquire(ONE, TOKEN, 1.5, numbered=Numbered(4, b"body", frozenset({"s"}))),
            (),
            ("MLZ", VALUE, "1500", "4", b"body", " s "),
        ),
        (
            lambda: commands.acquire(
                ONE,
                TOKEN,
                1.5,
                note="note",
                fence=True,
                call=b"call",
                claim=Claim(CLAIM, 7.25),
                numbered=Numbered(4, b"body", frozenset()),
            ),
            ("note", f"{KEY}:fence", QUEUED),
            ("nfWCpPMLZ", VALUE, "1500", b"call", OF_CLAIM, "7250", "4", b"body", ""),
        ),
    ],
)
def test_what_an_acquire_sends(command, keys, values):
    assert command() == (scripts.ACQUIRE, (KEY, LINE, *keys), values)


@pytest.mark.parametrize(
    ("more", "keys", "values"),
    [
        ({"in_queue": False}, (), ("",)),
        ({"in_queue": True}, (), ("Q",)),
        ({"in_queue": False, "window": 2.5}, (f"{KEY}:window:host:shop.pay",), ("wD",)),
        ({"in_queue": True, "window": 2.5}, (f"{KEY}:window:host:shop.pay",), ("QwD",)),
    ],
)
def test_what_a_reserve_sends(more, keys, values):
    owner, value = b"~" + NONCE.encode(), f"~{TEXT}".encode()
    sent = (*values, owner, value, "9000", "host:shop.pay", " a%20b ", " p ", " u ")
    after = (*(["Q"] if more["in_queue"] else []), *(["2500"] if "window" in more else []))
    command = commands.reserve(KEY, RESERVES, 9.0, PASSED, **more)
    assert command == (scripts.RESERVE, (KEY, LINE, QUEUED, *keys), (*sent, *after))


@pytest.mark.parametrize(
    ("call", "letters", "more"),
    [
        (Call(b"body", None), "", ()),
        (Call(b"body", None, expires_in=0.25, debounce=0.0), "EB", ("250", "1")),
        (CALLED, "AVEBXMZR", ("rooms", "2000", "3000", "4000", "5000", "6", " s ", "1")),
    ],
)
def test_what_a_merge_sends(call, letters, more):
    owner, value = b"~" + NONCE.encode(), f"~{TEXT}".encode()
    values = (letters, owner, value, "9000", "8000", "host:shop.pay", " a%20b ", " u ", b"body", *more)
    assert commands.merge(KEY, RESERVES, 9.0, 8.0, PASSED, call) == (scripts.MERGE, (KEY, LINE, QUEUED), values)


def test_what_a_replace_sends():
    command = commands.replace(KEY, RESERVES, 9.0, ["s", "t"])
    assert command == (scripts.REPLACE, (KEY, LINE, QUEUED), (b"~" + NONCE.encode(), "9000", " s  t "))


@pytest.mark.parametrize(
    ("command", "keys", "values"),
    [
        (lambda: commands.release(ONE, OWNER), (), ("", OWNER)),
        (lambda: commands.release(Demand(KEY, 2), OWNER), (), ("S", OWNER, "2")),
        (lambda: commands.release(ONE, OWNER, Note("note")), ("note",), ("nN", OWNER, DAY)),
        (
            lambda: commands.release(ONE, OWNER, Note("note", 5.0, in_any_case=True, given="given")),
            ("note", "given"),
            ("nNUa", OWNER, "5000", "1"),
        ),
        (lambda: commands.release(ONE, OWNER, gone=("gone", None)), ("gone",), ("g", OWNER)),
        (lambda: commands.release(ONE, OWNER, gone=("gone", 6.0)), ("gone",), ("gG", OWNER, "6000")),
        (lambda: commands.release(ONE, OWNER, places=("place",)), ("place",), ("p", OWNER)),
        (lambda: commands.release(ONE, OWNER, places=("place", "window")), ("place", "window"), ("pw", OWNER)),
        (
            lambda: commands.release(ONE, OWNER, places=("place", "window", "calls")),
            ("place", "window", "calls"),
            ("pwa", OWNER),
        ),
        (
            lambda: commands.hand_over(THREE, TOKEN, HEIR, 4.0, Note("note")),
            ("note", f"{KEY}:gone:{'h' * 22}"),
            ("nNgKTS", OWNER, DAY, HEIR.value, "4000", "3"),
        ),
        (
            lambda: commands.cool_down(ONE, TOKEN, 4.0, Note("note")),
            ("note",),
            ("nNKT", OWNER, DAY, f"={TEXT}".encode(), "4000"),
        ),
        (lambda: commands.give_up(ONE, CLAIM, is_to_come=False), (QUEUED,), ("p", OF_CLAIM)),
        (
            lambda: commands.give_up(THREE, CLAIM, is_to_come=True, closes=("window",)),
            (f"{KEY}:gone:{CLAIM}", QUEUED, "window"),
            ("gGpwS", OF_CLAIM, DAY, "3"),
        ),
    ],
)
def test_what_a_release_sends(command, keys, values):
    assert command() == (scripts.RELEASE, (KEY, LINE, *keys), values)


def test_what_the_others_send():
    locks = [("one", TOKEN, 1.25), ("two", RESERVES, math.inf)]
    renewed = (OWNER, "1250", b"~" + NONCE.encode(), "")
    assert commands.renew(locks) == (scripts.RENEW, ("one", "two"), renewed)
    assert commands.inspect(THREE) == (scripts.INSPECT, (KEY, LINE), ("3",))


@pytest.mark.parametrize(
    ("command", "script", "values"),
    [
        (lambda: commands.enter(ONE, ROOM, 5), scripts.STAND, ("5", "enter")),
        (lambda: commands.stand(ONE, ROOM, 5, None), scripts.STAND, ("5", "")),
        (lambda: commands.stand(ONE, ROOM, 5, 8, 6), scripts.STAND, ("5-6", "8")),
        (lambda: commands.leave(ONE, ROOM), scripts.LEAVE, ()),
    ],
)
def test_what_a_room_sends(command, script, values):
    assert command() == (script, (KEY, LINE), (ROOM.value, *values))


@pytest.mark.parametrize("send", [lambda *given: commands.enter(*given), lambda *given: commands.stand(*given, None)])
def test_a_room_stands_for_as_many_permits_as_its_waiters_want(send):
    (_, _, (room, *_)), (_, _, (left,)) = send(THREE, ROOM, 5), commands.leave(THREE, ROOM)
    assert room == left == commands.for_capacity(ROOM, 3).value != ROOM.value


@pytest.mark.parametrize("rank", [-1, 2**53, 1.0, True])
def test_what_a_script_could_not_compare_is_no_rank(rank):
    for send in (commands.enter, lambda *given: commands.stand(*given, None)):
        with pytest.raises(ValueError, match="is not a rank"):
            send(ONE, ROOM, rank)
    with pytest.raises(ValueError, match="is not a rank"):
        commands.stand(ONE, ROOM, 5, rank)


@pytest.mark.parametrize(
    ("seconds", "sent"),
    [(0.0, "1"), (0.0004, "1"), (0.002, "2"), (1.1, "1100"), (2.0019, "2001"), (4.6, "4600"), (1e300, "1000000000000")],
)
def test_a_time_to_live_is_sent_in_whole_milliseconds_and_never_as_none_at_all(seconds, sent):
    assert commands.renew([(KEY, TOKEN, seconds)]).values == (OWNER, sent)
