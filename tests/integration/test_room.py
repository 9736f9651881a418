"""The room: who waits for a key of a real server has its turn, in order, whatever is lost, refused or dies."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from celery_redislock.connection.connect import connect
from celery_redislock.connection.outage import Outage
from celery_redislock.connection.store import LockStore
from celery_redislock.line import lines, listener
from celery_redislock.line.room import Room
from celery_redislock.line.waiters import Waiter
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand, channel_of, keys_of
from celery_redislock.protocol.replies import Conflict, Granted
from celery_redislock.protocol.tokens import Attempt, Token
from tests.integration.conftest import KEY, ONE
from tests.lab.asking import acquire
from tests.lab.servers import wait_until

LINE = keys_of(KEY).line


class Guest(Waiter):
    """Waits in a room, and notes how it began: True where it was called."""

    def __init__(self, rank, key=KEY, deadline=math.inf, look_every=None, claim=None):
        self.demand, self.rank, self.deadline, self.look_every = Demand(key), rank, deadline, look_every
        self.claim, self.watches = claim, claim is not None
        self.began = []
        self.has_slot = True
        self.coming = False
        self.asked = 0
        self.error = None

    def is_ready(self):
        self.asked += 1
        return self.has_slot

    def is_coming(self):
        return self.coming

    def need_not_wait(self, holders):
        return any(holder.owner == self.claim for holder in holders)

    def take_turn(self, *, called):
        self.began.append(called)

    def unavailable(self, error):
        self.error = error

    def comes(self):
        wait_until(lambda: self.began, "it begins", 15)  # sooner than a look that nobody has asked for
        return self.began == [True]


@pytest.fixture
def make_room(locks):
    made = []

    def make(url=None, kind=LockStore):
        # Patient: on a busy machine a short time-out would be an outage.
        client = connect(url or locks.url(), {"socket_timeout": 5.0, "socket_connect_timeout": 5.0})
        room = Room(kind.of(client), connect(url or locks.url(), {}))
        made.append(room)
        return room

    yield make
    for room in made:
        room.leave_all(room.waiting())
        room.stop()


@pytest.fixture
def room(make_room):
    return make_room()


@pytest.fixture
def running(holder):
    """The holder of the key. It holds it for longer than any test waits: what waits must not begin as that ends."""
    one = holder("running")
    assert isinstance(one.acquire(300), Granted)
    return one


@pytest.fixture
def no_look(monkeypatch):
    """A room that waits to be handed a key does not look at it: only what it hears makes it look."""
    monkeypatch.setattr(lines, "WATCHED", (60.0, 60.0))


def in_line(client, *rooms):
    """Whether these rooms stand in line, in this order, and hear."""
    wait_until(lambda: client.zrange(LINE, 0, -1) == [room.token.value for room in rooms], "they stand in line")
    for room in rooms:
        hears(client, room)


def hears(client, room):
    wait_until(lambda: client.pubsub_numsub(channel_of(room.token.nonce))[0][1], "it hears")


def enter(room, *guests):
    for guest in guests:
        room.enter(guest)


def take_turn(store, holder, room):
    """As one who was called: it takes the key, and releases it."""
    one = holder("next")
    assert isinstance(acquire(store, ONE, one.token, 30, call=room.token.owner), Granted)
    assert one.release()


@pytest.mark.usefixtures("long_offers")
def test_who_waits_is_called_by_the_release(room, running, client):
    guest = Guest(10)
    room.enter(guest)
    in_line(client, room)
    assert (len(room), room.waiting()) == (1, [guest])
    running.release()
    assert guest.comes()  # the hint came; a look would have come after half a minute
    assert len(room) == 0
    assert Token.of(client.get(KEY)).owner == room.token.owner
    assert client.zcard(LINE) == 0


@pytest.mark.usefixtures("long_offers")
def test_those_of_one_room_come_by_rank(room, running, store, holder, client):
    guests = [Guest(rank) for rank in (30, 10, 20)]
    enter(room, *guests)
    in_line(client, room)
    wait_until(lambda: client.zscore(LINE, room.token) == 10, "the first counts")
    running.release()
    for rank in (10, 20, 30):
        guest = next(one for one in guests if one.rank == rank)
        assert guest.comes()
        assert sorted(one.rank for one in guests if one.began) == list(range(10, rank + 1, 10))
        take_turn(store, holder, room)
    assert client.keys() == []


@pytest.mark.usefixtures("long_offers")
def test_those_with_the_same_rank_are_called_one_after_the_other_as_they_came(room, running, store, holder, client):
    guests = [Guest(10) for _ in range(3)]
    enter(room, *guests)
    in_line(client, room)
    running.release()
    for number, guest in enumerate(guests, 1):
        assert guest.comes()
        client.publish(channel_of(room.token.nonce), f"look 1 {KEY}")
        newcomer = Guest(10, key="another")
        room.enter(newcomer)
        assert newcomer.comes()  # the room has looked at both
        assert [len(one.began) for one in guests] == [1] * number + [0] * (3 - number)
        assert client.get(KEY) == room.call_of(guest)
        take_turn(store, holder, room)
        client.delete("another")
    assert client.keys() == []


def test_while_one_whose_call_has_lapsed_is_on_its_way_no_second_one_is_called(make_room, running, client, monkeypatch):
    """It has no slot, whatever its room says: another room goes first."""
    monkeypatch.setattr(lines, "CALLED_FOR", 0.0)
    room, other = make_room(), make_room()
    first, second, elsewhere = Guest(10), Guest(20), Guest(30)
    first.coming = True
    enter(room, first, second)
    in_line(client, room)
    enter(other, elsewhere)
    in_line(client, room, other)
    running.release()
    assert first.comes()
    client.delete(KEY)  # its call has lapsed
    client.publish(channel_of(other.token.nonce), f"look 1 {KEY}")
    assert elsewhere.comes()
    assert second.began == []
    client.delete(KEY)
    first.coming = False
    assert second.comes()


@pytest.mark.usefixtures("long_offers")
def test_those_of_several_rooms_come_by_rank(make_room, running, store, holder, client):
    first, second = make_room(), make_room()
    early, late, last = Guest(10), Guest(20), Guest(30)
    enter(second, late)
    enter(first, early, last)
    in_line(client, first, second)
    running.release()
    for guest, room in ((early, first), (late, second), (last, first)):
        assert guest.comes()
        take_turn(store, holder, room)
    assert client.keys() == []


def test_who_waits_while_the_servers_clock_is_set_back_comes_before_who_comes_later(make_room, running, client):
    """Ranks are times of that clock: here the ranks are an hour ahead instead."""
    first, second = make_room(), make_room()
    seconds, _ = client.time()
    early, late, last = [Guest((seconds + ahead) * 1_000_000) for ahead in (3600, 3601, 0)]
    enter(first, early, late)
    in_line(client, first)
    wait_until(lambda: client.zscore(LINE, first.token) < (seconds + 60) * 1_000_000, "the room is told the time")
    seconds, microseconds = client.time()
    last.rank = seconds * 1_000_000 + microseconds
    enter(second, last)
    in_line(client, first, second)
    running.release()
    assert early.comes()
    assert first.waiting() == [late]
    assert late.rank <= last.rank


def test_who_waited_without_a_slot_while_the_servers_clock_was_set_back_moves_up_with_the_first_call(
    room, running, client
):
    """Where each call finds the key free, the room never meets a conflict."""
    seconds, _ = client.time()
    old, new = [Guest((seconds + ahead) * 1_000_000) for ahead in (3600, 0)]
    old.has_slot = new.has_slot = False
    enter(room, old, new)
    in_line(client, room)
    running.release()
    wait_until(lambda: client.keys() == [], "the room declines the key, and leaves the line")
    new.has_slot = True
    assert new.comes()
    wait_until(lambda: old.rank < (seconds + 60) * 1_000_000, "the other moves up")


def test_who_finds_the_key_free_is_called_at_once(room, client):
    guest = Guest(10)
    room.enter(guest)
    assert guest.comes()


def test_a_newcomer_who_is_not_the_first_sends_nothing(room, running, client, locks):
    room.enter(Guest(10))
    in_line(client, room)
    locks.calls()
    enter(room, *(Guest(rank) for rank in range(11, 50)))
    room.enter(Guest(9))
    wait_until(lambda: client.zscore(LINE, room.token) == 9, "the one who is counts")
    assert locks.calls()["evalsha"] <= 5  # for that one, and perhaps the look after the subscription, or the next one


@pytest.mark.usefixtures("long_offers")
def test_who_has_no_slot_lets_the_next_room_go_first_and_is_asked_again(make_room, running, store, holder, client):
    full, other = make_room(), make_room()
    early, late = Guest(10), Guest(20)
    enter(full, early)
    enter(other, late)
    in_line(client, full, other)
    early.has_slot = False
    asked = early.asked
    full.enter(Guest(30, claim=b"none"))  # has the room look: one that is on its way may have seen a slot
    wait_until(lambda: early.asked > asked, "the room knows that it has no slot")
    running.release()
    assert late.comes()
    assert early.began == []
    early.has_slot = True
    take_turn(store, holder, other)
    assert early.comes()


@pytest.mark.usefixtures("long_offers")
@pytest.mark.parametrize("keeps", [True, False])
def test_an_offer_is_kept_for_one_without_a_slot_only_if_a_newcomer_would_take_the_key(
    make_room, running, client, keeps
):
    class Host:
        def starts_round(self): ...

        def keeps_offer(self, waiter):
            waiter.has_slot = True  # by the next round
            return keeps

        def ends_round(self, room, aside): ...

    rooms, guests = [make_room(), make_room()], [Guest(10), Guest(20)]
    guests[0].has_slot = False
    rooms[0].hosts.add(Host())
    for room, guest in zip(rooms, guests, strict=True):
        room.enter(guest)
        hears(client, room)
    in_line(client, *rooms)
    running.release()
    next_one = guests[0] if keeps else guests[1]
    assert next_one.comes()
    assert [guest for guest in guests if guest.began] == [next_one]


@pytest.mark.usefixtures("long_offers")
def test_who_has_no_slot_stands_in_line_before_who_comes_later(make_room, running, client):
    full, other = make_room(), make_room()
    early, late = Guest(10), Guest(20)
    early.has_slot = False
    full.enter(early)
    in_line(client, full)
    enter(other, late)
    in_line(client, full, other)
    early.has_slot = True
    running.release()
    assert early.comes()
    assert late.began == []


def test_who_comes_first_without_a_slot_gives_the_room_its_rank(room, running, client):
    for rank in (20, 30, 10):
        guest = Guest(rank)
        guest.has_slot = False
        room.enter(guest)
    wait_until(lambda: client.zscore(LINE, room.token) == 10, "the first counts")


def test_a_room_that_has_passed_enters_again_only_with_a_slot(room, running, client):
    guest = Guest(10)
    guest.has_slot = False
    room.enter(guest)
    in_line(client, room)
    running.release()
    wait_until(lambda: client.keys() == [], "it has passed")
    asked = guest.asked
    wait_until(lambda: guest.asked > asked + 2, "it is asked again")
    assert client.keys() == []
    guest.has_slot = True
    assert guest.comes()


def test_a_room_without_a_slot_says_again_that_it_stands_before_its_line_ends(room, running, client, monkeypatch):
    monkeypatch.setattr(lines, "REFRESHED", 0.1)
    guest = Guest(10)
    guest.has_slot = False
    room.enter(guest)
    in_line(client, room)
    client.delete(LINE)
    in_line(client, room)


def test_who_had_no_slot_is_asked_again_without_being_told(room, running):
    guest = Guest(10)
    guest.has_slot = False
    room.enter(guest)
    running.release()
    wait_until(lambda: guest.asked > 3, "it is asked")
    guest.has_slot = True
    assert guest.comes()


def test_who_had_no_slot_is_asked_once_for_each_that_may_be_free(room):
    """An answer may hold for one asking only, as where the next of those who wait gets the slot."""
    guest, answers = Guest(10), iter([False, True])
    guest.is_ready = lambda: next(answers, False)
    room.enter(guest)
    assert guest.comes()


@pytest.mark.usefixtures("long_offers")
def test_a_newcomer_without_a_slot_does_not_take_the_key_from_one_who_is_on_the_way(room, running, store, client):
    first, second, newcomer = Guest(20), Guest(30), Guest(10)
    enter(room, first, second)
    in_line(client, room)
    running.release()
    assert first.comes()
    newcomer.has_slot = False
    room.enter(newcomer)
    wait_until(lambda: newcomer.asked, "it is asked")
    time.sleep(0.1)
    assert Token.of(client.get(KEY)).owner == room.token.owner
    newcomer.has_slot = True
    assert isinstance(acquire(store, ONE, running.token, 30, call=room.token.owner), Granted)


def test_at_its_deadline_it_begins_uncalled_and_the_room_leaves(room, running, client):
    guest = Guest(10, deadline=time.monotonic() + 0.1)
    room.enter(guest)
    wait_until(lambda: guest.began, "it begins")
    assert guest.began == [False]
    wait_until(lambda: not client.exists(LINE), "the line is left")


def test_who_leaves_is_not_called(room, running, client):
    first, second = Guest(10), Guest(20)
    enter(room, first, second)
    in_line(client, room)
    room.leave(first)
    assert len(room) == 1
    wait_until(lambda: client.zscore(LINE, room.token) == 20, "the next counts")
    room.leave(second)
    wait_until(lambda: not client.exists(LINE), "the line is left")
    running.release()
    assert client.keys() == []
    assert first.began == second.began == []


def test_who_was_called_and_leaves_passes_the_key_on(make_room, running, client):
    room, other = make_room(), make_room()
    first, second, elsewhere = Guest(10), Guest(30), Guest(20)
    enter(room, first, second)
    enter(other, elsewhere)
    in_line(client, room, other)
    running.release()
    assert first.comes()
    client.persist(KEY)  # so that nobody comes because it has lapsed
    room.leave(first)
    assert elsewhere.comes()
    client.persist(KEY)
    other.leave(elsewhere)
    assert second.comes()


@pytest.mark.usefixtures("long_offers")
def test_who_gives_up_late_takes_the_key_from_nobody(room, running, store, holder, client):
    """Its turn is over: the next is on the way."""
    first, second, third = Guest(10), Guest(20), Guest(30)
    enter(room, first, second, third)
    in_line(client, room)
    running.release()
    assert first.comes()
    take_turn(store, holder, room)
    assert second.comes()
    room.leave(first)
    room.leave(third)
    wait_until(lambda: not client.exists(LINE), "both have left")
    assert client.get(KEY) == tokens.call(room.token, 20, second.number).value


def test_who_was_called_and_died_costs_as_long_as_the_key_is_kept(room, running, client):
    first, second = Guest(10), Guest(20)
    enter(room, first, second)
    in_line(client, room)
    running.release()
    assert first.comes()
    assert 0 < client.pttl(KEY) <= 5000
    client.pexpire(KEY, 100)  # they have passed
    wait_until(lambda: second.began, "it begins")
    assert (first.began, second.began) == ([True], [True])


def test_a_key_that_is_handed_over_to_one_who_waits_calls_that_one_at_once(room, running, store, client, no_look):
    """Whatever its rank: the key is reserved for its message, and nobody else can have it."""
    reserved = tokens.mint(tokens.mint_nonce(), Attempt("id", 1, 0), tokens.origin("host", "task"), tokens.RESERVED)
    first, owner, last = Guest(10), Guest(20, claim=reserved.owner), Guest(30, claim=b"~another")
    enter(room, first, owner, last)
    in_line(client, room)
    assert store.send(commands.hand_over(ONE, running.token, reserved, 10))
    wait_until(lambda: owner.began, "it begins")
    assert owner.began == [False]  # nothing is offered: it asks with its claim
    assert first.began == last.began == []
    assert client.get(KEY) == reserved.value


def test_who_comes_after_the_key_was_handed_over_to_it_begins_at_once_also_behind_others(
    room, running, store, client, no_look
):
    """The key may be handed over between the message's refusal and its coming: the hint finds nobody to begin."""
    reserved = tokens.mint(tokens.mint_nonce(), Attempt("id", 1, 0), tokens.origin("host", "task"), tokens.RESERVED)
    first, owner = Guest(10), Guest(20, claim=reserved.owner)
    room.enter(first)
    in_line(client, room)
    asked = first.asked
    assert store.send(commands.hand_over(ONE, running.token, reserved, 10))
    wait_until(lambda: first.asked > asked, "the room looks")
    room.enter(owner)
    wait_until(lambda: owner.began, "it begins")
    assert (owner.began, first.began) == ([False], [])


def test_who_comes_after_one_who_began_out_of_turn_is_looked_for_at_the_end_of_the_next_lease(
    room, running, store, holder, client
):
    """The room has seen no more than a reservation, which lasts for long; and it is woken up by nobody."""
    reserved = tokens.mint(tokens.mint_nonce(), Attempt("id", 1, 0), tokens.origin("host", "task"), tokens.RESERVED)
    owner, newcomer = Guest(10, claim=reserved.owner), Guest(20)
    room.enter(owner)
    in_line(client, room)
    assert store.send(commands.hand_over(ONE, running.token, reserved, 30))
    wait_until(lambda: owner.began, "it begins")
    client.set(KEY, holder("next").token.value, px=300)
    room.enter(newcomer)
    assert newcomer.comes()


def test_a_key_that_cools_down_is_looked_at_when_it_has_and_not_when_the_lease_would_have_ended(
    room, running, store, client
):
    guest = Guest(10)
    room.enter(guest)
    in_line(client, room)
    assert client.pttl(KEY) > 20_000
    began = time.monotonic()
    assert store.send(commands.cool_down(ONE, running.token, 0.2))
    assert guest.comes()
    assert time.monotonic() - began > 0.15


@pytest.mark.parametrize("dead", [1, 2])
def test_a_room_that_died_costs_one_offer(room, running, client, dead):
    client.zadd(LINE, {tokens.of_room(tokens.mint_nonce(), "host"): number for number in range(dead)})
    guest = Guest(10)
    room.enter(guest)
    wait_until(lambda: client.zcard(LINE) == dead + 1, "it stands in line")
    hears(client, room)
    began = time.monotonic()
    running.release()
    assert guest.comes()
    assert time.monotonic() - began > dead * 0.95


def test_all_leave_when_the_room_is_emptied(room, running, client):
    guests = [Guest(10), Guest(20)]
    enter(room, *guests)
    in_line(client, room)
    assert room.leave_all(room.waiting()) == guests
    assert client.zcard(LINE) == 0
    assert len(room) == 0
    assert running.release()
    assert client.keys() == []


def test_an_offer_for_nobody_is_passed_on(make_room, running, client):
    """As after a command that has arrived late."""
    left = []

    class Leaving(LockStore):
        def leave(self, demand, room):
            left.append(demand.key)
            return super().leave(demand, room)

    room, other = make_room(kind=Leaving), make_room()
    guest = Guest(20)
    enter(room, Guest(1, key="another"))
    enter(other, guest)
    in_line(client, other)
    hears(client, room)
    client.zadd(LINE, {room.token: 5})
    running.release()
    assert guest.comes()
    assert left == [KEY]  # it was not the offer that lapsed


MALFORMED = [
    b"",
    b" ",
    b"garbage",
    b"offer",
    b"offer ",
    b"offer  ",
    b"offer k",
    b"offer 1",
    b"offer 1 ",
    b"offer one k",
    b"offer 0 k",
    b"offer -1 k",
    b"offer 01 k",
    b"offer +1 k",
    b"offer 1_0 k",
    b"offer 51 k",
    b"offer 99999999999999999999 k",
    b"offer 1.5 k",
    "offer ² k".encode(),
    b"offer 1 \xff\xfe",
    b"\x00\xff\xfe",
    b"take 1 k",
    b"Offer 1 k",
    b"look look look",
    b"soon 1 unknown",
    b"offer 1 " + b"k" * 1_000_000,
]


@pytest.mark.usefixtures("long_offers")
def test_a_malformed_hint_costs_the_room_nothing(make_room, running, client, log):
    """Anybody may publish on its channel."""
    asked = []

    class Noting(LockStore):
        def stand(self, demand, *args):
            asked.append(("stand", demand.key))
            return super().stand(demand, *args)

        def leave(self, demand, room):
            asked.append(("leave", demand.key))
            return super().leave(demand, room)

    room, guest = make_room(kind=Noting), Guest(10)
    room.enter(guest)
    in_line(client, room)
    for name in ("first", "second"):  # when it leaves the second one, its looks after its subscription are over
        client.publish(channel_of(room.token.nonce), f"offer 1 {KEY}{name}")
        wait_until(lambda line=f"{KEY}{name}": ("leave", line) in asked, "the room has heard it")
    asked.clear()
    for hint in MALFORMED:
        client.publish(channel_of(room.token.nonce), hint)
    client.publish(channel_of(room.token.nonce), f"offer 1 {KEY}unknown")
    wait_until(lambda: asked, "the room has heard them all")
    time.sleep(1.2)
    assert asked == [("leave", f"{KEY}unknown")]  # a command may have come late
    assert log.text == ""
    running.release()
    assert guest.comes()


def test_its_threads_end_with_the_users_client(locks):
    client = redis.Redis(unix_socket_path=str(locks.socket))
    pool, guest = weakref.ref(client.connection_pool), Guest(10)
    room = LockServer.behind(client).room
    before = set(threading.enumerate())
    room.enter(guest)
    assert guest.comes()
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"redislock-room", "redislock-listener"}
    client.close()
    del client, room
    gc.collect()
    assert pool() is None
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "they have ended")


def test_a_rank_that_is_none_is_refused_at_the_door(room):
    with pytest.raises(ValueError, match="is not a rank"):
        room.enter(Guest("10"))
    assert len(room) == 0


class TestWhatFails:
    def test_whose_user_may_not_use_channels_waits_on_and_says_so_once(
        self, make_room, running, store, holder, locks, log
    ):
        """Neither the message nor the subscription: the room looks every second."""
        locks.client.acl_setuser("mute", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset_channels=True)
        try:
            room = make_room(f"unix://mute@{locks.socket}")
            first, second = Guest(10), Guest(20)
            enter(room, first, second)
            wait_until(lambda: "redislock:room:*" in log.text, "it says so")
            running.release()
            assert first.comes()
            take_turn(store, holder, room)
            assert second.comes()
            assert log.text.count("redislock:room:*") == 1
        finally:
            locks.client.acl_deluser("mute")

    def test_a_release_that_may_not_publish_delays_and_loses_nothing(self, room, holder, client, locks):
        """The room looks when what it has seen of the holder ends."""
        running, guest = holder("running"), Guest(10)
        running.acquire(0.6)
        room.enter(guest)
        in_line(client, room)
        locks.client.execute_command("ACL", "SETUSER", "default", "-publish")
        try:
            running.release()
            assert guest.comes()
        finally:
            locks.client.execute_command("ACL", "SETUSER", "default", "+publish")

    def test_a_hand_over_that_may_not_publish_delays_by_a_moment_the_one_to_whom_the_key_is_handed_over(
        self, room, running, store, client, locks
    ):
        """Whose claim it is looks sooner than when the lease would have ended, also behind others."""
        reserved = tokens.mint(tokens.mint_nonce(), Attempt("id", 1, 0), tokens.origin("host", "task"), tokens.RESERVED)
        first, owner = Guest(10), Guest(20, claim=reserved.owner)
        enter(room, first, owner)
        in_line(client, room)
        locks.client.execute_command("ACL", "SETUSER", "default", "-publish")
        try:
            assert store.send(commands.hand_over(ONE, running.token, reserved, 30))
            wait_until(lambda: owner.began, "it begins")
            assert (owner.began, first.began) == ([False], [])
        finally:
            locks.client.execute_command("ACL", "SETUSER", "default", "+publish")

    def test_those_who_have_left_are_not_kept_until_their_deadlines(self, room, running):
        left = weakref.WeakSet()
        for number in range(300):
            guest = Guest(number, deadline=time.monotonic() + 3600)
            left.add(guest)
            room.enter(guest)
            room.leave(guest)
        del guest
        room.enter(Guest(1000, deadline=time.monotonic() + 3600))
        wait_until(lambda: gc.collect() is not None and len(left) < 150, "the room forgets them")

    def test_a_server_that_restarts_empty_forgets_nobody(self, private_locks, room, running, monkeypatch):
        monkeypatch.setattr(lines, "SHORT_LOOK", 60.0)  # nothing but the new connection makes the room look
        guest = Guest(10)
        room.enter(guest)
        hears(private_locks.client, room)
        private_locks.kill()
        private_locks.restart()
        wait_until(lambda: guest.began, "it begins")
        assert guest.began == [True]

    def test_a_room_without_a_slot_that_could_not_enter_its_line_enters_it_once_the_server_answers(
        self, private_locks, make_room
    ):
        room = make_room()
        guest = Guest(10)
        guest.has_slot = False
        private_locks.kill()
        room.enter(guest)
        wait_until(lambda: guest.error, "it is told")
        private_locks.restart()
        in_line(private_locks.client, room)

    def test_a_server_that_is_away_is_told_to_who_waits(self, private_locks, room, running):
        guest = Guest(10)
        room.enter(guest)
        hears(private_locks.client, room)
        private_locks.kill()
        wait_until(lambda: guest.error, "it is told")
        assert guest.began == []
        assert len(room) == 1

    def test_who_comes_once_the_server_is_back_is_not_told_that_it_was_away(
        self, private_locks, room, running, monkeypatch
    ):
        """Since nobody waited any more, nothing has noticed that it answers again."""
        monkeypatch.setattr("celery_redislock.connection.outage.SHORTEST_PAUSE", 0.02)
        first, second = Guest(10), Guest(20)
        room.enter(first)
        hears(private_locks.client, room)
        private_locks.kill()
        wait_until(lambda: first.error, "it is told")
        room.leave(first)
        private_locks.restart()
        assert room.is_out(KEY)
        room.enter(second)
        assert second.comes()
        assert second.error is None

    def test_a_room_that_all_have_left_asks_a_server_that_is_away_no_more(
        self, private_locks, make_room, running, monkeypatch
    ):
        """What cannot be left ends by itself."""

        asked = []

        class Noting(LockStore):
            def stand(self, *args):
                asked.append("stand")
                return super().stand(*args)

            def leave(self, *args):
                asked.append("leave")
                return super().leave(*args)

            def pass_on(self, *args):
                asked.append("pass_on")
                return super().pass_on(*args)

        monkeypatch.setattr("celery_redislock.line.room.SHORT_LOOK", 0.02)
        monkeypatch.setattr("celery_redislock.connection.outage.SHORTEST_PAUSE", 0.02)
        room = make_room(kind=Noting)
        guests = [Guest(10), Guest(10, key="another"), Guest(20)]
        enter(room, *guests)
        in_line(private_locks.client, room)
        assert guests[1].comes()
        private_locks.kill()
        wait_until(lambda: guests[0].error, "it is told")
        for guest in guests:  # the second was called already: it passes its key on
            room.leave(guest)

        def rests():
            before = len(asked)
            time.sleep(0.2)
            return len(asked) == before

        wait_until(rests, "it asks no more", 5)

    def test_a_cut_connection_is_made_again_and_what_was_not_heard_is_looked_for(
        self, make_room, running, client, lock_proxy
    ):
        room = make_room(lock_proxy.url)
        guest = Guest(10)
        room.enter(guest)
        in_line(client, room)
        lock_proxy.refuse()
        running.release()
        lock_proxy.mend()
        assert guest.comes()

    def test_a_server_that_falls_silent_is_asked_for_a_sign_of_life_and_heard_again(
        self, private_locks, room, running, client, monkeypatch, caplog
    ):
        """A connection may be dead unseen: nobody says so, and what is sent on it is lost."""
        caplog.set_level(logging.DEBUG, "celery_redislock")
        monkeypatch.setattr(listener, "LOOK_EVERY", 0.05)
        monkeypatch.setattr(listener, "SILENCE", 0.2)
        guest = Guest(10)
        room.enter(guest)
        in_line(client, room)
        private_locks.pause()
        try:
            wait_until(lambda: "the server is silent" in caplog.text, "the room has noticed")
        finally:
            private_locks.resume()
        in_line(client, room)
        running.release()
        assert guest.comes()

    def test_a_lost_reply_to_a_call_loses_no_time(self, make_room, running, client, lock_proxy):
        room = make_room(lock_proxy.url)
        guest = Guest(10)
        room.enter(guest)
        in_line(client, room)
        lost = lock_proxy.drop_reply(to=b"EVALSHA")
        running.release()
        lost.wait()
        client.persist(KEY)  # so that it does not come because the key has lapsed
        assert guest.comes()
        assert lost.struck == 1

    def test_who_cannot_begin_costs_nobody_else(self, room, running, store, holder, client, log):
        bad, good = Guest(10), Guest(20)
        bad.take_turn = lambda *, called: client.persist(KEY) / 0  # and the key does not lapse
        enter(room, bad, good)
        in_line(client, room)
        running.release()
        assert good.comes()
        assert "could not start" in log.text

    def test_who_cannot_tell_whether_it_can_begin_begins(self, room, running, store, holder, client, log):
        bad, good = Guest(10), Guest(20)
        bad.is_ready = lambda: 1 / 0
        enter(room, bad, good)
        in_line(client, room)
        running.release()
        assert bad.comes()
        take_turn(store, holder, room)
        assert good.comes()
        assert "can start; starting it" in log.text

    def test_a_key_that_the_server_refuses_to_look_at_costs_the_others_nothing(self, room, running, store, client):
        """As where somebody has stored something else in its line, or where the user has no right to it."""
        odd = keys_of(f"{KEY}odd")
        client.set(odd.line, "no line")
        bad, good = Guest(10, key=odd.lock), Guest(20)
        enter(room, bad, good)
        in_line(client, room)
        wait_until(lambda: bad.error, "it is told")
        assert good.error is None
        running.release()
        assert good.comes()
        client.delete(odd.line)
        assert bad.comes()

    def test_a_key_of_a_node_that_is_away_does_not_keep_the_others_from_their_turn(self, make_room):
        """As in a Cluster, where another node may answer for the other keys."""

        class TwoNodes(LockStore):
            def __init__(self, transport, outage_of):
                super().__init__(transport, outage_of)
                away = Outage()
                self.outage_of = lambda key: away if key == "bad" else outage_of(key)

            def stand(self, demand, *args):
                if demand.key == "bad":
                    away = connect("redis://127.0.0.1:1", {"socket_connect_timeout": 0.5})
                    return LockStore.of(away, self.outage_of(demand.key)).stand(demand, *args)
                return super().stand(demand, *args)

        room = make_room(kind=TwoNodes)
        bad, good = Guest(10, key="bad"), Guest(20, key="good")
        enter(room, bad, good)
        assert good.comes()
        assert bad.error is not None

    def test_a_key_that_cannot_be_passed_on_costs_the_others_nothing(self, room, client, locks):
        """One who was called to it has left."""
        odd = keys_of(f"{KEY}odd")
        bad = Guest(10, key=odd.lock)
        room.enter(bad)
        assert bad.comes()
        client.delete(odd.lock)
        client.lpush(odd.lock, "no lock")
        good = Guest(20)
        room.leave(bad)
        room.enter(good)
        assert good.comes()
        assert good.error is None

    def test_a_look_that_fails_is_tried_again_and_costs_nobody_else(self, make_room, log):
        class Failing(LockStore):
            fails = True

            def stand(self, demand, *args):
                if demand.key == "bad" and self.fails:
                    self.fails = False
                    raise RuntimeError("a defect")
                return super().stand(demand, *args)

        room = make_room(kind=Failing)
        bad, good = Guest(10, key="bad"), Guest(20, key="good")
        enter(room, bad, good)
        assert good.comes()
        assert bad.comes()
        assert "checking the lock bad failed" in log.text


def test_a_lock_of_another_library_is_looked_at_every_so_often(room, client):
    client.set(KEY, "theirs", px=30_000)
    guest = Guest(10, look_every=0.02)
    room.enter(guest)
    in_line(client, room)
    client.delete(KEY)
    assert guest.comes()


def test_many_enter_and_leave_at_once_and_nobody_is_forgotten(room, store, holder, client):
    guests = [Guest(rank, key=f"{KEY}{rank % 7}") for rank in range(1, 300)]
    leaving = guests[::3]
    staying = [guest for guest in guests if guest not in leaving]

    def come_and_go(guest):
        room.enter(guest)
        if guest in leaving:
            room.leave(guest)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, guests))

    def free_all():
        for number in range(7):
            held = client.get(f"{KEY}{number}")
            if held and Token.of(held).state == "offered":
                one, demand = holder("one"), Demand(f"{KEY}{number}")
                if not isinstance(acquire(store, demand, one.token, 5, call=room.token.owner), Conflict):
                    store.release(demand, one.token)
        return all(guest.began for guest in staying)

    wait_until(free_all, "all have their turn", 20)
    assert all(guest.began == [True] for guest in staying)
