"""What the main process does for a child that has ended, and whose last run was a retry that was left its key."""

from __future__ import annotations

import pytest

from celery_redislock.app import server_of
from celery_redislock.server import tokens
from celery_redislock.server.tokens import Attempt
from celery_redislock.task.plan import LockPlan
from celery_redislock.worker.children import Reservation, Run, release_of_dead

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
        server.store.acquire(key, token, LEASE)
        return token

    return take_key


@pytest.fixture
def claim():
    """Of the message of the second attempt: the first one has left the key to it, or is to."""
    return tokens.mint_nonce()


@pytest.fixture
def release(app, key, claim):
    """The child that had the second attempt has ended."""

    def job_again(key): ...

    plan = LockPlan(app, "lab.job_again", job_again, False, {"args": ["key"], "scope": "job"})
    run = Run("id", plan, ("k",), {}, tokens.mint_nonce(), Reservation(key, claim), 1)
    assert run.key == key
    return lambda: release_of_dead(run)


def test_while_the_run_before_holds_the_key_a_note_tells_it_to_leave_it_to_nobody(
    server, key, take, claim, release, locks
):
    first = take("id", 0)
    release()
    assert len(locks.client.keys()) == 2  # the key and the note
    again = tokens.mint(claim, Attempt("id", 1, 0), ORIGIN, tokens.RESERVED)
    assert server.store.hand_over(key, first, again, LEASE)
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
    server.store.acquire(key, tokens.mint(claim, Attempt("id", 1, 0), ORIGIN, tokens.RESERVED), LEASE)
    release()
    assert locks.client.keys() == []
