"""The shape that Celery's JSON gives to arguments, in an encoding of our own, and its digest.

It is versioned, so that another version of kombu does not split a lock.
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

#: Python refuses to write longer ints as text: 4300 digits.
MAX_INT_BITS = 14_000
#: Part of what is digested. A change of the encoding below changes it, and so every default name.
FORMAT_VERSION = "1"
#: A datetime is a date too, so it comes first; the methods of the base classes, as kombu calls them.
_MARKERS: Sequence[tuple[type, str, Callable[[Any], Any]]] = (
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
    (UUID, "uuid", lambda value: {"hex": value.hex}),
    (Decimal, "decimal", str),
    (bytes, "bytes", lambda value: b64encode(value).decode()),
)
#: Wire values as text, dicts in the order of their keys.
encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def wire(value: Any) -> Any:
    """`value` in the shape that Celery's JSON gives it on the wire: plain JSON values only.

    Raises:
        TypeError, ValueError, RecursionError: It cannot be encoded.
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
    if hasattr(value, "__json__"):  # kombu asks that first
        if not isinstance(value, str | int | float):
            return wire(value.__json__())
    else:
        for kind, marker, encode in _MARKERS:
            if isinstance(value, kind):
                return {"__type__": marker, "__value__": encode(value)}
    try:  # subclasses of str, int and float, and types that an application registered with kombu
        encoded = kombu_dumps(value)
    except TypeError:
        if not hasattr(value, "model_dump"):
            raise
        return wire(value.model_dump(mode="json"))  # a pydantic model: what a task with pydantic=True is sent
    return wire(json.loads(encoded))


def digest(text: str) -> str:
    """32 hexadecimal digits for `text` in this version of the encoding."""
    return sha256(f"{FORMAT_VERSION}:{text}".encode()).hexdigest()[:32]
