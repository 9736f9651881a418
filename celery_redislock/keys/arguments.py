"""Arguments as text: the wire shape that Celery's JSON gives them, a digest of that, and `lock_key` templates.

The encoding is defined here, not left to kombu, and has a version. Otherwise two workers with different versions of
kombu might make different names for the same call, and both would run it.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from hashlib import sha256
from typing import Any
from uuid import UUID

from kombu.utils.json import dumps as kombu_dumps

from celery_redislock.errors import LockConfigError, LockKeyError

Arguments = Mapping[str, Any]
Namer = Callable[[Arguments], str]

#: An int with more bits cannot be part of a name: Python refuses to convert an int of more than 4300 digits to text.
MAX_INT_BITS = 14_000
#: The version of the encoding below, part of every digested text. Change it whenever the encoding changes; that changes
#: every default name.
FORMAT_VERSION = "1"
#: What kombu writes for each type: a marker and a text. The order matters, since a datetime is also a date. As in
#: kombu, the functions are those of the types listed, so a subclass that overrides one still makes the same text.
#: Source: `kombu.utils.json`.
_MARKERS: Sequence[tuple[type, str, Callable[[Any], Any]]] = (
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
    (UUID, "uuid", lambda value: {"hex": value.hex}),
    (Decimal, "decimal", str),
    (bytes, "bytes", lambda value: b64encode(value).decode()),
)
#: Encodes a value in wire shape as text, with the keys of dicts sorted. `wire` has copied the value, so nothing in it
#: contains itself.
encode = json.JSONEncoder(check_circular=False, sort_keys=True, separators=(",", ":")).encode
#: Matches braces, and text that looks like an escape. A name must not contain braces: the Redis key has
#: the name between braces, which make it the hash tag. Escapes are escaped too, or they would be taken for ours.
UNSAFE = re.compile("[{}]|%(?=[0-9A-F]{2})")


def wire(value: Any) -> Any:
    """Return `value` in the shape that Celery's JSON gives it: only dicts with string keys, lists and plain values.

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
    if hasattr(value, "__json__"):  # kombu checks for this method first
        if not isinstance(value, str | int | float):
            return wire(value.__json__())
    else:
        for kind, marker, text_of in _MARKERS:
            if isinstance(value, kind):
                return {"__type__": marker, "__value__": text_of(value)}
    try:  # kombu handles subclasses of str, int and float, and the types that an application has registered with it
        encoded = kombu_dumps(value)
    except TypeError:
        if not hasattr(value, "model_dump"):
            raise
        # A pydantic model: for a task with pydantic=True, Celery sends the result of `model_dump`.
        return wire(value.model_dump(mode="json"))
    return wire(json.loads(encoded))


def digest(text: str) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 of `FORMAT_VERSION` and `text`."""
    return sha256(f"{FORMAT_VERSION}:{text}".encode()).hexdigest()[:32]


def template_namer(task: str, parameters: Sequence[str], template: str, option: str = "lock_key") -> Namer:
    """Return a function that makes a name by filling arguments into `template`. Such a name is readable in Redis."""
    *filled, (end, _) = parse_template(task, template, option)
    check_parameters(task, option, [field for _, field in filled], parameters)
    # Escape values so that none contains the separator after its field, or ':', the usual separator in keys. Otherwise
    # two different calls could make the same name.
    separators = "".join(_separator(literal) or "" for literal, _ in filled[1:])
    unsafe = re.compile(f"[%:{{}}\\s{re.escape(separators)}]")

    def name(arguments: Arguments) -> str:
        made = ""
        for literal, field in filled:
            made += literal + printable(_template_value(task, option, field, arguments[field]), unsafe)
        if not made + end:
            raise LockKeyError(f"{task}: {option} makes an empty name from these arguments")
        return made + end

    return name


def _separator(literal: str) -> str | None:
    """Return the first character of `literal` that cannot be part of an escape, ``%XX``; None if all can."""
    return next((c for c in literal if c not in "%0123456789ABCDEF"), None)


def parse_template(task: str, template: str, option: str = "lock_key") -> list[tuple[str, str]]:
    """Return the parts of a template: pairs of literal text and the field after it. The last field is ``""``.

    ``"stock:{sku}"`` gives ``[("stock:", "sku"), ("", "")]``.

    Raises:
        LockConfigError: There is something other than a plain parameter name in braces, two fields have no separator
            between them, or the template is empty.
    """
    refused = f"{task}: {option} = {template!r}"
    found = re.split(r"\{(\w+)\}", template)
    literals, fields = found[::2], found[1::2]
    # A brace in what is left belongs to no plain field, and would end the hash tag around the name.
    if not template or set("".join(literals)) & set("{}") or not all(map(str.isidentifier, fields)):
        allowed = 'only plain parameter names between braces are allowed, as in "stock:{sku}"'
        raise LockConfigError(f"{refused}: {'' if template else 'it is empty; '}{allowed}")
    for literal, one, other in zip(literals[1:], fields, fields[1:], strict=False):
        if _separator(literal) is None:
            raise LockConfigError(f"{refused}: put a separator between {{{one}}} and {{{other}}}, such as ':'")
    return [*zip(literals, [*fields, ""], strict=True)]


def _template_value(task: str, option: str, parameter: str, value: Any) -> str:
    """Return the text of `value` in a template's field: the same before and after Celery's JSON."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= MAX_INT_BITS:
        return int.__repr__(value)
    if isinstance(value, UUID) or (isinstance(value, date) and not isinstance(value, datetime)):
        return str(value)
    raise LockKeyError(
        f"{task}: parameter {parameter!r} is a {type(value).__name__}; a {option} template takes str, int, UUID and "
        f"date; convert it, or {'in a task, use a callable lock_key' if option == 'lock_key' else 'name it alone'}"
    )


def check_parameters(task: str, option: str, wanted: Iterable[str], parameters: Sequence[str]) -> None:
    """Check that an option names only parameters of the task.

    Raises:
        LockConfigError: It names something else.
    """
    for name in wanted:
        if name not in parameters:
            raise LockConfigError(
                f"{task}: {option} names {name!r}, which is not one of its parameters: "
                f"{', '.join(parameters) or 'none'}"
            )


def printable(text: str, unsafe: re.Pattern[str]) -> str:
    """Escape the characters of `text` that are `unsafe` or not printable as ``%XX``."""
    text = unsafe.sub(lambda found: _percent(found[0]), text)
    return text if text.isprintable() else "".join(one if one.isprintable() else _percent(one) for one in text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
