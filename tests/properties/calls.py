"""Generated bodies of tasks, and calls of them, in all the ways in which one call can be written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

Body = Callable[..., None]
Call = tuple[list[Any], dict[str, Any]]
_KINDS = [
    Parameter.POSITIONAL_ONLY,
    *[Parameter.POSITIONAL_OR_KEYWORD] * 3,
    Parameter.VAR_POSITIONAL,
    *[Parameter.KEYWORD_ONLY] * 2,
    Parameter.VAR_KEYWORD,
]
_STARS = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
#: Names that a body may have, and that Celery, Python or the code that makes keys has too.
_NAMES = ["a", "b", "c", "args", "kwargs", "task", "name", "signature", "cls", "lock", "__type__"]
_PLAIN = [0, 1, -1, True, False, None, "", "1", "true", "null", '","b":1', "}:x{", 1.0, b"1", b"\xff"]
_IDS = [UUID(int=0), UUID(int=0).hex, {"__type__": "uuid", "__value__": {"hex": UUID(int=0).hex}}]
#: Values so few that most pairs are nearly equal; and some that a caller would choose to be taken for another. (A dict
#: whose keys are "__type__" and "__value__", but of no type that kombu knows, is missing: no worker can read it.)
VALUES = st.recursive(
    st.sampled_from([*_PLAIN, *_IDS]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "__type__", "1", 1, True, None]), inner, max_size=2)
    ),
    max_leaves=3,
)


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """A body of a task with up to five parameters of all kinds, some of which have a default."""
    parameters: list[Parameter] = []
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=5))
    for name, kind in zip(names, sorted(draw(st.sampled_from(_KINDS)) for _ in names), strict=True):
        if kind not in _STARS:
            must = kind is not Parameter.KEYWORD_ONLY and any(one.default is not one.empty for one in parameters)
            default = draw(VALUES) if must or draw(st.booleans()) else Parameter.empty
            parameters.append(Parameter(name, kind, default=default))
        elif kind not in {one.kind for one in parameters}:
            parameters.append(Parameter(name, kind))
    return _body(inspect.Signature(parameters))


def _body(signature: inspect.Signature) -> Body:
    """A function with this signature, as its author has written it: Celery reads the code of a body too."""
    defaults = {f"default_of_{one.name}": one.default for one in signature.parameters.values()}
    spelled = [
        str(one.replace(default=one.empty)) + (f" = default_of_{one.name}" if one.default is not one.empty else "")
        for one in signature.parameters.values()
    ]
    kinds = [one.kind for one in signature.parameters.values()]
    if Parameter.KEYWORD_ONLY in kinds and Parameter.VAR_POSITIONAL not in kinds:
        spelled.insert(kinds.index(Parameter.KEYWORD_ONLY), "*")
    if Parameter.POSITIONAL_ONLY in kinds:
        spelled.insert(kinds.count(Parameter.POSITIONAL_ONLY), "/")
    scope: dict[str, Any] = dict(defaults)
    exec(f"def body({', '.join(spelled)}): ...", scope)  # noqa: S102
    body: Body = scope["body"]
    assert inspect.signature(body) == signature
    return body


def plain_parameters(body: Body) -> list[str]:
    """Those that take one value."""
    return [one.name for one in inspect.signature(body).parameters.values() if one.kind not in _STARS]


def arguments(body: Body) -> st.SearchStrategy[dict[str, Any]]:
    """What the parameters of `body` are bound to by a call that fits."""
    return st.fixed_dictionaries({one.name: _values(one) for one in inspect.signature(body).parameters.values()})


def _values(one: Parameter) -> st.SearchStrategy[Any]:
    if one.kind is Parameter.VAR_POSITIONAL:
        return st.lists(VALUES, max_size=2).map(tuple)
    if one.kind is Parameter.VAR_KEYWORD:
        return st.dictionaries(st.sampled_from(["x", "y", "z"]), VALUES, max_size=2)
    return VALUES if one.default is one.empty else st.just(one.default) | VALUES


@st.composite
def spellings(draw: st.DrawFn, body: Body, bound: Mapping[str, Any]) -> Call:
    """A call that binds `bound`: by position or by name, with what is a default or without it."""
    signature = inspect.signature(body)
    whole = inspect.BoundArguments(signature, bound)  # type: ignore[arg-type]
    args, kwargs = list(whole.args), dict(whole.kwargs)
    by_position = [one for one in signature.parameters.values() if one.kind < Parameter.VAR_POSITIONAL]
    while len(args) <= len(by_position) and args and draw(st.booleans()):
        one = by_position[len(args) - 1]
        if args[-1] is one.default and draw(st.booleans()):
            args.pop()
        elif one.kind is Parameter.POSITIONAL_OR_KEYWORD:
            kwargs[one.name] = args.pop()
        else:
            break
    for one in signature.parameters.values():
        if one.name in kwargs and kwargs[one.name] is one.default and draw(st.booleans()):
            del kwargs[one.name]
    return args, dict(draw(st.permutations(list(kwargs.items()))))
