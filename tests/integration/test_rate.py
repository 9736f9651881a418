"""A rate on a real server: what is granted, kept and undone, and what twenty rooms ask."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.line.room import Room
from celery_redislock.line.waiters import Waiter
from celery_redislock.options import shares_of
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, channel_of, keys_of
from celery_redislock.protocol.replies import Conflict, Granted
from celery_redislock.protocol.scripts import Tag
from tests.integration.conftest import KEY
from tests.lab.servers import wait_until

#: Two in a second.
RATE = Demand(KEY, 2, 1.0)


def mint(task_id="id"):
    origin = tokens.origin("w@host", "shop.mail")
    return tokens.mint(tokens.mint_nonce(), tokens.Attempt(task_id, 0, 0), origin, tokens.SPENT)


@pytest.fixture
def store(locks):
    client = connect(locks.url(), {})
    yield LockStore.of(client)
    client.close()


@pytest.fixture
def ask(store):
    def ask(token, demand=RATE):
        reply, sent_at, _ = store.ask(commands.acquire(demand, token, 30.0))
        return Granted.of(reply, sent_at) if reply[0] == Tag.GRANTED else Conflict.of(reply)

    return ask


def test_what_is_granted_is_spent_for_its_time_and_nobodys(ask, store, locks):
    first, second = mint("first"), mint("second")
    assert (ask(first).permit, ask(second).permit) == (1, 2)
    refused = ask(mint())
    assert (refused.holder, refused.is_spent, refused.others, 0 < refused.ttl <= 1) == (first, True, (), True)
    for owner in (tokens.known_by(first.nonce).owner, tokens.known_by(first.nonce, tokens.RESERVED).owner):
        assert store.ask(commands.release(Demand(KEY, 50), owner))[0][0] == Tag.LOST
    assert store.renew([(KEY, tokens.known_by(first.nonce), 60.0)]) == [None]
    wait_until(lambda: locks.client.keys() == [], "their time is over", 5)


def test_a_copy_and_a_retry_of_what_was_granted_take_a_permit_of_their_own(ask):
    granted = [ask(mint("same")) for _ in range(2)]
    assert [isinstance(one, Granted) and one.permit for one in granted] == [1, 2]
    assert ask(mint("same")).is_spent


def test_an_undo_gives_back_only_its_own_grant(ask, store):
    first, again = mint("same"), mint("same")
    ask(first)
    ask(again)
    assert store.ask(commands.release(RATE, first.value))[0][0] == Tag.RELEASED
    assert store.ask(commands.release(RATE, first.value))[0][0] == Tag.LOST
    assert isinstance(ask(mint()), Granted)
    assert ask(mint()).is_spent


def test_a_lower_rate_beside_the_old_one_allows_no_more_than_the_higher(ask):
    """In a rolling deploy."""
    higher, lower = Demand(KEY, 4, 1.0, 4), Demand(KEY, 2, 1.0, 2)
    granted = [isinstance(ask(mint(), demand), Granted) for demand in (lower, higher) * 4]
    assert sum(granted) == 4


@pytest.mark.parametrize(("first", "second"), [(50, 51), (60, 99), (101, 250), (1, 120)])
def test_permits_share_the_runs_of_a_rate_and_those_of_two_rates_allow_no_more_than_the_greater(
    ask, locks, first, second
):
    """A grant's share of the time says how often the permit is granted in the whole."""
    times = {}
    for number in (first, second):
        locks.client.flushall()
        demand = Demand(KEY, *shares_of((number, 3600)))
        granted = [ask(mint(), demand) for _ in range(demand.capacity)]
        spent = [locks.client.pttl(keys_of(KEY).permit(one.permit)) for one in granted]
        times[number] = [round(3_600_000 / left) for left in spent]
        assert sum(times[number]) == number
        assert ask(mint(), demand).is_spent
    assert sum(map(max, itertools.zip_longest(*times.values(), fillvalue=0))) == second


def test_lock_info_is_free_until_all_permits_are_spent(ask, store):
    ask(mint())
    assert store.look(RATE) is None
    ask(mint())
    assert store.look(RATE).is_spent


def test_a_room_that_leaves_tells_the_next_one_to_check(ask, store, locks):
    rooms = [tokens.of_room(tokens.mint_nonce(), f"host {number}") for number in range(2)]
    ask(mint())
    ask(mint())
    waits = [store.stand(RATE, room, rank, None) for rank, room in enumerate(rooms, 1)]
    assert waits[1].ttl > waits[0].ttl + 0.9, "the second checks a second later, in case the first is dead"
    with locks.client.pubsub(ignore_subscribe_messages=True) as hears:
        hears.subscribe(channel_of(rooms[1].nonce))
        wait_until(lambda: locks.client.pubsub_numsub(channel_of(rooms[1].nonce))[0][1], "it hears")
        store.leave(RATE, rooms[0])
        hints = []
        wait_until(lambda: hints.append(hears.get_message(timeout=1)) or hints[-1], "it is told")
    assert hints[-1]["data"] == f"look 2 {KEY}".encode()
    assert store.stand(RATE, rooms[1], 2, None).ttl <= 1


class Guest(Waiter):
    """Asks for the key when it is called."""

    def __init__(self, demand, rank, room, ask, granted):
        self.demand, self.rank, self._room, self._ask, self._granted = demand, rank, room, ask, granted

    def take_turn(self, *, called):
        assert called
        threading.Thread(target=self._take).start()

    def _take(self):
        if isinstance(self._ask(self._room.call_of(self)), Granted):
            self._granted.append((time.monotonic(), self.rank))


@pytest.mark.parametrize("capacity", [1, 2])
def test_one_room_goes_on_where_all_permits_were_called_at_once(locks, capacity):
    """Then no permit was spent when the room was told that its waiters are called."""
    demand, grants = Demand(KEY, capacity, 0.5, capacity), []
    client = connect(locks.url(), {})
    store = LockStore.of(client)
    room = Room(store, client)
    asking = LockStore.of(connect(locks.url(), {}))
    lock = threading.Lock()

    def asks(call):
        with lock:
            reply, sent_at, _ = asking.ask(commands.acquire(demand, mint(), 30.0, call=call))
        return Granted.of(reply, sent_at) if reply[0] == Tag.GRANTED else Conflict.of(reply)

    try:
        for rank in range(6 * capacity):
            room.enter(Guest(demand, rank + 1, room, asks, grants))
        wait_until(lambda: len(grants) == 6 * capacity, "all have had their turn")
    finally:
        room.stop()
    times = sorted(moment for moment, _ in grants)
    longest = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert longest[-2] < 4, "it has waited five seconds again and again"


def test_twenty_rooms_send_at_most_two_commands_for_each_grant_and_use_nine_tenths_of_the_rate(locks):
    demand, grants, number, counts = Demand(KEY, 20, 0.5), [], 160, []
    clients = [connect(locks.url(), {}) for _ in range(20)]
    stores = [LockStore.of(client) for client in clients]
    rooms = [Room(store, client) for store, client in zip(stores, clients, strict=True)]
    asking = LockStore.of(clients[0])
    lock = threading.Lock()

    def asks(call):
        with lock:
            reply, sent_at, _ = asking.ask(commands.acquire(demand, mint(), 30.0, call=call))
        return Granted.of(reply, sent_at) if reply[0] == Tag.GRANTED else Conflict.of(reply)

    try:
        for rank in range(number):
            room = rooms[rank % 20]
            room.enter(Guest(demand, rank + 1, room, asks, grants))
        wait_until(lambda: len(grants) >= 40, "the first have their turn")
        before = locks.client.info("commandstats")["cmdstat_evalsha"]["calls"], len(grants)
        wait_until(lambda: len(grants) >= 120, "most have had their turn")
        after = locks.client.info("commandstats")["cmdstat_evalsha"]["calls"], len(grants)
        counts = [later - earlier for earlier, later in zip(before, after, strict=True)]
        wait_until(lambda: len(grants) == number, "all have had their turn")
    finally:
        for room in rooms:
            room.stop()
    assert counts[0] <= counts[1] * 3, counts  # with the acquire itself
    ranks = [rank for _, rank in sorted(grants)]
    assert all(abs(place - rank) <= 40 for place, rank in enumerate(ranks, 1)), ranks
    print(f"{counts[0] / counts[1] - 1:.2f} commands of rooms for each grant")
    print(f"{(number - 20) / 40 / (max(grants)[0] - min(grants)[0]):.2f} of the rate")
    assert not locks.client.exists(keys_of(KEY).line)
