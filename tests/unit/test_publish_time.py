"""The time of a publish: by it the messages that wait for one key are put in order."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from celery_redislock.message.delivery import publish_time

SECOND = 1_000_000


def test_it_is_now_in_microseconds() -> None:
    before = time.time_ns() // 1000
    assert before <= publish_time({}) <= before + 5 * SECOND


def test_of_two_publishes_in_one_process_the_later_has_the_greater_number() -> None:
    times = [publish_time({}) for _ in range(1000)]
    assert times == sorted(set(times))


def test_with_a_countdown_or_an_eta_it_is_when_the_message_is_due() -> None:
    now = publish_time({})
    assert 60 * SECOND <= publish_time({"countdown": 60}) - now < 65 * SECOND
    assert 0 <= publish_time({"countdown": 0.5}) - now - SECOND // 2 < 5 * SECOND
    due = datetime(2030, 1, 1, 12, tzinfo=UTC)
    expected = int(due.timestamp()) * SECOND
    assert publish_time({"eta": due}) == expected
    assert publish_time({"eta": due.astimezone(timezone(timedelta(hours=5)))}) == expected
    assert publish_time({"eta": due.replace(tzinfo=None)}) == expected  # as a worker reads it
    assert publish_time({"eta": due.isoformat()}) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"countdown": "soon"},
        {"countdown": float("inf")},
        {"countdown": float("nan")},
        {"countdown": None, "eta": None},
        {"eta": "tomorrow"},
        {"eta": 5},
        {"countdown": [1]},
    ],
    ids=repr,
)
def test_an_option_that_celery_will_refuse_counts_as_not_given(options: dict[str, Any]) -> None:
    now = time.time_ns() // 1000
    assert now <= publish_time(options) <= now + 5 * SECOND


def test_a_publish_that_is_due_later_does_not_move_the_next_one() -> None:
    publish_time({"countdown": 3600})
    assert publish_time({}) < time.time_ns() // 1000 + SECOND
