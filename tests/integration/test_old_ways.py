"""The old ways to lock with Redis: each shown to fail, with what this library does in its place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from celery_redislock import Lock, LockLost
from tests.lab.servers import wait_until

NAME = "stock"


@pytest.fixture
def client(locks):
    return locks.client


@pytest.fixture
def make(locks):
    with redis.Redis(unix_socket_path=str(locks.socket)) as client:
        yield lambda **options: Lock(client, NAME, **{"timeout": 10, "blocking": False, **options})


def in_a_child_that_is_killed(work, at):
    """Run `work` in a child process, which is killed as soon as `at()` holds."""
    pid = os.fork()
    if pid == 0:
        work()
        signal.pause()
        os._exit(1)
    wait_until(at, "the child is there")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class TestSetnxThenExpire:
    """SETNX, and the time to live by a second command: a crash in between locks for ever."""

    def test_the_old_way_stays_locked_for_ever(self, client, locks):
        in_a_child_that_is_killed(lambda: locks.connect().setnx(NAME, "1"), lambda: client.exists(NAME))
        assert client.ttl(NAME) == -1
        assert not client.setnx(NAME, "1")

    def test_ours_has_its_end_from_the_first_moment(self, client, make):
        in_a_child_that_is_killed(make(timeout=30).acquire, lambda: client.exists(NAME))
        assert 0 < client.pttl(NAME) <= 30_000


class TestPlainDel:
    """DEL at the end of the work: when the own lock has expired meanwhile, it frees another's."""

    def test_the_old_way_frees_anothers_lock(self, client):
        client.set(NAME, "first", nx=True, px=10)
        wait_until(lambda: not client.exists(NAME), "the first expires while it works")
        assert client.set(NAME, "second", nx=True)
        client.delete(NAME)  # the first has ended
        assert client.set(NAME, "third", nx=True)  # beside the second

    def test_ours_leaves_it_alone_and_says_so(self, client, make):
        first, second, third = make(timeout=0.05), make(), make()
        assert first.acquire()
        wait_until(lambda: not client.exists(NAME), "the first expires while it works")
        assert second.acquire()
        with pytest.raises(LockLost):
            first.release()
        assert second.owned()
        assert not third.acquire()


class TestGetsetTakeover:
    """The expiry as the value, taken over by GETSET: two who saw it pass both write, and one spoils the other's."""

    def test_the_old_way_leaves_the_winner_with_the_losers_expiry(self, client):
        now, lease = time.time(), 10
        client.set(NAME, now - 1)  # a holder that died
        seen = [float(client.get(NAME)), float(client.get(NAME))]
        assert all(expiry < now for expiry in seen)  # both see it, both try
        winner = float(client.getset(NAME, now + lease)) < now
        loser = float(client.getset(NAME, now + 2 * lease)) < now
        assert (winner, loser) == (True, False)
        assert float(client.get(NAME)) == now + 2 * lease  # not what the winner wrote: it cannot tell its own lock

    def test_the_old_way_believes_the_clock_of_each_client(self, client):
        client.set(NAME, time.time() + 10)  # held
        fast = time.time() + 60  # a client whose clock is a minute ahead
        assert float(client.get(NAME)) < fast
        assert float(client.getset(NAME, fast + 10)) < fast  # it has it too

    def test_ours_is_taken_over_by_one_and_by_the_servers_clock(self, client, make):
        in_a_child_that_is_killed(make(timeout=30).acquire, lambda: client.exists(NAME))
        client.pexpire(NAME, 1)  # its thirty seconds have passed
        wait_until(lambda: not client.exists(NAME), "it expires")
        first, second = make(), make()
        assert (first.acquire(), second.acquire()) == (True, False)
        assert client.get(NAME).decode() == first.token


class TestNoRenewal:
    """A time to live shorter than the work: another begins in the middle of it."""

    def test_the_old_way_lets_another_in(self, client):
        with client.lock(NAME, timeout=0.2, raise_on_release_error=False):
            other = client.lock(NAME, timeout=10)
            assert other.acquire(blocking_timeout=20, sleep=0.01)  # beside the first

    def test_ours_is_renewed_for_as_long_as_the_work_takes(self, make, client, often):
        with make(timeout=30, renew=True) as lock:
            client.pexpire(NAME, 15_000)  # half of its lease has passed
            wait_until(lambda: client.pttl(NAME) > 15_000, "it is renewed")
            assert not make().acquire()
            lock.check()

    def test_ours_without_renewal_at_least_knows_in_time(self, client, make):
        lock = make(timeout=0.2)
        lock.acquire()
        wait_until(lambda: lock.state == "lost", "its own deadline")
        with pytest.raises(LockLost):
            lock.check()


class TestNineProcesses:
    """Nine processes that want one lock at once, with time enough for all of them to wait."""

    WORK = 0.6

    @staticmethod
    def _work(take, socket, ledger, barrier, seconds):
        client = redis.Redis(unix_socket_path=socket)
        barrier.wait()
        release = take(client)
        if release is None:
            os._exit(1)
        begin = time.monotonic()
        time.sleep(seconds)
        with Path(ledger).open("a") as lines:
            lines.write(f"{begin} {time.monotonic()}\n")
        release()

    def _run(self, take, locks, ledger):
        """Let nine processes take it; returns when each began and ended."""
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(9)
        arguments = (take, str(locks.socket), str(ledger), barrier, self.WORK)
        children = [context.Process(target=self._work, args=arguments) for _ in range(9)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        runs = [tuple(map(float, line.split())) for line in ledger.read_text().splitlines()]
        return sorted(runs)

    @staticmethod
    def _overlap(runs):
        return any(later[0] < earlier[1] for earlier, later in pairwise(runs))

    def test_the_old_way_runs_some_beside_others(self, locks, tmp_path):
        """A time to live shorter than the work, no owner, a plain DEL: as found in many a recipe."""

        def take(client):
            end = time.monotonic() + 30
            while time.monotonic() < end:
                if client.set(NAME, "1", nx=True, px=200):
                    return lambda: client.delete(NAME)
                time.sleep(0.01)
            return None

        runs = self._run(take, locks, tmp_path / "ledger")
        assert len(runs) == 9
        assert self._overlap(runs)

    def test_ours_runs_all_nine_one_after_another(self, locks, tmp_path):
        """With a lease that no pause of the machine outlasts: where one does, a key ends under its holder."""

        def take(client):
            lock = Lock(client, NAME, timeout=30, renew=True, blocking_timeout=60)
            return lock.release if lock.acquire() else None

        runs = self._run(take, locks, tmp_path / "ledger")
        assert len(runs) == 9
        assert not self._overlap(runs)
        wait_until(lambda: locks.client.keys() == [], "the last wake-up, which may be for nobody, expires")
