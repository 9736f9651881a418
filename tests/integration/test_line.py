"""The line of a key, by the scripts alone: who comes before whom, and what a reply that is lost leaves."""

from __future__ import annotations

from itertools import permutations

import pytest

from celery_redislock import LockUnavailable
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import channel_of, keys_of
from celery_redislock.protocol.replies import Called, Conflict, Finished, Granted, info_of
from celery_redislock.protocol.scripts import Claim, Note
from celery_redislock.protocol.tokens import CALLED, COOLING, OFFERED, RESERVED, Token, mint_nonce
from tests.integration.conftest import KEY, ONE
from tests.lab.asking import acquire

LINE = keys_of(KEY).line
pytestmark = pytest.mark.usefixtures("long_offers")


@pytest.fixture
def room():
    """Makes rooms: each is a token."""
    return lambda host="host": tokens.of_room(mint_nonce(), host)


@pytest.fixture
def line(client):
    """Who stands in line, by owner, with the rank."""

    def read():
        found = client.zrange(LINE, 0, -1, withscores=True)
        return [(Token.of(member).owner, rank) for member, rank in found]

    return read


@pytest.fixture
def kept(client):
    """The state of the key and the owner of what it holds; a key that is kept for a room is kept for a moment only."""

    def read():
        value = client.get(KEY)
        if value is None:
            return None
        token = Token.of(value)
        if token.state == "offered":
            assert 0 < client.pttl(KEY) <= 60_000
        return token[0], token.owner

    return read


def called(room, rank):
    return f"{CALLED}{room[1:]} {rank}".encode()


class TestARelease:
    def test_offers_the_key_to_the_room_with_the_smallest_rank(self, holder, store, room, line, kept):
        first, second, running = room(), room(), holder("running")
        running.acquire()
        assert isinstance(store.stand(ONE, second, 20, None), Conflict)
        assert isinstance(store.stand(ONE, first, 10, None), Conflict)
        assert line() == [(first.owner, 10), (second.owner, 20)]
        assert running.release()
        assert kept() == (OFFERED, first.owner)
        assert line() == [(second.owner, 20)]

    def test_tells_the_room_which_key_it_is(self, holder, store, room, client):
        mine, running = room(), holder("running")
        running.acquire()
        store.stand(ONE, mine, 10, None)
        with client.pubsub() as heard:
            heard.subscribe(channel_of(mine.nonce))
            assert heard.get_message(timeout=15)["type"] == "subscribe"
            running.release()
            assert heard.get_message(timeout=15)["data"] == f"offer 1 {KEY}".encode()

    def test_tells_the_next_room_that_lives_to_look_once_the_offer_has_ended(self, holder, store, room, client):
        rooms, running = [room() for _ in range(5)], holder("running")
        running.acquire()
        for rank, one in enumerate(rooms):
            store.stand(ONE, one, rank, None)
        with client.pubsub() as third, client.pubsub() as last:
            for heard, one in ((third, rooms[2]), (last, rooms[4])):
                heard.subscribe(channel_of(one.nonce))
                assert heard.get_message(timeout=15)["type"] == "subscribe"
            running.release()
            assert third.get_message(timeout=15)["data"] == f"soon 1 {KEY}".encode()
            assert last.get_message(timeout=0.05) is None

    def test_deletes_the_key_where_nobody_waits(self, holder, client):
        running = holder("running")
        running.acquire()
        running.release()
        assert client.keys() == []

    def test_writes_the_note_as_well(self, holder, store, room, kept, client):
        mine, running = room(), holder("running")
        running.acquire()
        store.stand(ONE, mine, 10, None)
        assert running.release(copy_may_wait=True)
        assert kept() == (OFFERED, mine.owner)
        assert client.exists(running.note)

    def test_that_hands_the_key_over_or_lets_it_cool_offers_nothing(self, holder, store, room, kept, line):
        mine, running = room(), holder("running")
        running.acquire()
        store.stand(ONE, mine, 10, None)
        reserved = tokens.mint(mint_nonce(), None, tokens.origin("host", None), RESERVED)
        assert store.send(commands.hand_over(ONE, running.token, reserved, 10))
        assert kept() == (RESERVED, reserved.owner)
        assert store.give_up(ONE, reserved.nonce, is_to_come=False)
        assert kept() == (OFFERED, mine.owner)
        assert line() == []
        assert isinstance(store.stand(ONE, mine, 10, None), Called)
        assert isinstance(acquire(store, ONE, running.token, 10, call=mine.owner), Granted)
        store.stand(ONE, mine, 11, None)
        assert store.send(commands.cool_down(ONE, running.token, 10))
        assert kept()[0] == COOLING
        assert line() == [(mine.owner, 11)]

    @pytest.mark.parametrize("how", ["handed over", "cooling"])
    def test_that_keeps_the_key_tells_all_rooms_in_line(self, holder, store, room, client, how):
        """A message that waits in one of them may be the one that gets the key, and the key may end sooner now."""
        rooms, running = [room(), room()], holder("running")
        running.acquire()
        for rank, one in enumerate(rooms):
            store.stand(ONE, one, rank, None)
        with client.pubsub() as heard:
            for one in rooms:
                heard.subscribe(channel_of(one.nonce))
                assert heard.get_message(timeout=15)["type"] == "subscribe"
            if how == "cooling":
                store.send(commands.cool_down(ONE, running.token, 10))
            else:
                to = tokens.mint(mint_nonce(), None, tokens.origin("host", None), RESERVED)
                store.send(commands.hand_over(ONE, running.token, to, 10))
            assert [heard.get_message(timeout=15)["data"] for _ in rooms] == [f"look 1 {KEY}".encode()] * 2

    def test_loses_nothing_where_its_user_may_not_publish(self, holder, store, room, kept, locks, client):
        mine, running = room(), holder("running")
        running.acquire()
        store.stand(ONE, mine, 10, None)
        store.stand(ONE, room("later"), 20, None)
        locks.client.acl_setuser("default", reset_channels=True, enabled=True)
        try:
            assert running.release(copy_may_wait=True)
        except LockUnavailable as error:
            pytest.fail(f"the release fails: {error}")
        finally:
            locks.client.acl_setuser("default", channels=["*"], enabled=True)
        assert kept() == (OFFERED, mine.owner)
        assert client.exists(running.note)


class TestAnAcquire:
    def test_that_happens_by_finds_a_free_key_kept_for_the_first_in_line(self, holder, store, room, kept, line, client):
        mine = room()
        client.zadd(LINE, {mine: 10})
        refused = holder("other").acquire()
        assert isinstance(refused, Conflict)
        assert info_of(refused.holder, KEY, refused.ttl)[1:] == (
            None,
            None,
            "host",
            mine.since,
            refused.ttl,
            "offered",
            0,
            (),
        )
        assert info_of(refused.holder, KEY, refused.ttl).who == "the first in line, on host"
        assert kept() == (OFFERED, mine.owner)
        assert line() == []

    def test_of_a_key_that_is_no_string_is_refused_and_leaves_it_alone_where_a_room_waits(
        self, holder, store, room, client
    ):
        client.zadd(LINE, {room(): 10})
        client.rpush(KEY, "not ours")
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            acquire(store, ONE, holder("other").token, 10)
        assert client.lrange(KEY, 0, -1) == [b"not ours"]

    @pytest.mark.parametrize("of", ["a claim", "a fence"])
    def test_with_options_comes_no_sooner(self, holder, store, room, kept, client, of):
        mine, other = room(), holder("other")
        client.zadd(LINE, {mine: 10})
        if of == "a claim":
            assert isinstance(acquire(store, ONE, other.token, 10, claim=Claim(mint_nonce(), 10)), Conflict)
        else:
            assert isinstance(acquire(store, ONE, other.token, 10, fence=True), Conflict)
        assert kept() == (OFFERED, mine.owner)

    @pytest.mark.parametrize("state", ["free", OFFERED, CALLED])
    @pytest.mark.parametrize("fence", [False, True])
    def test_that_my_room_has_called_is_granted(self, holder, store, room, kept, client, state, fence):
        mine, other, one = room(), room(), holder("one")
        client.zadd(LINE, {other: 5})
        if state != "free":
            client.set(KEY, called(mine, 10) if state == CALLED else mine.value, px=60_000)
        granted = acquire(store, ONE, one.token, 10, fence=fence, call=mine.owner)
        assert isinstance(granted, Granted)
        assert kept() == (one.token[0], one.token.owner)
        assert 5000 < client.pttl(KEY) <= 10_000
        again = acquire(store, ONE, one.token, 10, fence=fence, call=mine.owner)  # sent once more
        assert again.fence == granted.fence

    def test_that_another_room_has_called_is_refused(self, holder, store, room, kept):
        mine, other = room(), room()
        assert isinstance(store.stand(ONE, other, 10, None), Called)
        assert isinstance(acquire(store, ONE, holder("one").token, 10, call=mine.owner), Conflict)
        assert kept() == (CALLED, other.owner)

    def test_of_a_copy_that_finds_its_note_passes_the_key_on(self, holder, store, room, kept, client):
        mine, next_room, copy = room(), room(), holder("copy")
        client.set(copy.note, "")
        assert isinstance(store.stand(ONE, mine, 10, None), Called)
        client.zadd(LINE, {next_room: 20})
        assert isinstance(acquire(store, ONE, copy.token, 10, copy.note, call=mine.owner), Finished)
        assert kept() == (OFFERED, next_room.owner)

    def test_that_is_refused_is_told_the_time_of_the_server(self, holder, client):
        holder("one").acquire()
        seconds, micros = client.time()
        refused = holder("other").acquire()
        assert 0 <= refused.now - (seconds * 1_000_000 + micros) < 5_000_000


class TestARoomThatStands:
    def test_takes_a_free_key_for_its_first_waiter_and_stays_for_its_next(self, store, room, line, kept, client):
        mine = room()
        assert isinstance(store.stand(ONE, mine, 10, 20), Called)
        assert client.get(KEY) == called(mine, 10)
        assert kept() == (CALLED, mine.owner)
        assert line() == [(mine.owner, 20)]
        assert 140_000 < client.pttl(LINE) <= 150_000

    def test_takes_what_is_offered_to_it_and_leaves_with_its_last_waiter(self, store, room, line, client):
        mine = room()
        client.zadd(LINE, {mine: 10})
        client.set(KEY, mine.value, px=500)
        assert isinstance(store.stand(ONE, mine, 10, None), Called)
        assert line() == []

    def test_lets_an_earlier_one_go_first(self, store, room, line, kept, client):
        mine, earlier = room(), room()
        client.zadd(LINE, {earlier: 9})
        refused = store.stand(ONE, mine, 10, None)
        assert isinstance(refused, Conflict)
        assert refused.holder.owner == earlier.owner
        assert kept() == (OFFERED, earlier.owner)
        assert line() == [(mine.owner, 10)]

    @pytest.mark.parametrize("next_rank", [None, 30])
    def test_passes_on_what_is_offered_to_it_where_its_first_waiter_has_left_and_another_room_is_earlier_now(
        self, holder, store, room, line, kept, next_rank
    ):
        mine, earlier, running = room(), room(), holder("running")
        running.acquire()
        store.stand(ONE, mine, 10, 20)
        store.stand(ONE, earlier, 15, None)
        running.release()
        assert kept() == (OFFERED, mine.owner)
        for _ in range(2):  # the second as after a lost answer
            assert isinstance(store.stand(ONE, mine, 20, next_rank), Conflict)
            assert kept() == (OFFERED, earlier.owner)
            assert line() == [(mine.owner, 20)]

    def test_keeps_what_is_offered_to_it_where_another_room_has_the_same_rank(self, store, room, line, client):
        """Else two rooms could pass it to and fro."""
        for mine, other in permutations((room(), room())):
            client.set(KEY, mine.value, px=1000)
            client.zadd(LINE, {other: 10})
            assert isinstance(store.stand(ONE, mine, 10, None), Called)
            assert line() == [(other.owner, 10)]
            client.delete(KEY, LINE)

    def test_goes_before_a_later_one(self, store, room, line, client):
        mine, later = room(), room()
        client.zadd(LINE, {later: 11})
        assert isinstance(store.stand(ONE, mine, 10, None), Called)
        assert line() == [(later.owner, 11)]

    def test_is_answered_as_before_where_its_command_is_sent_once_more(self, store, room, line, client):
        mine = room()
        for _ in range(2):
            assert isinstance(store.stand(ONE, mine, 10, 20), Called)
        assert client.get(KEY) == called(mine, 10)
        assert line() == [(mine.owner, 20)]

    def test_calls_no_second_waiter_while_the_first_is_on_its_way(self, store, room, line, client):
        mine = room()
        assert isinstance(store.stand(ONE, mine, 10, 20), Called)
        assert isinstance(store.stand(ONE, mine, 20, None), Conflict)
        assert client.get(KEY) == called(mine, 10)
        assert line() == [(mine.owner, 20)]

    @pytest.mark.parametrize("rank", [None, "10", 1.5, -1, True, 2**53, float("nan")])
    def test_with_a_rank_that_is_none_asks_nobody(self, store, room, client, rank):
        with pytest.raises(ValueError, match="is not a rank"):
            store.stand(ONE, room(), rank, None)
        assert client.keys() == []

    def test_is_counted_by_who_inspects_the_key(self, holder, store, room):
        holder("one").acquire()
        assert store.inspect(ONE).waiting_processes == 0
        store.stand(ONE, room(), 10, None)
        store.stand(ONE, room(), 11, None)
        assert store.inspect(ONE).waiting_processes == 2


class TestARoomThatLeaves:
    def test_passes_on_what_is_offered_to_it(self, store, room, line, kept, client):
        mine, other = room(), room()
        client.set(KEY, mine.value, px=60_000)
        client.zadd(LINE, {mine: 10, other: 20})
        assert store.leave(ONE, mine)
        assert kept() == (OFFERED, other.owner)
        assert line() == []
        assert not store.leave(ONE, mine)  # sent once more
        assert kept() == (OFFERED, other.owner)

    def test_takes_nothing_from_one_whom_it_has_called(self, store, room, line, kept, client):
        mine, other = room(), room()
        assert isinstance(store.stand(ONE, mine, 10, 30), Called)
        client.zadd(LINE, {other: 20})
        assert not store.leave(ONE, mine)
        assert kept() == (CALLED, mine.owner)
        assert line() == [(other.owner, 20)]

    def test_offers_a_key_that_is_free(self, store, room, kept, client):
        mine, other = room(), room()
        client.zadd(LINE, {mine: 10, other: 20})
        assert not store.leave(ONE, mine)
        assert kept() == (OFFERED, other.owner)

    def test_leaves_nothing_where_it_was_alone(self, store, room, client):
        mine = room()
        client.zadd(LINE, {mine: 10})
        client.set(KEY, mine.value)
        assert store.leave(ONE, mine)
        assert client.keys() == []

    def test_touches_no_key_of_another(self, holder, store, room, kept):
        running, mine = holder("running"), room()
        running.acquire()
        assert not store.leave(ONE, mine)
        assert kept() == (running.token[0], running.token.owner)


class TestWhoWasCalledAndDoesNotAsk:
    def test_passes_the_key_on(self, store, room, line, kept, client):
        mine, other = room(), room()
        assert isinstance(store.stand(ONE, mine, 10, 30), Called)
        client.zadd(LINE, {other: 20})
        assert store.pass_on(ONE, tokens.call(mine, 10).value)
        assert kept() == (OFFERED, other.owner)
        assert line() == [(mine.owner, 30)]

    def test_takes_nothing_from_the_next_whom_the_same_room_has_called(self, store, room, kept):
        """As where the first took the key, released it, and only then gave up."""
        mine = room()
        assert isinstance(store.stand(ONE, mine, 20, None), Called)
        assert not store.pass_on(ONE, tokens.call(mine, 10).value)
        assert kept() == (CALLED, mine.owner)


def test_a_room_that_has_died_costs_one_offer(holder, store, room, kept, client):
    """Each costs one offer, and then it is out of the line."""
    client.zadd(LINE, {room(): 1, room(): 2})
    one = holder("one")
    for _ in range(2):
        assert isinstance(one.acquire(), Conflict)
        client.delete(KEY)  # the offer has ended
    assert isinstance(one.acquire(), Granted)
    assert store.release(ONE, one.token, Note(one.note))
    assert client.keys() == []
