"""Where the promise ends: a failover, lost writes, a paused process. Who holds, who is told, and what a fence saves.

What was seen is printed (`pytest -rP`); docs/split-brain.md has it in words.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

import pytest
from redis import Redis

from tests.lab.holders import NAME, Holder, Table
from tests.lab.servers import wait_until
from tests.lab.topologies import pair, primary_behind

#: A lease that is over before the Sentinels can agree that the primary is down, in seconds: that takes them more.
SHORT = 0.9
#: One that lasts over a failover. The first renewal is due only after it.
LONG = 10.0


@pytest.fixture
def table(tmp_path):
    return Table(tmp_path / "table")


@pytest.fixture
def start():
    """Starts holders: ``start(connect, lease)``."""
    with ExitStack() as stack:
        yield lambda connect, lease: stack.enter_context(Holder(connect, lease).living())


@pytest.fixture
def servers(tmp_path):
    with pair(tmp_path / "pair") as servers:
        yield servers


@pytest.fixture
def connect(servers):
    return partial(primary_behind, servers.ports)


def write_down(since, *, promoted=None, first, second, loss):
    """What was seen, in seconds from the fault; the test itself asserts what is always so."""
    print(f"promoted {promoted - since:.2f}" if promoted else "no failover", end=", ")
    print(f"granted {second.at - since:.2f}, told {loss.at - since:.2f}, overlap {loss.at - second.at:+.2f}", end=", ")
    print(f"fences {first.fence} and {second.fence - first.fence:+}: {loss.reason}")


class TestStoppedPrimary:
    def test_a_failover_shorter_than_the_lease_costs_nobody_the_lock(self, servers, connect, start, table):
        first, second = start(connect, LONG), start(connect, LONG)
        fence = first.take().result(30).fence
        servers.primary.pause()
        stopped = time.monotonic()
        servers.wait_for_failover()
        promoted, left = time.monotonic(), servers.replica.client.pttl(NAME)
        wait_until(lambda: servers.replica.client.pttl(NAME) > left, "it is renewed there")
        print(f"promoted {promoted - stopped:.2f}, renewed there {time.monotonic() - stopped:.2f}")
        waiting = second.take()
        assert first.state() == "held"
        assert first.write(table, "first").result(30)
        assert not waiting.done()
        assert first.give_back() == ""
        assert waiting.result(30).fence > fence

    def test_its_holder_is_told_by_its_deadline_and_its_late_write_is_refused(self, servers, connect, start, table):
        first, second = start(connect, SHORT), start(connect, LONG)
        earlier = first.take().result(30)
        servers.primary.pause()
        stopped = time.monotonic()
        waiting = second.take()
        servers.wait_for_failover()
        promoted, later = time.monotonic(), waiting.result(30)
        assert second.write(table, "second").result(30)
        assert not first.write(table, "first, late").result(30)
        loss = first.loss()
        write_down(stopped, promoted=promoted, first=earlier, second=later, loss=loss)
        assert later.fence > earlier.fence
        assert loss.deadline <= stopped + SHORT

        servers.primary.resume()
        wait_until(lambda: servers.is_replica(servers.primary), "the old primary is a replica")
        assert first.give_back() == "LockLost"
        assert second.state() == "held"
        assert table.row() == ["second", later.fence]
        assert second.give_back() == ""

    def test_when_it_wakes_up_it_grants_once_more_until_it_is_a_replica(self, servers, connect, start, table):
        """To whoever has kept its connections to it; who connects anew is sent to the new primary.

        The table sides with the last one to whom the key was granted, on whichever server.
        """
        second, third = start(connect, LONG), start(connect, LONG)
        third.connect()
        servers.primary.pause()
        servers.wait_for_failover()
        earlier = second.take().result(30)
        servers.primary.resume()
        woken, later = time.monotonic(), third.take().result(30)
        holders = {server.client.get(NAME) for server in (servers.primary, servers.replica)}
        assert len(holders - {None}) == 2
        assert third.write(table, "third").result(30)
        assert second.state() == "held"
        assert not second.write(table, "second").result(30)
        loss = third.loss()
        write_down(woken, first=earlier, second=later, loss=loss)
        assert later.fence > earlier.fence
        assert third.give_back() == "LockLost"
        assert second.state() == "held"
        assert second.give_back() == ""


def test_a_grant_that_dies_with_the_primary_is_given_to_another(servers, connect, start, table):
    first, second = start(connect, LONG), start(connect, LONG)
    servers.link.blackhole()
    earlier = first.take().result(30)
    assert not servers.replica.client.exists(NAME)
    servers.primary.kill()
    killed = time.monotonic()
    waiting = second.take()
    servers.wait_for_failover()
    promoted, later = time.monotonic(), waiting.result(30)
    assert second.write(table, "second").result(30)
    assert not first.write(table, "first, late").result(30)
    loss = first.loss()
    write_down(killed, promoted=promoted, first=earlier, second=later, loss=loss)
    assert later.fence > earlier.fence
    assert loss.deadline <= killed + LONG
    assert first.give_back() == "LockLost"
    assert second.state() == "held"
    assert table.row() == ["second", later.fence]


def test_a_process_that_stood_still_over_its_lease_writes_too_late(locks, start, table):
    connect = partial(Redis.from_url, locks.url())
    first, second = start(connect, SHORT), start(connect, LONG)
    earlier = first.take().result(30)
    first.stand_still()
    stopped = time.monotonic()
    late = first.write(table, "first, late")  # the first thing that it does when it goes on
    later = second.take().result(30)
    assert second.write(table, "second").result(30)
    first.go_on()
    assert not late.result(30)
    loss = first.loss()
    write_down(stopped, first=earlier, second=later, loss=loss)
    assert later.fence > earlier.fence
    assert first.give_back() == "LockLost"
    assert second.state() == "held"
    assert table.row() == ["second", later.fence]
