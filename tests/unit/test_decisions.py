"""Decisions: what becomes of a run, of a message and of a publish, without a worker."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.app.task import Context

from celery_redislock.errors import LockInfo
from celery_redislock.message.delivery import ConsumerStops, Delivery, Facts
from celery_redislock.message.header import NO_HEADER
from celery_redislock.options import ConflictPolicy, LockOptions, resolve_options
from celery_redislock.policy import Ended, Place, Reason, Verdict, leaves_note, may_be_handed_a_key
from celery_redislock.policy.conflict import (
    POLICIES,
    Answer,
    Decision,
    HasEnded,
    NotSent,
    on_conflict,
    on_outage,
    on_outstanding,
)
from celery_redislock.policy.join import Join, Joined, Joining, Outcome, joined_of, moment_of, note_joined, on_joining
from celery_redislock.policy.raise_ import Fail
from celery_redislock.policy.replace import Replaced
from celery_redislock.policy.skip import Skip, Skipped, is_skipped
from celery_redislock.policy.wait import ComeBack, Wait, Waiting
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import Passed
from celery_redislock.protocol.tokens import Attempt

FRESH = Delivery("n" * 22)
MESSAGE = Facts(FRESH, Attempt("mine", 0, 0), frozenset({"mine", "my parent", "my root"}))
HOLDER = LockInfo("key", "holder", "shop.bill", "celery@host", None, 10.0)
COOLING = HOLDER._replace(state="cooling")


def options(policy: str = "skip", **others: object) -> LockOptions:
    needed = {"scope": "queue", "arguments": "latest", "args": ["a"]} if policy == "replace" else {}
    return resolve_options("shop.bill", {"on_conflict": policy, **needed, **others}, {})


def decide(
    message: Facts = MESSAGE, holder: LockInfo = HOLDER, policy: str = "skip", *, ended: bool = False, **others: object
) -> Decision:
    return on_conflict(message, holder, options(policy, **others), is_own_copy=False, has_ended=lambda _: ended)


def test_every_policy_that_may_be_set_decides() -> None:
    assert set(POLICIES) == set(get_args(ConflictPolicy))


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        ("skip", Skip(Skipped.DUPLICATE, "holder")),
        ("wait", Wait()),
        ("replace", Wait()),
        ("raise", Fail()),
        ("join", Join("holder")),
    ],
)
def test_a_duplicate_meets_its_policy(policy: str, decision: Decision) -> None:
    assert decide(policy=policy) == decision


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("why", "is_begun"),
    [
        (MESSAGE._replace(delivery=FRESH._replace(acks_late=True, is_redelivered=True)), True),
        (MESSAGE._replace(delivery=FRESH._replace(is_marked_begun=True)), True),
        (MESSAGE._replace(attempt=Attempt("mine", 1, 0)), False),
        (MESSAGE._replace(causes=frozenset({"mine", "holder"})), False),
        (MESSAGE._replace(is_owed_its_key=True), False),
    ],
    ids=["redelivered, acked late", "marked begun", "a retry", "caused by the holder", "owed its key"],
)
def test_what_is_no_duplicate_comes_back_whatever_the_policy(why: Facts, is_begun: bool, policy: str) -> None:
    assert decide(why, policy=policy) == ComeBack(is_begun)


@pytest.mark.parametrize("changed", [{"is_redelivered": True}, {"overdue_at": 0.0}, {"is_republished": True}])
def test_what_cannot_have_begun_is_a_duplicate(changed: dict[str, Any]) -> None:
    assert decide(MESSAGE._replace(delivery=FRESH._replace(**changed))) == Skip(Skipped.DUPLICATE, "holder")


def test_what_a_run_has_sent_is_skipped_where_that_run_has_only_spent_a_share_of_a_rate() -> None:
    caused = MESSAGE._replace(causes=frozenset({"holder"}))
    assert decide(caused, HOLDER._replace(state="spent")) == Skip(Skipped.SPENT)
    assert decide(caused) == ComeBack(is_begun=False)


def test_a_second_worker_in_the_process_makes_no_run_of_the_first_forget_that_its_consumer_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops = ConsumerStops()
    monkeypatch.setattr("celery_redislock.message.delivery.STOPS", stops)
    stops.open()
    delivery = FRESH._replace(stops=stops.count[0])
    assert not delivery.is_delivered_again
    stops.count[0] += 1
    stops.open()
    assert delivery.is_delivered_again


def test_a_copy_of_the_holders_own_message_comes_back_as_begun() -> None:
    decision = on_conflict(MESSAGE, HOLDER, options(), is_own_copy=True, has_ended=lambda _: False)
    assert decision == ComeBack(is_begun=True)


@pytest.mark.parametrize("policy", ["skip", "raise", "join"])
def test_a_holder_whose_end_may_have_been_seen_is_nobodys_holder(policy: str) -> None:
    assert decide(policy=policy, ended=True) == ComeBack(is_begun=False, reason=Waiting.UNLESS_COOLING)


@pytest.mark.parametrize("ended", ["holder", "other"])
def test_each_holder_is_asked_whether_its_own_end_may_have_been_seen(ended: str) -> None:
    two = HOLDER._replace(others=(HOLDER._replace(task_id="other"),))
    decision = on_conflict(MESSAGE, two, options(), is_own_copy=False, has_ended=lambda one: one.task_id == ended)
    assert decision == ComeBack(is_begun=False, reason=Waiting.UNLESS_COOLING)


@pytest.mark.parametrize("policy", ["skip", "raise", "join"])
def test_a_key_that_is_offered_to_the_first_in_line_is_nobodys(policy: str) -> None:
    """Who is offered a key has not begun, and may never begin."""
    offered = HOLDER._replace(task_id=None, task=None, state="offered")
    assert decide(holder=offered, policy=policy) == ComeBack(is_begun=False, reason=Waiting.UNLESS_COOLING)
    assert decide(holder=offered, policy="wait") == Wait()


def test_who_waits_asks_nobody_whether_the_holder_has_ended() -> None:
    def fail(_: LockInfo) -> bool:
        raise AssertionError("asked")

    assert on_conflict(MESSAGE, HOLDER, options("wait"), is_own_copy=False, has_ended=fail) == Wait()


def test_a_key_that_cools_down_says_so() -> None:
    assert decide(holder=COOLING) == Skip(Skipped.COOLING, "holder")


def test_who_waits_waits_for_a_key_that_cools_down_and_as_often_as_it_must() -> None:
    assert decide(holder=COOLING, policy="wait") == Wait()
    assert decide(MESSAGE._replace(delivery=FRESH._replace(is_republished=True)), policy="wait") == Wait()


@pytest.mark.parametrize("policy", ["wait", "join"])
def test_a_wait_ends_with_the_message_or_with_lock_wait_for(policy: str) -> None:
    assert decide(MESSAGE._replace(has_expired=True), policy=policy) == Skip(Skipped.EXPIRED)
    assert decide(MESSAGE._replace(waited=5.0), policy=policy, wait_for=5.0) == Fail(is_late=True)
    assert isinstance(decide(MESSAGE._replace(waited=4.9), policy=policy, wait_for=5.0), Wait | Join)
    assert isinstance(decide(MESSAGE._replace(waited=1e9), policy=policy), Wait | Join)


def test_what_is_no_duplicate_waits_for_longer_than_lock_wait_for() -> None:
    retry = MESSAGE._replace(attempt=Attempt("mine", 1, 0), waited=6.0)
    assert decide(retry, policy="wait", wait_for=5.0) == ComeBack(is_begun=False)


def test_who_joins_keeps_to_the_first_holder_that_it_met() -> None:
    assert decide(MESSAGE._replace(joins="first"), policy="join") == Join("first")


def test_who_joins_passes_over_a_holder_that_is_no_task() -> None:
    two = HOLDER._replace(task_id=None, others=(HOLDER._replace(task_id="other"),))
    assert decide(holder=two, policy="join") == Join("other")


def test_who_joins_a_lock_that_is_no_task_waits_in_line() -> None:
    assert decide(holder=HOLDER._replace(task_id=None), policy="join") == Wait()


def test_in_scope_job_a_lock_outside_tasks_is_waited_for() -> None:
    assert decide(holder=HOLDER._replace(task_id=None), scope="job") == Wait()


@pytest.mark.parametrize(
    ("state", "has_key", "waited", "what"),
    [
        ("SUCCESS", False, 0.0, Joining.END),
        ("FAILURE", True, 0.0, Joining.END),
        ("RETRY", False, 0.0, Joining.ASK),
        ("RETRY", True, 0.0, Joining.COME_BACK),
        ("RETRY", True, 3600.0, Joining.RUN),
        ("STARTED", True, 0.0, Joining.RUN),
    ],
)
def test_who_joins_ends_with_the_other_or_runs_in_its_place(
    state: str, has_key: bool, waited: float, what: Joining
) -> None:
    assert on_joining(Outcome(state, None), options("join"), waited, has_key=has_key) is what


def test_an_outage_goes_by_its_option() -> None:
    assert on_outage(FRESH, 0.0, options(on_outage="raise")) == "raise"
    assert on_outage(FRESH, 0.0, options(on_outage="run")) == "run"
    assert on_outage(FRESH, 0.0, options()) == ComeBack(is_begun=False)
    begun = FRESH._replace(acks_late=True, is_redelivered=True)
    assert on_outage(begun, 0.0, options()) == ComeBack(is_begun=True)


def test_lock_wait_for_ends_the_wait_for_a_lock_server_too() -> None:
    assert on_outage(FRESH, 5.0, options(wait_for=5.0)) == "raise"
    assert on_outage(FRESH, 4.9, options(wait_for=5.0)) == ComeBack(is_begun=False)
    assert on_outage(FRESH, 5.0, options(wait_for=5.0, on_outage="run")) == "run"


NOTHING = Passed()


def outstanding(
    taken: list[LockInfo], passed: Passed = NOTHING, has_ended: HasEnded = lambda _: False
) -> Answer | Passed | NotSent | None:
    return on_outstanding("shop.bill", frozenset(), taken, passed, has_ended)


ENDED, PRECEDING = Passed(ended=frozenset({"holder"})), Passed(preceding=frozenset({"holder"}))


@pytest.mark.parametrize(
    ("causes", "holder", "ended", "passed"),
    [
        ((), {}, False, None),
        ((), {}, True, ENDED),
        ((), {"state": "queued", "hostname": "web"}, False, None),
        ((), {"hostname": "web"}, False, PRECEDING),
        ((), {"task": "shop.other"}, False, PRECEDING),
        ((), {"task_id": "l" * 200}, False, Passed(preceding=frozenset({"l" * 200}))),
        (("holder",), {}, False, PRECEDING),
    ],
    ids=["a job", "one that has ended", "queued", "by apply()", "another task", "a cut id", "its own"],
)
def test_a_publish_is_answered_with_a_job_alone(
    causes: tuple[str, ...], holder: dict[str, object], ended: bool, passed: Passed | None
) -> None:
    found = HOLDER._replace(**holder)
    expected = Answer(found) if passed is None else passed
    assert on_outstanding("shop.bill", frozenset(causes), [found], Passed(), lambda _: ended) == expected


def test_a_publish_is_answered_with_the_job_behind_one_that_has_ended() -> None:
    behind = HOLDER._replace(task_id="behind", state="queued")
    assert outstanding([HOLDER, behind], has_ended=lambda job: job is HOLDER) == Answer(behind)


def test_a_publish_that_asks_again_is_answered_with_a_newer_job_and_with_none_that_it_passes_over() -> None:
    newer = HOLDER._replace(task_id="newer")
    assert outstanding([HOLDER, newer], ENDED) == Answer(newer)
    assert outstanding([HOLDER, HOLDER._replace(task="shop.other")], ENDED) is None


def test_a_job_that_is_being_sent_is_waited_for_and_then_passed_over() -> None:
    sending = HOLDER._replace(task_id="sending", state="sending", hostname="web-1")
    unsent = Passed(unsent=frozenset({"sending"}))
    assert outstanding([sending]) == NotSent("sending")
    assert outstanding([sending], ENDED) == NotSent("sending")
    assert outstanding([sending], unsent) is None
    assert outstanding([sending, HOLDER], unsent) == Answer(HOLDER)
    assert outstanding([sending._replace(task_id="another")], unsent) == NotSent("another")
    assert isinstance(outstanding([sending._replace(task="shop.other")]), Passed)


def test_a_publish_inside_a_window_is_answered_with_its_job_whatever_has_become_of_it() -> None:
    def in_window(job: LockInfo, passed: Passed = NOTHING) -> object:
        return on_outstanding("shop.bill", frozenset(), [job], passed, lambda _: True, in_window=True)

    assert in_window(HOLDER) == Answer(HOLDER, "window")
    assert in_window(HOLDER, ENDED) == Answer(HOLDER, "window")
    assert in_window(HOLDER._replace(state="sending")) == NotSent("holder")


def test_a_run_is_not_dropped_in_favour_of_a_job_that_is_being_sent() -> None:
    sending = HOLDER._replace(state="sending")
    for policy in ("skip", "raise", "join"):
        assert isinstance(decide(holder=sending, policy=policy), ComeBack)


@pytest.mark.parametrize(
    ("reason", "is_one"),
    [
        (Skipped.DUPLICATE, is_skipped),
        (Skipped.COOLING, is_skipped),
        (Skipped.SPENT, is_skipped),
        (Skipped.EXPIRED, None),
        (Skipped.DROPPED, None),
        (Skipped.SUPERSEDED, Skipped.SUPERSEDED.is_told_by),
        (Replaced.STOPPED, Replaced.STOPPED.is_told_by),
        (Replaced.NOT_BEGUN, Replaced.STOPPED.is_told_by),
        (Joined.REVOKED, None),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_the_text_of_a_revoked_tells_what_has_become_of_the_run(reason: Reason, is_one: object) -> None:
    text = reason.text.format("holder")
    asks = (is_skipped, Skipped.SUPERSEDED.is_told_by, Replaced.STOPPED.is_told_by)
    assert [ask for ask in asks if ask(text)] == ([is_one] if is_one else [])


def test_a_date_without_a_zone_is_utc_and_what_is_no_date_is_none() -> None:
    noon = datetime(2026, 11, 27, 12, tzinfo=UTC)
    assert [moment_of(one) for one in (noon, noon.replace(tzinfo=None), noon.isoformat())] == [noon] * 3
    assert moment_of("2026-11-27T14:00:00+02:00") == noon
    assert [moment_of(one) for one in (None, "", "soon", 7)] == [None] * 4
    assert moment_of(datetime.max, timezone(timedelta(hours=-5))) is None  # beyond what a datetime holds in UTC


@pytest.mark.parametrize(("hours", "later"), [(-5, 5), (0, 0), (9, 0)])
def test_a_date_without_a_zone_is_the_later_of_utc_and_the_apps_zone(hours: int, later: int) -> None:
    noon, zone = datetime(2026, 11, 27, 12, tzinfo=UTC), timezone(timedelta(hours=hours))
    assert moment_of(noon.replace(tzinfo=None), zone) == noon + timedelta(hours=later)
    assert moment_of(noon.isoformat(), zone) == noon


def test_a_date_of_the_hour_that_autumn_repeats_is_the_later_one_and_a_zone_of_pytz_is_understood() -> None:
    pytz = pytest.importorskip("pytz")
    for zone in (ZoneInfo("America/New_York"), pytz.timezone("America/New_York")):
        assert moment_of(datetime(2026, 11, 1, 1, 30), zone) == datetime(2026, 11, 1, 6, 30, tzinfo=UTC)
        assert moment_of(datetime(2026, 7, 1, 8), zone) == datetime(2026, 7, 1, 12, tzinfo=UTC)


def test_the_children_of_a_result_name_the_task_that_its_run_has_joined() -> None:
    with Celery("joins", set_as_current=False) as app:
        request = Context(children=[])
        note_joined(app, request, "holder")
        children = [one.as_tuple() for one in request.children]
    assert joined_of(json.loads(json.dumps(children))) == "holder"
    assert joined_of([*children, [["a link", None], None]]) == "holder"
    other = [[["a group", None], [[["holder", None], None]]]]
    assert [joined_of(one) for one in (None, [], other, [[["a link", None], None]])] == [None] * 4


def test_a_note_is_left_by_what_is_over_alone() -> None:
    assert [leaves_note(state) for state in ("SUCCESS", "FAILURE", "RETRY", "IGNORED")] == [True] * 4
    assert [leaves_note(state) for state in ("REJECTED", "REVOKED", None)] == [False] * 3


def test_a_key_is_left_to_a_retry_alone() -> None:
    assert may_be_handed_a_key(1, options(scope="job"))
    assert may_be_handed_a_key(1, options(hold_on_retry=True))
    assert not may_be_handed_a_key(1, options())
    assert not may_be_handed_a_key(0, options(scope="job"))


def test_each_reason_has_a_row_of_its_own() -> None:
    """Two members of an Enum with equal rows would be one."""
    for reasons in Reason.__subclasses__():
        assert [one.name for one in reasons] == [*reasons.__members__]


@pytest.mark.parametrize("reason", [one for reasons in Reason.__subclasses__() for one in reasons], ids=str)
@pytest.mark.parametrize("place", [None, Place(Demand("key", 2), NO_HEADER)], ids=["gone", "in line"])
def test_the_main_process_reads_the_verdict_that_a_child_has_sent(reason: Reason, place: Place | None) -> None:
    verdict = Verdict("wait", reason, "it is held", place)
    error = pickle.loads(pickle.dumps(Ended(verdict)))  # noqa: S301 - its own
    assert repr(error) == str(error) == verdict.text  # formatters of logs write either
    assert error.verdict == verdict
    assert error.verdict.reason is reason
    assert str(error) == "it is held"
