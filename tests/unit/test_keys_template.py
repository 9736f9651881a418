"""Names from a `lock_key` template."""

from __future__ import annotations

import enum
import unicodedata
from datetime import date, datetime, time
from decimal import Decimal
from itertools import product
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redislock.errors import LockConfigError, LockKeyError
from celery_redislock.keys.arguments import MAX_INT_BITS
from celery_redislock.keys.key_maker import MAX_NAME

from .wire import SECRET, hostile_text, key_maker


def task(a: Any, b: Any = 2, *rest: Any, **more: Any) -> None: ...


def name_of(template: str, *values: Any) -> str:
    return key_maker(task, lock_key=template).name(values, {})


class Level(enum.IntEnum):
    LOW = 1


class Shade(enum.StrEnum):
    DARK = "dark"


class Tone(str, enum.Enum):  # noqa: UP042 - what people had before StrEnum
    HIGH = "high"


MALFORMED = {
    "no name": "{}",
    "a number": "{0}",
    "attribute": "{a.b}",
    "index": "{a[0]}",
    "conversion": "{a!r}",
    "format spec": "{a:03d}",
    "nested format spec": "{a:{b}}",
    "conversion and spec": "{a!r:>3}",
    "expression": "{a + 1}",
    "blanks": "{ a }",
    "open brace at the end": "x{",
    "open brace before a name": "{a",
    "closed brace": "a}",
    "closed twice": "{a}}",
    "no conversion after its mark": "{a!}",
    "escaped braces": "{{a}}:{a}",
    "an escaped brace first": "}}{a}",
    "empty": "",
}


@pytest.mark.parametrize("template", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_template_is_refused_with_task_option_value_and_what_is_allowed(template: str) -> None:
    with pytest.raises(LockConfigError) as refused:
        key_maker(task, lock_key=template)
    message = str(refused.value)
    assert message.startswith(f"t: lock_key = {template!r}: ")
    assert "only plain parameter names between braces are allowed" in message


@pytest.mark.parametrize("separator", ["", "5", "A", "3A", "%", "%25"])
def test_two_fields_without_a_separator_that_no_value_can_contain_are_refused(separator: str) -> None:
    """``("ab", "c")`` and ``("a", "bc")`` would be one name; so would values whose escapes hold the separator."""
    with pytest.raises(LockConfigError, match=r"^t: lock_key = .*: put a separator between {a} and {b}, such as ':'$"):
        key_maker(task, lock_key=f"{{a}}{separator}{{b}}")


def test_an_unknown_parameter_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(LockConfigError, match=r"^t: lock_key names 'c', .* its parameters: a, b, rest, more$"):
        key_maker(task, lock_key="{a}:{c}")


def test_a_template_and_lock_args_together_are_refused() -> None:
    with pytest.raises(LockConfigError, match=r"^t: lock_key and lock_args are both set"):
        key_maker(task, lock_key="{a}", lock_args=["a"])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("stock:{a}", "stock:1"),
        ("{a}", "1"),
        ("{b}-{a}", "2-1"),
        ("{a}/{a}", "1/1"),
        ("the only one", "the only one"),
    ],
)
def test_a_template_is_filled_in_without_the_tasks_name(template: str, name: str) -> None:
    assert name_of(template, 1) == name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ASK-7_x.y~é", "ASK-7_x.y~é"),
        ("", ""),
        (-7, "-7"),
        (0, "0"),
        (Level.LOW, "1"),
        (Shade.DARK, "dark"),
        (Tone.HIGH, "high"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (date(2026, 1, 2), "2026-01-02"),
        ("a:b c%", "a%3Ab%20c%25"),
        ("{a}", "%7Ba%7D"),
    ],
)
def test_str_int_uuid_and_date_are_filled_in(value: Any, text: str) -> None:
    assert name_of("stock:{a}", value) == f"stock:{text}"


@pytest.mark.parametrize(
    "value",
    [True, 1.5, None, datetime(2026, 1, 2), time(3), Decimal(1), [SECRET], (SECRET,), {SECRET: 1}, SECRET.encode()],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_by_the_parameters_name_without_the_value(value: Any) -> None:
    with pytest.raises(LockKeyError) as refused:
        name_of("stock:{a}", value)
    message = str(refused.value)
    assert message.startswith(f"t: parameter 'a' is a {type(value).__name__}; ")
    assert "takes str, int, UUID and date" in message
    assert SECRET not in message


def test_an_int_too_long_for_text_is_refused_by_the_parameters_name() -> None:
    with pytest.raises(LockKeyError, match=r"^t: .*'a'"):
        name_of("stock:{a}", 10**5000)


@pytest.mark.parametrize("field", ["rest", "more"])
def test_the_values_of_star_parameters_are_refused(field: str) -> None:
    with pytest.raises(LockKeyError, match=f"'{field}' is a "):
        name_of(f"{{{field}}}", 1)


#: Values made of separators, of the escape's own characters and of what may not appear raw.
_hostile = hostile_text(
    "-:%{}\n\r\x00\x1b\x9b\u2028\ud800\udfff 123ABab", st.characters(exclude_categories=()), max_size=100
) | st.text("ab-:%", min_size=150, max_size=250)


@pytest.mark.parametrize("template", ["{a}-{b}", "{a}:{b}", "x:{a}--{b}:y", "{a}x{b}", "{a}^{b}", "{a}]{b}", "{a} {b}"])
@given(one=st.tuples(_hostile, _hostile), other=st.tuples(_hostile, _hostile))
def test_different_values_never_give_one_name(template: str, one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (name_of(template, *one) == name_of(template, *other)) == (one == other)


@pytest.mark.parametrize("separator", ["-", ":", "--", "]", "^", "\\", "é", "\n", "5-", "%-", "-%", ":%3", "A:3"])
def test_no_value_imitates_a_separator(separator: str) -> None:
    """Every pair of short values over the separator's and the escape's own characters."""
    make_name = key_maker(task, lock_key=f"{{a}}{separator}{{b}}").name
    alphabet = sorted({*separator, *":%25A3"})
    values = ["".join(letters) for length in range(4) for letters in product(alphabet, repeat=length)]
    calls = {make_name((a, b), {}): (a, b) for a in values[:60] for b in values}
    for a, b in product(values[:60], values):
        assert calls[make_name((a, b), {})] == (a, b)


@given(_hostile.filter(bool))
def test_control_characters_spaces_and_braces_of_a_value_never_appear_raw(value: str) -> None:
    """They would forge log lines, drive terminals and end the key's hash tag."""
    name = name_of("{a}", value)
    assert not {character for character in name if unicodedata.category(character) in {"Cc", "Zs", "Zl", "Zp"}}
    assert not {"{", "}"} & set(name)


def test_lone_surrogates_are_escaped_and_kept_apart() -> None:
    """JSON carries them; a Redis key is UTF-8."""
    names = {name_of("stock:{a}", value) for value in ("\ud800", "\udfff", "?", "\ud800" * 300, "\udfff" * 300)}
    assert len(names) == 5
    assert all(name.encode("utf-8") for name in names)


@given(st.integers(0, 400), st.text(min_size=1, max_size=3), st.text(min_size=1, max_size=3))
def test_long_names_are_shortened_and_still_differ(length: int, one: str, other: str) -> None:
    """Also where they differ in their ends alone."""
    first, second = (name_of("stock:{a}", "x" * length + end) for end in (one, other))
    assert (first == second) == (one == other)
    assert max(len(first), len(second)) <= MAX_NAME == 200


def test_a_name_is_left_readable_up_to_199_characters() -> None:
    assert name_of("{a}", "x" * 199) == "x" * 199
    assert name_of("{a}", "x" * 200) != "x" * 200


def test_an_empty_name_is_refused() -> None:
    """It would be an empty hash tag, which counts as none."""
    with pytest.raises(LockKeyError, match=r"^t: lock_key makes an empty name from"):
        name_of("{a}", "")


def test_no_other_values_imitate_a_shortened_name() -> None:
    """Whoever chooses the values must not be able to share the lock of others on purpose."""
    shortened = name_of("{a}:{b}", "x" * 300, "y")
    assert name_of("{a}:{b}", *shortened.split(":")) != shortened


def test_a_value_is_escaped_only_where_it_could_be_taken_for_something_else() -> None:
    plain = "ABCXYZabcxyz0189.-_/+"
    assert name_of("stock:{a}", plain) == f"stock:{plain}"
    assert name_of("{a}+{b}", "1+2", 2) == "1%2B2+2"


def test_a_malformed_template_is_refused_with_an_example() -> None:
    allowed = 'only plain parameter names between braces are allowed, as in "stock:{sku}"'
    for template, why in [("{a!r}", ""), ("", "it is empty; ")]:
        with pytest.raises(LockConfigError) as refused:
            name_of(template, 1)
        assert str(refused.value) == f"t: lock_key = {template!r}: {why}{allowed}"


def test_the_longest_int_that_has_a_text_makes_a_name_and_a_longer_one_is_refused() -> None:
    longest = 2**MAX_INT_BITS - 1
    assert len(name_of("{a}", longest)) == MAX_NAME
    assert key_maker(task).name((longest,), {})
    for template in ("{a}", None):
        with pytest.raises(LockKeyError):
            key_maker(task, lock_key=template).name((longest + 1,), {})
