"""The names of what a lock has in Redis: as docs/ tells them, and in one hash slot of a Cluster."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_redislock.protocol.names import Demand, LockKeys, is_line, keys_of, redis_key
from celery_redislock.protocol.tokens import Attempt


def all_of(keys: LockKeys) -> list[str]:
    others = [keys.queued, keys.line, keys.fence, keys.note(Attempt("id", 0, 0)), keys.gone("claim")]
    return [keys.lock, *others]


def test_a_tasks_lock_has_the_names_that_the_docs_tell() -> None:
    assert all_of(keys_of(redis_key("redislock", "shop.bill:7"))) == [
        "redislock:{shop.bill:7}",
        "redislock:{shop.bill:7}:queued",
        "redislock:{shop.bill:7}:line",
        "redislock:{shop.bill:7}:fence",
        "redislock:{shop.bill:7}:note:id/0/0",
        "redislock:{shop.bill:7}:gone:claim",
    ]


def test_a_lock_that_any_code_names_keeps_its_name() -> None:
    keys = keys_of("stock")
    assert (keys.lock, keys.line, keys.fence) == ("stock", "{stock}:line", "{stock}:fence")


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
