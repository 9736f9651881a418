"""Several keys for one run: their order, their names, and what is refused, each with the reason."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from celery_redislock import Also, LockConfigError, LockKeyError, locked
from celery_redislock.options import may_have_several, resolve_options
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.several import gathered, in_order

from .wire import SECRET, key_maker

A, B, RATE = Demand("a", 20), Demand("b"), Demand("0-rate", 5, 2000)


def transfer(source: Any, target: Any, seconds: Any = 0) -> None: ...


def refusal(**options: Any) -> str:
    with pytest.raises(LockConfigError) as refused:
        resolve_options("bank.transfer", options, {})
    return str(refused.value)


class TestTheOrder:
    def test_goes_by_name_and_rates_come_last(self) -> None:
        for given in permutations([B, RATE, A]):
            assert in_order(given) == (A, B, RATE)

    def test_has_a_rate_last_however_short_its_time_is(self) -> None:
        fast = Demand("0-rate", 5, 0.1)
        assert in_order([fast, A]) == (A, fast)

    def test_is_the_same_whatever_limits_other_tasks_give_the_keys(self) -> None:
        assert [one.key for one in in_order([Demand("b", 2), Demand("a", 7)])] == ["a", "b"]

    def test_has_each_key_once_as_it_was_first_named(self) -> None:
        assert in_order([Demand("a"), B, Demand("a", 9)]) == (Demand("a"), B)

    def test_of_a_room_that_keeps_nothing_begins_with_the_key_that_was_refused(self) -> None:
        assert gathered((A, B, RATE), B, is_offered=False, keeps=False) == (B, A, RATE)

    def test_of_a_room_that_is_offered_a_key_ends_with_that_one(self) -> None:
        assert gathered((A, B, RATE), A, is_offered=True, keeps=False) == (B, RATE, A)

    def test_of_a_room_that_keeps_what_it_gets_is_the_common_one(self) -> None:
        for offered in (True, False):
            assert gathered((A, B, RATE), B, is_offered=offered, keeps=True) == (A, B, RATE)


def test_the_call_to_each_key_is_that_of_its_capacity() -> None:
    room = tokens.of_room("0" * 16, "host", "")
    calls = {n: tokens.call(tokens.for_capacity(room, n), 7, 3).value for n in (1, 5, 50)}
    for made in calls.values():
        assert {n: tokens.call_at(made, n) for n in calls} == calls


class TestNames:
    def test_a_callable_may_return_one_or_several(self) -> None:
        def names(made: Any) -> list[str]:
            return key_maker(transfer, lock_key=lambda _: made).names_of({})

        assert (names("a"), names(["a", "b"]), names(("a",))) == (["a"], ["a", "b"], ["a"])

    @pytest.mark.parametrize(
        ("made", "text"),
        [
            ([], "lock_key must return a non-empty str, not list"),
            (["a", 7], "lock_key must return a non-empty str, not a list of int"),
            (["a", ""], "not a list of str"),
            ([["a"]], "not a list of list"),
            ({"a", "b"}, "not set"),
            ({SECRET: 1}, "not dict"),
        ],
    )
    def test_a_callable_that_returns_anything_else_fails_and_its_value_is_not_told(self, made: Any, text: str) -> None:
        with pytest.raises(LockKeyError, match=text) as refused:
            key_maker(transfer, lock_key=lambda _: made).names_of({})
        assert SECRET not in str(refused.value)

    def test_where_only_one_key_is_allowed_a_list_fails_with_the_reason(self) -> None:
        with pytest.raises(LockKeyError, match="several keys, which is not allowed with lock_scope 'job' or 'queue'"):
            key_maker(transfer, lock_key=lambda _: ["a", "b"]).name((1, 2), {})


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"scope": "job"}, "a publish can reserve only one key; allowed: 'run'"),
            ({"scope": "queue"}, "a publish can reserve only one key; allowed: 'run'"),
            ({"on_conflict": "join"}, "each key may be held by another task; allowed: 'wait', 'skip' or 'raise'"),
            ({"hold_on_retry": True}, "a retry releases all keys, and takes them again"),
            ({"rate": "5/m"}, "name the rate in lock_also: Also(key, rate=...)"),
            ({"fair": "source"}, "groups take turns at one key only"),
        ],
    )
    def test_each_option_that_does_not_go_with_several_keys(self, options: dict[str, Any], why: str) -> None:
        ((name, value),) = options.items()
        refused = f"bank.transfer: lock_{name} = {value!r} is not allowed with"
        assert refusal(key=["a:{source}", "b"], **options) == f"{refused} lock_key = a list: {why}"
        assert refusal(key="a", also=[Also("farm")], **options) == f"{refused} lock_also: {why}"

    def test_no_key_and_nine(self) -> None:
        assert "lock_key and lock_also name 0 keys; a run has from 1 to 8" in refusal(key=[])
        assert "name 9 keys; a run has from 1 to 8" in refusal(key=[f"k{n}" for n in range(9)])
        assert "name 9 keys" in refusal(args=["source"], also=[Also(f"k{n}") for n in range(8)])
        resolve_options("bank.transfer", {"key": [f"k{n}" for n in range(8)]}, {})

    @pytest.mark.parametrize(
        ("options", "key"),
        [
            ({"key": "a", "also": [Also("api", limit=5), Also("api", rate="5/m")]}, "api"),
            ({"args": ["source"], "also": [Also("api", limit=5), Also("farm"), Also("api", limit=4)]}, "api"),
            ({"key": ["a", "b:{source}"], "also": [Also("b:{source}", rate="5/m")]}, "b:{source}"),
        ],
    )
    def test_a_key_with_a_second_limit_or_rate_which_would_have_no_effect(
        self, options: dict[str, Any], key: str
    ) -> None:
        assert f"lock_also gives {key!r} a second limit or rate: name another key for it" in refusal(**options)

    def test_a_key_that_is_named_twice_with_the_same_limit_or_rate_counts_once(self) -> None:
        resolve_options("bank.transfer", {"key": "a", "limit": 3, "also": [Also("a", limit=3), Also("a", limit=3)]}, {})
        same = [Also("api", rate="5/m"), Also("api", rate=(5, 60))]
        resolve_options("bank.transfer", {"args": ["source"], "also": same}, {})

    @pytest.mark.parametrize("key", [["a", 7], [None], {"a"}, 7])
    def test_a_key_that_is_no_template(self, key: Any) -> None:
        assert "lock_key" in refusal(key=key)
        assert "a template, a list of templates, a callable, or None" in refusal(key=key)

    @pytest.mark.parametrize(
        ("also", "text"),
        [
            (
                ["farm"],
                "lock_also = ['farm'] is not allowed; allowed: a list of Also(key, limit=...) or Also(key, rate=",
            ),
            (Also("farm"), "lock_also"),
            ([Also("")], "lock_also[0].key"),
            ([Also("farm"), Also("api", limit=0)], "lock_also[1].limit"),
            ([Also("farm", limit=51)], "lock_also[0].limit"),
            ([Also("farm", rate="often")], "lock_also[0].rate"),
            (
                [Also("farm", 5, "5/m")],
                "lock_also[0]: a rate with a limit is not allowed: use an Also for each, with a key of its own",
            ),
        ],
    )
    def test_an_also_that_is_none(self, also: Any, text: str) -> None:
        assert text in refusal(key="a", also=also)

    @pytest.mark.parametrize("templates", [[], [f"k{n}" for n in range(9)], ["a", 7], [["a"]], ()])
    def test_what_locked_cannot_name(self, templates: Any) -> None:
        with pytest.raises(LockConfigError, match="a template, or a list of 1 to 8 templates, names what is locked"):
            locked(templates)

    def test_a_task_whose_template_names_an_unknown_parameter(self) -> None:
        for key in (["a", "b:{sourc}"], "b:{sourc}"):
            with pytest.raises(LockConfigError, match="sourc"):
                key_maker(transfer, lock_key=key if isinstance(key, str) else key[1])


def test_only_what_may_have_several_keys_takes_the_longer_way() -> None:
    for options, may in (
        ({}, False),
        ({"key": "a"}, False),
        ({"key": ["a"]}, True),
        ({"key": lambda _: "a"}, True),
        ({"key": lambda _: "a", "scope": "job"}, False),
        ({"key": "a", "also": [Also("farm")]}, True),
    ):
        assert may_have_several(resolve_options("bank.transfer", options, {})) is may
