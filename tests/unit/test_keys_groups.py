"""The names of groups, from `lock_fair`."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from celery_redislock.errors import LockConfigError, LockKeyError
from celery_redislock.keys.key_maker import DIGEST, MAX_NAME

from .wire import SECRET, key_maker


def task(customer: Any, region: Any = "eu", path: Any = "") -> None: ...


def other(path: Any, customer: Any = None) -> None: ...


def group_of(lock_fair: str, *values: Any, of: Any = task, **key: Any) -> str:
    maker = key_maker(of, **(key or {"lock_key": "imports"}))
    return maker.groups(lock_fair)(maker.bind(values, {}))


def refusal(lock_fair: str, **key: Any) -> str:
    with pytest.raises(LockConfigError) as refused:
        group_of(lock_fair, 1, **key)
    return str(refused.value)


def test_a_parameter_makes_a_digest_that_does_not_show_its_value() -> None:
    group = group_of("customer", SECRET)
    assert len(group) == DIGEST
    assert SECRET not in group
    assert group == group_of("customer", SECRET, "us", "a path")
    assert group != group_of("customer", SECRET + "2")


def test_equal_values_are_one_group_in_all_tasks() -> None:
    assert group_of("customer", 7) == group_of("customer", "a path", 7, of=other)


@pytest.mark.parametrize(("one", "two"), [(1, "1"), (1, True), (None, ""), ([1], [1, 1])])
def test_different_values_are_different_groups(one: Any, two: Any) -> None:
    assert group_of("customer", one) != group_of("customer", two)


def test_a_value_is_the_same_group_before_and_after_its_json() -> None:
    assert group_of("customer", (1, 2)) == group_of("customer", [1, 2])
    assert group_of("customer", UUID(int=7)) == group_of(
        "customer", {"__type__": "uuid", "__value__": {"hex": f"{7:032x}"}}
    )


def test_a_template_makes_a_group_that_can_be_read() -> None:
    assert group_of("{region}:{customer}", 7) == "eu:7"
    assert group_of("of {customer}", "a b:{c}") == "of a%20b%3A%7Bc%7D"
    assert len(group_of("{customer}", "x" * 1000)) == MAX_NAME


def test_what_cannot_be_a_group_is_refused_without_its_value() -> None:
    with pytest.raises(
        LockKeyError,
        match=r"^t: parameter 'customer' cannot be a group: a value of type object cannot be encoded as JSON; "
        "group by another parameter$",
    ):
        group_of("customer", object())
    with pytest.raises(LockKeyError) as refused:
        group_of("{customer}", [SECRET])
    assert SECRET not in str(refused.value)
    assert "a lock_fair template takes str, int, UUID and date; convert it, or name it alone" in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        {"lock_args": ["customer"]},
        {"lock_args": ["customer", "region"]},
        {"lock_args": None},
        {"lock_key": "imports:{customer}"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("lock_fair", ["customer", "of {customer}"])
def test_a_group_that_is_all_of_the_key_is_refused(lock_fair: str, key: dict[str, Any]) -> None:
    assert "all calls with one key are in one group; set lock_args or lock_key to what the groups share" in refusal(
        lock_fair, **key
    )


@pytest.mark.parametrize(
    "key",
    [{"lock_args": []}, {"lock_args": ["region"]}, {"lock_key": "{region}"}, {"lock_key": str}],
    ids=repr,
)
def test_a_group_that_says_more_than_the_key_is_allowed(key: dict[str, Any]) -> None:
    assert group_of("{region}/{customer}", 7, **key) == "eu/7"


@pytest.mark.parametrize(
    ("lock_fair", "told"),
    [
        ("client", "lock_fair names 'client', which is not one of its parameters: customer, region, path"),
        ("{client}", "lock_fair names 'client', which is not one of its parameters"),
        ("", "lock_fair = '': it is empty; only plain parameter names between braces are allowed"),
        ("no field", "lock_fair = 'no field' names no parameter: put one between braces, as in"),
        ("{customer", "lock_fair = '{customer': only plain parameter names between braces are allowed"),
        ("{customer}{region}", "put a separator between {customer} and {region}"),
    ],
)
def test_what_names_no_group_is_refused_with_what_to_do(lock_fair: str, told: str) -> None:
    assert told in refusal(lock_fair)


@pytest.mark.parametrize("lock_fair", ["{customer", "{colour}", "colour", "eu"])
def test_the_refusal_of_a_group_names_the_task_and_the_option(lock_fair: str) -> None:
    assert refusal(lock_fair).startswith("t: lock_fair ")


def test_the_refusal_of_a_value_in_a_template_names_the_task() -> None:
    with pytest.raises(LockKeyError, match=r"^t: parameter 'customer' is a list; a lock_fair template takes"):
        group_of("{customer}", [])
