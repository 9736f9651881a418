"""Strangers: private names of other packages that the package uses, and undocumented ones.

A name is private if it begins with an underscore. It is our own where its module defines it, and on ``self``
where any module does. What is undocumented though its name is public is listed in house.toml.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from .imports import MODULES

_PRIVATE = re.compile(r"_(?!_)\w+").fullmatch


def strangers(allowed: Collection[str], undocumented: Collection[str]) -> dict[str, list[str]]:
    """The modules that use names of others which may change without notice, each with these names.

    Args:
        allowed: Names that are private and may be used all the same.
        undocumented: Names that look public and may not.
    """
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    ours = {one for tree in trees.values() for one in _defined(tree)}
    used = {name: sorted(names_of_others(tree, ours, undocumented) - {*allowed}) for name, tree in trees.items()}
    return {name: names for name, names in used.items() if names}


def names_of_others(tree: ast.AST, ours: Collection[str], undocumented: Collection[str]) -> set[str]:
    """The names of others in one module; `ours` are those that any module of the package defines."""
    own = {*_defined(tree)}
    return {
        name
        for name, is_on_self in _used(tree)
        if name in undocumented or (_PRIVATE(name) and name not in own and not (is_on_self and name in ours))
    }


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module gives to what is its own: variables, functions, classes and attributes."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
            ):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def _used(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """The names that a module uses, each with whether that is on ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=base, attr=name):
                yield name, isinstance(base, ast.Name) and base.id in {"self", "cls"}
            case ast.ImportFrom(names=names):
                yield from ((alias.name, False) for alias in names)
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name, False
