"""A lock that several may hold at once: who gets a permit, who waits, and what a permit is to its holder."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery import Celery
from celery.exceptions import Reject, SoftTimeLimitExceeded
from redis.exceptions import LockError

from celery_redislock import Lock, LockConfigError, LockConflict, LockedTask, LockKeyError, LockUnavailable, locked
from celery_redislock.lock.lock_server import LockServer
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.hold import Hold
from celery_redislock.protocol.names import Demand, channel_of, keys_of
from celery_redislock.protocol.replies import Called, Conflict, Finished, Granted
from celery_redislock.protocol.scripts import Claim, Note
from celery_redislock.protocol.tokens import CALLED, RESERVED, SEEN, Attempt, Token, known_by, mint_nonce
from tests.integration.conftest import KEY, ONE
from tests.lab.asking import acquire
from tests.lab.renewals import begin_renewal
from tests.lab.servers import wait_until

TWO, THREE = Demand(KEY, 2), Demand(KEY, 3)
ORIGIN = tokens.origin("w@host", "shop.bill")


def attempt(name):
    return Attempt(name, 0, 0)


def token(name="a", nonce=None):
    return tokens.mint(nonce or mint_nonce(), attempt(name), ORIGIN)


def note(name):
    return keys_of(KEY).note(attempt(name))


@pytest.fixture
def permits(client):
    """What each permit holds: the number and the attempt's id, or the state of one that is no task's."""

    def read():
        found = {}
        for number in range(1, 51):
            value = client.get(keys_of(KEY).permit(number))
            if value is not None:
                one = Token.of(value)
                found[number] = one.attempt.task_id if one.attempt else one.state
        return found

    return read


@pytest.fixture
def take(store):
    """Acquires the lock for a task of that name, of which it returns the token."""

    def take_one(name, demand=TWO):
        mine = token(name)
        granted = acquire(store, demand, mine, 10.0)
        assert isinstance(granted, Granted), granted
        return mine

    return take_one


@pytest.fixture
def room():
    return tokens.of_room(mint_nonce(), "host")


class TestAnAcquire:
    def test_grants_as_many_permits_as_the_limit_allows_and_names_all_holders_to_the_next(self, store, permits):
        grants = [acquire(store, TWO, token(name), 10.0) for name in "ab"]
        assert [grant.permit for grant in grants] == [1, 2]
        refused = acquire(store, TWO, token("c"), 10.0)
        assert [one.attempt.task_id for one in refused.holders] == ["a", "b"]
        assert 5 < refused.ttl <= 10
        assert permits() == {1: "a", 2: "b"}

    def test_that_is_sent_twice_has_one_permit(self, store, permits):
        mine = token()
        assert [acquire(store, THREE, mine, 10.0).permit for _ in range(2)] == [1, 1]
        assert permits() == {1: "a"}

    def test_takes_the_lowest_free_permit(self, store, take, permits):
        first, _ = take("a", THREE), take("b", THREE)
        assert store.release(THREE, first)
        assert acquire(store, THREE, token("c"), 10.0).permit == 1
        assert permits() == {1: "c", 2: "b"}

    def test_with_a_limit_of_one_holds_the_first_permit_alone(self, store, take, permits):
        take("a", ONE)
        assert isinstance(acquire(store, ONE, token("b"), 10.0), Conflict)
        assert permits() == {1: "a"}

    def test_of_a_copy_gets_no_second_permit_and_marks_that_of_its_attempt(self, store, client, take, permits):
        take("x")
        running = take("a")
        copy = token("a")
        refused = acquire(store, THREE, copy, 10.0, note("a"))
        assert isinstance(refused, Conflict)
        assert refused.cannot_wait
        assert refused.holder.owner == running.owner
        assert permits() == {1: "x", 2: "a"}
        assert client.get(keys_of(KEY).permit(2)).startswith(SEEN.encode())
        assert store.release(THREE, running, Note(note("a")))
        assert isinstance(acquire(store, THREE, copy, 10.0, note("a")), Finished)

    @pytest.mark.parametrize("limit", [1, 2])
    def test_of_a_copy_sees_its_attempt_above_a_limit_that_was_lowered(self, store, take, permits, limit):
        below = [take(name, THREE) for name in "xy"]
        take("a", THREE)
        for holder in below:
            store.release(THREE, holder)
        demand = Demand(KEY, limit)
        refused = acquire(store, demand, token("a"), 10.0, note("a"))
        assert isinstance(refused, Conflict)
        assert refused.cannot_wait
        assert permits() == {3: "a"}

    def test_of_a_called_copy_gives_its_call_back(self, store, take, room, permits):
        first, twin = take("x"), take("a")
        assert isinstance(store.stand(TWO, room, 10, None), Conflict)
        assert store.release(TWO, first)
        assert isinstance(store.stand(TWO, room, 10, None), Called)
        call = tokens.call(tokens.for_capacity(room, 2), 10)
        refused = acquire(store, TWO, token("a"), 10.0, note("a"), call=call.value)
        assert refused.holder.owner == twin.owner
        assert permits() == {2: "a"}

    def test_finds_the_permit_that_is_reserved_for_its_message(self, store, take, permits):
        take("x", THREE)
        running, claim = take("a", THREE), mint_nonce()
        reserved = tokens.mint(claim, Attempt("a", 1, 0), ORIGIN, RESERVED)
        assert store.send(commands.hand_over(THREE, running, reserved, 60.0))
        retried = tokens.mint(mint_nonce(), Attempt("a", 1, 0), ORIGIN)
        assert acquire(store, THREE, retried, 10.0, claim=Claim(claim, 60.0)).permit == 2
        assert permits() == {1: "x", 2: "a"}

    def test_of_a_retry_that_comes_before_its_permit_is_handed_over_takes_one_and_leaves_none_reserved(
        self, store, take, permits
    ):
        running, claim = take("a"), mint_nonce()
        retried = tokens.mint(mint_nonce(), Attempt("a", 1, 0), ORIGIN)
        assert acquire(store, TWO, retried, 10.0, claim=Claim(claim, 60.0)).permit == 2
        reserved = tokens.mint(claim, Attempt("a", 1, 0), ORIGIN, RESERVED)
        assert store.send(commands.hand_over(TWO, running, reserved, 60.0))
        assert permits() == {2: "a"}

    def test_of_a_copy_that_comes_again_after_the_mark_still_sees_its_attempt_above_the_limit(
        self, store, take, permits
    ):
        take("x")
        running = take("a")
        for _ in range(2):
            refused = acquire(store, ONE, token("a"), 10.0, note("a"))
            assert refused.cannot_wait
            assert refused.holder.owner == running.owner
        assert permits() == {1: "x", 2: "a"}

    def test_that_is_sent_again_keeps_the_mark_of_its_permit_and_its_claim_is_not_gone(self, store, client):
        mine, claim = token("a"), Claim(mint_nonce(), 60.0)
        acquire(store, TWO, mine, 10.0)
        acquire(store, TWO, token("a"), 10.0)  # it is refused: a copy
        assert acquire(store, TWO, mine, 10.0, claim=claim).permit == 1
        assert client.get(KEY) == f"{SEEN}{mine[1:]}".encode()
        assert client.keys() == [KEY.encode()]

    def test_without_a_lease_never_ends(self, store, client):
        assert acquire(store, TWO, token(), math.inf).permit == 1
        assert client.pttl(KEY) == -1

    @pytest.mark.parametrize("how", ["called", "claimed"])
    def test_of_a_copy_gives_back_the_key_that_was_kept_for_it_since_the_limit_went(
        self, store, take, room, permits, how
    ):
        """The message's first run still has a permit that a lock without a limit does not have."""
        first, twin = take("x"), take("a")
        if how == "called":
            store.release(ONE, first)
            assert isinstance(store.stand(ONE, room, 10, None), Called)
            refused = acquire(store, ONE, token("a"), 10.0, note("a"), call=tokens.call(room, 10).value)
        else:
            claim = mint_nonce()
            store.send(commands.hand_over(ONE, first, tokens.mint(claim, attempt("a"), ORIGIN, RESERVED), 60.0))
            refused = acquire(store, ONE, token("a"), 10.0, note("a"), claim=Claim(claim, 60.0))
        assert refused.cannot_wait
        assert refused.holder.owner == twin.owner
        assert permits() == {2: "a"}

    def test_of_a_copy_leaves_alone_the_key_of_another(self, store, take, room, permits):
        """Who was called may have come late, and its claim may be given up: the key is somebody else's by then."""
        take("x"), take("a")
        call, claim = tokens.call(room, 10).value, Claim(mint_nonce(), 60.0)
        assert acquire(store, ONE, token("a"), 10.0, note("a"), call=call, claim=claim).cannot_wait
        assert permits() == {1: "x", 2: "a"}

    def test_of_a_key_that_is_no_string_is_refused_and_leaves_it_alone(self, store, client, take):
        take("a")
        client.hset(keys_of(KEY).permit(2), "not", "ours")
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            acquire(store, TWO, token("b"), 10.0)
        assert client.hgetall(keys_of(KEY).permit(2)) == {b"not": b"ours"}


@pytest.mark.parametrize("permit", [1, 2])
def test_a_room_leaves_a_key_alone_that_is_no_string(store, client, room, permit):
    """It stood in line when another program stored that there."""
    name = keys_of(KEY).permit(permit)
    if permit == 2:
        acquire(store, TWO, token("a"), 10.0)
    client.hset(name, "not", "ours")
    with pytest.raises(LockUnavailable, match="WRONGTYPE"):
        store.stand(TWO, room, 10, None)
    with pytest.raises(LockUnavailable, match="WRONGTYPE"):
        store.leave(TWO, tokens.for_capacity(tokens.of_room(tokens.mint_nonce(), "host"), 2))
    assert client.hgetall(name) == {b"not": b"ours"}


class TestARoom:
    def test_is_offered_the_permit_that_is_released_and_calls_its_first_waiter_there(self, store, client, take, room):
        _, second = take("a"), take("b")
        refused = store.stand(TWO, room, 10, 20)
        assert [one.attempt.task_id for one in refused.holders] == ["a", "b"]
        with client.pubsub() as heard:
            heard.subscribe(channel_of(room.nonce))
            assert heard.get_message(timeout=5)["type"] == "subscribe"
            store.release(TWO, second)
            assert heard.get_message(timeout=5)["data"] == f"offer 2 {KEY}".encode()
        assert isinstance(store.stand(TWO, room, 10, 20), Called)
        assert client.get(keys_of(KEY).permit(2)).startswith(CALLED.encode())
        call = tokens.call(tokens.for_capacity(room, 2), 10)
        assert acquire(store, TWO, token("c"), 10.0, call=call.value).permit == 2

    def test_takes_all_permits_that_are_free_one_after_the_other(self, store, take, room, permits):
        holders = [take(name, THREE) for name in "abc"]
        store.stand(THREE, room, 10, 20)
        for holder in holders:
            store.release(THREE, holder)
        assert isinstance(store.stand(THREE, room, 10, 20), Called)
        assert isinstance(store.stand(THREE, room, 20, 30), Called)
        assert isinstance(store.stand(THREE, room, 30, None), Called)
        assert permits() == dict.fromkeys((1, 2, 3), "offered")

    def test_that_is_asked_twice_calls_once(self, store, take, room, permits):
        holder = take("a", Demand(KEY, 2))
        take("b")
        store.stand(TWO, room, 10, None)
        store.release(TWO, holder)
        assert all(isinstance(store.stand(TWO, room, 10, None), Called) for _ in range(2))
        assert permits() == {1: "offered", 2: "b"}

    def test_that_asks_twice_does_not_stand_in_line_beside_the_permit_that_its_next_waiter_is_offered(
        self, store, client, room, permits
    ):
        for _ in range(2):
            assert isinstance(store.stand(TWO, room, 10, 20), Called)
            assert permits() == {1: "offered", 2: "offered"}
            assert client.zcard(keys_of(KEY).line) == 0

    def test_behind_an_earlier_one_takes_the_permit_that_is_left_and_a_command_that_comes_twice_changes_nothing(
        self, store, client, take, room
    ):
        earlier, names = tokens.of_room(mint_nonce(), "earlier"), [KEY, keys_of(KEY).permit(2)]
        for name in "ab":
            take(name)
        store.stand(TWO, earlier, 5, None)
        assert isinstance(store.stand(TWO, room, 10, 20), Conflict)
        client.delete(*names)  # both locks have ended with their leases
        assert isinstance(store.stand(TWO, room, 10, 20), Called)
        left = client.mget(names), client.zrange(keys_of(KEY).line, 0, -1, withscores=True)
        assert [value[:1] for value in left[0]] == [tokens.OFFERED.encode(), CALLED.encode()]
        assert isinstance(store.stand(TWO, room, 10, 20), Called)
        assert (client.mget(names), client.zrange(keys_of(KEY).line, 0, -1, withscores=True)) == left

    def test_comes_before_who_happens_by(self, store, take, room, permits):
        holder = take("a")
        take("b")
        store.stand(TWO, room, 10, None)
        store.release(TWO, holder)
        assert isinstance(acquire(store, TWO, token("c"), 10.0), Conflict)
        assert permits() == {1: "offered", 2: "b"}

    def test_with_an_unanswered_offer_comes_before_who_happens_by_a_second_free_permit(
        self, store, take, room, permits
    ):
        holders = [take(name) for name in "ab"]
        store.stand(TWO, room, 10, 20)
        for holder in holders:
            store.release(TWO, holder)
        assert permits() == {1: "offered"}  # it is out of the line until it has answered
        assert isinstance(acquire(store, TWO, token("c"), 10.0), Conflict)
        assert isinstance(store.stand(TWO, room, 10, 20), Called)
        assert isinstance(store.stand(TWO, room, 20, None), Called)

    def test_is_offered_no_permit_above_its_limit(self, store, take, permits):
        low, high = (tokens.of_room(mint_nonce(), name) for name in ("low", "high"))
        holders = {name: take(name, THREE) for name in "abc"}
        store.stand(TWO, low, 10, None)
        store.stand(THREE, high, 20, None)
        store.release(THREE, holders["c"])
        assert permits()[3] == "offered"
        assert isinstance(store.stand(TWO, low, 10, None), Conflict)
        assert isinstance(store.stand(THREE, high, 20, None), Called)
        store.release(THREE, holders["b"])
        assert isinstance(store.stand(TWO, low, 10, None), Called)

    def test_that_leaves_passes_its_offer_on(self, store, take, permits):
        first, second = (tokens.of_room(mint_nonce(), name) for name in ("first", "second"))
        holder = take("a")
        take("b")
        store.stand(TWO, first, 10, None)
        store.stand(TWO, second, 20, None)
        store.release(TWO, holder)
        assert store.leave(TWO, first)
        assert isinstance(store.stand(TWO, second, 20, None), Called)


class TestAHolder:
    @pytest.mark.parametrize("capacity", [50, 2])
    def test_is_found_by_who_knows_no_limit_wherever_its_permit_is(self, store, take, permits, capacity):
        take("a", THREE), take("b", THREE)
        last = take("c", THREE)
        assert store.release(Demand(KEY, capacity), known_by(last.nonce))
        assert permits() == {1: "a", 2: "b"}

    def test_that_gives_up_a_reservation_frees_its_permit(self, store, take, permits):
        take("a")
        running, claim = take("b"), mint_nonce()
        store.send(commands.hand_over(TWO, running, tokens.mint(claim, Attempt("b", 1, 0), ORIGIN, RESERVED), 60.0))
        assert store.give_up(Demand(KEY, 50), claim, is_to_come=False)
        assert permits() == {1: "a"}

    def test_that_lost_its_reply_is_released_wherever_it_is(self, store, take, permits):
        take("a")
        lost = take("b")
        store.undo(Hold(TWO, lost).undo())
        assert permits() == {1: "a"}


# `Lock`.


@pytest.fixture
def plain(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield client


@pytest.fixture
def seat(plain):
    return lambda **options: Lock(plain, "seats", **{"timeout": 10, "limit": 2, "thread_local": False, **options})


def test_as_many_locks_of_one_name_are_held_at_once_as_the_limit_says(seat):
    first, second, third = seat(), seat(), seat(blocking=False)
    assert first.acquire()
    assert not first.locked()  # another one may have it
    assert second.acquire()
    assert first.locked()
    assert first.owned()
    assert second.owned()
    assert not third.acquire()
    second.release()
    assert third.acquire()
    assert not second.owned()


def test_who_waits_for_a_seat_is_called_when_one_is_free_and_in_order(seat):
    holders = [seat(), seat()]
    for holder in holders:
        holder.acquire()
    served, enter = [], threading.Lock()

    def wait(number):
        with seat(), enter:
            served.append(number)

    with ThreadPoolExecutor() as pool:
        waiting = []
        for number in range(4):
            waiting.append(pool.submit(wait, number))
            wait_until(lambda number=number: in_room(holders[0].redis) == number + 1, "it waits")
        holders[0].release()
        for one in waiting:
            one.result(10)
    assert served == [0, 1, 2, 3]


def in_room(client):
    return len(LockServer.behind(client).room)


def test_a_seat_is_renewed_and_extended_by_its_own_permit(seat, plain):
    renewed = {"timeout": 30, "renew": True, "raise_on_release_error": False}
    first, second = seat(**renewed), seat(**renewed)
    with first, second:
        for number, one in ((1, first), (2, second)):
            permit = keys_of("seats").permit(number)
            plain.pexpire(permit, 15_000)
            begin_renewal(one)
            wait_until(lambda permit=permit: plain.pttl(permit) > 15_000, "it is renewed")
        second.extend(200, replace_ttl=True)
        assert plain.pttl(keys_of("seats").permit(2)) > 150_000
        second.extend(200)
        assert plain.pttl(keys_of("seats").permit(2)) > 350_000
        assert plain.pttl("seats") <= 30_000


def test_a_conflict_names_all_holders(seat):
    with seat(), seat(), pytest.raises(LockConflict) as refused, seat(blocking_timeout=0):
        pass
    error = refused.value
    assert len(error.holders) == 2
    assert str(error).count("a lock outside tasks on") == 2
    assert pickle.loads(pickle.dumps(error)).holders == error.holders  # noqa: S301


@pytest.mark.parametrize("limit", [0, -1, 51, 2.0, True, "3", None])
def test_what_is_no_limit_of_a_lock_is_refused(plain, limit):
    with pytest.raises(LockConfigError, match=r"lock seats: limit = .* is not allowed; allowed: a whole number from 1"):
        Lock(plain, "seats", limit=limit)


def test_a_lock_with_a_limit_has_no_fence_and_takes_no_token_of_the_callers(seat):
    with pytest.raises(LockConfigError, match="fence"):
        seat(fence=True)
    with pytest.raises(LockConfigError, match="token"):
        seat().acquire(token="mine")  # noqa: S106


def test_a_seat_takes_over_no_token_of_another_object(seat):
    first, second = seat(), seat()
    first.acquire()
    second.local.token = first.local.token
    with pytest.raises(LockConfigError, match="cannot take over the token of another object"):
        second.extend(5)


def test_a_reentrant_seat_is_entered_again_and_takes_no_second_one(seat):
    outer = seat(reentrant=True)
    with outer, seat(reentrant=True), seat(blocking=False) as other:
        assert other.owned()


@pytest.mark.parametrize("thread_local", [True, False])
def test_one_object_may_have_several_seats_and_leaves_one_after_the_other(seat, plain, thread_local):
    one = seat(thread_local=thread_local)
    assert one.acquire()
    assert one.acquire()
    assert not one.acquire(blocking=False)
    for left in (1, 0):
        one.release()
        assert len(plain.keys("seats*")) == left
    with pytest.raises(LockError, match="already unlocked"):
        one.release()
    assert (one.state, one.local.token) == (None, None)


def test_threads_that_share_one_object_have_a_seat_each(seat, plain):
    one, inside = seat(renew=True, timeout=30), threading.Barrier(2)

    def sit():
        with one:
            inside.wait(10)
            one.check()
            inside.wait(10)

    with ThreadPoolExecutor() as pool:
        for sitting in [pool.submit(sit) for _ in range(2)]:
            sitting.result(20)
    assert plain.keys() == []


def test_an_object_that_is_never_left_because_its_timeout_is_a_pause_remembers_none_that_is_over(seat):
    one = seat(timeout=0.05)
    for _ in range(5):
        assert one.acquire(blocking_timeout=10)
    assert len(one.local.entries) <= 2


# Tasks and `locked`.


@pytest.fixture
def own_app(locks):
    app = Celery("limits", broker="memory://", set_as_current=False)
    app.conf.redislock_url = locks.celery_url()
    app.conf.redislock_client_options = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0}
    return app


@pytest.mark.parametrize("limit", [0, -1, 51, 2.5, True, "3", None])
def test_what_is_no_limit_of_a_task_is_refused_when_it_is_bound(own_app, limit):
    with pytest.raises(LockConfigError, match=r"bill: lock_limit = .*a whole number from 1 to 50, or a callable"):

        @own_app.task(name="bill", base=LockedTask, lock_limit=limit, shared=False, lazy=False)
        def bill():
            pass


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lock_scope": "job"}, "lock_limit = 2 is not allowed with lock_scope = 'job'"),
        ({"lock_scope": "queue"}, "lock_limit = 2 is not allowed with lock_scope = 'queue'"),
        ({"lock_fence": True}, "lock_limit = 2 is not allowed with lock_fence"),
        ({"lock_cooldown": 1}, "lock_limit = 2 is not allowed with lock_cooldown"),
    ],
)
def test_what_does_not_go_with_a_limit_is_refused_with_the_reason(own_app, options, match):
    with pytest.raises(LockConfigError, match=match):

        @own_app.task(name="bill", base=LockedTask, lock_limit=2, shared=False, lazy=False, **options)
        def bill():
            pass


def test_a_limit_of_the_app_counts_for_tasks_and_blocks_and_the_error_says_where_it_was_set(own_app):
    own_app.conf.redislock_limit = 2

    @own_app.task(name="bill", base=LockedTask, lock_key="seats", shared=False)
    def bill():
        pass

    with bill.lock_for() as lock, locked("seats", app=own_app) as entered_again:
        assert lock.demand.capacity == entered_again.demand.capacity == 2
        assert len(bill.lock_info().holders) == 1
    with pytest.raises(LockConfigError, match="redislock_limit = 2 is not allowed with lock_scope"):

        @own_app.task(name="job", base=LockedTask, lock_scope="job", shared=False, lazy=False)
        def job():
            pass


def test_a_callable_limit_is_asked_with_the_bound_arguments(own_app):
    @own_app.task(
        name="bill",
        base=LockedTask,
        lock_args=["customer"],
        lock_limit=lambda arguments: 10 if arguments["is_premium"] else 1,
        shared=False,
    )
    def bill(customer, is_premium=False):
        pass

    assert bill.lock_for(7, is_premium=True).demand.capacity == 10
    assert bill.lock_for(7).demand.capacity == 1


@pytest.mark.parametrize(
    ("limit", "match"),
    [
        (lambda _: 0, "bill: lock_limit must return a whole number from 1 to 50, not 0"),
        (lambda _: 51, "not 51"),
        (lambda _: True, "not a bool"),
        (lambda _: "secret", "not a str"),
        (lambda _: None, "not a NoneType"),
        (lambda arguments: arguments["secret"], r"bill: lock_limit raised KeyError in test_limit.py, line \d+"),
    ],
)
def test_a_callable_that_returns_no_limit_or_raises_is_an_error_of_the_call(own_app, limit, match):
    @own_app.task(name="bill", base=LockedTask, lock_limit=limit, shared=False)
    def bill():
        pass

    with pytest.raises(LockKeyError, match=match) as error:
        bill.lock_for()
    assert "secret" not in str(error.value)


def test_a_soft_time_limit_that_strikes_in_the_callable_is_no_error_of_it(own_app):
    def limit(_):
        raise SoftTimeLimitExceeded

    @own_app.task(name="bill", base=LockedTask, lock_limit=limit, shared=False)
    def bill():
        pass

    with pytest.raises((SoftTimeLimitExceeded, LockKeyError)) as raised:
        bill.lock_for()
    assert raised.type is SoftTimeLimitExceeded


def test_lock_info_tells_of_all_holders(own_app):
    @own_app.task(name="bill", base=LockedTask, lock_limit=3, shared=False)
    def bill():
        pass

    with bill.lock_for() as first, Lock(first.redis, first.key, timeout=10, limit=3):
        info = bill.lock_info()
        assert len(info.holders) == 2
        assert info.others[0].state == "held"
    assert bill.lock_info() is None


class Refusing(LockedTask):
    abstract = True

    def before_start(self, *args):
        raise Reject("not today", requeue=False)


def test_a_retry_that_is_rejected_before_it_asks_gives_its_permit_back(own_app, deliver, locks):
    """Whichever permit the attempt before has left to it."""

    @own_app.task(name="bill", base=Refusing, lock_limit=2, lock_hold_on_retry=True, shared=False)
    def bill():
        pass

    with bill.lock_for() as first:
        claim, demand, store = mint_nonce(), first.demand, LockServer.behind(first.redis).store
        running = token()
        assert acquire(store, demand, running, 60.0).permit == 2
        assert store.send(
            commands.hand_over(demand, running, tokens.mint(claim, attempt("id"), ORIGIN, RESERVED), 60.0)
        )
        deliver(own_app, "bill", retries=1, redislock={"claim": claim, "key": demand.key})
        wait_until(lambda: [one.state for one in bill.lock_info().holders] == ["held"], "its permit is free")


def test_coroutines_that_share_a_block_have_a_seat_each(app):
    seats, all_inside = locked("cad", limit=3, block_for=0, app=app), asyncio.Barrier(3)

    async def sit():
        with seats as seat:
            await all_inside.wait()
            seat.check()
            assert seat.state == "held"
            await all_inside.wait()

    async def sit_together():
        await asyncio.gather(*[sit() for _ in range(3)])

    asyncio.run(sit_together())
    with pytest.raises(LockError, match="already unlocked"):
        seats.__exit__(None, None, None)
