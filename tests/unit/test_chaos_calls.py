"""The checker of merged calls, of runs that are replaced, of rates, and of runs that need several keys."""

from __future__ import annotations

import pytest

from chaos import calls
from chaos.check import check
from chaos.faults import COLD, KILL_WORKER, RESTART, STOP_CHILD, STOP_WORKER
from promises import Excuse, Promise
from tests.lab.ledger import Ledger
from tests.unit.test_chaos_check import CHILD, MAIN, OTHER, Book

NO_RUN = "a call of {}1 was accepted, and no run to its end has its arguments"


class Calls(Book):
    """A ledger of calls that may be merged."""

    def call(self, name, task_id, at, *, kind="latest", merged=False, unasked=False, key=None):
        line = {"kind": kind, "key": key or f"{kind}1", "name": name, "task_id": task_id}
        line |= {"asked_at": at, "returned_at": at + 0.1, "merged": merged, "unasked": unasked}
        self.ledger.write({"event": "call", **line})

    def gives(self, task_id, start, end, *names, kind="latest", pid=CHILD, replaced=False, done=True):
        """A run of a message, for these calls."""
        self.run(task_id, start, end, pid=pid, key=f"{kind}1", item=f"{kind}/0", done=done and not replaced)
        line = {"task_id": task_id, "pid": pid}
        self.ledger.write({"event": "given", **line, "key": f"{kind}1", "calls": list(names), "at": start})
        if replaced:
            self.ledger.write({"event": "done", **line, "at": end, "replaced": True})

    def ended(self, task_id, kind, result, at=0.0):
        self.ledger.write({"event": "sent", "task_id": task_id, "kind": kind, "after": ""})
        self.publish(task_id, at)
        self.ledger.write({"event": "final", "task_id": task_id, "state": "REVOKED", "result": result})


@pytest.fixture
def book(tmp_path):
    return Calls(Ledger(tmp_path / "ledger"))


@pytest.fixture
def broken(book):
    """What the checker says is broken."""
    return lambda: [(offence.promise, offence.what) for offence in check(book.ledger).offences]


class TestMergedCalls:
    @pytest.fixture
    def two(self, book):
        """Call a is sent, and call b is merged into its message."""

        def write(kind):
            book.sent("a", kind)
            book.call("1", "a", 1, kind=kind)
            book.call("2", "a", 2, kind=kind, merged=True)

        return write

    @pytest.mark.parametrize(("kind", "names"), [("latest", "2"), ("all", "12")])
    def test_a_run_for_them_passes(self, two, book, broken, kind, names):
        two(kind)
        book.gives("a", 3, 4, *names, kind=kind)
        assert broken() == []
        assert check(book.ledger).calls[calls.MERGED] == 1

    @pytest.mark.parametrize(
        ("kind", "names", "more"), [("latest", "1", " or later ones"), ("all", "1", ""), ("all", "2", "")]
    )
    def test_one_that_no_run_was_given_is_found(self, two, book, broken, kind, names, more):
        two(kind)
        book.gives("a", 3, 4, *names, kind=kind)
        assert broken() == [(Promise.LATEST, NO_RUN.format(kind) + more)]

    def test_a_run_that_began_before_the_call_does_not_count(self, two, book, broken):
        two("latest")
        book.gives("a", 1.5, 4, "2")
        assert (Promise.LATEST, f"{NO_RUN.format('latest')} or later ones") in broken()

    def test_nor_does_one_that_did_not_come_to_its_end(self, two, book, broken):
        two("latest")
        book.gives("a", 3, 4, "2", done=False)
        book.died(4)
        assert [promise for promise, _ in broken()].count(Promise.LATEST) == 2

    @pytest.mark.parametrize(("lost_at", "excused"), [(2.5, True), (0.5, False), (3.5, False)])
    def test_lost_data_before_the_run_excuse_it(self, two, book, broken, lost_at, excused):
        two("all")
        book.gives("a", 3, 4, "1", kind="all")
        book.fault(RESTART, lost_at)
        assert (broken() == []) == excused
        assert check(book.ledger).lost_calls[Excuse.DATA_LOST] == int(excused)

    def test_they_excuse_it_also_after_a_run_whose_process_died(self, two, book, broken):
        two("all")
        book.gives("a", 3, 4, "1", "2", kind="all", done=False)
        book.died(4)
        book.fault(RESTART, 5)
        book.gives("a", 6, 7, "1", kind="all")
        assert broken() == []
        assert check(book.ledger).lost_calls[Excuse.DATA_LOST] == 1

    def test_they_excuse_no_call_that_has_a_message_of_its_own(self, book, broken):
        book.sent("a", "all")
        book.call("1", "a", 1, kind="all")
        book.run("a", 3, 4, key="all1")
        book.fault(RESTART, 2)
        assert broken() == [(Promise.LATEST, NO_RUN.format("all"))]

    def test_a_message_that_is_lost_excuses_the_calls_that_were_merged_into_it(self, book, broken):
        book.sent("a", "latest", "PENDING", received=False)
        book.call("1", "a", 1)
        book.call("2", "a", 2, merged=True)
        assert (Promise.LATEST, f"{NO_RUN.format('latest')} or later ones") in broken()
        book.fault(KILL_WORKER, 0.5, pids=[MAIN])
        assert broken() == []
        assert check(book.ledger).lost_calls[Excuse.TAKEN_BY_KOMBU] == 2

    def test_two_runs_at_once_are_found(self, two, book, broken):
        two("latest")
        book.sent("b", "latest")
        book.gives("a", 3, 6, "1")
        book.gives("b", 4, 5, "2", pid=OTHER)
        assert (Promise.AT_MOST_N, "two runs of latest1 at the same time") in broken()


class TestOlderArguments:
    OLDER = (Promise.NOT_STALE, "a run of latest1 began with older arguments than one before it")

    @pytest.fixture
    def swapped(self, book):
        """The run for the second of two calls begins first."""

        def write(kind="latest", **first):
            for number, (name, start) in enumerate({"1": 5, "2": 3}.items(), start=1):
                book.sent(name, kind)
                book.call(name, name, number, kind=kind, **(first if name == "1" else {}))
                book.gives(name, start, start + 1, name, kind=kind)

        return write

    def test_are_found(self, swapped, broken):
        swapped()
        assert broken() == [self.OLDER]

    @pytest.mark.parametrize(("kind", "unasked"), [("all", False), ("latest", True)])
    def test_of_all_calls_and_of_one_that_was_sent_alone_are_not(self, swapped, broken, kind, unasked):
        swapped(kind, unasked=unasked)
        assert broken() == []

    @pytest.mark.parametrize(("name", "end"), [(RESTART, 4), (STOP_CHILD, 4.9)])
    def test_are_excused_by_lost_data_and_by_a_standstill_before_the_body(self, swapped, book, broken, name, end):
        swapped()
        book.fault(name, 3.5, end, [CHILD])
        assert broken() == []

    def test_are_not_by_a_standstill_of_another(self, swapped, book, broken):
        swapped()
        book.fault(STOP_CHILD, 3.5, 4.9, [OTHER])
        assert broken() == [self.OLDER]


class TestReplacing:
    @pytest.fixture
    def replaced(self, book):
        """The call that comes at 2 s ends the run that began at 1 s."""

        def write(end=2.5, *, by="b", second=2.0, **how):
            book.ended("a", "newest", f"replaced by {by}")
            book.sent("b", "newest")
            book.call("1", "a", 0.5, kind="newest")
            book.call("2", "b", second, kind="newest")
            book.gives("a", 1, end, "1", kind="newest", **{"replaced": True, **how})
            book.gives("b", end + 0.1, end + 3, "2", kind="newest", pid=OTHER)

        return write

    def test_a_run_that_is_replaced_passes_and_is_counted(self, replaced, book, broken):
        replaced()
        assert broken() == []
        assert check(book.ledger).calls[calls.REPLACED] == 1

    def test_one_that_is_replaced_without_a_newer_call_is_found(self, replaced, broken):
        replaced(second=2.6)
        assert broken() == [(Promise.REPLACED, "a run of newest1 was replaced, and there was no newer call")]

    def test_one_that_is_stopped_for_anything_else_is_found(self, replaced, book, broken):
        replaced(replaced=False, done=False)
        assert (Promise.REPLACED, "a run of newest1 was stopped, and not for a newer call") in broken()
        book.fault(COLD, 2.4, 2.6, [CHILD])
        assert broken() == []

    @pytest.mark.parametrize("unasked", [True, False])
    def test_one_sent_alone_that_begins_after_the_run_of_a_newer_call_may_go_on(self, book, broken, unasked):
        book.sent("a", "newest")
        book.sent("b", "newest")
        book.call("1", "a", 0.5, kind="newest", unasked=unasked)
        book.call("2", "b", 1, kind="newest")
        book.gives("b", 1.5, 3, "2", kind="newest")
        book.gives("a", 4, 9, "1", kind="newest", pid=OTHER)
        found = [(Promise.REPLACED, "a run of newest1 went on for 5.0 s after a newer call")]
        assert [one for one in broken() if one[0] is Promise.REPLACED] == ([] if unasked else found)
        book.sent("c", "newest")
        book.call("3", "c", 4.5, kind="newest")
        book.gives("c", 9.1, 10, "3", kind="newest")
        assert [promise for promise, _ in broken()].count(Promise.REPLACED) == 1

    @pytest.mark.parametrize(("lost_at", "excused"), [(2, True), (0.2, False)])
    def test_a_call_that_is_lost_with_the_servers_data_stops_no_run_that_begins_later(
        self, book, broken, lost_at, excused
    ):
        book.sent("a", "newest")
        book.call("1", "a", 0.5, kind="newest")
        book.call("2", "a", 1, kind="newest", merged=True)
        book.gives("a", 20, 25, "1", kind="newest")
        book.fault(RESTART, lost_at)
        assert (Promise.REPLACED in [promise for promise, _ in broken()]) is not excused

    def test_one_that_goes_on_is_found_where_no_fault_has_struck(self, replaced, book, broken):
        replaced(end=7)
        assert broken() == [(Promise.REPLACED, "a run of newest1 went on for 4.9 s after a newer call")]
        book.fault(KILL_WORKER, 0.5, pids=[99])
        assert broken() == []

    def test_two_at_once_are_found(self, replaced, book, broken):
        replaced()
        book.sent("c", "newest")
        book.call("3", "c", 2.6, kind="newest")
        book.gives("c", 3, 5, "3", kind="newest", pid=99)
        assert (Promise.AT_MOST_N, "two runs of newest1 at the same time") in broken()

    def test_one_that_runs_again_is_found(self, replaced, book, broken):
        replaced()
        book.gives("a", 6, 7, "1", kind="newest")
        assert (Promise.NOT_AGAIN, "an attempt ran again after it had finished") in broken()

    def test_a_newest_call_that_does_not_run_to_its_end_is_found(self, book, broken):
        book.sent("a", "newest")
        book.call("1", "a", 0.5, kind="newest")
        book.call("2", "a", 2, kind="newest", merged=True)
        book.gives("a", 1, 3, "1", kind="newest")
        assert broken() == [(Promise.LATEST, f"{NO_RUN.format('newest')} or later ones")]

    @pytest.mark.parametrize("result", ["revoked", "replaced by strange", "replaced by a", "duplicate of b"])
    def test_one_that_ends_by_no_newer_call_is_found(self, book, broken, result):
        book.ended("a", "newest", result)
        book.sent("b", "newest")
        book.call("1", "a", 0.5, kind="newest")
        book.call("2", "b", 1, kind="newest")
        book.gives("b", 2, 3, "2", kind="newest")
        assert broken() == [(Promise.POLICY, f"a message of kind newest ended as REVOKED: {result}")]

    def test_calls_that_are_all_to_run_supersede_none(self, book, broken):
        for name in "ab":
            book.call(name, name, 1, kind="all")
        book.ended("a", "all", "superseded by b")
        book.sent("b", "all")
        book.gives("b", 2, 3, "b", kind="all")
        assert (Promise.POLICY, "a message of kind all ended as REVOKED: superseded by b") in broken()


class TestRates:
    TOO_MANY = (Promise.RATE, "4 runs of rate0 began in 1.00 s: 3 may in 2 s")

    @pytest.fixture
    def begin(self, book):
        def write(*starts):
            for number, start in enumerate(starts):
                book.sent(f"m{number}", "rated")
                book.run(f"m{number}", start, start + 5, pid=CHILD + number, key="rate0")

        return write

    def test_as_many_as_may_begin_pass_and_may_overlap_and_run_twice(self, begin, book, broken):
        begin(1, 1, 1, 2.6, 3)
        book.run("m0", 4, 5, key="rate0")
        assert broken() == []

    def test_more_are_found(self, begin, broken):
        begin(1, 1.2, 1.4, 2)
        assert broken() == [self.TOO_MANY]

    def test_lost_data_excuse_twice_as_many_and_no_more(self, begin, book, broken):
        begin(*(1 + number / 10 for number in range(6)))
        book.fault(RESTART, 1.3)
        assert broken() == []
        book.sent("m6", "rated")
        book.run("m6", 1.9, 2, pid=50, key="rate0")
        assert [promise for promise, _ in broken()] == [Promise.RATE]

    @pytest.mark.parametrize(
        ("name", "pid", "excused"), [(STOP_CHILD, CHILD, True), (STOP_CHILD, 99, False), (STOP_WORKER, 99, True)]
    )
    def test_a_standstill_between_a_grant_and_its_body_excuses_it(self, begin, book, broken, name, pid, excused):
        begin(1, 1.2, 1.4, 2)
        book.fault(name, 0.1, 0.9, [pid])
        assert (broken() == []) == excused


class TestSeveralKeys:
    def test_runs_that_share_no_key_may_overlap(self, book, broken):
        self._run(book, "a", 1, "both0", "both1")
        self._run(book, "b", 2, "both2", "both3", pid=OTHER)
        assert broken() == []

    def test_two_runs_of_a_key_that_they_share_are_found(self, book, broken):
        self._run(book, "a", 1, "both0", "both1")
        self._run(book, "b", 2, "both2", "both1", pid=OTHER)
        assert broken() == [(Promise.AT_MOST_N, "two runs of both1 at the same time")]

    @pytest.mark.parametrize(("lost", "excused"), [("both1", True), ("both0", False)])
    def test_one_that_has_lost_a_key_holds_its_others(self, book, broken, lost, excused):
        self._run(book, "a", 1, "both0", "both1")
        book.fault(RESTART, 1.2)
        line = {"key": f"redislock:{{chaos:{lost}}}", "task_id": "a", "reason": "its key was deleted, expired or taken"}
        book.ledger.write({"event": "lost", **line, "pid": CHILD, "at": 2.0})
        self._run(book, "b", 4, "both2", "both1", pid=OTHER)
        assert broken() == ([] if excused else [(Promise.AT_MOST_N, "two runs of both1 at the same time")])

    def test_more_runs_than_there_are_permits_are_found(self, book, broken):
        for number in range(4):
            self._run(book, f"m{number}", 1 + number / 10, f"both{number}", "three-several", pid=CHILD + number)
        assert broken() == [(Promise.AT_MOST_N, "more than 3 runs of three-several at the same time")]

    @pytest.mark.parametrize("kind", ["several", "rated", "fair", "latest", "all", "newest"])
    def test_a_message_that_is_lost_is_found(self, book, broken, kind):
        book.sent("a", kind, "PENDING")
        assert broken() == [(Promise.NOT_DROPPED, f"a message that is acked late was lost: {kind}, PENDING")]

    @staticmethod
    def _run(book, task_id, start, *keys, pid=CHILD):
        book.sent(task_id, "several")
        for number, key in enumerate(keys):
            book.run(task_id, start + number / 1000, start + 5, pid=pid, key=key, item=f"several@{key}/0")


class TestFairTurns:
    def test_two_runs_at_once_are_found(self, book, broken):
        for number, task_id in enumerate("ab"):
            book.sent(task_id, "fair")
            book.run(task_id, 1 + number, 5, pid=CHILD + number, key="fair")
        assert broken() == [(Promise.AT_MOST_N, "two runs of fair at the same time")]

    def test_a_later_message_of_another_group_may_go_first(self, book, broken):
        for task_id, at in {"a": 0.1, "b": 0.2}.items():
            book.sent(task_id, "fair", at=at)
            book.waits(task_id, at + 0.1, 3.0 if task_id == "b" else 4.0, rank=int(at * 10), key="fair")
        book.run("holder", 0, 2.99, key="fair", pid=99)
        book.run("b", 3.01, 3.99, key="fair")
        book.run("a", 4.01, 5, key="fair")
        assert broken() == []

    @pytest.mark.parametrize(("turns", "found"), [(4, []), (5, [(Promise.FAIR, "group h had 5 turns {}")])])
    def test_a_group_that_has_many_turns_while_another_waits_is_found(self, book, broken, turns, found):
        self._take_turns(book, "h" * turns)
        meanwhile = "while a message of group g waited, which had 0"
        assert broken() == [(promise, what.format(meanwhile)) for promise, what in found]

    def test_it_may_have_as_many_as_that_group_and_a_few_more(self, book, broken):
        self._take_turns(book, "hhghhghhghg")
        assert broken() == []

    @pytest.mark.parametrize(("worker", "at", "excused"), [(OTHER, 6, True), (MAIN, 6, False), (OTHER, 0, False)])
    def test_the_worker_of_the_other_excuses_it_where_it_was_full(self, book, broken, worker, at, excused):
        self._take_turns(book, "hhhhh", worker=worker)
        book.full(at, key="fair")
        assert (broken() == []) == excused

    def _take_turns(self, book, groups, worker=MAIN):
        """One message of each of these groups runs, one second after the other, while one of group g waits."""
        for number, group in enumerate(groups):
            self._in_group(book, group, 1 + number / 100, 2 + number, worker=worker)
        self._in_group(book, "g", 1.5, 2 + len(groups))

    @staticmethod
    def _in_group(book, group, waits, runs, worker=MAIN):
        task_id = f"{group}{waits}"
        book.ledger.write({"event": "sent", "task_id": task_id, "kind": "fair", "after": "", "group": group})
        book.publish(task_id, waits)
        book.ledger.write({"event": "final", "task_id": task_id, "state": "SUCCESS"})
        book.waits(task_id, waits, runs, key="fair", worker=worker)
        book.run(task_id, runs + 0.01, runs + 0.99, key="fair")
