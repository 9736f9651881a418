"""KeyMaker: turns the arguments of a call into the name of its lock. Pure: every process makes the same name.

The publisher has the caller's own objects; the worker has what Celery's JSON made of them. So the name is made from the
arguments in *wire shape*: tuples are lists, ``{1: 2}`` is ``{"1": 2}``, and a datetime is what kombu writes for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import basename
from typing import Any

from celery_redislock.errors import STRIKES, LockConfigError, LockKeyError

from .arguments import (
    UNSAFE,
    Arguments,
    Namer,
    check_parameters,
    digest,
    encode,
    parse_template,
    printable,
    template_namer,
    wire,
)

Binder = Callable[[Sequence[Any], Mapping[str, Any]], dict[str, Any]]

#: A name of this many characters or more is cut to exactly this length, and then ends with a digest of the whole
#: name. Every other name is shorter, so none equals a cut one.
MAX_NAME = 200
#: The length of a group's digest, in hexadecimal digits.
DIGEST = 16
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class KeyMaker:
    """Makes the names of one task's locks. Everything that is the same for all calls is computed up front.

    Args:
        task: The task's name, for digest names and error messages.
        signature: The signature of the task's body, without ``self``.
        lock_args: The parameters that make up the name; None for all.
        lock_key: A template over parameter names, or a callable that takes the bound arguments and returns the name, or
            a list of names.
        remedy: For error messages: what the user can do if an argument cannot be part of a name.
        option: For error messages: the option that `lock_key` comes from.

    Raises:
        LockConfigError: Both `lock_args` and `lock_key` are given, a parameter does not exist, or the template is
            malformed.
    """

    def __init__(
        self,
        task: str,
        signature: inspect.Signature,
        lock_args: Iterable[str] | None = None,
        lock_key: str | Callable[[Arguments], str | Sequence[str]] | None = None,
        remedy: str = "leave the parameter out with lock_args, or name the lock with lock_key",
        *,
        option: str = "lock_key",
    ) -> None:
        if lock_args is not None and lock_key is not None:
            raise LockConfigError(f"{task}: lock_key and lock_args are both set; set one of them")
        self._task = task
        self._signature = signature
        #: The parameters that make up the name; None if `lock_key` is a callable, which may use any.
        self._fields: frozenset[str] | None = None
        #: Maps the arguments of a call to parameters, with defaults applied. Raises TypeError if they do not fit.
        self.bind = binder(task, signature)
        parameters = tuple(signature.parameters)
        self._namer: Callable[[Arguments], str | list[str]]
        if lock_key is None:
            chosen = parameters if lock_args is None else tuple(lock_args)
            self._namer = _digest_namer(printable(task, UNSAFE), parameters, chosen, remedy)
            self._fields = frozenset(chosen)
        elif callable(lock_key):
            self._namer = _callable_namer(task, lock_key, option)
        else:
            self._namer = template_namer(task, parameters, lock_key, option)
            self._fields = frozenset(name for _, name in parse_template(task, lock_key, option) if name)
        #: `_fields`, which `completed` needs; None also if all parameters make up the name.
        self._needed = None if lock_args is None and lock_key is None else self._fields

    def completed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[KeyMaker] = ()
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Complete a call without changing its name: missing arguments that are not in the name become None.

        Nor do they change the names that `others` make of the call.

        Raises:
            TypeError: An argument that is part of the name is missing, or the arguments do not fit the signature.
        """
        needs = [maker._needed for maker in (self, *others)]
        if None in needs:
            return args, kwargs
        of_name = frozenset[str]().union(*filter(None, needs))
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._task}() {error}") from None
        parameters = self._signature.parameters.values()
        required = [one.name for one in parameters if one.default is one.empty and one.kind not in _STARS]
        lacking = [name for name in required if name not in bound.arguments]
        if needed := [name for name in lacking if name in of_name]:
            raise TypeError(f"{self._task}() lacks arguments that its lock's key needs: {', '.join(needed)}")
        bound.arguments.update(dict.fromkeys(lacking))
        return bound.args, bound.kwargs

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the lock's name for a call with these arguments.

        Raises:
            TypeError: The arguments do not fit the signature.
            LockKeyError: They fit, but cannot be made into a name.
        """
        return self.name_of(self.bind(args, kwargs))

    def name_of(self, arguments: Arguments) -> str:
        """Return the lock's name for a call with these arguments, as returned by `bind`.

        Raises:
            LockKeyError: They cannot be made into a name.
        """
        made = self._namer(arguments)
        if isinstance(made, str):
            return _shortened(made)
        raise LockKeyError(
            f"{self._task}: lock_key returned several keys, which is not allowed with lock_scope 'job' or 'queue', "
            "lock_on_conflict 'join', lock_hold_on_retry, lock_rate or lock_fair"
        )

    def names_of(self, arguments: Arguments) -> list[str]:
        """Return the names for a call with these arguments: one, or several if `lock_key` has returned several.

        Raises:
            LockKeyError: They cannot be made into a name, or `lock_key` has returned no name.
        """
        made = self._namer(arguments)
        return [_shortened(made)] if isinstance(made, str) else [*map(_shortened, made)]

    def groups(self, lock_fair: str) -> Namer:
        """Return a function that names the group of a call: by a digest for a parameter, or in words for a template.

        Equal arguments make the same group in all tasks.

        Raises:
            LockConfigError: `lock_fair` names no parameter, is malformed, or all calls with one key are in one group.
        """
        task, parameters = self._task, tuple(self._signature.parameters)
        is_template = not lock_fair.isidentifier()
        parts = parse_template(task, lock_fair, "lock_fair") if is_template else [("", lock_fair)]
        fields = [field for _, field in parts if field]
        check_parameters(task, "lock_fair", fields, parameters)
        if not fields:
            raise LockConfigError(
                f"{task}: lock_fair = {lock_fair!r} names no parameter: put one between braces, as in "
                '"region:{customer}"'
            )
        if self._fields is not None and self._fields.issuperset(fields):
            raise LockConfigError(
                f"{task}: lock_fair = {lock_fair!r} is not allowed with a key that has the same arguments: all calls "
                "with one key are in one group; set lock_args or lock_key to what the groups share"
            )
        if is_template:
            namer = template_namer(task, parameters, lock_fair, "lock_fair")
            return lambda arguments: _shortened(namer(arguments))
        remedy = "group by another parameter"
        return lambda arguments: digest(encode(_wired(task, "a group", lock_fair, arguments, remedy)))[:DIGEST]


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """How callers pass their arguments to `function`.

    If it is a wrapper with ``*args`` or ``**kwargs``, it has the signature of the function inside, as `functools.wraps`
    says. A wrapper that names all of its parameters has its own: it may pass other arguments on.
    """
    own = inspect.signature(function, follow_wrapped=not inspect.isfunction(function))  # not `functools.cache`, in C
    passes_on = any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in own.parameters.values())
    return inspect.signature(function) if passes_on else own


def binder(task: str, signature: inspect.Signature) -> Binder:
    """Return a function that maps the arguments of a call to parameter names, with defaults applied.

    It is ten times as fast as `Signature.bind`. It falls back to `Signature.bind` for signatures with ``*args``,
    ``**kwargs`` or positional-only parameters, and for calls that do not fit, whose TypeError then starts with
    the task's name.
    """
    parameters = signature.parameters.values()
    simple = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    names = signature.parameters.keys()

    def bind_any(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{task}() {error}") from None
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
    """Return a function that makes a name from the task's name and a digest, which hides the chosen arguments."""
    check_parameters(task, "lock_args", chosen, parameters)
    if not chosen:  # every call has the same name, so make it once: a digest costs more than the rest of a key
        only = f"{task}:{digest(encode({}))}"
        return lambda arguments: only

    def name(arguments: Arguments) -> str:
        shaped = {one: _wired(task, "part of a lock key", one, arguments, remedy) for one in chosen}
        return f"{task}:{digest(encode(shaped))}"

    return name


def _wired(task: str, what: str, parameter: str, arguments: Arguments, remedy: str) -> Any:
    """Return an argument in wire shape. The error does not show it."""
    try:
        return wire(arguments[parameter])
    except STRIKES:
        raise
    except Exception:  # noqa: BLE001 - a type's own __json__ may raise anything; the message may show the value
        one = f"a value of type {type(arguments[parameter]).__name__}"
        raise LockKeyError(
            f"{task}: parameter {parameter!r} cannot be {what}: {one} cannot be encoded as JSON; {remedy}"
        ) from None


def _shortened(name: str) -> str:
    return name if len(name) < MAX_NAME else f"{name[: MAX_NAME - 33]}:{digest(name)}"


def _callable_namer(
    task: str, lock_key: Callable[[Arguments], str | Sequence[str]], option: str
) -> Callable[[Arguments], str | list[str]]:
    """Return a function that calls the user's `lock_key` for each call and checks its result."""

    def checked(made: Any, of: str = "") -> str:
        if not isinstance(made, str) or not made:
            raise LockKeyError(f"{task}: {option} must return a non-empty str, not {of}{type(made).__name__}")
        return printable(str.__str__(made), UNSAFE)

    def name(arguments: Arguments) -> str | list[str]:
        made = made_by(lock_key, task, option, arguments)
        if option == "lock_key" and isinstance(made, list | tuple) and made:
            return [checked(one, "a list of ") for one in made]
        return checked(made)

    return name


def made_by(function: Callable[[Arguments], Any], task: str, option: str, arguments: Arguments) -> Any:
    """Return what the user's own `function`, the value of an option, makes of the arguments of a call.

    Raises:
        LockKeyError: It raises.
    """
    try:
        return function(arguments)
    except STRIKES:  # raised in a body that publishes, or a time limit before the body
        raise
    except Exception as error:
        raise LockKeyError(f"{task}: {option} raised {_blame(error)}") from error


def _blame(error: Exception) -> str:
    """Say what the user's callable raised and where, but not the message, which may contain an argument."""
    if frame := error.__traceback__ and error.__traceback__.tb_next:
        return f"{type(error).__name__} in {basename(frame.tb_frame.f_code.co_filename)}, line {frame.tb_lineno}"
    if isinstance(error, TypeError):  # the call itself failed
        return "TypeError; it must take one argument, a mapping of the call's arguments by name"
    return type(error).__name__
