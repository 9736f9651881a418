"""The room and waiters that need several keys: called with all of them, or with none."""

from __future__ import annotations

import math
import time

import pytest

from celery_redislock.line import lines as lines_module
from celery_redislock.line import room as room_module
from celery_redislock.protocol.names import FIRST_TURN, Demand, Share, keys_of
from celery_redislock.protocol.several import in_order
from tests.integration.test_room import Guest, make_room, room  # noqa: F401 - fixtures
from tests.lab.servers import wait_until

A, B, C = (f"redislock:{{{name}}}" for name in "abc")


class Several(Guest):
    """Needs several keys; it was refused one of them."""

    def __init__(self, rank, *keys, refused=None, **more):
        super().__init__(rank, refused or keys[0], **more)
        self.wants = in_order(one if isinstance(one, Demand) else Demand(one) for one in keys)
        self.demand = next(one for one in self.wants if one.key == self.demand.key)
        self.lost_at = None


@pytest.fixture
def hold(client):
    """A key that another library holds; ``hold(A)`` returns what releases it, with a look of the room."""

    def take(key, *rooms):
        client.set(key, "another's", px=300_000)

        def release():
            client.delete(key)
            for one in rooms:
                one.look(Demand(key).line)

        return release

    return take


def state(client, key):
    return (client.get(key) or b"")[:1]


def lines(client):
    return {key for key in (A, B, C) if client.zcard(keys_of(key).line)}


def test_who_finds_all_keys_free_is_called_with_all(room, client):  # noqa: F811
    guest = Several(10, B, A, Demand(C, 5))
    room.enter(guest)
    assert guest.comes()
    assert [state(client, key) for key in (A, B, C)] == [b"!"] * 3
    assert lines(client) == set()


def test_who_waits_for_one_key_leaves_the_others_to_anybody(room, client, hold):  # noqa: F811
    release = hold(B, room)
    guest, other = Several(10, A, B), Guest(20, A)
    room.enter(guest)
    wait_until(lambda: lines(client) == {B}, "it waits for the key that is held")
    assert guest.demand.key == B
    room.enter(other)
    assert other.comes()
    client.delete(A)
    release()
    assert guest.comes()


def test_who_moves_gives_back_what_it_has_got(room, client, hold):  # noqa: F811
    releases = {key: hold(key, room) for key in (A, C)}
    guest = Several(10, A, B, C)
    room.enter(guest)
    wait_until(lambda: lines(client) == {A}, "it waits for the first one")
    releases[A]()
    wait_until(lambda: lines(client) == {C}, "it waits for the last one")
    wait_until(lambda: [state(client, key) for key in (A, B)] == [b"", b""], "the others are free", 3)
    assert guest.began == []
    releases[C]()
    assert guest.comes()


def test_who_has_an_earlier_rank_goes_first_in_each_line(room, client, hold):  # noqa: F811
    release = hold(A, room)
    early, late = Several(10, A, B), Several(20, B, A)
    room.enter(late)
    wait_until(lambda: late.demand.key == A, "the late one waits")
    room.enter(early)
    wait_until(lambda: len(room) == 2, "both wait")
    release()
    assert early.comes()
    assert late.began == []
    for key in (A, B):
        client.delete(key)
        room.look(Demand(key).line)
    assert late.comes()


def test_who_watches_a_key_does_not_start_because_another_has_its_turn_after_a_third(room, client, hold):  # noqa: F811
    """A run that joins the holder waits for that, and not for its turn."""

    class Joins(Guest):
        def need_not_wait(self, holders):
            return not holders

    hold(A)
    first, joins = Guest(1, A), Joins(5, A)
    joins.watches = True
    room.enter(first)
    room.enter(joins)
    release = hold(B, room)
    late = Several(10, A, B, refused=B)
    room.enter(late)
    wait_until(lambda: lines(client) == {A, B}, "all wait")
    release()
    wait_until(lambda: late.demand.key == A, "its turn came at one key, and another goes before it at the other")
    next_round = Guest(20, C)
    room.enter(next_round)
    assert next_round.comes()
    assert joins.began == []


class JoinsTheHolder(Guest):
    def __init__(self, rank, key):
        super().__init__(rank, key)
        self.watches = True

    def need_not_wait(self, holders):
        return not any(one.value == b"another's" for one in holders)


@pytest.mark.parametrize(("key", "limit"), [(A, 1), (A, 2), (B, 1)])
def test_who_watches_a_key_starts_when_it_is_another_waiters_turn_with_several(room, client, hold, key, limit):  # noqa: F811
    """The run that it has joined is over."""
    demand = Demand(A, limit)
    hold(A)
    hold(key)
    if limit > 1:
        client.set(keys_of(A).permit(2), "a third's")
    first, joins = Several(1, demand, B, refused=A), JoinsTheHolder(5, key)
    joins.demand = joins.demand._replace(capacity=limit)
    room.enter(first)
    room.enter(joins)
    wait_until(lambda: lines(client) == {A, key} and len(room) == 2, "both wait")
    client.delete(A, key)
    room.look(demand.line)
    assert first.comes()
    wait_until(lambda: joins.began == [False], "it need not wait any longer", 3)
    wait_until(lambda: lines(client) == set(), "the room stands in no line for waiters that have left", 10)


def test_a_line_that_is_set_aside_is_forgotten_when_all_who_wait_there_start_for_another_reason(
    room,  # noqa: F811
    client,
    hold,
    log,
):
    """No other line that was set aside has lost its waiters in the middle of a round."""
    hold(A)
    hold(B)
    first, joins = Several(1, A, B, refused=A), JoinsTheHolder(5, B)
    first.has_slot = joins.has_slot = False
    room.enter(first)
    room.enter(joins)
    wait_until(lambda: lines(client) == {A, B}, "both wait for a slot")
    client.delete(A, B)
    first.has_slot = True
    room.wake()
    assert first.comes()
    wait_until(lambda: joins.began == [False], "it need not wait any longer", 3)
    wait_until(lambda: lines(client) == set(), "the room stands in no line for waiters that have left", 10)
    assert log.text == ""


class InAGroup(Guest):
    published = 5

    def __init__(self, rank, key):
        super().__init__(rank, key)
        self.demand = Demand(key, share=Share("a customer", 16 * "0", 1000))


def test_who_moves_to_a_line_with_groups_is_in_no_group(room, client, hold):  # noqa: F811
    """Another task has the same key, and `lock_fair`."""
    hold(A)
    release = hold(B, room)
    fair, several = InAGroup(FIRST_TURN + 5, A), Several(10, A, B, refused=B)
    room.enter(fair)
    room.enter(several)
    wait_until(lambda: lines(client) == {A, B}, "both wait")
    release()
    wait_until(lambda: several.demand.key == A, "it waits for the other key now")
    wait_until(lambda: state(client, B) == b"", "it has given back what it got", 3)
    assert (several.rank, fair.rank) == (10, FIRST_TURN + 5)


class TestWhoseTurnCameInVainForLong:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(room_module, "STARVES_AFTER", 0.0)
        monkeypatch.setattr(room_module, "KEPT_FOR", 0.2)
        monkeypatch.setattr(room_module, "KEPT_WITHOUT_SLOT", 0.5)

    @pytest.fixture
    def starves(self, room, client, hold):  # noqa: F811
        """A waiter for which the room keeps the first key while another holds the second one."""

        def wait(**more):
            release = hold(B, room)
            guest = Several(10, A, B, **more)
            guest.lost_at = -math.inf
            room.enter(guest)
            wait_until(lambda: state(client, A) == b"!" and guest.demand.key == B, "the room keeps the first key")
            return guest, release

        return wait

    def test_is_kept_what_it_got_until_it_has_all(self, room, client, starves):  # noqa: F811
        guest, release = starves()
        before = client.pttl(A)
        wait_until(lambda: client.pttl(A) > before - 100, "the room asks for it again before its call ends")
        assert state(client, A) == b"!"
        release()
        assert guest.comes()
        assert [state(client, key) for key in (A, B)] == [b"!", b"!"]

    def test_is_one_at_a_time(self, room, client, starves, hold):  # noqa: F811
        hold(C)
        guest, release = starves()
        other = Several(20, C, Demand("redislock:{aa}"))
        other.lost_at = -math.inf
        room.enter(other)
        wait_until(lambda: other.demand.key == C, "the other one waits")
        time.sleep(0.5)
        assert state(client, "redislock:{aa}") == b""
        release()
        assert guest.comes()

    @pytest.mark.parametrize("how", ["leaves", "deadline", "no slot", "shutdown"])
    def test_is_kept_nothing_any_more_once_it_is_gone(self, room, client, starves, how):  # noqa: F811
        guest, release = starves(deadline=time.monotonic() + 1.0 if how == "deadline" else math.inf)
        match how:
            case "leaves":
                room.leave(guest)
            case "deadline":
                wait_until(lambda: guest.began == [False], "its deadline has passed")
            case "no slot":
                guest.has_slot = False
                release()
            case "shutdown":
                assert room.leave_all(room.waiting()) == [guest]
        wait_until(lambda: state(client, A) == b"", "the key is free", 3)
        time.sleep(0.5)
        assert state(client, A) == b""
        wait_until(lambda: lines(client) == ({B} if how == "no slot" else set()), "it stands only where one waits", 5)

    def test_is_kept_a_part_while_there_is_no_slot_because_a_backlog_leaves_none(self, client, starves):
        guest, release = starves()
        guest.has_slot = False
        time.sleep(1.0)
        assert state(client, A) == b"!"
        guest.has_slot = True
        release()
        assert guest.comes()

    def test_stands_in_line_at_once_where_it_was_kept_all_without_a_slot(self, client, starves, monkeypatch):
        """The room checks a key that it has called a waiter to only when that call has ended: here not in this test."""
        monkeypatch.setattr(lines_module, "CALLED_FOR", 600.0)
        guest, release = starves()
        guest.has_slot = False
        release()
        wait_until(lambda: state(client, B) == b"!", "the room keeps both keys")
        wait_until(lambda: lines(client), "it waits in line again")
        guest.has_slot = True
        assert guest.comes()

    def test_does_not_wait_in_a_circle_with_one_in_another_room(self, make_room, client, hold):  # noqa: F811
        """One that names the keys the other way around asks for them in the same order."""
        rooms = [make_room() for _ in range(2)]
        releases = [hold(key, *rooms) for key in (A, B)]
        guests = [Several(10, A, B), Several(5, B, A)]
        for one, guest in zip(rooms, guests, strict=True):
            guest.lost_at = -math.inf
            one.enter(guest)
            wait_until(lambda guest=guest: lines(client) and guest.asked, "it waits")
        for release in releases:
            release()
            time.sleep(0.3)
        for _ in guests:
            wait_until(lambda: any(guest.began for guest in guests), "one of them has both keys", 5)
            for guest in guests:
                guest.began.clear()
            client.delete(A, B)
            for one in rooms:
                for key in (A, B):
                    one.look(Demand(key).line)
