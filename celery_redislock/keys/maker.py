"""KeyMaker: from the arguments of a call to the name of its lock. Pure: every process makes the same name of one call.

The publisher has the caller's own objects, and the worker has what Celery's JSON has made of them. So a name is made of
the arguments in the *shape of the wire*: tuples are lists, ``{1: 2}`` is ``{"1": 2}``, and a datetime is what kombu
writes for it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from os.path import basename
from string import Formatter
from typing import Any
from uuid import UUID

from celery_redislock.errors import LockConfigError, LockKeyError

from .wire import MAX_INT_BITS, digest, encode, wire

Arguments = Mapping[str, Any]
Binder = Callable[[Sequence[Any], Mapping[str, Any]], dict[str, Any]]
Namer = Callable[[Arguments], str]

#: A name has fewer characters than this. A longer one is cut to exactly this many, of which the last are a digest of
#: the whole: so no short name equals a cut one.
MAX_NAME = 200
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class KeyMaker:
    """Makes the names of one task's locks. What can be worked out once for all calls is worked out when it is made.

    Args:
        task: The task's name, for names that are digests and for error messages.
        signature: The signature of the task's body, without ``self``.
        lock_args: The parameters that make the name; None for all.
        lock_key: A template over parameter names, or a callable that takes the bound arguments and returns the name.
        remedy: For error messages: what the user can do where an argument cannot make a name.

    Raises:
        LockConfigError: Both `lock_args` and `lock_key` are given, a parameter does not exist, or the template is
            malformed.
    """

    def __init__(
        self,
        task: str,
        signature: inspect.Signature,
        lock_args: Iterable[str] | None = None,
        lock_key: str | Callable[[Arguments], str] | None = None,
        remedy: str = "leave the parameter out with lock_args, or name the lock with lock_key",
    ) -> None:
        if lock_args is not None and lock_key is not None:
            raise LockConfigError(f"{task}: lock_key and lock_args are both set; set one of them")
        self._task = task
        self._signature = signature
        self.bind = binder(signature)
        parameters = tuple(signature.parameters)
        #: The parameters that make the name; None where all do, or where `lock_key` is a callable and may use any.
        self._needed: frozenset[str] | None = None
        if lock_key is None:
            chosen = parameters if lock_args is None else tuple(lock_args)
            self._namer = _digest_namer(task, parameters, chosen, remedy)
            self._needed = None if lock_args is None else frozenset(chosen)
        elif callable(lock_key):
            self._namer = _callable_namer(task, lock_key)
        else:
            self._namer = _template_namer(task, parameters, lock_key)
            self._needed = frozenset(field for _, field in parse_template(task, lock_key) if field)

    def completed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of a complete call with the same name: what is missing in this one is set to None.

        Args:
            args: The positional arguments of a call. Those that do not make the name may be missing.
            kwargs: Its keyword arguments. Those that do not make the name may be missing.

        Raises:
            TypeError: An argument that makes the name is missing, or the arguments do not fit the signature.
        """
        if self._needed is None:
            return args, kwargs
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._task}() {error}") from None
        required = [
            p.name for p in self._signature.parameters.values() if p.default is p.empty and p.kind not in _STARS
        ]
        lacking = [name for name in required if name not in bound.arguments]
        if needed := [name for name in lacking if name in self._needed]:
            raise TypeError(f"{self._task}() misses what its lock's key is made of: {', '.join(needed)}")
        bound.arguments.update(dict.fromkeys(lacking))
        return bound.args, bound.kwargs

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The lock's name for a call with these arguments.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: They fit, but no name can be made of them.
        """
        try:
            arguments = self.bind(args, kwargs)
        except TypeError as error:
            raise TypeError(f"{self._task}() {error}") from None
        name = self._namer(arguments)
        return name if len(name) < MAX_NAME else f"{name[: MAX_NAME - 33]}:{digest(name)}"


def binder(signature: inspect.Signature) -> Binder:
    """A function that maps the arguments of a call to parameter names, with defaults applied.

    It is ten times as fast as `Signature.bind`. It uses `Signature.bind` all the same for signatures with ``*args``,
    ``**kwargs`` or positional-only parameters, and for calls that do not fit, for which that raises TypeError.
    """
    parameters = signature.parameters.values()
    simple = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    names = signature.parameters.keys()

    def bind_any(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def bind_simple(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        fits = (
            len(args) <= len(positional)
            and bound.keys() == names
            and (not kwargs or not args or kwargs.keys().isdisjoint(positional[: len(args)]))
        )
        return bound if fits else bind_any(args, kwargs)

    return bind_simple if simple else bind_any


def _digest_namer(task: str, parameters: Sequence[str], chosen: Sequence[str], remedy: str) -> Namer:
    """Names of the task's name and a digest of the `chosen` arguments, which cannot be read in Redis."""
    _check_parameters(task, "lock_args", chosen, parameters)

    def name(arguments: Arguments) -> str:
        shaped = {}
        for parameter in chosen:
            try:
                shaped[parameter] = wire(arguments[parameter])
            except Exception:  # noqa: BLE001 - a type's own __json__ may raise anything, and its message show the value
                kind = type(arguments[parameter]).__name__
                raise LockKeyError(
                    f"{task}: parameter {parameter!r} cannot make a lock key: its {kind} cannot be encoded as JSON; "
                    f"{remedy}"
                ) from None
        return f"{task}:{digest(encode(shaped))}"

    return name


def _callable_namer(task: str, lock_key: Callable[[Arguments], str]) -> Namer:
    """Names that the user's own function returns."""

    def name(arguments: Arguments) -> str:
        try:
            made = lock_key(arguments)
        except Exception as error:
            what = type(error).__name__ + _place_of(error)
            raise LockKeyError(f"{task}: lock_key raised {what}; mend the callable") from error
        if not isinstance(made, str) or not made:
            raise LockKeyError(f"{task}: lock_key must return a non-empty str, not {type(made).__name__}")
        return _printable(str.__str__(made), _BRACE)

    return name


def _place_of(error: Exception) -> str:
    """Where in the user's `lock_key` the error was raised. Its message is not shown, for it may hold an argument."""
    frame = error.__traceback__ and error.__traceback__.tb_next
    return f" in {basename(frame.tb_frame.f_code.co_filename)}, line {frame.tb_lineno}" if frame else ""


def _template_namer(task: str, parameters: Sequence[str], template: str) -> Namer:
    """Names made by a template, which can be read in Redis."""
    parts = parse_template(task, template)
    _check_parameters(task, "lock_key", [field for _, field in parts if field], parameters)
    # Values are escaped so that none can contain the separator after its field, nor ':', the usual separator of keys:
    # else two different calls could make one name.
    separators = "".join(_separator(literal) or "" for literal, field in parts[1:] if field)
    unsafe = re.compile(f"[%:{{}}\\s{re.escape(separators)}]")

    def name(arguments: Arguments) -> str:
        made = []
        for literal, field in parts:
            made.append(literal)
            if field:
                made.append(_printable(_template_value(task, field, arguments[field]), unsafe))
        if not any(made):
            raise LockKeyError(f"{task}: lock_key makes an empty name of these arguments")
        return "".join(made)

    return name


def _separator(literal: str) -> str | None:
    """The first character of `literal` that is no part of an escape, ``%XX``; None where there is none."""
    return next((c for c in literal if c not in "%0123456789ABCDEF"), None)


def parse_template(task: str, template: str) -> list[tuple[str, str]]:
    """The parts of a template: pairs of a literal text and the field that follows it, ``""`` after the last text.

    Args:
        task: The task's name, for the error's message.
        template: Such as ``"stock:{sku}"``, which gives ``[("stock:", "sku"), ("", "")]``.

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
            if "{" in literal or "}" in literal:  # it would end the hash tag around the name
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


#: Braces are escaped in names: around every name there is a pair of them, its hash tag for a Cluster.
_BRACE = re.compile("[{}]")


def _printable(text: str, unsafe: re.Pattern[str]) -> str:
    """`text` with the characters that are `unsafe` or cannot be printed escaped as ``%XX``."""
    text = unsafe.sub(_percent, text)
    return text if text.isprintable() else _UNPRINTABLE.sub(_percent_unprintable, text)


_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _percent_unprintable(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else _percent(match)


def _check_parameters(task: str, option: str, wanted: Iterable[str], parameters: Sequence[str]) -> None:
    for name in wanted:
        if name not in parameters:
            raise LockConfigError(
                f"{task}: {option} names {name!r}, which is no parameter of the task; it has: "
                f"{', '.join(parameters) or 'none'}"
            )
