"""Queues: those who wait in a room. What has ended is not kept, and to keep it out costs little."""

from __future__ import annotations

import gc
import math
import time
import weakref

import pytest

from celery_redislock.line.waiters import Queues, Waiter
from celery_redislock.protocol.names import Demand


class Guest(Waiter):
    """Waits, and is forgotten."""

    def __init__(self, rank, key="k", deadline=math.inf, watches=False):
        self.demand, self.rank, self.deadline, self.watches = Demand(key), rank, deadline, watches

    def take_turn(self, *, called):
        """It is never called here."""


@pytest.fixture
def queues():
    return Queues()


def kept(guests):
    gc.collect()
    return sum(guest() is not None for guest in guests)


def round_of(queues, now=0.0):
    """As a room does in each of its rounds."""
    queues.take_in()
    return len(queues.end(now))


def enter(queues, *guests):
    for guest in guests:
        queues.add(guest)
    round_of(queues)
    return [weakref.ref(guest) for guest in guests]


@pytest.mark.parametrize("watches", [False, True])
def test_those_who_have_expired_behind_the_first_are_not_kept(queues, watches):
    enter(queues, *(Guest(rank) for rank in range(3)))
    ended = enter(queues, *(Guest(rank, deadline=10.0, watches=watches) for rank in range(3, 3003)))
    assert round_of(queues, now=11.0) == 3000
    assert kept(ended) < 30
    assert [queues.first("1 k").rank, queues.second("1 k").rank, len(queues)] == [0, 1, 3]


@pytest.mark.parametrize("watches", [False, True])
def test_those_who_leave_are_not_kept_in_any_line(queues, watches):
    guests = [Guest(rank, key=f"k{rank % 7}", watches=watches) for rank in range(3000)]
    refs = enter(queues, *guests)
    for guest in guests[30:]:
        queues.remove(guest)
    del guests, guest
    round_of(queues)
    assert kept(refs) < 100
    assert sum(len(queue.heap) for queue in queues.by_line.values()) < 100
    assert sum(len(queue.watching) for queue in queues.by_line.values()) < 100


def test_the_order_is_kept_while_others_leave(queues):
    guests = [Guest((rank * 7919) % 1000) for rank in range(1000)]
    enter(queues, *guests)
    for number, guest in enumerate(sorted(guests, key=lambda one: one.rank)):
        if number % 10:
            queues.remove(guest)
    round_of(queues)
    order = []
    while first := queues.first("1 k"):
        order.append(first.rank)
        queues.remove(first)
    assert order == list(range(0, 1000, 10))


def test_many_who_come_and_go_one_by_one_cost_little(queues):
    """Each round may look at all, but only after as many have ended."""
    enter(queues, *(Guest(rank) for rank in range(5000)))
    began = time.process_time()
    for rank in range(5000, 10_000):
        guest = Guest(rank, deadline=1e9)
        queues.add(guest)
        round_of(queues)
        queues.remove(guest)
    assert time.process_time() - began < 2.0


def test_who_was_called_and_waits_on_does_not_stand_behind_itself(queues):
    """Its room would stand in line with its rank when it is called again, before those of other rooms."""
    first, second = Guest(1), Guest(2)
    enter(queues, first, second)
    queues.remove(first)
    enter(queues, first)
    assert queues.second(first.line) is second
    assert queues.first(first.line) is first
    queues.remove(second)
    assert queues.second(first.line) is None
