"""Names from a callable `lock_key`."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from itertools import product
from operator import itemgetter
from typing import Any
from uuid import UUID

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from hypothesis import given
from hypothesis import strategies as st

from celery_redislock.errors import LockKeyError, LockLost, LockReplaced
from celery_redislock.keys.key_maker import MAX_NAME

from .wire import SECRET, hostile_text, key_maker, over_the_wire


def task(a: Any, b: Any = 2, *rest: Any, c: Any = None, **more: Any) -> None: ...


class Tone(str, enum.Enum):  # noqa: UP042 - what people had before StrEnum
    HIGH = "high"


def test_the_callable_gets_a_mapping_of_the_bound_arguments() -> None:
    calls: list[Mapping[str, Any]] = []

    def name(arguments: Mapping[str, Any]) -> str:
        calls.append(arguments)
        return "stock"

    assert key_maker(task, lock_key=name).name((1,), {"c": 3, "d": 4}) == "stock"
    assert [dict(arguments) for arguments in calls] == [{"a": 1, "b": 2, "rest": (), "c": 3, "more": {"d": 4}}]


def test_what_the_callable_returns_is_the_name() -> None:
    assert key_maker(task, lock_key=lambda arguments: f"stock:{arguments['a']}").name((7,), {}) == "stock:7"


def test_an_error_of_the_callable_is_a_lock_key_error_caused_by_it() -> None:
    with pytest.raises(LockKeyError) as refused:
        key_maker(task, lock_key=lambda arguments: arguments["missing"]).name((1,), {})
    line = (lambda: None).__code__.co_firstlineno - 1
    assert str(refused.value) == (f"t: lock_key raised KeyError in test_keys_callable.py, line {line}")
    assert isinstance(refused.value.__cause__, KeyError)


def test_an_error_of_the_callable_is_placed_in_the_callable_and_shows_no_value() -> None:
    """What a library says of a value is in the cause alone."""

    def name(arguments: Mapping[str, Any]) -> str:
        return str(UUID(arguments["a"]))

    with pytest.raises(LockKeyError) as refused:
        key_maker(task, lock_key=name).name((SECRET,), {})
    assert str(refused.value).startswith("t: lock_key raised ValueError in test_keys_callable.py, line ")


def test_an_error_of_a_callable_without_lines_names_the_error_alone() -> None:
    with pytest.raises(LockKeyError, match=r"^t: lock_key raised KeyError$"):
        key_maker(task, lock_key=itemgetter("missing")).name((1,), {})


@pytest.mark.parametrize("struck", [SoftTimeLimitExceeded(), LockLost("k", "gone"), LockReplaced("k", "newer")])
def test_what_strikes_the_body_that_calls_is_no_error_of_the_callable(struck: Exception) -> None:
    def name(arguments: Mapping[str, Any]) -> str:
        raise struck

    with pytest.raises(type(struck)):
        key_maker(task, lock_key=name).name((1,), {})


@pytest.mark.parametrize("name", [lambda: "stock", lambda a, b: "stock"], ids=["no argument", "the task's arguments"])
def test_a_callable_that_cannot_be_called_with_the_arguments_is_told_what_it_gets(name: Any) -> None:
    said = r"^t: lock_key raised TypeError; it must take one argument, a mapping of the call's arguments by name$"
    with pytest.raises(LockKeyError, match=said):
        key_maker(task, lock_key=name).name((1,), {})


@pytest.mark.parametrize("made", [None, "", 7, b"stock", {"stock"}], ids=repr)
def test_what_is_no_text_is_refused_by_its_type(made: Any) -> None:
    with pytest.raises(LockKeyError, match=f"^t: lock_key must return a non-empty str, not {type(made).__name__}$"):
        key_maker(task, lock_key=lambda _: made).name((1,), {})


def test_a_str_enum_makes_the_name_that_its_value_makes() -> None:
    """The publisher has the member, the worker its value."""
    make_name = key_maker(task, lock_key=lambda arguments: arguments["a"]).name
    received, _ = over_the_wire([Tone.HIGH], {})
    assert f"{make_name([Tone.HIGH], {})}" == f"{make_name(received, {})}" == "high"


def name_of(made: str) -> str:
    return key_maker(task, lock_key=lambda _: made).name((1,), {})


def test_what_looks_like_an_escape_is_another_name_than_what_is_escaped() -> None:
    assert (name_of("{"), name_of("%7B")) == ("%7B", "%257B")


@pytest.mark.parametrize("name", ["100%", "%", "%%", "%7", "%x7B", "50% off", "%7b", "a:b é/ü"])
def test_usual_names_stay_as_they_are(name: str) -> None:
    assert name_of(name) == name


def test_different_texts_never_make_one_name() -> None:
    """Every short text over what is escaped and what escapes are made of."""
    texts = ["".join(letters) for length in range(1, 5) for letters in product("{}%27B5\n", repeat=length)]
    assert len({name_of(text) for text in texts}) == len(texts)


@given(hostile_text("{}%27BD5b\n\u2028\ud800", st.characters(exclude_categories=()), max_size=40).filter(bool))
def test_each_text_can_be_told_from_its_name(text: str) -> None:
    """So no two texts make one name."""
    name = name_of(text)
    escapes = re.compile("(?:%[0-9A-F]{2})+")
    assert len(name) == MAX_NAME or text == escapes.sub(
        lambda found: bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "surrogatepass"), name
    )


def test_long_names_are_shortened_and_still_differ() -> None:
    make_name = key_maker(task, lock_key=lambda arguments: "x" * 500 + arguments["a"]).name
    one, other = make_name(("1",), {}), make_name(("2",), {})
    assert one != other
    assert len(one) <= MAX_NAME


@pytest.mark.parametrize("made", ["\ud800", "\udfff" * 300], ids=["short", "long"])
def test_a_name_with_surrogates_can_be_sent_or_is_refused(made: str) -> None:
    try:
        name = key_maker(task, lock_key=lambda _: made).name((1,), {})
    except LockKeyError:
        return
    assert name.encode("utf-8")


def test_a_callable_that_returns_several_names_makes_several_and_one_that_returns_a_text_makes_one() -> None:
    long = "x" * (MAX_NAME + 1)
    maker = key_maker(task, lock_key=lambda arguments: arguments["a"])
    assert maker.names_of(maker.bind(("stock:1",), {})) == ["stock:1"]
    first, second = maker.names_of(maker.bind((["stock:1", long],), {}))
    assert first == "stock:1"
    assert (len(second), second[:100]) == (MAX_NAME, "x" * 100)


@pytest.mark.parametrize(("made", "what"), [(["a", 7], "a list of int"), ([""], "a list of str"), ([], "list")])
def test_a_list_of_anything_but_names_is_refused(made: Any, what: str) -> None:
    maker = key_maker(task, lock_key=lambda arguments: made)
    with pytest.raises(LockKeyError, match=rf"^t: lock_key must return a non-empty str, not {what}$"):
        maker.names_of(maker.bind((1,), {}))


def test_several_names_are_refused_where_a_run_may_have_only_one() -> None:
    with pytest.raises(LockKeyError, match=r"^t: lock_key returned several keys, which is not allowed with lock_scope"):
        key_maker(task, lock_key=lambda arguments: ["a", "b"]).name((1,), {})
