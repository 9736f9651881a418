"""A lost run's key goes over to the attempt that Celery publishes, whichever thread of the main process comes first."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from celery_redislock.app import server_of
from celery_redislock.message.header import Header, Reservation
from celery_redislock.policy import hands_over
from celery_redislock.protocol import commands, tokens
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.tokens import Attempt, known_by
from celery_redislock.task.lost import NOTICED_WITHIN, NextAttempt, is_retried_if_lost
from celery_redislock.worker.children import Run, release_of_dead
from tests.lab.asking import acquire
from tests.lab.servers import wait_until

LEASE, KEPT = 60.0, 1000.0
ORIGIN = tokens.origin("w@host", "lab.job")


@pytest.fixture
def server(app):
    return server_of(app)


@pytest.fixture
def plan(tasks):
    return tasks.job.lock_plan


@pytest.fixture
def key(tasks):
    return tasks.job.lock_for("k").name


@pytest.fixture
def claim():
    """Of the lost run's own message."""
    return tokens.mint_nonce()


@pytest.fixture
def run(plan, key, claim):
    nonce, reservation = tokens.mint_nonce(), Reservation(key, claim)
    attempt = NextAttempt(plan, {"id": "id", "hostname": "w@host"}, nonce, reservation)
    return Run("id", plan, plan.options, nonce, reservation, 0, waited_for=(Demand(key),), next=attempt)


@pytest.fixture
def held(server, key, run):
    """The run holds the key when its process dies."""
    acquire(server.store, Demand(key), tokens.mint(run.nonce, Attempt("id", 0, 0), ORIGIN), LEASE)


@pytest.fixture
def header(run):
    return run.next.header(Header())


def kept_for(server, key, header):
    """For how many seconds the key is kept for the message with `header`; 0 where it is not."""
    found = server.store.look(Demand(key))
    is_kept = found is not None and (found.holder.state, found.holder.nonce) == ("queued", header.claim)
    return found.ttl if is_kept else 0.0


def test_first_the_death_and_then_the_message(server, key, run, held, header):
    release_of_dead(run)
    assert NOTICED_WITHIN - 5 < kept_for(server, key, header) <= NOTICED_WITHIN
    assert header.key == key
    run.next.was_sent(KEPT)
    wait_until(lambda: kept_for(server, key, header) > KEPT - 5, "it is kept for as long as its message may take")


def test_first_the_message_and_then_the_death(server, key, run, held, header):
    run.next.was_sent(KEPT)
    assert kept_for(server, key, header) == 0
    release_of_dead(run)
    assert kept_for(server, key, header) > KEPT - 5


def test_the_message_comes_amid_the_handover(server, key, run, held, header):
    handed_over = run.next.takes(Demand(key))
    run.next.was_sent(KEPT)
    wait_until(lambda: kept_for(server, key, header) > KEPT - 5, "it is kept")
    assert not server.store.send(commands.hand_over(Demand(key), known_by(run.nonce), *handed_over))
    assert kept_for(server, key, header) > KEPT - 5


@pytest.mark.parametrize("first", ["the death", "the end"])
def test_where_celery_publishes_nothing_the_key_is_free(key, run, held, locks, first):
    if first == "the death":
        release_of_dead(run)
    run.next.call_off()
    if first != "the death":
        release_of_dead(run)
    wait_until(lambda: locks.client.keys() == [], "nothing is left")


def test_where_that_is_known_amid_the_handover_the_key_is_free(server, key, run, held, locks):
    handed_over = run.next.takes(Demand(key))
    run.next.call_off()
    wait_until(lambda: len(locks.client.keys()) == 2, "a note says that nobody comes")
    server.store.send(commands.hand_over(Demand(key), known_by(run.nonce), *handed_over))
    assert locks.client.keys() == []


def test_a_key_that_was_reserved_for_the_lost_message_goes_over_too(server, key, claim, run, header):
    """Its process has died before it asked."""
    acquire(server.store, Demand(key), tokens.mint(claim, Attempt("id", 0, 0), ORIGIN, tokens.RESERVED), LEASE)
    release_of_dead(run)
    assert kept_for(server, key, header) > 0


def test_a_key_that_somebody_else_has_stays_with_him(server, key, run, locks):
    other = tokens.mint(tokens.mint_nonce(), Attempt("other", 0, 0), ORIGIN)
    acquire(server.store, Demand(key), other, LEASE)
    release_of_dead(run)
    run.next.was_sent(KEPT)
    done = threading.Event()
    server.keeper.later("key", math.inf, lambda _: done.set())  # the keeper has then done what it was given before
    assert done.wait(10)
    assert server.store.look(Demand(key)).holder.nonce == other.nonce
    assert len(locks.client.keys()) == 1


def test_where_the_lock_server_is_away_at_the_death_the_key_goes_over_once_it_answers(
    lock_proxy, server, key, run, held, header
):
    lock_proxy.refuse()
    release_of_dead(run)
    run.next.was_sent(KEPT)
    lock_proxy.mend()
    wait_until(lambda: kept_for(server, key, header) > KEPT - 30, "it is kept", 20)


@pytest.mark.parametrize(("scope", "retries", "most"), [("run", 0, 3), ("job", 3, 3), ("job", 0, 0)])
def test_there_is_none_in_scope_run_nor_after_the_last_retry(tasks, scope, retries, most):
    options = (tasks.job if scope == "job" else tasks.work).lock_plan.options
    task = SimpleNamespace(max_retries=most, retry_on_worker_lost=True)
    assert not (hands_over(options) and is_retried_if_lost(task, {"id": "id", "retries": retries}))


@pytest.mark.parametrize("retries", ["1", [1], -1, True, 10**400, None], ids=lambda value: type(value).__name__)
def test_whatever_a_message_says_of_its_retries_the_worker_that_receives_it_lives(plan, retries):
    request = {"id": "id", "retries": retries}
    assert NextAttempt(plan, request, "nonce", None).attempt.retries in {1, 10**400 + 1}
    assert is_retried_if_lost(SimpleNamespace(max_retries=None, retry_on_worker_lost=True), request)
