"""Default names: the digest over a task's bound arguments."""

from __future__ import annotations

import enum
import math
from collections import namedtuple
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from hashlib import sha256
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.utils.json import register_type
from pydantic import BaseModel

from celery_redislock.errors import LockConfigError, LockKeyError
from celery_redislock.keys.key_maker import MAX_NAME

from .wire import SECRET, key_maker, over_the_wire, wire_form

AN_ID = UUID("12345678-1234-5678-1234-567812345678")
BERLIN = timezone(timedelta(hours=2))


def task(a: Any, b: Any = 2, *, c: Any = None) -> None: ...


def one(value: Any) -> None: ...


make_name = key_maker(task).name


def name_of(value: Any) -> str:
    """The name of a call with one argument."""
    return key_maker(one).name((value,), {})


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Shade(enum.StrEnum):
    DARK = "dark"


class Tone(str, enum.Enum):  # noqa: UP042 - what people had before StrEnum
    HIGH = "high"


class Size(float, enum.Enum):
    WIDE = 1.5


Point = namedtuple("Point", "x y")


class Money:
    """Registered with kombu: the worker gets it back as it was."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


class Percent:
    """Registered with kombu as a pure transformation: the worker gets a string."""


class Described:
    """kombu writes what `__json__` returns."""

    def __json__(self) -> Any:
        return {"when": date(2026, 1, 2), "pair": (1, 2), "bytes": b"abc"}


class DescribedModel(Described):
    """Like a pydantic model with a hook of its own, which comes before `model_dump` for kombu."""

    def model_dump(self, **_: Any) -> Any:
        return {"other": "form"}


class DescribedId(UUID):
    """A type that kombu knows, with a hook that comes before it."""

    def __json__(self) -> Any:
        return f"id {self.hex}"


class DescribedText(str):
    """kombu writes a text as it is, and does not ask it."""

    __slots__ = ()

    def __json__(self) -> Any:
        return "not asked for"


class RegisteredModel:
    """Like a pydantic model that the application registered with kombu."""

    def model_dump(self, **_: Any) -> Any:
        return {"other": "form"}


register_type(Money, "tests.Money", lambda money: money.cents, Money)
register_type(Percent, None, lambda _: "42 %")
register_type(RegisteredModel, None, lambda _: "registered")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2), {}),
        ((1, 2), {"c": None}),
        ((), {"a": 1}),
        ((), {"b": 2, "a": 1}),
        ((1,), {"b": 2}),
        ((), {"c": None, "b": 2, "a": 1}),
    ],
)
def test_positional_and_keyword_and_defaulted_arguments_give_one_name(args: Any, kwargs: Any) -> None:
    assert make_name(args, kwargs) == make_name((1,), {})


CARRIED = {
    "tuple": (1, 2, [3]),
    "dict keys": {1: 2, None: 3, False: 4, 1.5: 5},
    "dict keys that become one": {1: "first", "1": "last"},
    "UUID": AN_ID,
    "naive datetime": datetime(2026, 1, 2, 3, 4, 5, 6),
    "aware datetime": datetime(2026, 1, 2, tzinfo=BERLIN),
    "UTC datetime": datetime(2026, 1, 2, tzinfo=UTC),
    "date": date(2026, 1, 2),
    "time": time(3, 4, 5),
    "aware time": time(3, 4, tzinfo=BERLIN),
    "Decimal": Decimal("1.10"),
    "utf-8 bytes": b"text",
    "other bytes": b"\xff\x00",
    "NaN": math.nan,
    "infinity": -math.inf,
    "int of 4001 digits": 10**4000,
    "surrogates": "\ud83d\ude00 \ud800 \u2028",
    "IntEnum": Level.LOW,
    "StrEnum": Shade.DARK,
    "str Enum": Tone.HIGH,
    "float Enum": Size.WIDE,
    "Enum dict keys": {Level.LOW: 1, Shade.DARK: 2, Tone.HIGH: 3},
    "namedtuple": Point(1, AN_ID),
    "kombu type with decoder": Money(5),
    "kombu type as a pure transformation": Percent(),
    "__json__": Described(),
    "model with __json__": DescribedModel(),
    "UUID with __json__": DescribedId(int=7),
    "text with __json__": DescribedText("a text"),
    "model registered with kombu": RegisteredModel(),
    "nested": {"a": [(AN_ID, {"b": (b"\xff", Decimal(1))}), Point(Money(1), Shade.DARK)]},
}


@pytest.mark.parametrize("value", CARRIED.values(), ids=CARRIED)
def test_publisher_and_worker_make_one_name(value: Any) -> None:
    """The worker has what kombu's JSON made of the caller's own objects."""
    received, _ = over_the_wire([value], {})
    assert name_of(value) == name_of(*received)


def test_different_values_of_every_type_give_different_names() -> None:
    values: list[Any] = [
        *(1, "1", True, 1.0, "True", "true", 0, "0", False, 0.0, -1),
        *(None, "None", "null", "", [], {}, [[]], [{}], [None], {"a": None}, {"a": []}),
        *(math.nan, "NaN", math.inf, -math.inf),
        *([1, 2], [2, 1], ["1", 2], {"1": 2}, {"1": "2"}, {"2": 1}),
        *(AN_ID, str(AN_ID), AN_ID.hex, b"1", b"12", b"13", b"\xff", "/w=="),
        *(date(2026, 1, 2), datetime(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02", time(0), "00:00:00"),
        *(Decimal(1), Decimal("1.0"), "1.0"),
        *(Money(1), Money(2), Described()),
    ]
    names = {name_of(value): value for value in values}
    assert len(names) == len(values), "one of them is missing: " + ", ".join(map(repr, names.values()))


@pytest.mark.parametrize(
    ("value", "same"),
    [
        ((1, (2,)), [1, [2]]),
        ({1: 2}, {"1": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Shade.DARK, "dark"),
        (Level.LOW, 1),
        (Point(1, 2), [1, 2]),
        (Percent(), "42 %"),
    ],
)
def test_values_with_one_wire_form_give_one_name(value: Any, same: Any) -> None:
    assert name_of(value) == name_of(same)


NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (AN_ID, str(AN_ID)),
        (date(2026, 1, 2), "2026-01-02"),
        (1, 1.0),
        (1, "1"),
        (Decimal("1.0"), Decimal("1.00")),
        (NOON, NOON.astimezone(BERLIN)),
        (NOON, NOON.replace(tzinfo=None)),
    ],
)
def test_what_people_take_for_the_same_makes_different_names(one: Any, other: Any) -> None:
    """docs/choosing.md says so, and what to do about it."""
    assert name_of(one) != name_of(other)


class Model(BaseModel):
    """What a publisher may have where the worker has a dict."""

    id: UUID
    day: date


def test_a_pydantic_model_counts_as_its_json_dump() -> None:
    """Which is what a task is sent of it, by Celery 5.7 with ``pydantic=True`` or by the caller."""
    model = Model(id=AN_ID, day=date(2026, 1, 2))
    assert name_of(model) == name_of({"id": str(AN_ID), "day": "2026-01-02"}) == name_of(model.model_dump(mode="json"))


def test_an_argument_is_not_taken_for_another_parameters() -> None:
    assert make_name((1, 2), {"c": 3}) != make_name((1, 3), {"c": 2})


_fixed_offsets = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(),
    st.binary(max_size=8),
    st.uuids(),
    st.dates(),
    st.times(timezones=st.none() | _fixed_offsets),
    st.datetimes(timezones=st.none() | _fixed_offsets),
    st.decimals(),
    st.sampled_from([*Level, *Shade, *Tone, *Size]),
)
_dict_keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.booleans(), st.none(), st.floats())
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_dict_keys, inner, max_size=4)
    ),
    max_leaves=8,
)


@given(a=_values, b=_values, c=_values)
def test_any_call_that_json_carries_has_one_name_on_both_sides(a: Any, b: Any, c: Any) -> None:
    """The publisher's own arguments and what came through kombu's serializer give the same name."""
    assert make_name((a, b), {"c": c}) == make_name(*over_the_wire((a,), {"b": b, "c": c}))


@given(_values, _values)
@example(1, True)
@example([], {})
@example({1: 1.0}, {"1": 1})
@example((1, 2), [1, 2])
def test_names_are_equal_exactly_where_the_wire_forms_are(one: Any, other: Any) -> None:
    assert (name_of(one) == name_of(other)) == (wire_form(one) == wire_form(other))


_few = st.recursive(
    st.sampled_from([0, 1, True, False, None, "1", "", 1.0, b"1"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner)
        | st.dictionaries(st.sampled_from(["1", "", 1, True, None]), inner, max_size=2)
    ),
    max_leaves=3,
)


@given(_few, _few)
def test_names_of_lookalikes_are_equal_exactly_where_the_wire_forms_are(one: Any, other: Any) -> None:
    """As above, with values so few that most pairs are nearly equal."""
    assert (name_of(one) == name_of(other)) == (wire_form(one) == wire_form(other))


def _circular() -> list[Any]:
    circular: list[Any] = [SECRET]
    circular.append(circular)
    return circular


def _generated() -> Iterator[str]:
    yield SECRET


class Secretive:
    def __repr__(self) -> str:
        return SECRET


class Failing:
    """Its encoder raises `error`, which shows the value."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __json__(self) -> Any:
        raise self.error(SECRET)


NOT_CARRIED = {
    "object": Secretive(),
    "set": {SECRET},
    "generator": _generated(),
    "plain Enum": Colour.RED,
    "circular list": _circular(),
    "int of 5001 digits": 10**5000,
    "complex": 1 + 2j,
    "tuple as dict key": {(SECRET,): 1},
    "UUID as dict key": {AN_ID: 1},
    "int of 5001 digits as dict key": {10**5000: 1},
    "nested": [{"deep": Secretive()}],
    "ValueError in __json__": Failing(ValueError),
    "KeyError in __json__": Failing(KeyError),
    "AttributeError in __json__": Failing(AttributeError),
}


@pytest.mark.parametrize("value", NOT_CARRIED.values(), ids=NOT_CARRIED)
def test_what_json_cannot_carry_is_refused_by_the_parameters_name_without_its_value(value: Any) -> None:
    with pytest.raises(LockKeyError) as refused:
        make_name((1,), {"b": value})
    message = str(refused.value)
    assert message.startswith("t: ")
    assert "'b'" in message
    assert "lock_args" in message
    assert SECRET not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"a": 1}), ((1,), {"d": 1}), ((), {"b": 1})],
)
def test_arguments_that_do_not_fit_raise_type_error(args: Any, kwargs: Any) -> None:
    """So that Celery's own error for them is what the user sees."""
    with pytest.raises(TypeError):
        make_name(args, kwargs)


def test_lock_args_take_only_their_parameters_into_the_name() -> None:
    name = key_maker(task, lock_args=["a", "c"]).name
    assert name((1, 2), {}) == name((1,), {"b": object()})
    assert name((1,), {"c": 3}) != name((1,), {})
    assert name((2,), {}) != name((1,), {})


def test_the_order_of_lock_args_does_not_matter() -> None:
    one, other = key_maker(task, lock_args=["a", "b"]), key_maker(task, lock_args=("b", "a"))
    assert one.name((1, 2), {}) == other.name((1, 2), {})


def test_empty_lock_args_give_one_name_for_all_calls() -> None:
    name = key_maker(task, lock_args=()).name
    assert name((1, 2), {}) == name((object(),), {"c": 3})


def test_an_unknown_name_in_lock_args_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(LockConfigError, match=r"^t: lock_args names 'd', .* its parameters: a, b, c$"):
        key_maker(task, lock_args=["a", "d"])


def test_a_task_without_parameters_has_one_name() -> None:
    assert key_maker(lambda: None).name((), {}).startswith("t:")


def test_the_same_call_of_two_tasks_has_two_names() -> None:
    assert name_of(1) != key_maker(one, task="other").name((1,), {})


def test_the_encoding_is_format_version_1() -> None:
    """A changed digest splits every lock in a rolling upgrade: then the format version must change as well."""
    call = (7, "é"), {"c": [AN_ID, datetime(2026, 1, 2, tzinfo=UTC), b"\xff", (None, True, 1.5), {2: Decimal("1.0")}]}
    encoded = (
        '{"a":7,"b":"\\u00e9","c":[{"__type__":"uuid","__value__":{"hex":"12345678123456781234567812345678"}},'
        '{"__type__":"datetime","__value__":"2026-01-02T00:00:00+00:00"},{"__type__":"bytes","__value__":"/w=="},'
        '[null,true,1.5],{"2":{"__type__":"decimal","__value__":"1.0"}}]}'
    )
    assert make_name(*call) == f"t:{sha256(f'1:{encoded}'.encode()).hexdigest()[:32]}"
    assert make_name(*call) == "t:28284a73420d4ebb00f1e8dbfe88664b"
    assert key_maker(task, lock_args=()).name((7,), {}) == f"t:{sha256(b'1:{}').hexdigest()[:32]}"


@pytest.mark.parametrize("length", [150, 168, 200, 1000])
def test_a_long_task_name_is_shortened_and_still_tells_tasks_and_calls_apart(length: int) -> None:
    names = {key_maker(one, task="t" * length + suffix).name((value,), {}) for suffix in ("x", "y") for value in (1, 2)}
    assert len(names) == 4
    assert max(map(len, names)) <= MAX_NAME == 200
