"""The checker itself: it finds what is planted in a ledger, and excuses only what has its evidence there."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from celery_redislock.protocol import tokens
from chaos import stalls, turns, windows
from chaos.check import check
from chaos.complaints import complaints_in
from chaos.faults import (
    BLACKHOLE,
    COLD,
    CUT_BROKER,
    FAULTS,
    KILL_CHILD,
    KILL_WORKER,
    REFUSE,
    RESTART,
    STOP_CHILD,
    STOP_WORKER,
    WARM,
    plan,
)
from chaos.report import offences, table
from promises import Excuse
from tests.lab.ledger import Ledger

MAIN, CHILD, OTHER = 10, 11, 21


class Book:
    """A ledger in the making. Times are seconds."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def sent(self, task_id, kind="late", final="SUCCESS", after="", at=0.0, received=True):
        self.ledger.write({"event": "sent", "task_id": task_id, "kind": kind, "after": after})
        self.publish(task_id, at, received=received)
        self.ledger.write({"event": "final", "task_id": task_id, "state": final})

    def publish(self, task_id, at, worker=MAIN, *, received=True):
        line = {"task_id": task_id, "publish": f"{task_id} {at}", "at": at}
        self.ledger.write({"event": "published", **line})
        if received:
            self.ledger.write({"event": "received", "worker": worker, **line})

    def run(self, task_id, start, end=None, *, pid=CHILD, key="key", item=None, done=True):
        run = {"key": key, "item": item or f"{task_id}/0", "pid": pid, "task_id": task_id, "start": start}
        self.ledger.write({"event": "start", **run})
        if end is not None:
            if done:
                self.ledger.write({"event": "done", "task_id": task_id, "pid": pid, "at": end})
            self.ledger.write({"event": "end", **run, "end": end})

    def fault(self, name, start, end=None, pids=(), **facts):
        line = {"event": "fault", "name": name, "from": start, "until": end or start, "struck": True}
        self.ledger.write({**line, "pids": list(pids), "worker": MAIN, "publishers": True, **facts})

    def died(self, at, pid=CHILD):
        self.ledger.write({"event": "died", "pid": pid, "at": at})

    def waits(self, task_id, start, end=None, rank=1, *, worker=MAIN, key="key", called=True):
        line = {"task_id": task_id, "key": f"redislock:{{chaos:{key}}}", "rank": rank}
        line |= {"worker": worker, "waiter": f"{task_id} {start}"}
        self.ledger.write({"event": "waits", "at": start, **line})
        if end is not None:
            self.ledger.write({"event": "begins", "at": end, "called": called, **line})

    def full(self, at, worker=MAIN, key="key"):
        self.ledger.write({"event": "full", "key": f"redislock:{{chaos:{key}}}", "worker": worker, "at": at})

    def ended(self, *times, worker=MAIN):
        for at in times:
            self.ledger.write({"event": "ended", "worker": worker, "since": at - 0.1, "at": at})

    def takes_slots(self, count, since, at, worker=MAIN):
        for _ in range(count):
            self.ledger.write({"event": "ended", "worker": worker, "since": since, "at": at})

    def lost(self, task_id, at, reason, pid=CHILD):
        line = {"event": "lost", "key": "redislock:{key}", "task_id": task_id, "reason": reason}
        self.ledger.write({**line, "pid": pid, "at": at})


@pytest.fixture
def book(tmp_path):
    return Book(Ledger(tmp_path / "ledger"))


@pytest.fixture
def broken(book):
    """What the checker says is broken."""
    return lambda: [offence.what for offence in check(book.ledger).offences]


def test_a_run_without_faults_passes(book, broken):
    book.sent("a")
    book.sent("b")
    book.run("a", 1, 2)
    book.run("b", 2, 3)
    assert broken() == []
    assert check(book.ledger).outcomes == Counter({"messages sent": 2, "finished": 2, "runs": 2})


class TestOverlaps:
    @pytest.fixture
    def overlap(self, book):
        """A second run from 5 to 6 s, in another process than the first one, from 1 to 9 s."""
        book.sent("a")
        book.sent("b")
        book.run("a", 1, 9)
        book.run("b", 5, 6, pid=OTHER)

    @pytest.mark.parametrize(("count", "found"), [(3, []), (4, ["more than 3 runs of three0 at the same time"])])
    def test_of_a_key_that_three_may_hold_the_fourth_breaks_it(self, book, broken, count, found):
        for number in range(count):
            book.sent(f"m{number}", "three")
            book.run(f"m{number}", 1 + number, 9, pid=CHILD + number, key="three0")
        assert broken() == found

    def test_of_such_a_key_one_that_stood_still_is_excused(self, book, broken):
        for number in range(4):
            book.sent(f"m{number}", "three")
            book.run(f"m{number}", 1 + number, 9, pid=CHILD + number, key="three0")
        book.fault(STOP_CHILD, 1.5, 4.2, [CHILD])
        assert broken() == []
        assert check(book.ledger).overlaps[Excuse.STOOD_STILL] == 1

    def test_of_such_a_key_two_deliveries_of_one_message_may_not_run_at_once(self, book, broken):
        book.sent("a", "three")
        book.run("a", 1, 9, key="three0")
        book.run("a", 5, 10, key="three0", pid=OTHER)
        assert "two runs of three0 at the same time" in broken()

    def test_without_a_cause_it_is_broken(self, overlap, broken, book):
        assert broken() == ["two runs of key at the same time"]
        shown = check(book.ledger).offences[0].lines
        assert {line["pid"] for line in shown} == {CHILD, OTHER}

    def test_a_holder_that_had_been_told_is_excused(self, overlap, book, broken):
        book.fault(RESTART, 4)
        book.lost("a", 4.9, "its key was deleted, expired or taken")
        assert broken() == []
        assert check(book.ledger).overlaps == {Excuse.KNEW_OF_THE_LOSS: 1}

    @pytest.mark.parametrize("name", [STOP_WORKER, STOP_CHILD])
    def test_a_holder_that_stood_still_is_excused(self, overlap, book, broken, name):
        book.fault(name, 1.5, 5.2, [CHILD])
        assert broken() == []
        assert check(book.ledger).overlaps[Excuse.STOOD_STILL] == 1

    def test_one_that_stood_still_twice_in_a_row_is_excused(self, overlap, book, broken):
        book.fault(STOP_WORKER, 1.5, 4.3, [CHILD])
        book.fault(STOP_CHILD, 4.31, 8.0, [CHILD])
        assert broken() == []

    @pytest.mark.parametrize(
        ("start", "end", "pid"), [(1.5, 5.2, 99), (1.5, 4.0, CHILD), (4.5, 8.0, CHILD)], ids=["other", "early", "late"]
    )
    def test_a_stop_of_another_or_at_another_time_excuses_nothing(self, overlap, book, broken, start, end, pid):
        book.fault(STOP_CHILD, start, end, [pid])
        assert broken() == ["two runs of key at the same time"]

    def test_a_holder_that_an_outage_kept_from_renewing_before_it_stood_still_is_excused(self, overlap, book, broken):
        book.fault(STOP_CHILD, 4.5, 8.0, [CHILD])
        book.fault(BLACKHOLE, 2.0, 4.4)
        assert broken() == []

    def test_one_that_stood_still_between_its_grant_and_its_first_word_is_excused(self, book, broken):
        book.sent("a")
        book.sent("b")
        book.fault(STOP_CHILD, 1, 5, [CHILD])
        book.run("b", 4.5, 6, pid=OTHER)
        book.run("a", 5.1, 5.2)
        assert broken() == []

    @pytest.mark.parametrize(("lost_at", "excused"), [(4.2, True), (3.0, False), (5.5, False)])
    def test_lost_data_excuse_what_began_before_the_next_renewal(self, overlap, book, broken, lost_at, excused):
        book.fault(RESTART, lost_at)
        assert (broken() == []) == excused
        assert check(book.ledger).overlaps[Excuse.DATA_LOST] == int(excused)

    def test_an_outage_that_hinders_the_renewal_extends_that_to_the_deadline(self, overlap, book, broken):
        book.fault(RESTART, 2.5)
        assert broken()
        book.fault(BLACKHOLE, 2.6, 4.8)
        assert broken() == []

    def test_a_holder_that_is_stopped_before_that_renewal_is_excused(self, overlap, book, broken):
        book.fault(RESTART, 3.0)
        book.fault(STOP_CHILD, 3.9, 7.0, [CHILD])
        assert broken() == []

    def test_an_outage_alone_excuses_no_overlap(self, overlap, book, broken):
        book.fault(BLACKHOLE, 2, 5)
        assert broken()


class TestMessages:
    @pytest.mark.parametrize("final", ["PENDING", "RETRY", "FAILURE", "REVOKED"])
    @pytest.mark.parametrize("kind", ["late", "again", "step", "link"])
    def test_one_acked_late_must_succeed(self, book, broken, final, kind):
        book.sent("a", kind, final)
        assert broken() == [f"a message that is acked late was lost: {kind}, {final}"]

    def test_it_is_excused_where_no_worker_received_it_and_one_was_killed(self, book, broken):
        book.sent("a", final="PENDING", received=False)
        assert broken()
        book.fault(KILL_WORKER, 2, pids=[MAIN])
        assert broken() == []
        assert list(check(book.ledger).missing.values()) == [1]

    @pytest.mark.parametrize(("killed", "excused"), [(MAIN, True), (OTHER, False)])
    def test_it_is_excused_where_the_one_that_was_killed_had_stood_still_meanwhile(self, book, broken, killed, excused):
        """The broker gives a message to a worker that stands still, but waits for one."""
        book.sent("a", final="PENDING", received=False)
        book.fault(STOP_WORKER, -0.5, 4.3, pids=[MAIN])
        book.fault(KILL_WORKER, 4.4, pids=[killed], worker=killed)
        assert (broken() == []) == excused

    def test_it_may_lie_in_the_queue_for_as_long_as_others_that_were_published_then(self, book, broken):
        book.sent("a", final="PENDING", received=False)
        book.fault(KILL_WORKER, 9, pids=[MAIN])
        assert broken()
        book.sent("b", at=1, received=False)
        book.ledger.write({"event": "received", "task_id": "b", "publish": "b 1", "worker": OTHER, "at": 10.5})
        book.run("b", 10.6, 10.7)
        assert broken() == []

    def test_a_step_after_it_is_excused_with_it(self, book, broken):
        book.sent("a", "step", final="PENDING", received=False)
        book.fault(KILL_WORKER, 2, pids=[MAIN])
        book.ledger.write({"event": "sent", "task_id": "b", "kind": "step", "after": "a"})
        assert broken() == []

    def test_one_received_is_excused_only_where_its_worker_ended_with_it(self, book, broken):
        book.sent("a", final="PENDING")
        assert broken()
        book.fault(KILL_WORKER, 2, pids=[OTHER], worker=OTHER)
        assert broken()
        book.fault(KILL_WORKER, 2, pids=[MAIN])
        assert broken() == []

    @pytest.mark.parametrize(
        ("cut", "left", "worker", "excused"),
        [(3.0, 3.2, MAIN, True), (0.5, 0.7, MAIN, False), (8.0, 8.2, MAIN, False), (3.0, 3.2, OTHER, False)],
    )
    def test_one_that_went_back_to_the_queue_may_have_been_taken_from_there(
        self, book, broken, cut, left, worker, excused
    ):
        book.sent("a", final="PENDING", at=1)
        book.fault(STOP_WORKER, 3.9, 7, [OTHER], worker=OTHER)
        book.fault(KILL_WORKER, 7, pids=[OTHER], worker=OTHER)
        assert broken()
        book.fault(CUT_BROKER, cut, publishers=False)
        book.ledger.write({"event": "leaves", "worker": worker, "at": left})
        assert (broken() == []) == excused

    def test_one_acked_early_that_has_begun_went_back_to_no_queue(self, book, broken):
        book.sent("a", "early", final="PENDING", at=1)
        book.run("a", 2, 2.5, done=False)
        book.fault(STOP_WORKER, 3.9, 7, [OTHER], worker=OTHER)
        book.fault(KILL_WORKER, 7, pids=[OTHER], worker=OTHER)
        book.fault(CUT_BROKER, 3, publishers=False)
        book.ledger.write({"event": "leaves", "worker": MAIN, "at": 3.2})
        assert broken() == ["a message that is acked early was lost: early, PENDING"]

    def test_one_that_ran_to_its_end_is_not_excused(self, book, broken):
        book.sent("a", final="PENDING")
        book.run("a", 1, 2)
        book.fault(KILL_WORKER, 2, pids=[MAIN])
        assert broken()

    @pytest.mark.parametrize(
        ("start", "until", "pid", "passes"),
        [(2.0, 6.0, CHILD, True), (2.0, 3.5, CHILD, False), (2.0, 6.0, OTHER, False), (4.5, 6.0, CHILD, False)],
    )
    def test_one_whose_retry_has_finished_may_show_retry_if_the_run_that_sent_it_stood_still_meanwhile(
        self, book, broken, start, until, pid, passes
    ):
        book.sent("a", "again", "RETRY")
        book.run("a", 1, 2, done=False)
        book.run("a", 4, 5, pid=OTHER, item="a/1")
        assert broken()
        book.fault(STOP_CHILD, start, until, [pid])
        assert (broken() == []) == passes

    def test_rabbitmq_excuses_no_loss(self, book, broken):
        book.ledger.write({"event": "broker", "kind": "rabbitmq"})
        book.sent("a", final="PENDING", received=False)
        book.fault(KILL_WORKER, 2, pids=[MAIN])
        assert broken()

    def test_one_acked_early_may_be_lost_with_its_process_only(self, book, broken):
        book.sent("a", "early", "PENDING")
        book.fault(KILL_CHILD, 30, pids=[CHILD])  # long after it had the message
        assert broken() == ["a message that is acked early was lost: early, PENDING"]
        book.fault(KILL_CHILD, 5, pids=[CHILD])
        assert broken() == []
        assert check(book.ledger).missing == {Excuse.ACKED_EARLY: 1}

    def test_one_acked_early_that_waited_for_long_may_be_lost_as_its_process_is_ended(self, book, broken):
        book.sent("a", "early", "RETRY")
        book.run("a", 17.0, 17.1, done=False)
        assert broken() == ["a message that is acked early was lost: early, RETRY"]
        book.fault(COLD, 17.1, 18.0, [MAIN, CHILD], worker=MAIN)
        assert broken() == []

    def test_a_skipped_one_is_an_outcome(self, book, broken):
        book.sent("a", "once", "REVOKED")
        assert broken() == []
        assert check(book.ledger).outcomes["skipped as duplicates"] == 1

    @pytest.mark.parametrize(("kind", "passes"), [("limited", True), ("early", False), ("late", False)])
    def test_only_one_with_a_time_limit_may_fail(self, book, broken, kind, passes):
        book.sent("a", kind, "FAILURE")
        assert (broken() == []) == passes

    def test_a_success_without_a_run_is_broken(self, book, broken):
        book.sent("a")
        book.run("a", 1, 2, done=False)
        assert broken() == ["a message succeeded without a run"]


class TestRunsAgain:
    AGAIN = ["an attempt ran again after it had finished"]

    @pytest.fixture
    def again(self, book):
        """A run from 1 to 2 s that finished, and another of the same attempt from 5 s on."""
        book.sent("a", at=0.9)
        book.run("a", 1, 2)
        book.run("a", 5, 6, pid=OTHER)

    def test_without_a_cause_it_is_broken(self, again, broken):
        assert broken() == self.AGAIN

    @pytest.mark.parametrize(
        "cause",
        [
            lambda book: book.died(2.3),
            lambda book: book.fault(CUT_BROKER, 2.1, publishers=False),
            lambda book: book.fault(RESTART, 3),
            lambda book: book.fault(WARM, 1.5, 3, [CHILD]),
            lambda book: book.ledger.write({"event": "hang", "worker": MAIN}),
        ],
        ids=["died", "cut after", "notes lost", "shut down", "hung"],
    )
    def test_with_a_cause_it_is_excused(self, again, book, broken, cause):
        cause(book)
        assert broken() == []
        assert sum(check(book.ledger).again.values()) == 1

    def test_a_cause_at_another_time_excuses_nothing(self, again, book, broken):
        book.died(4.5)
        book.died(2.3, pid=99)
        book.fault(CUT_BROKER, 0.95, publishers=False)  # before its body: its worker had told it
        book.fault(CUT_BROKER, 4.8, publishers=False)
        book.fault(RESTART, 0.5)
        assert broken() == self.AGAIN

    def test_what_was_sent_back_but_not_acked_is_excused_where_its_worker_was_killed(self, book, broken):
        book.sent("a", at=0.5)
        book.publish("a", 0.6)
        book.run("a", 1, 2)
        book.publish("a", 0.5, worker=OTHER)
        book.run("a", 5, 6, pid=OTHER)
        assert broken() == self.AGAIN
        book.fault(KILL_WORKER, 0.7, pids=[MAIN])
        assert broken() == []

    @pytest.mark.parametrize(("stopped", "excused"), [((3.0, 8.5), True), ((3.0, 7.0), False), ((9.2, 9.4), False)])
    def test_a_worker_that_stood_still_with_a_message_past_the_visibility_timeout_does_not_know_of_its_copy(
        self, book, broken, stopped, excused
    ):
        book.sent("a", at=3.1)
        book.run("a", 8.2, 8.3, pid=OTHER)
        line = {"task_id": "a", "publish": "a 3.1"}
        book.ledger.write({"event": "received", "worker": 99, "at": 8.6, **line})
        book.run("a", 9, 10)
        book.fault(STOP_WORKER, *stopped, pids=[99], worker=99)
        assert broken() == ([] if excused else self.AGAIN)

    @pytest.mark.parametrize(
        ("until", "stopped", "copied", "excused"),
        [(8.5, 99, True, True), (8.2, 99, True, False), (8.5, 98, True, False), (8.5, 99, False, False)],
        ids=["stood still", "had noted it later", "another worker", "no copy"],
    )
    def test_nor_does_its_copy_if_that_runs_second(self, book, broken, until, stopped, copied, excused):
        book.sent("a", at=3.1, received=False)
        for worker, at in ((99, 8.6), (OTHER, 8.7))[: 1 + copied]:
            line = {"task_id": "a", "publish": "a 3.1", "worker": worker, "at": at}
            book.ledger.write({"event": "received", **line})
        book.run("a", 8.8, 9)
        book.run("a", 9.2, 9.3, pid=OTHER)
        book.fault(STOP_WORKER, 3.0, until, pids=[stopped], worker=stopped)
        assert broken() == ([] if excused else self.AGAIN)

    @pytest.mark.parametrize(
        ("until", "copied_at", "excused"),
        [(7.8, 8.2, True), (3.4, 8.2, False), (7.8, 7.85, False)],
        ids=["most of the timeout", "a moment", "copied for another reason"],
    )
    def test_one_that_stood_still_as_it_received_a_message_does_not_know_when_its_copy_is_due(
        self, book, broken, until, copied_at, excused
    ):
        book.sent("a", at=3.1, received=False)
        for worker, at in ((99, until + 0.1), (OTHER, copied_at)):
            book.ledger.write({"event": "received", "task_id": "a", "publish": "a 3.1", "worker": worker, "at": at})
        book.run("a", 8.0, 8.5)
        book.run("a", 8.6, 8.7, pid=OTHER)
        book.fault(STOP_WORKER, 3.2, until, pids=[99], worker=99)
        assert broken() == ([] if excused else self.AGAIN)

    def test_a_cut_during_a_run_excuses_nothing(self, book, broken):
        book.sent("a", at=0.9)
        book.run("a", 1, 4)
        book.publish("a", 0.9, worker=OTHER)
        book.fault(CUT_BROKER, 2.5)
        book.run("a", 5, 6, pid=OTHER)
        assert broken() == self.AGAIN

    @pytest.mark.parametrize(
        ("noticed_at", "fetched_at", "excused"), [(4.1, 1, True), (3.2, 1, False), (4.1, 3.8, False)]
    )
    def test_a_cut_that_its_worker_notices_only_at_its_ack_is_excused_if_it_fetched_nothing_meanwhile(
        self, book, broken, noticed_at, fetched_at, excused
    ):
        book.sent("a", at=0.9)
        book.run("a", 1, 4)
        book.fault(CUT_BROKER, 2.5)
        book.ledger.write({"event": "received", "task_id": "b", "publish": "b", "worker": MAIN, "at": fetched_at})
        book.ledger.write({"event": "leaves", "worker": MAIN, "at": noticed_at})
        book.run("a", 5, 6, pid=OTHER)
        assert broken() == ([] if excused else self.AGAIN)

    def test_a_copy_that_runs_while_the_first_goes_on_without_its_lock_is_excused(self, book, broken):
        book.sent("a")
        book.run("a", 1, 9)
        book.run("a", 5, 6, pid=OTHER)
        assert set(broken()) == {*self.AGAIN, "two runs of key at the same time"}
        book.fault(STOP_CHILD, 1.5, 4.95, [CHILD])
        book.lost("a", 4.9, "not renewed by its deadline")
        assert broken() == []

    @pytest.mark.parametrize(("again_at", "excused"), [(9, True), (7, False)])
    def test_one_that_had_lost_its_lock_leaves_no_note_for_what_the_visibility_timeout_brings(
        self, book, broken, again_at, excused
    ):
        book.sent("a", at=3)
        book.run("a", 3.1, 6.5)
        book.fault(BLACKHOLE, 2, 5)
        book.lost("a", 6, "not renewed by its deadline")
        book.run("a", again_at, again_at + 1, pid=OTHER)
        assert broken() == ([] if excused else self.AGAIN)

    @pytest.mark.parametrize(("after", "excused"), [(0.1, True), (0.5, False)])
    def test_one_that_had_lost_its_lock_leaves_its_note_a_moment_after_its_end(self, book, broken, after, excused):
        book.sent("a", at=3)
        book.run("a", 3.1, 6.5)
        book.fault(BLACKHOLE, 2, 5)
        book.lost("a", 6, "not renewed by its deadline")
        book.run("a", 6.5 + after, 8, pid=OTHER)
        assert broken() == ([] if excused else self.AGAIN)

    @pytest.mark.parametrize(("died_at", "excused"), [(5.5, True), (7.5, False)])
    def test_a_process_that_died_before_an_outage_was_made_up_for_is_excused(self, book, broken, died_at, excused):
        book.sent("a")
        book.run("a", 1, 2)
        book.fault(BLACKHOLE, 1.9, 5)
        book.died(died_at)
        book.run("a", 9, 10, pid=OTHER)
        assert broken() == ([] if excused else self.AGAIN)

    @pytest.mark.parametrize(
        ("stopped", "again_at", "excused"),
        [
            ((4.5, 8.5), 9, True),
            ((4.5, 7.5), 9, False),
            ((6.5, 8.5), 9, False),
        ],
        ids=["past it", "not for long", "after it was made up for"],
    )
    def test_a_process_that_stood_still_before_an_outage_was_made_up_for_is_excused(
        self, book, broken, stopped, again_at, excused
    ):
        book.sent("a")
        book.run("a", 1, 2)
        book.fault(BLACKHOLE, 1.9, 5)
        book.fault(STOP_CHILD, *stopped, [CHILD])
        book.run("a", again_at, again_at + 1, pid=OTHER)
        assert broken() == ([] if excused else self.AGAIN)

    @pytest.mark.parametrize(("refuses_at", "excused"), [(5.01, True), (6.5, False)])
    def test_an_outage_that_follows_another_one_counts_as_the_same(self, book, broken, refuses_at, excused):
        book.sent("a")
        book.run("a", 1, 2)
        book.fault(BLACKHOLE, 1.9, 5)
        book.fault(REFUSE, refuses_at, 7)
        book.fault(STOP_CHILD, 6.8, 10, [CHILD])
        book.run("a", 9, 10, pid=OTHER)
        assert broken() == ([] if excused else self.AGAIN)

    @pytest.mark.parametrize(("again_at", "excused"), [(3.5, False), (5.3, True), (6.5, False)])
    def test_a_lease_that_ended_before_an_outage_was_made_up_for_is_excused(self, book, broken, again_at, excused):
        book.sent("a")
        book.run("a", 1, 2)
        book.fault(BLACKHOLE, 1.9, 5)
        book.run("a", again_at, again_at + 1, pid=OTHER)
        assert broken() == ([] if excused else self.AGAIN)

    def test_a_run_that_stood_still_between_its_grant_and_its_body_is_excused(self, again, book, broken):
        book.fault(STOP_CHILD, 0.8, 4.95, [OTHER])
        assert broken() == []

    def test_an_unfinished_run_needs_a_death_or_a_cold_shutdown(self, book, broken):
        book.sent("a")
        book.run("a", 1, 2, done=False)
        book.run("a", 5, 6, pid=OTHER)
        assert broken() == self.AGAIN
        book.fault(COLD, 1.5, 2.5, [CHILD])
        assert broken() == []

    def test_a_killed_run_is_excused(self, book, broken):
        book.sent("a")
        book.run("a", 1)
        book.died(2)
        book.run("a", 5, 6, pid=OTHER)
        assert broken() == []
        assert check(book.ledger).again == {Excuse.UNFINISHED: 1}

    def test_the_next_attempt_is_another(self, book, broken):
        book.sent("a", "again")
        book.run("a", 1, 2, item="a/0")
        book.run("a", 3, 4, item="a/1")
        assert broken() == []

    def test_what_a_second_run_published_too_is_excused(self, book, broken):
        book.sent("a", "again")
        book.run("a", 1, 2, item="a/0")
        book.died(2.1)
        book.run("a", 5, 6, pid=OTHER, item="a/0")
        book.run("a", 7, 8, pid=OTHER, item="a/1")
        book.run("a", 9, 10, pid=OTHER, item="a/1")
        assert broken() == []
        assert check(book.ledger).again[Excuse.PUBLISHED_TWICE] == 1


class TestLosses:
    NOT_OURS = "its key was gone or taken at the release"

    @pytest.mark.parametrize("reason", [NOT_OURS, "its key was deleted, expired or taken"])
    def test_a_key_may_be_gone_only_with_the_servers_data_or_while_its_process_stood_still(self, book, broken, reason):
        book.sent("a")
        book.run("a", 1, 9)
        book.lost("a", 5, reason)
        book.fault(BLACKHOLE, 2, 4)
        assert broken() == ["a lock was lost without a cause"]
        book.fault(STOP_CHILD, 1.5, 4.9, [CHILD])
        assert broken() == []

    @pytest.mark.parametrize(("lost_at", "excused"), [(5.01, True), (6, False)])
    def test_a_process_that_stood_still_before_its_body_has_lost_its_lock_as_that_begins(
        self, book, broken, lost_at, excused
    ):
        book.sent("a")
        book.run("a", 5, 9)
        book.lost("a", lost_at, "not renewed by its deadline")
        book.fault(STOP_CHILD, 0.5, 4.7, [CHILD])
        assert broken() == ([] if excused else ["a lock was lost without a cause"])

    def test_a_missed_deadline_needs_an_outage(self, book, broken):
        book.sent("a")
        book.run("a", 1, 9)
        book.lost("a", 5, "not renewed by its deadline")
        assert broken() == ["a lock was lost without a cause"]
        book.fault(BLACKHOLE, 2, 4)
        assert broken() == []


class TestOrder:
    PASSED = "one who waited for key was passed by one published later"

    @pytest.fixture
    def two(self, book):
        """Two that wait for a run which ends at 3 s, in two workers: a, which was published first, and b."""
        for number, task_id in enumerate(["holder", "a", "b"]):
            book.sent(task_id, at=number / 10)
        book.run("holder", 0.5, 3)

        def turns(a, b, worker=OTHER):
            book.waits("a", 1, a, rank=1)
            book.waits("b", 1.1, b, rank=2, worker=worker)
            for task_id, at in (("a", a), ("b", b)):
                book.run(task_id, at + 0.01, at + 1, pid=OTHER)

        return turns

    def test_those_who_begin_in_the_order_of_publishing_pass(self, two, book, broken):
        two(a=3.01, b=4.02)
        assert broken() == []
        assert check(book.ledger).turns == {turns.WAITED: 2, turns.CHECKED: 2}

    @pytest.mark.parametrize("worker", [MAIN, OTHER])
    def test_one_who_is_passed_is_found(self, two, book, broken, worker):
        two(a=4.02, b=3.01, worker=worker)
        assert broken() == [self.PASSED]
        assert {line["task_id"] for line in check(book.ledger).offences[0].lines} == {"a", "b"}

    def test_one_who_came_just_when_the_other_had_its_turn_is_not_passed(self, book, broken):
        for task_id in ("a", "b"):
            book.sent(task_id)
        book.waits("b", 0.5, 1.0, rank=2, worker=OTHER)
        book.waits("a", 0.9, 2.0, rank=1)
        book.run("b", 1.01, 2, pid=OTHER)
        book.run("a", 2.01, 3)
        assert broken() == []

    def test_a_full_worker_excuses_it_and_only_before_another_worker(self, two, book, broken):
        two(a=4.02, b=3.01)
        book.full(2.95, worker=OTHER)
        assert broken() == [self.PASSED]
        book.full(1.5)
        assert broken() == [self.PASSED]
        book.full(2.95)
        assert broken() == []
        assert check(book.ledger).turns[turns.PASSES] == 1

    def test_in_one_worker_nothing_excuses_it(self, two, book, broken):
        two(a=4.02, b=3.01, worker=MAIN)
        book.full(2.95)
        assert broken() == [self.PASSED]

    @pytest.mark.parametrize(("struck", "excused"), [(2.0, True), (-8.5, True), (-25.0, False), (4.5, False)])
    def test_a_fault_lately_or_meanwhile_excuses_it(self, two, book, broken, struck, excused):
        two(a=4.02, b=3.01)
        book.fault(RESTART, struck)
        assert (broken() == []) == excused

    def test_a_newcomer_who_runs_at_once_while_another_waits_is_found(self, book, broken):
        for number, task_id in enumerate(["holder", "a", "b"]):
            book.sent(task_id, at=number)
        book.run("holder", 0.5, 2.9)
        book.waits("a", 1.5, 4.0)
        book.run("b", 3, 3.9, pid=OTHER)
        book.run("a", 4.1, 5)
        assert broken() == [self.PASSED]

    def test_a_newcomer_who_runs_right_after_it_has_not_passed_it(self, book, broken):
        book.sent("a")
        book.waits("a", 0.1, 1.0)
        book.run("a", 1.01, 1.1)
        book.sent("b", at=0.9)
        book.run("b", 1.12, 2, pid=OTHER)
        assert broken() == []

    @pytest.mark.parametrize("gone", [{"event": "leaves"}, {"event": "fault", "name": KILL_WORKER}])
    def test_one_whose_room_is_gone_is_not_passed(self, book, broken, gone):
        for task_id in ("a", "b"):
            book.sent(task_id)
        book.waits("a", -30)
        times = {"at": -29, "from": -29, "until": -29}
        book.ledger.write({**gone, **times, "worker": MAIN, "struck": True, "pids": []})
        book.waits("b", 1, 2, rank=2, worker=OTHER)
        book.run("b", 2, 3)
        book.run("a", 4, 5)
        assert broken() == []


class TestStarvation:
    @pytest.mark.parametrize(("passes", "excused"), [(24, True), (25, False)])
    def test_one_who_is_passed_again_and_again_is_found_though_its_worker_is_full(self, book, broken, passes, excused):
        book.sent("a")
        book.waits("a", 0, 40)
        for number in range(passes):
            task_id, at = f"b{number}", 1.0 + number
            book.sent(task_id)
            book.waits(task_id, 0.5, at, rank=2 + number, worker=OTHER)
            book.full(at)
            book.run(task_id, at + 0.01, at + 1, pid=OTHER)
        book.run("holder", 1.01 + passes, 40)
        book.run("a", 40, 41)
        assert broken() == ([] if excused else [f"one who waited for key was passed by {passes}"])

    @pytest.fixture
    def idle(self, book):
        """One that waits for a run which ends at 2 s, and is called when the key has idled until 5 s."""
        book.sent("holder")
        book.sent("a")
        book.run("holder", 0, 2)
        book.waits("a", 1, 5)
        book.run("a", 5.01, 6)

    IDLED = "key idled for 3.0 s while a message waited for it"

    def test_a_key_that_idles_while_one_waits_is_found(self, idle, broken):
        assert broken() == [self.IDLED]

    def test_so_it_is_where_the_one_who_waits_never_has_its_turn(self, book, broken):
        book.sent("a", at=9)
        book.waits("a", 1)
        assert "key idled for 8.0 s while a message waited for it" in broken()

    def test_a_fault_meanwhile_excuses_it(self, idle, book, broken):
        book.fault(BLACKHOLE, 2.5, 3)
        assert broken() == []

    def test_a_worker_that_hung_as_it_was_to_end_excuses_it(self, book, broken):
        for task_id in ("holder", "a"):
            book.sent(task_id)
        calm = 2 + windows.RECOVERED
        book.run("holder", 0, calm)
        book.waits("a", 1, calm + 3)
        book.fault(COLD, 1.5, 2, [MAIN])
        book.run("a", calm + 3.01, calm + 4)
        assert broken() == [self.IDLED]
        book.ledger.write({"event": "hang", "worker": OTHER})
        assert broken() == [self.IDLED]
        book.ledger.write({"event": "hang", "worker": MAIN})
        assert broken() == []

    def test_a_full_worker_excuses_it_as_long_as_it_is_full(self, idle, book, broken):
        book.full(2.5)
        assert broken() == ["key idled for 2.3 s while a message waited for it"]
        book.full(4.5)
        assert broken() == []

    @pytest.mark.parametrize(("slots", "seconds"), [(2, "3.0"), (3, "1.6")])
    def test_so_does_a_worker_all_of_whose_slots_are_taken(self, idle, book, broken, slots, seconds):
        book.takes_slots(slots, since=1.5, at=3.4)
        assert broken()[0] == f"key idled for {seconds} s while a message waited for it"

    @pytest.mark.parametrize(("until", "excused"), [(4.1, True), (4.3, False)])
    def test_a_child_that_is_replaced_meanwhile_excuses_a_second_more(self, book, broken, until, excused):
        book.sent("holder")
        book.sent("a")
        book.run("holder", 0, 2)
        book.waits("a", 1, until)
        book.run("a", until + 0.01, 6)
        assert broken()
        book.died(2.5)
        assert (broken() == []) == excused

    def test_so_is_one_that_is_kept_for_a_message_which_was_called_into_a_full_worker(self, book, broken):
        for task_id in ("holder", "a", "b"):
            book.sent(task_id)
        book.run("holder", 0, 1)
        book.waits("a", 0.5, 1.01, rank=1)
        book.waits("b", 0.5, 5.6, rank=2, worker=OTHER)
        book.run("a", 4.5, 5.5)
        book.run("b", 5.61, 6, pid=OTHER)
        assert broken() == ["key idled for 3.5 s while a message waited for it"]


class TestStalls:
    @pytest.fixture
    def stalled(self, book):
        """One that waits, in a worker that never has a free slot, for a run which ends at 2 s, and is called at 7 s."""
        book.sent("holder")
        book.sent("a")
        book.run("holder", 0, 2)
        book.waits("a", 1, 7)
        book.run("a", 7.01, 8)
        for tenth in range(20, 71, 2):
            book.full(tenth / 10)

    STALLED = "key was free, a message waited in a worker, and nobody ran for 4.0 s while that worker ended 2 runs"

    def test_a_worker_that_ends_runs_while_a_message_waits_in_it_for_a_free_key_is_found(self, stalled, book, broken):
        assert broken() == []
        book.ended(3, 4.5, 6)
        assert broken() == [self.STALLED]
        assert {line["task_id"] for line in check(book.ledger).offences[0].lines} == {"a"}

    def test_it_is_told_once_for_all_that_wait_there(self, stalled, book, broken):
        book.sent("b")
        book.waits("b", 1.5, 7.5, rank=2)
        book.run("b", 8, 9)
        book.ended(3, 4.5)
        assert broken() == [self.STALLED]

    def test_calls_that_end_nowhere_do_not_hide_it(self, book, broken):
        """The room of a full worker calls one after the other, and each finds the key kept for the next."""
        for number in range(4):
            book.sent(f"m{number}")
            book.waits(f"m{number}", 0.5, 2 + 5 * number, rank=number)
            book.full(1.9 + 5 * number)
            book.run(f"m{number}", 20 + number, 21 + number, item=f"m{number}/0")
        book.run("holder", 0, 1)
        book.ended(*range(2, 20, 3))
        assert broken() == [self.STALLED.replace("4.0 s", "15.0 s").replace("2 runs", "5 runs")]

    def test_the_runs_of_another_worker_and_those_that_have_just_ended_break_nothing(self, stalled, book, broken):
        book.ended(3, 4.5, worker=OTHER)
        book.ended(5.1, 6)
        assert broken() == []

    def test_slots_that_went_to_messages_which_waited_for_other_keys_excuse_it(self, stalled, book, broken):
        book.ended(3, 4.5)
        for number, at in enumerate([3.1, 4.6]):
            assert broken() == [self.STALLED]
            book.sent(f"o{number}")
            book.waits(f"o{number}", at - 1, at, key=f"other{number}")
            book.run(f"o{number}", at, at + 1, key=f"other{number}")
        assert broken() == []
        assert check(book.ledger).turns[stalls.LEFT_FREE] == 1

    def test_a_fault_excuses_it_but_for_a_drill_which_no_fault_reaches(self, stalled, book, broken):
        book.ended(3, 4.5)
        book.fault(BLACKHOLE, 2.5, 3)
        assert broken() == []
        book.sent("d")
        book.waits("d", 1, 6.5, key="drill-backlog")
        book.full(6.4, key="drill-backlog")
        book.run("d", 6.5, 6.6, key="drill-backlog")
        (what,) = broken()
        assert what.startswith("drill-backlog was free, a message waited in a worker, and nobody ran for 3.5 s")


class TestDrains:
    @pytest.fixture
    def drain(self, book):
        """A worker that is told to end at 2 s, while two messages wait in it."""
        book.ledger.write({"event": "drain", "at": 2, "worker": MAIN})
        book.run("holder", 0, 9)
        for task_id in ("a", "b"):
            book.sent(task_id)
            book.waits(task_id, 1)

    def goes_on(self, book, task_id, at, worker=OTHER):
        book.ledger.write({"event": "leaves", "worker": MAIN, "at": at})
        book.publish(task_id, at, worker)
        book.waits(task_id, at, 9, worker=worker)
        book.run(task_id, 9 + at / 10, 9.9, pid=worker, key=task_id)

    @pytest.mark.parametrize(("at", "found"), [(3, []), (8, ["kept 1 messages that waited, for 6.0 s"])])
    def test_a_worker_that_is_told_to_end_and_keeps_what_waits_in_it_is_found(self, drain, book, broken, at, found):
        self.goes_on(book, "a", 2.5)
        self.goes_on(book, "b", at)
        assert broken() == [f"a worker that was told to end {what}" for what in found]

    def test_what_the_worker_itself_receives_again_stays_there(self, drain, book, broken):
        self.goes_on(book, "a", 2.5)
        self.goes_on(book, "b", 2.5, worker=MAIN)
        assert broken() == ["a worker that was told to end kept 1 messages that waited, for 7.2 s"]

    def test_what_runs_at_once_was_not_kept(self, drain, book, broken):
        self.goes_on(book, "a", 2.5)
        book.run("b", 3, 3.5, key="b")
        assert broken() == []


@pytest.mark.parametrize(
    ("commands", "size", "found"),
    [
        (900, 20_000_000, []),
        (1100, 20_000_000, ["110 commands a second while 1000 messages waited for one key"]),
        (900, 80_000_000, ["a worker needed 80 kB for each of 1000 messages"]),
    ],
)
def test_a_crowd_that_costs_too_much_is_found(book, broken, commands, size, found):
    crowd = {"at": 1, "size": 1000, "delivered_in": 5.0, "seconds": 10.0, "commands": commands, "bytes": size}
    book.ledger.write({"event": "crowd", **crowd})
    assert broken() == found


def test_a_message_that_a_drill_never_saw_again_is_lost_on_both_brokers(book, broken):
    """A worker that lost its broker has fetched it, found its key held, and kept it nowhere."""
    book.ledger.write({"event": "broker", "kind": "redis"})
    book.sent("a", final="RETRY")
    book.fault(WARM, 40, 41, pids=[MAIN])
    assert broken() == ["a message that is acked late was lost: late, RETRY"]


def test_a_key_that_is_left_is_broken(book, broken):
    book.ledger.write({"event": "key", "key": "redislock:{chaos:key1}", "holder": "somebody"})
    assert broken() == ["a key was left one lease after the end"]


def test_a_key_that_is_kept_for_a_message_is_broken_unless_that_message_was_lost(book, broken):
    for task_id, received in {"lost": False, "finished": True}.items():
        book.sent(task_id, "job", "SUCCESS" if received else "PENDING", at=10, received=received)
        token = tokens.mint(tokens.mint_nonce(), f"{task_id}/0/0", tokens.origin("host", "chaos.job"), tokens.RESERVED)
        book.ledger.write({"event": "key", "key": f"redislock:{{chaos:{task_id}}}", "holder": token})
    book.run("finished", 10, 11)
    book.fault(KILL_WORKER, 10.5)
    assert broken() == ["a key was left one lease after the end"]


def test_an_answer_with_a_job_that_nobody_has_sent_is_broken(book, broken):
    book.sent("real", "job")
    book.run("real", 0, 1)
    for task_id in ("real", "unreal"):
        book.ledger.write({"event": "answered", "task_id": task_id})
    assert broken() == ["a publish was answered with a job that nobody has sent"]


def test_a_complaint_is_broken(book, broken):
    book.ledger.write({"event": "complaint", "text": "the keeper failed"})
    assert broken() == ["the keeper failed"]


def test_a_log_may_not_hold_a_failed_keeper_nor_a_traceback_from_the_package(tmp_path):
    log = tmp_path / "worker.log"
    head = "[2026 ERROR] it failed\nTraceback (most recent call last):\n"
    log.write_text(
        f'{head}  File "/site/celery/app/trace.py", line 1, in trace\n    run()\nValueError: the user\'s own\n'
    )
    assert list(complaints_in(log)) == []
    with log.open("a") as text:
        text.write(
            f'{head}  File "/site/celery_redislock/store.py", line 1, in x\n    y()\nTypeError: z\n[2026 INFO] on\n'
        )
        text.write("the keeper failed; it renews the locks again in a second\n")
        text.write(
            f'{head}  File "/site/celery_redislock/task/publish.py", line 1, in send\n    y()\n'
            "kombu.exceptions.OperationalError: the broker is away\n[2026 INFO] on\n"
        )
        text.write(
            f'{head}  File "/site/celery_redislock/message/message.py", line 1, in send_back\n    y()\n'
            "celery.exceptions.Reject: ('OperationalError: the broker is away', True)\n[2026 INFO] on\n"
        )
        text.write(
            f'{head}  File "/site/celery_redislock/message/message.py", line 1, in send_back\n    y()\n'
            "celery.exceptions.Reject: ('OSError: Server unexpectedly closed connection', True)\n[2026 INFO] on\n"
        )
    keeper, traceback = complaints_in(log)
    assert keeper.startswith("the keeper failed")
    assert traceback.endswith("TypeError: z")


def test_the_same_seed_gives_the_same_faults_and_every_round_has_each_of_them():
    first, same, other = (list(islice(plan(seed, 3), 36)) for seed in ("7", "7", "8"))
    assert first == same
    assert first != other
    assert Counter(strike.name for strike in first) == dict.fromkeys(FAULTS, 3)


def test_the_table_tells_everything_in_few_columns(book):
    book.sent("a", final="PENDING", received=False)
    book.fault(KILL_WORKER, 2, pids=[MAIN])
    book.run("a", 1, 2)
    book.run("a", 2, 3)
    verdict = check(book.ledger)
    text = table("redis, seed 1", verdict)
    assert max(map(len, text.splitlines())) <= 100
    for name in FAULTS:
        assert name in text
    assert "broken promises" in text
    assert json.dumps(verdict.offences[0].lines[0]) in offences(verdict)


class TestContendedJobs:
    @pytest.fixture
    def job(self, book):
        """A job that was called for at some time, and the time from its body's start to its end."""

        def write(
            task_id, asked_at, start=None, end=None, *, key="job-1", retries=0, attempt=0, pid=CHILD, unasked=False
        ):
            call = {"key": key, "asked_at": asked_at, "returned_at": asked_at + 0.1, "retries": retries}
            call["unasked"] = unasked
            book.ledger.write({"event": "sent", "task_id": task_id, "kind": "contended", "after": "", **call})
            book.publish(task_id, asked_at + 0.05)
            book.ledger.write({"event": "final", "task_id": task_id, "state": "SUCCESS"})
            if start is not None:
                book.run(task_id, start, end, key=key, item=f"{task_id}/{attempt}", pid=pid)

        return write

    @pytest.fixture
    def pair(self, job):
        """The second job was sent while the first was queued or ran, and ran after it."""
        job("a", 1.0, 6.0, 7.0)
        job("b", 5.0, 8.0, 9.0, pid=OTHER)

    def test_one_sent_while_an_equal_one_is_outstanding_breaks_it(self, pair, book, broken):
        assert broken() == ["a job was sent while an equal one was outstanding"]
        assert check(book.ledger).outcomes["jobs of contending callers"] == 2

    @pytest.mark.parametrize(
        ("asked_at", "key"),
        [(1.05, "job-1"), (6.95, "job-1"), (7.1, "job-1"), (5.0, "job-2")],
        ids=["both at once", "amid the end", "after it", "of another key"],
    )
    def test_one_that_may_be_sent_does_not(self, job, broken, asked_at, key):
        job("a", 1.0, 6.0, 7.0)
        job("b", asked_at, 8.0, 9.0, key=key)
        assert broken() == []

    def test_a_job_is_outstanding_to_the_end_of_its_retry(self, job, book, broken):
        job("a", 1.0, 2.0, 3.0, retries=1)
        book.run("a", 6.0, 7.0, key="job-1", item="a/1")
        job("b", 5.0, 8.0, 9.0)
        assert broken() == ["a job was sent while an equal one was outstanding"]

    def test_and_not_to_that_of_a_copy(self, job, book, broken):
        job("a", 1.0, 2.0, 3.0, pid=OTHER)
        book.run("a", 6.0, 7.0, key="job-1", item="a/0")
        job("b", 5.0, 8.0, 9.0)
        assert "a job was sent while an equal one was outstanding" not in broken()

    @pytest.mark.parametrize(
        ("fault", "excuse"),
        [
            ((RESTART, 4.0), Excuse.DATA_LOST),
            ((KILL_CHILD, 4.0), Excuse.KILLED_BEFORE_REDELIVERY),
            ((KILL_WORKER, 4.0), Excuse.KILLED_BEFORE_REDELIVERY),
            ((COLD, 4.0), Excuse.KILLED_BEFORE_REDELIVERY),
            ((STOP_WORKER, 2.0, 5.5), Excuse.STOOD_STILL),
        ],
        ids=lambda value: value[0] if isinstance(value, tuple) else "",
    )
    def test_a_fault_that_frees_its_key_excuses_it(self, pair, book, broken, fault, excuse):
        book.fault(*fault, pids=[CHILD])
        assert broken() == []
        assert check(book.ledger).pairs == {excuse: 1}

    @pytest.mark.parametrize(
        ("fault", "more"),
        [
            ((RESTART, 0.5), {}),
            ((RESTART, 5.5), {}),
            ((KILL_WORKER, 4.0), {"worker": OTHER}),
            ((STOP_WORKER, 4.9, 5.5), {}),
            ((STOP_WORKER, 2.0, 5.5), {"worker": OTHER}),
            ((BLACKHOLE, 1.0, 5.5), {}),
            ((WARM, 4.0), {}),
            ((CUT_BROKER, 4.0), {}),
        ],
        ids=["before", "after", "another's", "too short", "another's stop", "outage", "warm", "broker"],
    )
    def test_no_other_does(self, pair, book, broken, fault, more):
        book.fault(*fault, pids=[OTHER], **more)
        assert broken() == ["a job was sent while an equal one was outstanding"]

    @pytest.mark.parametrize("unasked", ["a", "b"])
    def test_one_whose_publisher_could_not_ask_is_excused(self, job, book, broken, unasked):
        for name, times in {"a": (1.0, 6.0, 7.0), "b": (5.0, 8.0, 9.0)}.items():
            job(name, *times, unasked=name == unasked)
        assert broken() == []
        assert check(book.ledger).pairs == {Excuse.UNREACHABLE: 1}

    @pytest.mark.parametrize(("task_id", "at", "excused"), [("a", 3.0, True), ("a", 5.5, False), ("b", 3.0, False)])
    def test_one_whose_run_could_not_reach_the_lock_server_is_excused(self, job, book, broken, task_id, at, excused):
        job("a", 1.0, 6.0, 7.0)
        job("b", 5.0, 8.0, 9.0)
        book.ledger.write({"event": "unavailable", "task_id": task_id, "at": at})
        assert (broken() == []) == excused

    def test_one_whose_holder_was_told_of_the_loss_is_excused(self, job, book, broken):
        job("a", 1.0, 2.0, 7.0)
        book.fault(BLACKHOLE, 2.5, 7.0)
        book.lost("a", 4.9, "not renewed by its deadline")
        job("b", 5.0, 8.0, 9.0)
        assert broken() == []
        assert check(book.ledger).pairs == {Excuse.KNEW_OF_THE_LOSS: 1}

    @pytest.mark.parametrize(("outage", "excused"), [((2.9, 3.5), True), ((4.5, 5.0), False)], ids=["then", "later"])
    def test_one_whose_key_could_not_be_left_to_its_retry_is_excused(self, job, book, broken, outage, excused):
        job("a", 1.0, 2.9, 3.0, retries=1)
        book.run("a", 7.0, 8.0, key="job-1", item="a/1")
        job("b", 6.0, 9.0, 9.5)
        book.fault(BLACKHOLE, *outage)
        assert (broken() == []) == excused
