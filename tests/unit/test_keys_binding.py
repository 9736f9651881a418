"""Binding calls to parameters: the fast way agrees with `inspect.Signature.bind`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redislock.keys.key_maker import binder

from .wire import key_maker


def none() -> None: ...
def plain(a: Any, b: Any) -> None: ...
def defaulted(a: Any, b: Any = 2, c: Any = None) -> None: ...
def keyword_only(a: Any, *, b: Any, c: Any = 3) -> None: ...
def positional_only(a: Any, b: Any = 2, /, c: Any = 3) -> None: ...
def star_args(a: Any, *b: Any) -> None: ...
def star_kwargs(a: Any, **b: Any) -> None: ...
def everything(a: Any, /, b: Any, *args: Any, c: Any, d: Any = 4, **kwargs: Any) -> None: ...
def same_names(a: Any, /, **b: Any) -> None: ...


@pytest.mark.parametrize(
    "function",
    [none, plain, defaulted, keyword_only, positional_only, star_args, star_kwargs, everything, same_names],
    ids=lambda function: function.__name__,
)
@given(
    args=st.lists(st.integers(), max_size=4),
    kwargs=st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e", "args"]), st.integers(), max_size=4),
)
def test_every_call_is_bound_as_python_binds_it(
    function: Callable[..., Any], args: list[int], kwargs: dict[str, int]
) -> None:
    signature = inspect.signature(function)
    bind = binder("t", signature)
    try:
        expected = signature.bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            bind(args, kwargs)
    else:
        expected.apply_defaults()
        assert bind(args, kwargs) == expected.arguments


def test_the_callers_arguments_and_the_defaults_are_left_alone() -> None:
    bind, kwargs = binder("t", inspect.signature(defaulted)), {"c": 3}
    bind((1,), kwargs)["b"] = "changed"
    assert bind((1,), kwargs) == {"a": 1, "b": 2, "c": 3}
    assert kwargs == {"c": 3}


@pytest.mark.parametrize(
    ("function", "one", "other"),
    [
        (star_args, ((1, 2, 3), {}), ((1, 3, 2), {})),
        (star_kwargs, ((1,), {"x": 1}), ((1,), {"y": 1})),
        (same_names, ((1,), {"a": 2}), ((1,), {"b": 2})),
        (positional_only, ((1, 2), {}), ((1, 3), {})),
        (keyword_only, ((1,), {"b": 1}), ((1,), {"b": 2})),
    ],
)
def test_arguments_of_every_kind_of_parameter_make_the_name(function: Any, one: Any, other: Any) -> None:
    make_name = key_maker(function).name
    assert make_name(*one) != make_name(*other)


@pytest.mark.parametrize(
    ("function", "one", "other"),
    [
        (star_kwargs, ((1,), {"x": 1, "y": 2}), ((), {"y": 2, "x": 1, "a": 1})),
        (positional_only, ((1,), {}), ((1, 2), {"c": 3})),
        (everything, ((1, 2), {"c": 3}), ((1,), {"b": 2, "c": 3, "d": 4})),
    ],
)
def test_ways_to_write_one_call_give_one_name(function: Any, one: Any, other: Any) -> None:
    make_name = key_maker(function).name
    assert make_name(*one) == make_name(*other)


def test_a_star_parameter_in_lock_args_means_all_it_takes() -> None:
    make_name = key_maker(star_args, lock_args=["b"]).name
    assert make_name((1, 2, 3), {}) == make_name((7, 2, 3), {})
    assert make_name((1, 2, 3), {}) != make_name((1, 2), {})
