"""Fair turns: every order of a few messages on paper, and long ones on a real server, whose books are the model's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from celery_redislock.connection.connect import connect
from celery_redislock.connection.store import LockStore
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import FIRST_TURN, Demand, Share, keys_of
from celery_redislock.protocol.replies import Called, Conflict, Granted
from celery_redislock.protocol.tokens import Attempt, Token
from promises import Promise
from tests.lab.asking import acquire
from tests.lab.servers import Valkey

from .fair import SCENARIOS, START, Books, Mistake, explore

KEY = "redislock:{fair}"
BOOKS = KEY + ":fair"
ROOM = tokens.of_room(tokens.mint_nonce(), "host")
COSTS = {"a": 1000, "b": 333, "c": 10_000}
FOUND_IN = {
    Mistake.TAG_FROM_ZERO: ("two groups", Promise.ORDER),
    Mistake.V_NEVER_MOVES: ("two groups", Promise.FAIR),
    Mistake.CLAMPED: ("two groups", Promise.ORDER),
    Mistake.CHARGED_TWICE: ("asked again", Promise.FAIR),
    Mistake.ASKS_AS_A_NEWCOMER: ("asked again", Promise.ORDER),
    Mistake.LOST_BOOKS_BEGIN_AT_ZERO: ("lost", Promise.ORDER),
    Mistake.TIES_STAY_OPEN: ("many groups", Promise.ORDER),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_promises_hold_in_every_order_of(scenario):
    found = explore(scenario)
    assert found.broken is None, found
    assert found.states > 5000


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_the_model_finds_the_mistake_that(mistake):
    name, promise = FOUND_IN[mistake]
    (scenario,) = (one for one in SCENARIOS if one.name == name)
    found = explore(scenario, {mistake})
    assert found.broken is promise, found


class Server:
    """Runs the real scripts for messages that have numbers, and keeps the model's books next to the server's."""

    def __init__(self, store: LockStore, client) -> None:
        self.store, self.client, self.books = store, client, Books()
        self.holder = tokens.mint(tokens.mint_nonce(), None, "host *")
        assert isinstance(acquire(store, Demand(KEY), self.holder, 100.0), Granted)
        self.base = 0

    @staticmethod
    def token(number: int) -> Token:
        return tokens.mint(tokens.mint_nonce(), Attempt(f"m{number}", 0, 0), "host *")

    def asks(self, group: str, number: int, rank: int = 0) -> int:
        """Ask for the key, which is held: the rank that the server gives, from that of the first on, is the model's."""
        demand = Demand(KEY, share=Share(group, group, COSTS[group], rank and self.base + rank))
        conflict = acquire(self.store, demand, self.token(number), 100.0)
        assert isinstance(conflict, Conflict)
        assert conflict.waiting == 0
        self.base = self.base or conflict.rank - START
        expected, self.books = self.books.asks(group, COSTS[group], number, rank, START)
        assert conflict.rank - self.base == expected
        return expected

    def grants(self, group: str, number: int, rank: int, *, is_called: bool = True) -> None:
        """Let a message have the key, which has waited and is called, or comes when nobody is in line."""
        assert self.store.release(Demand(KEY), self.holder)
        self.holder = self.token(number)
        demand = Demand(KEY, share=Share(group, group, COSTS[group], rank and self.base + rank))
        call = tokens.call(ROOM, self.base + rank, 7).value if is_called else None
        assert isinstance(acquire(self.store, demand, self.holder, 100.0, call=call), Granted)
        self.books = self.books.granted(group, number, rank) if is_called else self.books

    def kept(self) -> dict[str, int]:
        """The server's books."""
        return {name.decode(): int(rank) - self.base for name, rank in self.client.zscan_iter(BOOKS)}


@pytest.fixture
def server(locks: Valkey) -> Iterator[Server]:
    client = connect(locks.url(), {})
    client.flushall()
    yield Server(LockStore.of(client), client)
    client.close()


@pytest.mark.parametrize("seed", range(5))
def test_the_server_keeps_the_books_of_the_model(server, seed):
    chance = random.Random(seed)
    waiting, number = [], 0
    for _ in range(150):
        match chance.randrange(5):
            case 0 | 1:
                group = chance.choice(list(COSTS))
                waiting.append((server.asks(group, number), number, group))
                number += 1
            case 2 if waiting:
                rank, which, group = chance.choice(waiting)
                assert server.asks(group, which, chance.choice([rank, 0])) == rank
            case 3 if waiting:
                rank, which, group = min(waiting)
                waiting.remove((rank, which, group))
                server.grants(group, which, rank)
    expected = {"now": server.books.virtual, **dict(server.books.turns)}
    expected |= {f"m{which}/0/0": rank for which, rank in server.books.ranks}
    assert server.kept() == expected
    assert server.client.ttl(BOOKS) > 86_000


def test_ranks_are_ahead_of_all_times_and_new_books_begin_where_the_clock_is_behind_what_waits(server):
    for number in range(100):
        server.asks("a", number)
    last = server.base + START + 99 * COSTS["a"]
    server.client.delete(BOOKS)
    time.sleep(0.2)  # a hundred turns of virtual time take a tenth of a second
    conflict = acquire(server.store, Demand(KEY, share=Share("b", "b", 333)), server.token(100), 100.0)
    assert FIRST_TURN < server.base + START < last < conflict.rank < 2**53


def test_a_rank_that_the_books_do_not_explain_is_that_of_a_newcomer(server):
    first = server.asks("a", 0)
    assert server.asks("a", 1, first + 10**9) == first + COSTS["a"]
    assert server.asks("b", 2, 2**40) == first


def test_a_forged_rank_does_not_move_the_virtual_time(server):
    first = server.asks("a", 0)
    server.grants("a", 1, first + 10**9)
    assert server.kept()["now"] == first


def test_a_grant_out_of_turn_moves_nothing(server):
    """A worker without a free slot leaves the line, and a message that was sent back may find the key free."""
    ranks = [server.asks("a", number) for number in range(9)]
    server.grants("a", 8, ranks[8], is_called=False)
    assert server.kept()["now"] == ranks[0]
    assert server.asks("b", 9) == ranks[0]


def test_a_message_that_comes_again_after_its_grant_takes_another_turn(server):
    ranks = [server.asks("a", number) for number in range(3)]
    server.grants("a", 0, ranks[0])
    assert server.asks("a", 0) == ranks[2] + COSTS["a"]


def test_new_groups_in_one_room_do_not_keep_a_group_in_another_from_its_first_turn(server):
    """Both rooms stand in line with the same rank. Redis sorts them by their names."""
    rooms = [tokens.of_room(tokens.mint_nonce(), "host") for _ in range(2)]
    early, late = sorted(rooms, key=lambda room: room.value)
    demand, holder = Demand(KEY), server.holder
    rank = server.asks("a", 0) + server.base
    server.store.stand(demand, late, rank, None)
    for number in range(1, 4):
        share = Share(f"group {number}", f"group {number}", 1000)
        newcomer, token = Demand(KEY, share=share), server.token(number)
        conflict = acquire(server.store, newcomer, token, 100.0)
        assert isinstance(conflict, Conflict)
        server.store.stand(demand, early, conflict.rank, None)
        assert server.store.release(demand, holder)
        if isinstance(server.store.stand(demand, late, rank, None), Called):
            break
        assert isinstance(server.store.stand(demand, early, conflict.rank, None), Called)
        call = tokens.call(early, conflict.rank, 0).value
        assert isinstance(acquire(server.store, newcomer, token, 100.0, call=call), Granted)
        holder = token
    assert number == 2, "one group of the other room has gone first, and no more"


def test_a_run_that_does_not_wait_touches_no_books(server):
    server.grants("a", 0, 0, is_called=False)
    assert not server.client.exists(BOOKS)


def test_all_that_is_kept_about_a_lock_is_in_one_hash_slot():
    assert BOOKS.startswith(keys_of(KEY).line.removesuffix(":line"))
