"""Templates: ``"stock:{sku}"`` and a call's arguments become a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from string import Formatter
from typing import Any
from uuid import UUID

from celery_redislock.errors import LockConfigError, LockKeyError

from .wire import MAX_INT_BITS

Arguments = Mapping[str, Any]
Namer = Callable[[Arguments], str]


def template_namer(task: str, parameters: Sequence[str], template: str) -> Namer:
    """A function that makes a name by filling the arguments into `template`. Such a name can be read in Redis."""
    parts = parse_template(task, template)
    check_parameters(task, "lock_key", [field for _, field in parts if field], parameters)
    # Values are escaped so that none can contain the separator after its field, nor ':', the usual separator of keys:
    # else two different calls could make one name.
    separators = "".join(_separator(literal) or "" for literal, field in parts[1:] if field)
    unsafe = re.compile(f"[%:{{}}\\s{re.escape(separators)}]")

    def name(arguments: Arguments) -> str:
        made = []
        for literal, field in parts:
            made.append(literal)
            if field:
                made.append(printable(_template_value(task, field, arguments[field]), unsafe))
        if not any(made):
            raise LockKeyError(f"{task}: lock_key makes an empty name of these arguments")
        return "".join(made)

    return name


def _separator(literal: str) -> str | None:
    """The first character of `literal` that is no part of an escape, ``%XX``; None where there is none."""
    return next((c for c in literal if c not in "%0123456789ABCDEF"), None)


def parse_template(task: str, template: str) -> list[tuple[str, str]]:
    """The parts of a template: pairs of a literal text and the field that follows it, ``""`` after the last text.

    ``"stock:{sku}"`` gives ``[("stock:", "sku"), ("", "")]``.

    Raises:
        LockConfigError: There is something else than plain parameter names between braces, or no text that separates
            two fields, or the template is empty.
    """
    allowed = 'only plain parameter names between braces are allowed, as in "stock:{sku}"'
    refused = f"{task}: lock_key = {template!r}"
    parts: list[tuple[str, str]] = []
    text = ""
    try:
        for literal, field, spec, conversion in Formatter().parse(template):
            if "{" in literal or "}" in literal:  # a brace would end the hash tag around the name
                raise LockConfigError(f"{refused}: it has a brace of its own; {allowed}")
            text = literal
            if field is None:
                continue
            if not field.isidentifier() or spec or conversion:
                raise LockConfigError(f"{refused}: {allowed}")
            if parts and _separator(text) is None:
                between = f"{{{parts[-1][1]}}} and {{{field}}}"
                raise LockConfigError(f"{refused}: put a separator between {between}, such as ':'")
            parts.append((text, field))
            text = ""
    except ValueError as error:
        raise LockConfigError(f"{refused}: {error}; {allowed}") from None
    if not parts and not text:
        raise LockConfigError(f"{refused}: it is empty; {allowed}")
    return [*parts, (text, "")]


def _template_value(task: str, parameter: str, value: Any) -> str:
    """`value` as a template's field shows it: the same text before and after Celery's JSON."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= MAX_INT_BITS:
        return int.__repr__(value)
    if isinstance(value, UUID) or (isinstance(value, date) and not isinstance(value, datetime)):
        return str(value)
    raise LockKeyError(
        f"{task}: parameter {parameter!r} is a {type(value).__name__}; a lock_key template takes str, int, UUID and "
        "date; for others use a callable lock_key"
    )


def check_parameters(task: str, option: str, wanted: Iterable[str], parameters: Sequence[str]) -> None:
    """Refuse an option that names what is no parameter of the task.

    Raises:
        LockConfigError: One of the names is no parameter.
    """
    for name in wanted:
        if name not in parameters:
            raise LockConfigError(
                f"{task}: {option} names {name!r}, which is no parameter of the task; it has: "
                f"{', '.join(parameters) or 'none'}"
            )


#: Braces are escaped in a name: in Redis the whole name stands between two braces. They make it the hash tag, by which
#: a Cluster chooses the slot of the key. What looks like an escape is escaped too, or else it would be taken for one.
UNSAFE = re.compile("[{}]|%(?=[0-9A-F]{2})")


def printable(text: str, unsafe: re.Pattern[str]) -> str:
    """`text` with the characters that are `unsafe` or cannot be printed escaped as ``%XX``."""
    text = unsafe.sub(_percent, text)
    return text if text.isprintable() else _UNPRINTABLE.sub(_percent_unprintable, text)


_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _percent_unprintable(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else _percent(match)
