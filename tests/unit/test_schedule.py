"""Looks: what a hint makes a room do."""

from __future__ import annotations

import math

import pytest

from celery_redislock.line.schedule import Looks


@pytest.mark.parametrize(
    "hint", ["", "garbage", "offer", "offer x k", "offer 51 k", "offer 1 \udcff", "soon 1 unknown"]
)
def test_a_malformed_hint_leaves_nothing_behind(hint: str) -> None:
    looks = Looks()
    looks.hear(hint)
    assert looks.due({"1 k": None}) == {}
    assert looks.next == math.inf


def test_an_offer_or_a_look_is_due_at_once_also_of_a_line_that_is_not_known() -> None:
    looks = Looks()
    for hint in ("look 1 k", "offer 2 other"):
        looks.hear(hint)
    assert looks.due({"1 k": None}) == {"1 k": False, "2 other": True}
