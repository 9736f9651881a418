"""Replies: what a script's reply, as Redis sends it, means to its caller."""

from __future__ import annotations

import hashlib
import re

import pytest

from celery_redislock.protocol.replies import Conflict, Granted, Merged, Outstanding, Renewed
from celery_redislock.protocol.scripts import (
    ACQUIRE,
    INSPECT,
    LEAVE,
    MERGE,
    RELEASE,
    RENEW,
    REPLACE,
    RESERVE,
    STAND,
    Script,
    Tag,
)
from celery_redislock.protocol.tokens import OFFERED, RESERVED, SPENT, Attempt, mint, of_room, origin

KEY = "redislock:{shop.bill:7}"
HOLDER, OTHER = (mint(nonce * 22, Attempt(nonce, 0, 0), origin("host", "shop.bill")) for nonce in "ab")
ROOM = of_room("r" * 22, "host")


def test_a_grant_may_have_a_permit_a_fence_a_number_and_calls() -> None:
    assert Granted.of([b"granted"], 5.0) == Granted(5.0, None, 1, 0, ())
    assert Granted.of([b"granted", 3], 5.0) == Granted(5.0, None, 3)
    assert Granted.of([b"granted", 1, 77], 5.0) == Granted(5.0, 77)
    assert Granted.of([b"granted", 1, None, 9, b"one", b"two"], 5.0) == Granted(5.0, None, 1, 9, (b"one", b"two"))


def test_a_conflict_names_the_holder_and_until_when_its_key_lives_unless_it_is_renewed() -> None:
    conflict = Conflict.of([b"conflict", 1500, 1_700_000_000_000_000, 2, HOLDER.value])
    assert conflict == Conflict(HOLDER, 1.5, 1_700_000_000_000_000, 2)
    assert conflict.holders == (HOLDER,)
    assert not conflict.is_spent
    info = conflict.info(KEY)
    assert (info.key, info.task_id, info.ttl, info.waiting_processes, info.others) == (KEY, "a", 1.5, 2, ())


def test_a_key_without_expiry_has_no_ttl() -> None:
    assert Conflict.of([b"conflict", -1, 0, 0, HOLDER.value]).ttl is None
    assert Conflict.of([b"conflict", 0, 0, 0, HOLDER.value]).ttl == 0


def test_of_several_holders_those_that_run_come_before_a_room_that_the_key_is_kept_for() -> None:
    conflict = Conflict.of([b"conflict", 1000, 0, 0, ROOM.value, HOLDER.value, OTHER.value])
    assert conflict.holders == (HOLDER, OTHER, ROOM)
    assert ROOM[0] == OFFERED
    info = conflict.info(KEY)
    assert (info.task_id, info.ttl) == ("a", 1.0)
    assert [(one.key, one.task_id, one.ttl) for one in info.others] == [(KEY, "b", None), (KEY, None, None)]


def test_a_conflict_that_comes_with_a_rank_does_not_tell_how_many_wait() -> None:
    conflict = Conflict.of([b"ranked", 1000, 5, 2**52 + 3, HOLDER.value])
    assert (conflict.rank, conflict.waiting, conflict.cannot_wait) == (2**52 + 3, 0, False)


def test_the_holder_may_be_a_copy_of_the_callers_message_with_which_it_cannot_wait() -> None:
    assert Conflict.of([b"copy", 1000, 0, 0, HOLDER.value]).cannot_wait
    assert not Conflict.of([b"conflict", 1000, 0, 0, HOLDER.value]).cannot_wait


def test_a_rate_that_is_used_up_is_known_by_its_permit() -> None:
    assert Conflict.of([b"conflict", 1000, 0, 0, (SPENT + HOLDER[1:]).encode()]).is_spent


def test_an_outstanding_job_has_the_key_or_the_place_in_the_queue_or_both() -> None:
    reserved = mint("c" * 22, Attempt("c", 0, 0), origin("host", "shop.bill"), RESERVED)
    both = Outstanding.of([b"outstanding", HOLDER.value, 1500, reserved.value, -1])
    assert both == Outstanding(((HOLDER, 1.5), (reserved, None)))
    assert [(one.key, one.task_id, one.ttl, one.state) for one in both.info(KEY)] == [
        (KEY, "a", 1.5, "held"),
        (KEY, "c", None, "queued"),
    ]
    assert Outstanding.of([b"outstanding", None, -2, reserved.value, 0]) == Outstanding(((reserved, 0.0),))
    assert Outstanding.of([b"window", HOLDER.value, 60_000]) == Outstanding(((HOLDER, 60.0),), in_window=True)


def test_a_merged_call_has_a_number_and_the_message_that_it_was_merged_into_unless_its_run_has_begun() -> None:
    merged = Merged.of([b"merged", 12, HOLDER.value, 1500])
    assert merged == Merged(12, HOLDER, 1.5)
    assert (merged.info(KEY).key, merged.info(KEY).task_id, merged.info(KEY).ttl) == (KEY, "a", 1.5)
    assert Merged.of([b"merged", 12]) == Merged(12, None)


def test_a_renewed_key_may_have_been_asked_to_stop() -> None:
    assert Renewed.of(b"kept") == Renewed()
    assert Renewed.of([b"kept", b"new%20er\xff"]) == Renewed("new er\ufffd")
    assert Renewed.of(b"lost") is None


@pytest.mark.parametrize("script", [ACQUIRE, RESERVE, RELEASE, RENEW, MERGE, REPLACE, INSPECT, STAND, LEAVE])
def test_a_script_has_the_test_of_an_owner_written_out_and_no_word_that_only_ends_like_it(script: Script) -> None:
    assert "OWNS" not in script.text
    assert re.search(r"\wstring\.sub", script.text) is None
    assert script.sha == hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()


def test_a_tag_is_the_text_that_a_script_sends() -> None:
    assert Tag.RANKED == b"ranked"
    assert Tag(b"copy") is Tag.COPY
