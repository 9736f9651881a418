"""The wire: the shape that Celery's JSON gives to arguments, the text of that shape, and its digest.

This module makes the text itself, and the text has a version. If kombu made the text, two workers with different
versions of kombu might make two names of one call, and both would run.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from hashlib import sha256
from typing import Any
from uuid import UUID

from kombu.utils.json import dumps as kombu_dumps

#: An int with more bits cannot make a name: Python refuses to write an int of more than 4300 digits as text.
MAX_INT_BITS = 14_000
#: The version of the encoding below, which is a part of each digested text. Whoever changes the encoding must change
#: the version, and thereby changes every default name.
FORMAT_VERSION = "1"
#: What kombu writes for each type: its marker and its text. The order matters, for a datetime is a date as well. The
#: functions are those of the types themselves, so that a subclass that overrides one makes the same text, as in kombu.
#: Source: `kombu.utils.json`.
_MARKERS: Sequence[tuple[type, str, Callable[[Any], Any]]] = (
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
    (UUID, "uuid", lambda value: {"hex": value.hex}),
    (Decimal, "decimal", str),
    (bytes, "bytes", lambda value: b64encode(value).decode()),
)
#: Makes text of values in the shape of the wire; the keys of a dict are sorted. `wire` has copied them, so that none of
#: them contains itself.
encode = json.JSONEncoder(check_circular=False, sort_keys=True, separators=(",", ":")).encode


def wire(value: Any) -> Any:
    """`value` in the shape that Celery's JSON gives it: only dicts with string keys, lists and plain values.

    Raises:
        TypeError, ValueError, RecursionError: `value` cannot be encoded.
        Exception: Whatever a type's own ``__json__`` raises.
    """
    kind = type(value)
    if kind is str or value is None or kind is bool or kind is float:
        return value
    if kind is int:
        if value.bit_length() > MAX_INT_BITS:
            raise ValueError("an int too long for text")
        return value
    if isinstance(value, list | tuple):
        return [wire(item) for item in value]
    if isinstance(value, dict):
        return {_wire_key(key): wire(item) for key, item in value.items()}
    return _wire_object(value)


def _wire_key(key: Any) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, int | float):  # as json.dumps does: 1 -> "1", True -> "true"
        return encode(key)
    raise TypeError(f"a dict key of type {type(key).__name__}")


def _wire_object(value: Any) -> Any:
    if hasattr(value, "__json__"):  # kombu asks for this method first
        if not isinstance(value, str | int | float):
            return wire(value.__json__())
    else:
        for kind, marker, text_of in _MARKERS:
            if isinstance(value, kind):
                return {"__type__": marker, "__value__": text_of(value)}
    try:  # kombu knows the subclasses of str, int and float, and the types that an application has registered with it
        encoded = kombu_dumps(value)
    except TypeError:
        if not hasattr(value, "model_dump"):
            raise
        # A pydantic model: for a task with pydantic=True, Celery sends what `model_dump` returns.
        return wire(value.model_dump(mode="json"))
    return wire(json.loads(encoded))


def digest(text: str) -> str:
    """32 hexadecimal digits: a SHA-256 of `text` and `FORMAT_VERSION`, cut."""
    return sha256(f"{FORMAT_VERSION}:{text}".encode()).hexdigest()[:32]
