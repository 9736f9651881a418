"""The waiters of one line: they keep their order, and those that have left leave nothing behind and cost little."""

from __future__ import annotations

import gc
import math
import random
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redislock.line.lines import Line, Ordered
from celery_redislock.line.waiters import Waiter
from celery_redislock.protocol.names import Demand, Share
from celery_redislock.worker.waiting_message import Drop


class Guest(Waiter):
    """Waits, and is forgotten."""

    def __init__(self, rank: int, *, watches: bool = False) -> None:
        self.demand, self.rank, self.watches = Demand("k"), rank, watches

    def take_turn(self, *, called: bool) -> None:
        """It is never called here."""


@pytest.mark.parametrize("watches", [False, True])
def test_waiters_that_leave_from_anywhere_in_the_line_are_not_kept(watches: bool) -> None:
    line = Line(Demand("k"))
    guests = [Guest(rank, watches=watches) for rank in range(3000)]
    left = [weakref.ref(guest) for guest in guests[3:]]
    for guest in guests:
        line.add(guest)
    for guest in guests[3:]:
        line.discard(guest)
    del guests[3:], guest
    gc.collect()
    assert not any(guest() for guest in left)
    assert [*line.waiters] == guests
    assert [*line.watching] == (guests if watches else [])


def test_the_order_is_kept_while_others_leave() -> None:
    line = Line(Demand("k"))
    guests = [Guest((rank * 7919) % 1000) for rank in range(1000)]
    for guest in guests:
        line.add(guest)
    for guest in guests:
        if guest.rank % 10:
            line.discard(guest)
    assert [guest.rank for guest in line.waiters] == list(range(0, 1000, 10))


def test_waiters_with_the_same_rank_stay_in_the_order_of_their_arrival() -> None:
    line = Line(Demand("k"))
    first, second, third = Guest(1), Guest(1), Guest(1)
    for guest in (first, second, third):
        line.add(guest)
    line.discard(second)
    assert [*line.waiters] == [first, third]


def test_many_that_come_and_go_one_by_one_cost_little() -> None:
    timers: Ordered[int] = Ordered()
    for number in range(5000):
        timers.put(number, 1e9)
    began = time.process_time()
    for number in range(5000, 10_000):
        timers.put(number, 1e9 + number)
        assert timers.between(-math.inf, 1.0) == []
        timers.discard(number)
    assert time.process_time() - began < 1.0


def test_a_waiter_that_was_called_and_waits_on_does_not_stand_behind_itself() -> None:
    """Its room would stand in line with its rank when it is called again, before those of other rooms."""
    line, first, second = Line(Demand("k")), Guest(1), Guest(2)
    for guest in (first, second, first):
        line.add(guest)
    assert line.waiters.first(2) == [first, second]
    line.discard(second)
    assert line.waiters.first(2) == [first]


def test_what_is_put_again_moves() -> None:
    timers: Ordered[str] = Ordered()
    for name, at in (("a", 3.0), ("b", 2.0), ("c", 1.0), ("a", 0.0)):
        timers.put(name, at)
    assert [*timers] == ["a", "c", "b"]
    assert timers.between(-math.inf, 1.5) == ["a", "c"]
    timers.discard("a")
    timers.discard("unknown")
    assert (timers.lowest, timers.place_of("b"), timers.place_of("a")) == (1.0, 2.0, math.inf)


def test_a_line_is_checked_for_a_waiter_that_is_first_or_watches_and_for_any_while_the_room_is_not_in_it() -> None:
    line = Line(Demand("k"))
    assert line.add(Guest(10)), "the room is not in line"
    line.stand(10)
    assert not line.add(Guest(20))
    assert line.add(Guest(5))
    assert line.add(Guest(30, watches=True))


class Member(Guest):
    """Waits for a turn of its group."""

    def __init__(self, rank: int, published: int, group: str = "g") -> None:
        super().__init__(rank)
        self.demand, self._published = Demand("k", share=Share(group, group, 1000)), published

    @property
    def published(self) -> int:
        """When it was published."""
        return self._published


@pytest.mark.parametrize("seed", range(5))
def test_the_oldest_of_a_group_has_its_first_turn_however_they_have_asked(seed: int) -> None:
    chance, line = random.Random(seed), Line(Demand("k"))
    members = [Member(0, published, chance.choice("ab")) for published in range(200)]
    chance.shuffle(members)
    for rank, member in enumerate(members):
        member.rank = rank
        line.add(member)
        if chance.random() < 0.2:
            line.discard(chance.choice([*line.waiters]))
    for group in "ab":
        mine = [one.published for one in line.waiters if one.demand.share.digest == group]
        assert mine == sorted(mine)
    ranks = [one.rank for one in line.waiters]
    assert ranks == sorted(set(ranks))
    for member in [*line.waiters]:
        line.discard(member)


def test_the_turns_of_one_group_are_not_those_of_another() -> None:
    line = Line(Demand("k"))
    late, early, stranger = Member(1, 20), Member(3, 10), Member(2, 5, "other")
    for member in (late, stranger, early):
        line.add(member)
    assert [*line.waiters] == [early, stranger, late]
    assert [one.rank for one in line.waiters] == [1, 2, 3]


def test_a_line_is_checked_when_an_older_waiter_gets_the_smaller_rank_of_one_that_came_later() -> None:
    """Other groups would go first until the room looks again."""
    line = Line(Demand("k"))
    line.add(Member(30, 10))
    line.stand(30)
    assert line.add(Member(20, 20))
    assert line.first.rank == 20


def test_a_drop_reads_no_header_of_a_newer_message() -> None:
    newer: Any = SimpleNamespace(published=2, request=None)
    assert not Drop(before=1, until=math.inf, spared=()).ends(newer)
    assert not Drop(before=2, until=time.monotonic(), spared=()).ends(newer)
