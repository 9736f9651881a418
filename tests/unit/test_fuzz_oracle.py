"""The oracle of the fuzz itself: each of its rules finds what is planted, and says nothing of what the docs allow."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from chaos.faults import KILL_CHILD, REFUSE, RESTART, SHRINK, STOP_WORKER, WARM
from fuzz.canvas import ALONE, before
from fuzz.facts import Facts
from fuzz.options import MAX_HOLD, WINDOW, Locks, Spec, locks_of, refusal
from fuzz.oracle import GIVEN_UP, judge
from fuzz.plan import PLAIN, Call, Life, Part, random_life
from promises import Promise
from tests.lab.ledger import Ledger

LOCK = {"lock_args": ["key"]}
ONE = "t(a)"
ASKED = {"asked_at": 0.0, "returned_at": 0.1}
HELD, OPEN, REVOKED = ("FAILURE", "LockConflict: held"), ("PENDING", None), ("REVOKED", "TaskRevokedError: revoked")


class Story:
    """A life in the making: calls of a task `t`, all for the key `a`. Times are seconds."""

    def __init__(self, ledger, options=LOCK, newer=None):
        self.ledger, self.calls = ledger, []
        specs = [options] if newer is None else [options, newer]
        self.deploys = tuple((Spec("t", one), Spec(PLAIN, None)) for one in specs)

    def call(
        self,
        name,
        asked=0.0,
        *,
        job=None,
        final="SUCCESS",
        result=None,
        does="returns",
        error=None,
        seen=True,
        **options,
    ):
        """A call, and the end of its job; with `job`, its caller was answered with that one."""
        self.calls.append(Call(0.0, ALONE, (Part(name, "t", "a", "b", does, options=options),)))
        line = {"event": "call", "deploy": 0, "names": [name], "ids": [job or name]}
        more = {"error": error} if error else {"duplicate": job is not None}
        self.ledger.write({**line, **more, "asked_at": asked, "returned_at": asked + 0.1})
        if job is None and error is None:
            self.ledger.write({"event": "sent", "task_id": name, "kind": "late", "after": ""})
            self.ledger.write({"event": "published", "task_id": name, "publish": name, "at": asked})
            if seen:
                self.receive(name, asked)
            self.end(name, final, name if result is None else result)

    def canvas(self, shape, ends):
        """A canvas, and the end of each of its parts. Those that are open were not sent."""
        self.calls.append(Call(0.0, shape, tuple(Part(name, "t", "a", "b") for name in ends)))
        self.ledger.write({"event": "call", "deploy": 0, "names": [*ends], "ids": [*ends], **ASKED})
        for name, (state, result) in ends.items():
            self.ledger.write({"event": "sent", "task_id": name, "kind": "late", "after": ""})
            if state != "PENDING":
                self.ledger.write({"event": "published", "task_id": name, "publish": name, "at": 0.1})
                self.receive(name, 0.1)
            self.end(name, state, result)

    def receive(self, name, at):
        self.ledger.write({"event": "received", "task_id": name, "publish": name, "worker": 1, "at": at})

    def end(self, task_id, state, result):
        self.ledger.write({"event": "final", "task_id": task_id, "state": state, "result": result})

    def run(self, task_id, start, end, *, items=None, retries=0, limits=None, rates=None, pid=None, done=True, **more):
        """A run of a body, which came to its end, or an error ended it; without an end, its child died first."""
        pid = pid or 100 + int(start * 10)
        who = {"task_id": task_id, "pid": pid}
        run = {**who, "key": task_id, "item": f"{task_id}/{retries}", "start": start}
        given = {"task": "t", "item": "", "items": items or [task_id], "fence": None, **more}
        locks = {"limits": {ONE: 1} if limits is None else limits, "rates": rates or {}}
        self.ledger.write({"event": "start", **run})
        self.ledger.write({"event": "body", **who, "at": start, **given, **locks})
        if end is None:
            self.ledger.died(pid, start + 0.1)
        else:
            if done:
                self.ledger.write({"event": "done", **who, "at": end})
            self.ledger.write({"event": "end", **run, "end": end})

    def fault(self, name, start, end, *pids):
        times = {"from": start, "until": end}
        self.ledger.write({"event": "fault", "name": name, "struck": True, "pids": list(pids), "worker": 1, **times})

    def broken(self):
        """The promises that the oracle finds broken."""
        verdict = judge(Facts(Life("1", self.deploys, (tuple(self.calls),), (), {}), self.ledger))
        return [violation.promise for violation in verdict.violations]


@pytest.fixture
def story(tmp_path):
    return Story(Ledger(tmp_path / "ledger"))


@pytest.fixture
def of(tmp_path):
    """Make the story of a task with other options than those of a deploy before it."""
    return lambda options, newer=None: Story(Ledger(tmp_path / "ledger"), {**LOCK, **options}, newer)


def test_runs_one_after_the_other_break_nothing(story):
    for number, name in enumerate(("x", "y")):
        story.call(name)
        story.run(name, 1.0 + number, 1.9 + number)
    assert story.broken() == []


def test_two_runs_at_once_are_found(story):
    for number, name in enumerate(("x", "y")):
        story.call(name)
        story.run(name, 1.0 + number / 2, 2.0 + number)
    assert story.broken() == [Promise.AT_MOST_N]


def test_two_runs_at_once_are_excused_if_the_first_stood_still(story):
    story.fault(STOP_WORKER, 2.0, 6.0, 110)
    for name, start, end in (("x", 1.0, 7.0), ("y", 5.5, 5.8)):
        story.call(name)
        story.run(name, start, end)
    assert story.broken() == []


@pytest.mark.parametrize(
    ("limits", "is_broken"), [((2, 2), False), ((2, 2, 2), True), ((1, 3), False), ((1, 1, 3), True)]
)
def test_a_run_with_a_limit_has_one_of_its_permits(story, limits, is_broken):
    for number, limit in enumerate(limits):
        story.call(f"x{number}")
        story.run(f"x{number}", 1.0 + number / 10, 2.0, limits={ONE: limit})
    assert set(story.broken()) == ({Promise.AT_MOST_N} if is_broken else set())


@pytest.mark.parametrize(("pause", "is_broken"), [(0.2, True), (2.0, False)])
def test_more_runs_than_a_rate_are_found(story, pause, is_broken):
    for number in range(3):
        story.call(f"x{number}")
        story.run(f"x{number}", 1.0 + number * pause, 1.1 + number * pause, limits={}, rates={ONE: [2, 2.0]})
    assert story.broken() == ([Promise.RATE] if is_broken else [])


@pytest.mark.parametrize(
    ("options", "outage", "is_broken"),
    [({"lock_on_outage": "run"}, 0.0, False), ({"lock_on_outage": "run"}, 3.0, True), ({}, 0.0, True)],
)
def test_a_run_without_its_lock_is_found_unless_its_task_asks_for_that_in_an_outage(of, options, outage, is_broken):
    story = of(options)
    story.fault(REFUSE, outage, outage + 2.0)
    for name in ("x", "y"):
        story.call(name)
    story.run("x", 1.0, 2.0, limits={}, unlocked=True)
    story.run("y", 1.5, 2.5)
    assert story.broken() == ([Promise.AT_MOST_N] if is_broken else [])


@pytest.mark.parametrize(
    ("max_hold", "noticed", "is_broken"), [(None, 4.0, True), (MAX_HOLD, 4.0, False), (MAX_HOLD, 1.2, True)]
)
def test_a_lock_is_given_up_only_when_its_max_hold_is_over(of, max_hold, noticed, is_broken):
    story = of({"lock_max_hold": max_hold, "lock_scope": "job"})
    story.call("x")
    story.run("x", 1.0, 7.0)
    lost = {"event": "lost", "task_id": "x", "pid": 110, "at": noticed, "reason": GIVEN_UP, "key": "t"}
    story.ledger.write(lost)
    story.call("y", 4.5)  # in scope job: what has no lock any more holds nobody up
    story.run("y", 5.0, 5.5)
    assert story.broken() == ([Promise.AT_MOST_N] if is_broken else [])


def test_a_run_past_its_max_hold_learns_only_at_its_deadline_that_the_server_lost_its_data(of):
    story = of({"lock_max_hold": MAX_HOLD})
    story.call("x")
    story.run("x", 1.0, 7.0)
    story.ledger.write({"event": "lost", "task_id": "x", "pid": 110, "at": 5.0, "reason": GIVEN_UP, "key": "t"})
    story.call("y", 4.0)
    story.run("y", 4.5, 5.5)
    assert story.broken() == [Promise.AT_MOST_N]
    story.fault(RESTART, 2.0, 2.1)
    assert story.broken() == []


def test_runs_without_their_lock_do_not_count_for_a_rate(of):
    story = of({"lock_on_outage": "run"})
    for number in range(3):
        story.call(f"x{number}")
        story.run(f"x{number}", 1.0 + number / 5, 1.1 + number / 5, limits={}, rates={ONE: [2, 2.0]})
    assert story.broken() == [Promise.RATE]
    story.fault(REFUSE, 1.3, 2.0)
    assert story.broken() == []


def test_a_merged_call_is_lost_if_its_ticket_runs_without_a_lock(of):
    story = of({"lock_scope": "queue", "lock_arguments": "latest", "lock_on_outage": "run"})
    story.fault(REFUSE, 0.0, 2.5)
    story.call("x", 0.0)
    story.call("y", 1.0, job="x")
    story.run("x", 2.0, 3.0, limits={}, unlocked=True)
    assert story.broken() == []


def test_a_copy_beside_its_message_is_found(story):
    story.call("x")
    story.run("x", 1.0, 2.0)
    story.run("x", 1.5, 2.0)
    assert set(story.broken()) >= {Promise.NO_TWINS, Promise.AT_MOST_N}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_retry_runs_beside_a_copy_of_its_attempt_only_if_a_run_went_on_without_its_lock(of, is_told):
    story = of({"lock_limit": 2})
    two = {ONE: 2}
    story.call("x")
    story.run("x", 1.0, 3.0, pid=101, limits=two)
    story.run("x", 2.5, 6.0, limits=two)
    story.run("x", 5.0, 7.0, retries=1, limits=two)
    if is_told:
        story.ledger.write(
            {"event": "lost", "task_id": "x", "pid": 101, "at": 2.0, "key": ONE, "reason": "held too long"}
        )
    assert (Promise.NO_TWINS in story.broken()) is not is_told


def test_an_attempt_that_runs_again_is_found(story):
    story.call("x")
    story.run("x", 1.0, 2.0)
    story.run("x", 9.0, 10.0)
    assert story.broken() == [Promise.NOT_AGAIN]


def test_an_attempt_that_an_error_has_ended_runs_again_only_if_the_lock_server_lost_its_data(story):
    story.call("x")
    story.run("x", 1.0, 2.0, done=False)
    story.run("x", 3.0, 4.0)
    assert story.broken() == [Promise.NOT_AGAIN]
    story.fault(RESTART, 1.5, 1.6)
    assert story.broken() == []


def test_a_fence_that_does_not_grow_is_found(of):
    story = of({"lock_fence": True})
    for number, (name, fence) in enumerate({"x": 7, "y": 7}.items()):
        story.call(name)
        story.run(name, 1.0 + number, 1.5 + number, fence=fence)
    assert story.broken() == [Promise.FENCE]


def test_an_answer_with_a_job_that_nobody_sent_is_found(of):
    story = of({"lock_scope": "job"})
    story.call("x", job="unknown")
    assert story.broken() == [Promise.ANSWERED]


def test_a_call_that_was_not_sent_in_scope_run_is_found(story):
    story.call("x")
    story.run("x", 1.0, 2.0)
    story.call("y", 1.5, job="x")
    assert story.broken() == [Promise.POLICY]


@pytest.mark.parametrize(
    ("error", "options", "is_broken"),
    [
        ("LockConfigError: no", {"lock_scope": "job"}, False),
        ("LockConfigError: no", {}, True),
        ("KeyError: x", {"lock_scope": "job"}, True),
    ],
)
def test_an_error_of_a_call_is_found_unless_its_own_options_are_refused(story, error, options, is_broken):
    story.call("x", error=error, **options)
    assert story.broken() == ([Promise.NO_ERRORS] if is_broken else [])


@pytest.mark.parametrize(
    ("options", "state", "result", "is_broken"),
    [
        ({"lock_on_conflict": "skip"}, "REVOKED", "TaskRevokedError: duplicate of held", False),
        ({"lock_on_conflict": "skip"}, "REVOKED", "TaskRevokedError: duplicate of nobody", True),
        ({"lock_on_conflict": "wait"}, "REVOKED", "TaskRevokedError: duplicate of held", True),
        ({"lock_on_conflict": "wait"}, "REVOKED", "TaskRevokedError: revoked", True),
        ({"lock_on_conflict": "wait"}, "REVOKED", "TaskRevokedError: expired", True),
        ({"lock_on_conflict": "skip"}, "REVOKED", "TaskRevokedError: the rate is used up", True),
        ({"lock_on_conflict": "wait"}, "REVOKED", "TaskRevokedError: replaced by held", True),
        ({"lock_on_conflict": "wait"}, "REVOKED", "TaskRevokedError: superseded by held", True),
        ({"lock_on_conflict": "raise"}, "FAILURE", "LockConflict: held", False),
        ({"lock_on_conflict": "wait", "lock_wait_for": 1.0}, "FAILURE", "LockConflict: held", False),
        ({"lock_on_conflict": "wait"}, "FAILURE", "LockConflict: held", True),
        ({"lock_on_conflict": "wait"}, "FAILURE", "ValueError: x", True),
        ({"lock_on_conflict": "wait"}, "FAILURE", "LockUnavailable: x", True),
        ({"lock_on_conflict": "wait"}, "FAILURE", "LockLost: x", True),
        ({"lock_on_conflict": "wait"}, "FAILURE", "WorkerLostError: x", True),
        ({"lock_on_conflict": "wait"}, "FAILURE", "KeyError: x", True),
        ({"lock_on_conflict": "join"}, "SUCCESS", "held", False),
        ({"lock_on_conflict": "join"}, "SUCCESS", "another", True),
        ({"lock_on_conflict": "wait"}, "SUCCESS", "x", True),
    ],
)
def test_a_job_without_a_run_ends_only_as_the_table_of_its_policy_says(of, options, state, result, is_broken):
    story = of(options)
    story.call("held")
    story.run("held", 1.0, 2.0)
    story.call("x", final=state, result=result)
    assert story.broken() == ([Promise.POLICY] if is_broken else [])


def test_a_policy_of_the_call_or_of_another_deploy_counts(of):
    story = of({"lock_on_conflict": "wait"}, newer={**LOCK, "lock_on_conflict": "raise"})
    story.call("x", final="FAILURE", result="LockConflict: held")
    story.call("y", final="FAILURE", result="LockConflict: held", lock_on_conflict="wait")
    assert story.broken() == [Promise.POLICY]


def test_a_job_that_never_ends_is_found(story):
    story.call("x", final="PENDING")
    assert story.broken() == [Promise.ENDS]


def test_a_retry_that_expired_before_celery_stored_its_state_need_not_end(story):
    story.call("x", final="RETRY", expires=1.0)
    story.run("x", 0.1, 0.9)
    story.call("y", final="RETRY")
    assert story.broken() == [Promise.ENDS]


@pytest.mark.parametrize(
    ("broker", "expires", "worker", "left_at", "is_broken"),
    [
        ("rabbitmq", 1, 1, 0.5, False),
        ("rabbitmq", 60, 1, 0.5, True),
        ("rabbitmq", 1, 2, 0.5, True),
        ("rabbitmq", 1, 1, 0.0, True),
        ("redis", 1, 1, 0.5, True),
    ],
)
def test_a_job_that_expires_may_be_dropped_in_the_queue_to_which_its_worker_gave_it_back(
    story, broker, expires, worker, left_at, is_broken
):
    story.ledger.write({"event": "broker", "kind": broker})
    story.call("x", 0.2, final="RETRY", expires=expires)
    story.ledger.write({"event": "leaves", "worker": worker, "at": left_at})
    story.ledger.write({"event": "leaves", "worker": 3, "at": 10.0})  # the end of the life
    assert story.broken() == ([Promise.ENDS] if is_broken else [])


@pytest.mark.parametrize(
    ("shape", "kind", "fault", "died_at", "is_broken"),
    [
        (("chord", 0, 1, 2), "early", KILL_CHILD, 1.1, False),
        (("chain", ("group", 0, 1), 2), "early", KILL_CHILD, 1.1, False),
        (("chain", 0, 1, 2), "early", KILL_CHILD, 1.1, True),
        (("chord", 0, 1, 2), "early", WARM, 1.1, True),
        (("chord", 0, 1, 2), "early", KILL_CHILD, 5.0, True),
        (("chord", 0, 1, 2), "late", KILL_CHILD, 1.1, True),
    ],
)
def test_the_body_of_a_chord_may_not_be_sent_if_a_process_was_killed_at_the_end_of_its_header(
    story, shape, kind, fault, died_at, is_broken
):
    story.canvas(shape, {"x0": ("SUCCESS", "x0"), "x1": ("SUCCESS", "x1"), "x2": OPEN})
    story.ledger.write({"event": "sent", "task_id": "x0", "kind": kind, "after": ""})
    story.ledger.write({"event": "sent", "task_id": "x1", "kind": kind, "after": ""})
    story.run("x0", 0.2, 0.4)
    story.run("x1", 0.5, 1.0, pid=110)
    story.fault(fault, died_at - 0.05, died_at, 110)
    story.ledger.died(110, died_at)
    assert story.broken() == ([Promise.ENDS] if is_broken else [])


@pytest.mark.parametrize(
    ("comes_again_at", "died_at", "is_broken"), [(6.0, 1.1, False), (14, 1.1, True), (6.0, 4.0, True)]
)
def test_the_body_of_a_chord_is_not_sent_if_a_copy_of_what_was_to_send_it_runs_soon_after(
    story, comes_again_at, died_at, is_broken
):
    story.canvas(("chord", 0, 1, 2), {"x0": ("SUCCESS", "x0"), "x1": ("SUCCESS", "x1"), "x2": OPEN})
    for name in ("x0", "x1"):
        story.ledger.write({"event": "sent", "task_id": name, "kind": "late", "after": ""})
    story.run("x0", 0.2, 0.4)
    story.run("x1", 0.5, 1.0, pid=110)
    story.fault(KILL_CHILD, died_at - 0.05, died_at, 110)
    story.ledger.died(110, died_at)
    story.run("x1", comes_again_at, comes_again_at + 0.1)
    assert (Promise.ENDS in story.broken()) == is_broken


@pytest.mark.parametrize(("comes_again", "is_killed"), [(True, True), (False, True), (True, False)])
def test_a_chord_may_fail_by_what_was_skipped_and_ran_when_it_came_again(story, comes_again, is_killed):
    failed = ("FAILURE", "ChordError: Dependency x1 raised TaskRevokedError('duplicate of x9')")
    story.canvas(("chord", 0, 1, 2), {"x0": ("SUCCESS", "x0"), "x1": ("SUCCESS", "x1"), "x2": failed})
    story.run("x0", 0.2, 0.4)
    story.run("x1", 2.0, 2.4)
    if comes_again:
        story.receive("x1", 1.0)
    if is_killed:
        story.fault(KILL_CHILD, 0.6, 0.7, 110)
    assert story.broken() == ([] if comes_again and is_killed else [Promise.POLICY])


def test_the_death_of_an_earlier_attempt_does_not_excuse_a_body_that_was_not_sent(story):
    story.canvas(("chord", 0, 1), {"x0": ("SUCCESS", "x0"), "x1": OPEN})
    story.ledger.write({"event": "sent", "task_id": "x0", "kind": "early", "after": ""})
    story.run("x0", 0.2, None, pid=110)
    story.fault(KILL_CHILD, 0.25, 0.3, 110)
    story.run("x0", 2.0, 2.4)
    assert story.broken() == [Promise.ENDS]


@pytest.mark.parametrize("seen", [False, True])
def test_a_job_that_a_purge_dropped_need_not_end(story, seen):
    story.call("x", final="PENDING", seen=seen)
    story.ledger.write({"event": "purged", "from": 0.4, "at": 0.5})
    assert story.broken() == ([Promise.ENDS] if seen else [])


@pytest.mark.parametrize(("at", "is_broken"), [(1.05, False), (12.0, True)])
def test_a_message_that_was_acked_early_may_be_lost_with_a_child_of_a_pool_that_shrinks(story, at, is_broken):
    story.call("x", final="PENDING")
    story.ledger.write({"event": "sent", "task_id": "x", "kind": "early", "after": ""})
    story.run("x", 1.0, None, pid=110)
    story.fault(SHRINK, at, at + 0.1, 110)
    assert story.broken() == ([Promise.ENDS] if is_broken else [])


@pytest.mark.parametrize(
    ("shape", "ends", "is_broken"),
    [
        (("chain", 0, ("group", 1, 2)), (HELD, OPEN, OPEN), False),
        (("chain", 0, ("group", 1, 2), 3), (HELD, OPEN, OPEN, HELD), False),
        (("chain", 0, ("group", 1, 2), 3), (HELD, OPEN, OPEN, OPEN), True),
        (("chain", 0, 1), (HELD, OPEN), True),
        (("chord", ("chain", 0, 1), 2), (HELD, HELD, OPEN), True),
        (("chord", ("chain", 0, 1), 2), (REVOKED, OPEN, OPEN), False),
        (("group", ("chain", 0, 1), 2), (REVOKED, OPEN, HELD), False),
        (("group", ("chain", 0, 1), 2), (REVOKED, HELD, OPEN), True),
        (("link", 0, 1), (HELD, OPEN), False),
        (("chain", 0, ("link", 1, 2)), (HELD, HELD, OPEN), False),
        (("chain", 0, ("link", 1, 2)), (HELD, OPEN, OPEN), True),
    ],
)
def test_a_part_of_a_canvas_that_never_ends_is_found_unless_celery_leaves_it_open(of, shape, ends, is_broken):
    story = of({"lock_on_conflict": "raise"})
    story.canvas(shape, {f"x{number}": end for number, end in enumerate(ends)})
    story.ledger.write({"event": "revoked", "task_id": "x0", "terminate": False, "at": 0.05})
    assert story.broken() == ([Promise.ENDS] if is_broken else [])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (ALONE, [()]),
        (("chain", 0, ("group", 1, 2), 3), [(), (0,), (0,), (0, 1, 2)]),
        (("group", ("chain", 0, 1), ("chain", 2, 3)), [(), (0,), (), (2,)]),
        (("chord", ("chain", 0, 1), 2, 3), [(), (0,), (), (0, 1, 2)]),
        (("chain", 0, ("link", 1, 2)), [(), (0,), (0, 1)]),
    ],
)
def test_what_comes_before_a_part_of_a_canvas(shape, expected):
    assert [before(shape)[number] for number in range(len(expected))] == expected


def test_a_call_whose_arguments_never_ran_is_found(of):
    story = of({"lock_scope": "queue", "lock_arguments": "latest"})
    story.call("x", 0.0)
    story.call("y", 1.0, job="x")
    story.run("x", 2.0, 3.0)
    assert story.broken() == [Promise.LATEST]


@pytest.mark.parametrize(("arguments", "is_broken"), [("latest", False), ("all", True)])
def test_later_arguments_are_enough_unless_each_call_counts(of, arguments, is_broken):
    story = of({"lock_scope": "queue", "lock_arguments": arguments})
    story.call("x", 0.0, result="y")
    story.call("y", 1.0, job="x")
    story.run("x", 2.0, 3.0, items=["y"])
    assert story.broken() == ([Promise.LATEST] if is_broken else [])


def test_arguments_that_go_back_are_found(of):
    story = of({"lock_scope": "queue", "lock_arguments": "latest"})
    for name, asked, start in (("x", 0.0, 5.0), ("y", 1.0, 3.0)):
        story.call(name, asked)
        story.run(name, start, start + 1.0)
    assert story.broken() == [Promise.NOT_STALE]
    story.fault(RESTART, 2.0, 2.5)
    assert story.broken() == []


@pytest.mark.parametrize(
    ("options", "end", "promise"),
    [
        ({}, 6.0, Promise.ONE_JOB),
        ({}, 4.0, None),
        ({"lock_window": WINDOW}, 1.5, Promise.ONE_IN_WINDOW),
        ({"lock_window": WINDOW}, 1.2, Promise.ONE_IN_WINDOW),
    ],
)
def test_a_second_job_is_found(of, options, end, promise):
    story = of({"lock_scope": "job", **options})
    second = 2.0 if options else 5.0
    for name, asked, start, ended in (("x", 0.0, 1.0, end), ("y", second, 7.0, 8.0)):
        story.call(name, asked)
        story.run(name, start, ended)
    assert story.broken() == ([promise] if promise else [])
    story.fault(RESTART, 1.0, 1.1)
    assert story.broken() == []


@pytest.mark.parametrize(("options", "is_broken"), [({}, True), ({"lock_cooldown": 1.0}, False)])
def test_an_answer_with_a_job_that_was_known_to_have_ended_is_found(of, options, is_broken):
    story = of({"lock_scope": "job", **options})
    story.call("x")
    story.run("x", 1.0, 2.0)
    story.ledger.write({"event": "known", "task_id": "x", "at": 2.1})
    story.call("y", 2.2, job="x")
    assert story.broken() == ([Promise.SERVED_ANEW] if is_broken else [])


@pytest.mark.parametrize("its_own", [{}, {"lock_on_conflict": "wait"}])
def test_a_replaced_job_that_runs_again_is_found(of, its_own):
    story = of({"lock_scope": "queue", "lock_arguments": "latest", "lock_on_conflict": "replace"})
    story.call("x", 0.0, final="REVOKED", result="TaskRevokedError: replaced by y", **its_own)
    story.run("x", 1.0, 2.0)
    story.call("y", 1.5)
    story.run("y", 2.0, 3.0)
    assert story.broken() == []
    story.run("x", 4.0, 5.0, retries=1)
    assert set(story.broken()) == {Promise.REPLACED, Promise.NOT_STALE}


def test_a_duplicate_of_what_had_ended_before_its_call_is_found(of):
    story = of({"lock_on_conflict": "skip"})
    story.call("held")
    story.run("held", 1.0, 2.0)
    story.call("x", 20.0, final="REVOKED", result="TaskRevokedError: duplicate of held")
    assert story.broken() == [Promise.POLICY]


def test_a_key_that_is_left_is_found_unless_its_message_is_lost(of):
    story = of({"lock_scope": "job"})
    story.call("x", final="PENDING", seen=False)
    story.ledger.write({"event": "key", "key": "redislock:{fuzz.t:0}", "holder": "queued x"})
    assert story.broken() == [Promise.ENDS, Promise.FREED]
    story.ledger.write({"event": "purged", "from": 0.4, "at": 0.5})
    assert story.broken() == []


@pytest.mark.parametrize(("dies", "is_broken"), [(2.5, False), (9.0, True)])
def test_a_key_that_was_given_up_in_an_outage_is_left_only_if_its_process_ended_in_it(of, dies, is_broken):
    story = of({"lock_scope": "job", "lock_on_outage": "run"})
    story.call("x")
    story.run("x", 1.0, 2.0, limits={}, unlocked=True)
    story.ledger.write({"event": "key", "key": "redislock:{fuzz.t:0}:queued", "holder": "queued x"})
    story.ledger.write({"event": "key", "key": "redislock:{fuzz.t:0}:pending", "holder": ""})
    story.fault(REFUSE, 0.5, 3.0)
    story.fault(WARM, dies, dies + 0.5, 110)
    assert story.broken() == ([Promise.FREED] * 2 if is_broken else [])
    story.ledger.write({"event": "key", "key": "redislock:{fuzz.t:1}:pending", "holder": ""})
    assert len(story.broken()) == (3 if is_broken else 1)


def test_a_traceback_of_the_package_is_found(story):
    story.ledger.write({"event": "complaint", "text": "a traceback"})
    assert story.broken() == [Promise.NO_ERRORS]


def test_a_seed_makes_one_life():
    life = random_life(7)
    assert random_life(7) == life != random_life(8)
    assert len(json.loads(json.dumps(life.deploys[0][0].options))) == len(life.deploys[0][0].options)
    assert "seed 7" in life.shown()


def test_every_task_of_a_life_is_taken_by_the_package():
    for seed in range(5):
        for deploy in random_life(seed).deploys:
            assert [refusal(spec.options) for spec in deploy if spec.options is not None] == [None] * (len(deploy) - 1)


@pytest.mark.parametrize(
    ("options", "locks"),
    [
        ({}, Locks({"t(a,b)": 1})),
        ({"lock_args": []}, Locks({"t()": 1})),
        ({"lock_args": ["key"], "lock_limit": 3}, Locks({"t(a)": 3})),
        ({"lock_key": ["s:{key}", "s:{other}"]}, Locks({"s:a": 1, "s:b": 1})),
        ({"lock_key": "s:{key}", "lock_rate": [3, 2.0]}, Locks(rates={"s:a": (3, 2.0)})),
        (
            {"lock_args": ["key"], "lock_also": [["farm", 2, None], ["api", 1, [4, 2.0]]]},
            Locks({"t(a)": 1, "farm": 2}, {"api": (4, 2.0)}),
        ),
    ],
)
def test_what_a_run_locks_is_what_its_options_say(options, locks):
    assert locks_of(Spec("t", options), "a", "b") == locks
    assert locks_of(replace(Spec("t", options), options=None), "a", "b") == Locks()
