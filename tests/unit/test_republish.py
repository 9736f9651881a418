"""Coming back: the header of a message that has waited, its rank in line, and how long it stays away."""

from __future__ import annotations

import json
import math
import pickle
import time
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st

from celery_redislock.message.header import LONGEST_AHEAD, MAX_KEY, Header
from celery_redislock.message.republish import DEFAULT_VISIBILITY_TIMEOUT, Broker, custom_headers, queue_of
from celery_redislock.protocol.tokens import mint_nonce, mint_publish

GOOD: dict[str, Any] = {
    "publish": mint_publish(),
    "claim": mint_nonce(),
    "key": "redislock:{shop.bill:7}",
    "times": 3,
    "since": 1_700_000_000.5,
    "begun": True,
    "joins": "an id",
    "published": 1_700_000_000_000_000,
    "died": 2,
    "number": 1_700_000_000_000_002,
    "queued": True,
    "republished": True,
    "unmerged": True,
    "rank": 1_700_000_000_000_001,
    "options": {"scope": "job", "on_conflict": None, "wait_for": 5.5, "cooldown": 0},
}
#: The lock server's time, in microseconds.
NOW = 1_800_000_000_000_000

MALFORMED_FIELDS = [
    *(("times", value) for value in (-1, -(10**30), 1.0, True, "3", None, math.nan, [3], {"times": 3})),
    *(("since", value) for value in (0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, "1", None, [1.0], {})),
    *(
        (field, value)
        for field in ("begun", "queued", "republished", "unmerged")
        for value in (0, 1, "true", None, [True], {})
    ),
    *(("claim", value) for value in (0, True, None, "", "short", "a b", [], {}, b"~", "~" + "x" * 22, "x" * 1000)),
    *(("publish", value) for value in (0, True, None, "short", "a b c d ", "eight/88", "x" * 9, b"12345678", [], {})),
    *(("key", value) for value in (0, True, None, "", "k" * (MAX_KEY + 1), b"key", [], {})),
    *(("died", value) for value in (-1, 0, 1000, 10**30, 1.0, True, None, "1", math.nan, [], {})),
    *(("joins", value) for value in (0, True, None, b"id", [], {})),
    *(("options", value) for value in (0, True, None, "scope", ["scope"], {}, {"scope": 1}, {"lease": 5}, {1: [2]})),
    *(
        (field, value)
        for field in ("number", "published", "rank")
        for value in (0, -1, 1.5e15, 2**53, 10**30, True, None, "1700000000000000", math.nan, math.inf, [1], {})
    ),
]


def test_a_header_is_read_as_it_was_written() -> None:
    """Through the broker's JSON."""
    for header in (Header(), Header(mint_publish()), Header(**GOOD), Header(**GOOD).next(begun=False, joins="b")):
        assert Header.read(json.loads(json.dumps(header.wire))) == header


def test_what_is_not_said_is_not_sent() -> None:
    publish = mint_publish()
    assert Header(publish).wire == {"publish": publish}


def test_a_message_whose_call_sets_no_option_has_the_header_that_it_always_had() -> None:
    """Byte for byte."""
    header = Header("aBcDeFgH", claim="c" * 22, key="redislock:{k}", queued=True, published=1_700_000_000_000_000)
    said = '{"publish":"aBcDeFgH","claim":"%s","key":"redislock:{k}","queued":true,"published":1700000000000000}'
    assert json.dumps(header.wire, separators=(",", ":")) == said % ("c" * 22)
    assert pickle.dumps(header._replace(options=None).wire) == pickle.dumps(header.wire)


def test_the_options_of_a_call_stay_when_its_message_comes_back() -> None:
    assert Header(**GOOD).next(begun=True, joins="b", rank=3).options == GOOD["options"]


def test_a_malformed_option_of_a_call_costs_itself_alone() -> None:
    options = {"scope": "job", "on_conflict": "overtake", "wait_for": 0, "cooldown": True, "lease": 5, "colour": "red"}
    assert Header.read({"options": options}).options == {"scope": "job"}


def test_what_was_left_to_a_message_stays_when_it_comes_back() -> None:
    header = Header(**GOOD)
    assert header.next(begun=False)[:3] == header[:3]


def test_a_message_that_sleeps_does_not_wait_meanwhile() -> None:
    slept = Header(published=NOW).next(rank=7, sleeps=True)
    assert (slept.rank, slept.times, slept.since) == (7, 0, 0)


def test_a_rank_once_set_stays_where_the_message_waits_again() -> None:
    ranked = Header(**GOOD).next(begun=False, rank=7)
    assert ranked.rank == 7
    assert ranked.next(begun=False).rank == 7


@pytest.mark.parametrize(
    ("header", "rank"),
    [
        (Header(), NOW),
        (Header(published=NOW - 5), NOW - 5),
        (Header(published=NOW + 5), NOW),
        (Header(published=NOW - 2 * LONGEST_AHEAD), NOW - LONGEST_AHEAD),
        (Header(published=NOW - 5, rank=NOW - 7), NOW - 7),
        (Header(published=NOW - 5, rank=NOW - 2 * LONGEST_AHEAD), NOW - 2 * LONGEST_AHEAD),
        (Header(rank=NOW + 5), NOW),
        (Header(published=NOW - 5, rank=1), 1),
    ],
    ids=[
        "tells nothing",
        "published",
        "a clock that is ahead",
        "a clock that is far behind",
        "has a rank",
        "has waited for long",
        "a rank that is yet to come",
        "the earliest rank",
    ],
)
def test_the_rank_in_line_is_the_time_of_the_publish_within_the_lock_servers_last_hour(
    header: Header, rank: int
) -> None:
    assert header.rank_at(NOW) == rank


@given(st.fixed_dictionaries({"published": st.integers() | st.floats(), "rank": st.integers() | st.text()}))
def test_whatever_a_header_claims_its_rank_is_one_that_the_lock_server_can_order(header: Any) -> None:
    assert 0 < Header.read(header).rank_at(NOW) <= NOW


@pytest.mark.parametrize(
    "header",
    [None, "", "times", b"{}", 0, 1, True, 1.5, math.nan, [], [3, 1.0, True], (3, 1.0, True), {}, {1: 2}],
    ids=repr,
)
def test_a_header_that_is_no_return_counts_as_none(header: Any) -> None:
    assert Header.read(header) == Header()


@pytest.mark.parametrize(("field", "value"), MALFORMED_FIELDS, ids=lambda value: repr(value)[:20])
def test_a_malformed_field_costs_itself_alone(field: str, value: Any) -> None:
    others = {name: value for name, value in GOOD.items() if name != field}
    assert Header.read({**GOOD, field: value}) == Header(**others)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("times", 1),
        ("since", 0.5),
        ("since", 1),
        ("died", 1),
        ("died", 999),
        ("key", "k"),
        ("key", "k" * MAX_KEY),
        *((field, value) for field in ("number", "published", "rank") for value in (1, 2**53 - 1)),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_the_least_and_the_most_that_a_field_may_be_is_read(field: str, value: Any) -> None:
    assert getattr(Header.read({field: value}), field) == value


def test_a_message_joins_the_same_task_until_it_is_told_another() -> None:
    joins = Header().next(joins="a")
    assert (joins.joins, joins.next().joins, joins.next(joins="b").joins) == ("a", "a", "b")


@pytest.mark.parametrize("ahead", [1.0, 60.5, 3600.0, 1e11, 10**30, 10**400], ids=lambda ahead: repr(ahead)[:10])
def test_a_message_from_a_clock_that_is_ahead_came_back_just_now_and_loses_nothing(ahead: float) -> None:
    header = Header.read({**GOOD, "since": int(time.time()) + ahead})
    assert abs(header.since - time.time()) < 5
    assert header._replace(since=0) == Header(**GOOD)._replace(since=0)


def test_what_a_later_version_adds_to_the_header_is_passed_over() -> None:
    assert Header.read({**GOOD, "colour": "red"}) == Header.read(GOOD)


_json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*Header._fields, "x"]), inner, max_size=4)
    ),
)


@given(
    _json_like | st.fixed_dictionaries({"times": st.integers() | _json_like, "since": _json_like, "begun": _json_like})
)
def test_no_header_makes_reading_raise_or_a_delay_leave_its_bounds(header: Any) -> None:
    returned = Header.read(header).next(begun=False)
    assert 0 < returned.since <= time.time()
    assert 1.0 <= returned.delay(1.0, 30.0) <= 30.0


def test_a_message_remembers_when_it_first_came_back() -> None:
    first = Header().next(begun=True)
    assert first.times == 1
    assert abs(first.since - time.time()) < 5
    assert first.next(begun=False) == Header(times=2, since=first.since, begun=True)


@given(times=st.integers(0, 10**12), shortest=st.floats(0.001, 3600), more=st.floats(0, 86400))
def test_a_delay_stays_between_the_shortest_and_the_longest(times: int, shortest: float, more: float) -> None:
    assert shortest <= Header(times=times, since=1.0).delay(shortest, shortest + more) <= shortest + more


def test_delays_grow_and_spread() -> None:
    """So that many duplicates neither hammer the server nor arrive together."""
    early = [Header(times=0).delay(1.0, 1000.0) for _ in range(200)]
    late = [Header(times=8).delay(1.0, 1000.0) for _ in range(200)]
    assert max(early) <= 2.0
    assert sum(late) / 200 > 10 * sum(early) / 200
    assert len(set(early)) > 100


def test_delays_spread_also_where_the_longest_is_reached() -> None:
    """Messages that have all waited for long must not come back together."""
    assert len({round(Header(times=50).delay(1.0, 30.0), 1) for _ in range(200)}) > 50


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (None, DEFAULT_VISIBILITY_TIMEOUT),
        ({}, DEFAULT_VISIBILITY_TIMEOUT),
        ({"visibility_timeout": None}, DEFAULT_VISIBILITY_TIMEOUT),
        ({"visibility_timeout": 7200}, 7200.0),
        ({"visibility_timeout": 2}, 2.0),
    ],
)
def test_the_visibility_timeout_is_the_brokers_or_shorter_than_any_default(
    app: Celery, options: Any, seconds: float
) -> None:
    app.conf.broker_transport_options = options
    assert Broker(app).visibility_timeout == seconds
    assert DEFAULT_VISIBILITY_TIMEOUT < 3600  # of kombu's Redis transport


@pytest.mark.parametrize(
    ("settings", "reaches"),
    [
        ({"broker_url": "amqp://one"}, True),
        ({"broker_read_url": "amqp://one", "broker_write_url": "amqp://one"}, True),
        ({"broker_read_url": "amqp://one", "broker_write_url": "amqp://two"}, False),
        ({"broker_url": "redis://one"}, True),
        ({"broker_read_url": "redis://one", "broker_write_url": "redis://two"}, False),
    ],
)
def test_a_message_goes_straight_to_its_queue_only_on_the_broker_that_it_came_from(
    app: Celery, settings: dict[str, str], reaches: bool
) -> None:
    app.conf.update(settings)
    assert Broker(app).reaches_queues is reaches


DELAY = "0." * 27 + "1."


@pytest.mark.parametrize(
    ("exchange", "routing_key", "found"),
    [
        ("orders", "orders", "orders"),
        ("celery_delayed_delivery", DELAY + "orders", "orders"),
        ("shop", "orders.created", "orders.created"),  # bound by a pattern
        ("celery_delayed_delivery", DELAY + "orders.created", "orders.created"),
        ("celery_delayed_1", DELAY + "orders", "orders"),  # where its last delay ended: that was 4 s
        ("elsewhere", "orders", "orders"),
        ("", "orders", None),  # by the queue's name: Celery knows it
        (None, None, None),
    ],
)
def test_where_a_message_came_from_is_known_by_its_routing_key_without_its_delay(
    app: Celery, exchange: str | None, routing_key: str | None, found: str | None
) -> None:
    app.conf.task_queues = {"orders": {"exchange": "orders", "exchange_type": "topic", "routing_key": "orders"}}
    request = Context(delivery_info={"exchange": exchange, "routing_key": routing_key})
    queue = queue_of(app, request)
    assert (queue and queue.routing_key) == found
    assert queue is None or queue.exchange.type == "topic"
    own = app.amqp.queues["orders"]
    if routing_key == DELAY + "orders":
        assert queue is own


def test_the_brokers_own_headers_do_not_come_back() -> None:
    own = {"tenant": "acme", "x-mine": 1}
    brokers = {"x-death": [{}], "x-first-death-queue": "q", "x-last-death-reason": "expired"}
    assert custom_headers({**own, **brokers}) == own
    assert custom_headers(None) == {}


def test_a_messages_own_headers_are_what_celery_takes_for_the_users_and_an_inner_dict_besides(app: Celery) -> None:
    own = {"tenant": "acme", "headers": {"x-trace": "1", "id": "mine"}}
    message = app.amqp.as_task_v2("id", "task", (), {}, stamped_headers=["stamp"], stamp="a stamp")
    assert custom_headers({**message.headers, **own, "compression": "application/x-gzip"}) == own
