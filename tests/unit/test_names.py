"""The names of what a lock has in Redis: as docs/ tells them, and in one hash slot of a Cluster."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_redislock.protocol.names import (
    ALL_ROOMS,
    LONGEST_KEY,
    MAX_CAPACITY,
    Demand,
    LockKeys,
    LockPart,
    channel_of,
    is_line,
    redis_key,
)
from celery_redislock.protocol.tokens import Attempt


def all_of(keys: LockKeys) -> list[str]:
    others = [keys.queued, keys.pending, keys.line, keys.fence, keys.permit(2)]
    notes = [keys.note(Attempt("id", 0, 0)), keys.gone("claim"), keys.given("id/0"), keys.window("shop.bill")]
    return [keys.lock, *others, *notes]


def test_a_tasks_lock_has_the_names_that_the_docs_tell() -> None:
    assert all_of(LockKeys(redis_key("redislock", "shop.bill:7"))) == [
        "redislock:{shop.bill:7}",
        "redislock:{shop.bill:7}:queued",
        "redislock:{shop.bill:7}:pending",
        "redislock:{shop.bill:7}:line",
        "redislock:{shop.bill:7}:fence",
        "redislock:{shop.bill:7}:permit:2",
        "redislock:{shop.bill:7}:note:id/0/0",
        "redislock:{shop.bill:7}:gone:claim",
        "redislock:{shop.bill:7}:args:id/0",
        "redislock:{shop.bill:7}:window:shop.bill",
    ]


def test_a_lock_that_any_code_names_keeps_its_name() -> None:
    keys = LockKeys("stock")
    assert (keys.lock, keys.line, keys.fence) == ("stock", "{stock}:line", "{stock}:fence")


@pytest.mark.parametrize(
    ("lock", "stem"),
    [
        ("{stock}", "{stock}"),
        ("a{stock}", "a{stock}"),
        ("{stock}b", "{stock}b"),
        ("{s}", "{s}"),
        ("}{s}", "}{s}"),
        ("{}stock", "{{}stock}"),  # an empty tag is none
        ("{}}", "{{}}}"),
        ("{stock", "{{stock}"),
        ("stock}", "stock}"),  # no tag could be put around it
        ("}stock", "}stock"),
    ],
)
def test_a_locks_own_hash_tag_is_that_of_its_other_keys_and_otherwise_the_whole_name_is(lock: str, stem: str) -> None:
    assert (LockKeys(lock).lock, LockKeys(lock).line) == (lock, f"{stem}:line")


def test_the_first_permit_is_the_key_itself() -> None:
    keys = LockKeys("redislock:{farm}")
    assert [keys.permit(number) for number in (1, 2, 50)] == [
        "redislock:{farm}",
        "redislock:{farm}:permit:2",
        "redislock:{farm}:permit:50",
    ]


@pytest.mark.parametrize("lock", ["redislock:{farm}", "stock", "{a}b", "a}"])
def test_a_key_that_can_hold_a_token_is_known_as_a_part_of_its_lock(lock: str) -> None:
    keys = LockKeys(lock)
    assert LockPart.of(lock) == LockPart(lock, lock, "lock")
    if lock != "{a}b":  # its other keys do not end in a hash tag, so they look like locks of their own
        permit, queued = keys.permit(12), keys.queued
        assert LockPart.of(permit) == LockPart(permit, lock, "permit")
        assert LockPart.of(queued) == LockPart(queued, lock, "queued")


def test_a_key_that_holds_no_token_is_no_part() -> None:
    keys = LockKeys("redislock:{farm}")
    parts = (keys.permit(2), keys.queued, keys.lock)
    assert [LockPart.of(key) for key in all_of(keys) if key not in parts] == [None] * (len(all_of(keys)) - len(parts))


def test_the_channel_of_a_room_is_named_by_its_nonce_after_the_servers_prefix() -> None:
    assert channel_of("nonce") == "redislock:room:nonce"
    assert channel_of(ALL_ROOMS, "shop:") == "shop:redislock:room:all"


@given(
    st.text("{a:", min_size=1)
    | st.builds("{}{{{}}}{}".format, st.text("a:"), st.text("a:", min_size=1), st.text("{}a:"))
)
def test_all_names_of_a_lock_are_different_and_in_one_hash_slot(name: str) -> None:
    names = all_of(LockKeys(name))
    assert len(set(names)) == len(names)
    assert len({key_slot(one.encode()) for one in names}) == 1


@given(st.text(min_size=1), st.integers(1, 50))
def test_what_names_a_line_is_known_as_a_line(key: str, capacity: int) -> None:
    assume(not any("\ud800" <= character <= "\udfff" for character in key))
    demand = Demand(key, capacity)
    assert is_line(demand.line)
    assert Demand.of_line(demand.line) == demand


@pytest.mark.parametrize(
    "text",
    [
        "",
        "stock",
        "1",
        "1 ",
        "0 stock",
        "01 stock",
        "-1 stock",
        f"{MAX_CAPACITY + 1} stock",
        "a stock",
        " stock",
        "x ",
        f"1 {'x' * (LONGEST_KEY + 1)}",
        "1 \ud800",
        "1 stock\udfff",
    ],
)
def test_a_hint_from_anyone_that_names_no_line_is_known_as_none(text: str) -> None:
    assert is_line(text) is False


@pytest.mark.parametrize("key", ["x", "x" * LONGEST_KEY, "stock \ud7ff\ue000"])
def test_a_key_of_any_length_that_a_room_accepts_names_a_line(key: str) -> None:
    assert is_line(f"{MAX_CAPACITY} {key}")
