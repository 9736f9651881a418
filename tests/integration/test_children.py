"""What the main process knows of its children, and does for one that has ended after a retry that was left its key."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from billiard import Process

from celery_redislock.app import server_of
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Attempt
from celery_redislock.task.plan import LockPlan
from celery_redislock.worker.children import Children, Reservation, Run, release_of_dead
from tests.lab.asking import acquire
from tests.lab.servers import wait_until

LEASE = 60.0
ORIGIN = tokens.origin("w@host", "lab.job_again")


@pytest.fixture
def server(app):
    return server_of(app)


@pytest.fixture
def key(tasks):
    return tasks.job_again.lock_for("k").name


@pytest.fixture
def take(server, key):
    """An attempt of the task, or another's, takes the key: its token."""

    def take_key(task_id, retries):
        token = tokens.mint(tokens.mint_nonce(), Attempt(task_id, retries, 0), ORIGIN)
        acquire(server.store, Demand(key), token, LEASE)
        return token

    return take_key


@pytest.fixture
def claim():
    """Of the message of the second attempt: the first one has left the key to it, or is to."""
    return tokens.mint_nonce()


@pytest.fixture
def run(app, key, claim):
    """What the child was given to run: the second attempt."""

    def job_again(key): ...

    plan = LockPlan(app, "lab.job_again", job_again, False, {"args": ["key"], "scope": "job"})
    return Run("id", plan, plan.options, tokens.mint_nonce(), Reservation(key, claim), 1, waited_for=(Demand(key),))


@pytest.fixture
def release(run):
    """The child that had the second attempt has ended."""
    return lambda: release_of_dead(run)


def test_while_the_run_before_holds_the_key_a_note_tells_it_to_leave_it_to_nobody(
    server, key, take, claim, release, locks
):
    first = take("id", 0)
    release()
    assert len(locks.client.keys()) == 2  # the key and the note
    again = tokens.mint(claim, Attempt("id", 1, 0), ORIGIN, tokens.RESERVED)
    assert server.store.send(commands.hand_over(Demand(key), first, again, LEASE))
    assert locks.client.keys() == []


@pytest.mark.parametrize(
    "holder", [None, ("id", 1), ("id", 2), ("other", 0)], ids=["nobody", "itself", "the next attempt", "another task"]
)
def test_once_the_run_before_holds_it_no_more_no_note_is_left(take, release, locks, holder):
    if holder is not None:
        take(*holder)
    kept = locks.client.keys()
    release()
    assert locks.client.keys() == kept


def test_what_was_left_to_it_and_not_used_is_free(server, key, claim, release, locks):
    """The run before has ended; the child died before it asked."""
    acquire(server.store, Demand(key), tokens.mint(claim, Attempt("id", 1, 0), ORIGIN, tokens.RESERVED), LEASE)
    release()
    assert locks.client.keys() == []


@pytest.mark.parametrize("has_asked", [True, False])
def test_where_the_lock_server_is_away_the_reservation_is_given_up_once_it_is_back(
    lock_proxy, server, key, run, claim, locks, log, has_asked
):
    acquire(server.store, Demand(key), tokens.mint(claim, Attempt("id", 1, 0), ORIGIN, tokens.RESERVED), LEASE)
    lock_proxy.refuse()
    release_of_dead(run if has_asked else run._replace(waited_for=()))
    (record,) = [record for record in log.records if "its lock may not be released" in record.getMessage()]
    assert "; retried until the worker ends" in record.getMessage()
    assert (record.redislock_event, record.redislock_key) == ("died", key)
    lock_proxy.mend()
    wait_until(lambda: not locks.client.exists(key), "the reservation is given up", 20)


def test_where_the_lock_server_is_away_the_lock_is_released_once_it_is_back(
    lock_proxy, server, key, run, release, locks, log
):
    acquire(server.store, Demand(key), tokens.mint(run.nonce, Attempt("id", 1, 0), ORIGIN), LEASE)
    lock_proxy.refuse()
    release()
    lock_proxy.mend()
    wait_until(lambda: not locks.client.exists(key), "the lock is released", 20)
    wait_until(lambda: f"its process died; its lock {key} was released" in log.text, "it says so")


def test_only_dead_children_without_a_message_are_counted():
    """A pool lists a child before it starts it. A dead child's message runs in the child that replaces it."""
    ready, tell = os.pipe()
    children = [Process(target=os.read, args=(ready, 1)) for _ in range(2)]
    inner = SimpleNamespace(_pool=children, _cache={})
    pool, dead = SimpleNamespace(_pool=inner, uses_semaphore=True), Children().dead
    assert dead(pool) == 0
    for child in children:
        child.start()
    assert dead(pool) == 0
    os.write(tell, b"!")
    wait_until(lambda: dead(pool) == 1, "the one that has read has ended")
    os.write(tell, b"!")
    for child in children:
        child.join()
    wait_until(lambda: dead(pool) == 2, "both have ended")
    inner._cache[1] = SimpleNamespace(_worker_pid=None, _write_to=children[0], _scheduled_for=None)
    inner._cache[2] = SimpleNamespace(_worker_pid=None, _write_to=None, _scheduled_for=None)
    assert dead(pool) == 1, "one has a message in its pipe"
    for end in (ready, tell):
        os.close(end)
