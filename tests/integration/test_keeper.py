"""The keeper renews what is held, knows its deadline, and survives."""

from __future__ import annotations

import os
import threading
import time

import pytest
import redis

from celery_redislock import LockLost
from tests.integration.conftest import KEY
from tests.lab.servers import wait_until


def test_a_held_lock_outlives_its_lease(hold, client):
    lock = hold(lease=0.6)
    time.sleep(1.5)
    assert lock.state == "held"
    assert client.get(KEY).decode() == lock.token


def test_a_removed_lock_ends_with_its_lease(hold, keeper, client):
    lock = hold(lease=0.6)
    keeper.remove(lock)
    wait_until(lambda: client.get(KEY) is None, "the key ends", 2)
    assert lock.state == "lost"
    with pytest.raises(LockLost, match="its lease has ended"):
        lock.check()


@pytest.mark.parametrize("thief", [None, "another's token"])
def test_a_deleted_or_stolen_key_is_noticed_at_the_next_renewal_and_left_alone(hold, client, log, thief):
    told = []
    lock = hold(lease=0.9, on_lost=lambda lock, reason: told.append(reason))
    client.set(KEY, thief, px=5000) if thief else client.delete(KEY)
    wait_until(lambda: told, "the holder is told", 2)
    assert lock.state == "lost"
    assert client.get(KEY) == (thief.encode() if thief else None)
    assert f"the lock {KEY} is lost: its key was deleted, expired or taken" in log.text


def test_a_silent_server_loses_the_lock_at_its_deadline(hold, store, log):
    told = []
    lock = hold(lease=1.0, on_lost=lambda lock, reason: told.append((time.monotonic(), reason)))
    store._client = _Broken()
    store._spare.clear()
    deadline = lock.deadline
    wait_until(lambda: told, "the holder is told", 3)
    ((at, reason),) = told
    assert reason == "it was not renewed until its deadline"
    assert at >= deadline
    assert log.text.count("the lock server cannot be asked") == 1


def test_a_server_that_comes_back_before_the_deadline_loses_nothing(hold, store, client):
    lock = hold(lease=1.5)
    working, store._client = store._client, _Broken()
    store._spare.clear()
    wait_until(lambda: lock.state == "at_risk", "a renewal is late", 2)
    store._client = working
    wait_until(lambda: lock.state == "held", "it is renewed", 2)
    assert client.get(KEY).decode() == lock.token


def test_a_lock_past_its_deadline_stays_lost_although_a_late_renewal_succeeds(hold):
    lock = hold(lease=30)
    lock.deadline = time.monotonic() - 1
    lock.renew_at = 0
    assert lock.state == "lost"
    hold("another", lease=0.3)  # wakes the keeper
    wait_until(lambda: lock._lost, "it is noted", 2)
    assert lock.state == "lost"


def test_max_hold_ends_renewal_and_says_so(hold, client, log):
    lock = hold(lease=0.6, max_hold=0.5)
    wait_until(lambda: lock.state == "lost", "it is lost", 3)
    assert f"still runs after lock_max_hold (0.5 s): its lock {KEY} is not renewed any more" in log.text
    wait_until(
        lambda: f"the lock {KEY} is lost: it was held for longer than lock_max_hold" in log.text, "it says so", 2
    )
    wait_until(lambda: client.get(KEY) is None, "the key ends", 2)


def test_the_keeper_survives_every_exception(hold, store, log):
    lock = hold(lease=3)
    working = store.renew
    store.renew = lambda locks: 1 / 0
    lock.renew_at = 0
    hold("another", lease=0.9)
    wait_until(lambda: "the keeper failed" in log.text, "it failed", 3)
    store.renew = working
    wait_until(lambda: lock.renew_at > time.monotonic(), "it renews again", 3)
    assert lock.state == "held"


def test_a_slow_receiver_does_not_keep_other_locks_from_being_renewed(hold, client, log):
    def slow(lock, reason):
        time.sleep(1.5)

    other = hold("other", lease=0.9)
    lost = hold(lease=0.9, on_lost=slow)
    client.delete(KEY)
    wait_until(lambda: lost.state == "lost", "it is lost", 3)
    time.sleep(1.5)
    assert other.state == "held"


def test_a_keeper_whose_thread_could_not_be_started_starts_it_with_the_next_lock(hold, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            hold("first", lease=0.6)
    lock = hold("second", lease=0.6)
    time.sleep(1.2)
    assert lock.state == "held"


def test_an_idle_keeper_sleeps_until_a_lock_comes(hold, keeper, locks):
    lock = hold(lease=0.6)
    keeper.remove(lock)
    wait_until(lambda: keeper._wake_at == float("inf"), "it has nothing to do", 5)
    locks.calls()
    time.sleep(0.7)
    assert locks.calls() == {}
    again = hold("another", lease=0.6)
    time.sleep(1.0)
    assert again.state == "held"


def test_many_locks_are_renewed_together(hold, locks):
    for number in range(1000):
        hold(f"{KEY}{number}", lease=3.0)
    locks.calls()
    time.sleep(1.1)  # one interval
    assert 1 <= locks.calls()["evalsha"] <= 10


def test_removing_while_renewing_does_not_tell_of_a_loss(hold, keeper, store, log):
    """A task that ends in the middle of a renewal released its key itself."""
    held = [hold(f"{KEY}{number}", lease=0.3) for number in range(50)]
    end = time.monotonic() + 2
    while time.monotonic() < end:
        lock = held.pop(0)
        keeper.remove(lock)
        store.release(lock.key, lock.nonce)
        held.append(hold(lock.key, lease=0.3))
        time.sleep(0.005)
    assert "lost" not in log.text


def test_locks_of_many_threads_are_all_renewed(hold):
    held = []
    threads = [
        threading.Thread(target=lambda n=n: held.extend(hold(f"{KEY}{n}-{m}", lease=0.6) for m in range(20)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1.5)
    assert {lock.state for lock in held} == {"held"}


def test_after_a_fork_the_child_renews_its_own_locks_and_not_its_parents(config, locks):
    from celery_redislock.server import LockServer
    from tests.lab.app import make_app

    app = make_app(config)
    parents = app.tasks["lab.work"].lock_for("parent")
    parents.acquire()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        server = LockServer.of(app)
        lock = app.tasks["lab.work"].lock_for("child")
        fresh = not server.keeper._held and server.keeper._thread is None
        lock.acquire()
        time.sleep(0.1)
        os.write(write, f"{fresh} {lock.state}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"True held"
    os.close(read)
    os.close(write)
    assert parents.state == "held"
    parents.release()


class _Broken:
    """A client whose server does not answer."""

    connection = None

    def client(self):
        return self

    def close(self): ...

    def execute_command(self, *args):
        raise redis.TimeoutError("Timeout reading from socket")
