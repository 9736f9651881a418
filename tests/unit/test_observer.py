"""The observer of `tests/lab` finds what is planted in a ledger, and accuses nobody wrongly."""

from __future__ import annotations

import pytest

from tests.lab.observer import Observer


class Book:
    """Writes into a ledger what callers and bodies would."""

    def __init__(self, ledger):
        self.write = ledger.write

    def call(self, job, asked_at, returned_at, *, sends=True, way="plain", expires_at=None):
        """It hands its message to the broker in the middle of the call."""
        call = {"event": "call", "caller": 0, "id": job, "way": way, "asked_at": asked_at, "returned_at": returned_at}
        sent_at = (asked_at + returned_at) / 2 if sends else None
        self.write({**call, "sent_at": sent_at, "expires_at": expires_at})

    def run(self, job, start, end):
        mark = {"key": "k", "item": "", "pid": 1, "task_id": job, "start": start}
        self.write({**mark, "event": "start"})
        self.write({**mark, "event": "end", "end": end})


@pytest.fixture
def book(ledger):
    return Book(ledger)


def pairs(ledger):
    return [(pair.first.call.id, pair.second.call.id) for pair in Observer(ledger).pairs()]


def test_a_job_that_is_sent_while_another_one_is_queued_or_runs_is_found(book, ledger):
    book.call("first", 0.0, 1.0)
    book.call("while queued", 2.0, 3.0)
    book.run("first", 4.0, 8.0)
    book.call("while running", 6.0, 7.0)
    assert pairs(ledger) == [("first", "while queued"), ("first", "while running")]


@pytest.mark.parametrize("call", [(0.5, 9.0), (7.9, 8.2), (8.1, 8.2)], ids=["both at once", "amid the end", "after it"])
def test_one_that_may_be_sent_is_not(book, ledger, call):
    book.call("first", 0.0, 1.0)
    book.run("first", 4.0, 8.0)
    book.call("second", *call)
    assert pairs(ledger) == []


def test_a_job_is_outstanding_to_the_end_of_its_last_attempt(book, ledger):
    book.call("first", 0.0, 1.0, way="retry")
    book.run("first", 2.0, 3.0)
    book.call("second", 4.0, 5.0)
    book.run("first", 6.0, 7.0)
    assert pairs(ledger) == [("first", "second")]


@pytest.mark.parametrize(("asked_at", "is_found"), [(1.5, True), (3.5, False)], ids=["before", "after"])
@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_one_that_never_ran_is_over_when_it_was_revoked_or_has_expired(book, ledger, asked_at, is_found, how):
    book.call("first", 0.0, 1.0, expires_at=3.0 if how == "expired" else None)
    if how == "revoked":
        book.write({"event": "revoke", "id": "first", "at": 3.0})
    book.call("second", asked_at, asked_at + 0.5)
    assert (pairs(ledger) != []) == is_found


def test_one_that_its_policy_has_ended_is_over_at_once(book, ledger):
    book.call("skipped", 0.0, 1.0)
    book.call("second", 2.0, 3.0)
    assert pairs(ledger) == []


def test_in_the_queue_a_job_is_over_when_it_asks_for_the_key_that_it_is_granted(book, ledger):
    book.call("first", 0.0, 1.0)
    book.call("while queued", 2.0, 2.5)
    for at in (2.0, 3.0):  # refused, and granted
        book.write({"event": "asks", "task_id": "first", "at": at})
    book.call("behind it", 3.1, 3.2)
    book.run("first", 4.0, 8.0)
    found = [(pair.first.call.id, pair.second.call.id) for pair in Observer(ledger).pairs_in_the_queue()]
    assert found == [("first", "while queued")]


@pytest.mark.parametrize(("asked_at", "is_found"), [(4.0, False), (6.0, True)], ids=["before", "after"])
def test_an_answer_with_a_job_that_somebody_had_seen_end_is_found(book, ledger, asked_at, is_found):
    book.call("first", 0.0, 1.0)
    book.run("first", 2.0, 3.0)
    book.write({"event": "seen", "id": "first", "at": 5.0})
    book.call("first", asked_at, asked_at + 1, sends=False)
    assert bool(Observer(ledger).late_answers()) == is_found


def test_a_job_that_runs_though_it_is_shown_as_revoked_has_not_ended(book, ledger):
    book.call("first", 0.0, 1.0)
    book.write({"event": "revoke", "id": "first", "at": 1.5})
    book.write({"event": "seen", "id": "first", "at": 1.6})
    book.run("first", 1.7, 3.0)
    book.call("first", 2.0, 2.1, sends=False)
    assert Observer(ledger).late_answers() == []


def test_an_answer_with_a_job_that_nobody_sent_is_found(book, ledger):
    book.write({"event": "named", "id": "named"})
    book.call("named", 0.0, 1.0, sends=False)
    book.call("nobody's", 0.0, 1.0, sends=False)
    assert [call.id for call in Observer(ledger).unknown_answers()] == ["nobody's"]
