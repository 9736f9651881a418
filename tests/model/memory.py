"""What makes an exploration fast: it calls the same functions a million times, mostly with values that it knows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")
Record = TypeVar("Record", bound=tuple[Any, ...])
_CACHES: list[Any] = []


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Remember what `function` returns, until the next exploration."""
    cached = functools.cache(function)
    _CACHES.append(cached)
    return cached


def quick(cls: type[Record]) -> type[Record]:
    """Give a NamedTuple a `_replace` that takes half as long."""
    index = {name: number for number, name in enumerate(cls._fields)}  # type: ignore[attr-defined]
    new = tuple.__new__

    def _replace(self: Record, **changes: object) -> Record:
        values = list(self)
        for name, value in changes.items():
            values[index[name]] = value
        return new(cls, values)

    cls._replace = _replace  # type: ignore[attr-defined]
    return cls


def forget() -> None:
    """Forget all that was remembered: the garbage collector need not look at it."""
    for cached in _CACHES:
        cached.cache_clear()
