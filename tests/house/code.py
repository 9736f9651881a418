"""Code: how many lines of it there are, without comments, docstrings and blank lines."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable

from .imports import MODULES, PACKAGE

#: Tokens that are no code by themselves.
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """The lines of a module that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for one in tokens if one.type not in _NO_CODE for line in range(one.start[0], one.end[0] + 1)}
    return len(lines - _docstrings(ast.parse(source)))


def _docstrings(tree: ast.AST) -> set[int]:
    """The lines of strings that are statements: docstrings, and those below attributes."""
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for one in strings for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}


def lines_of_python(names: Iterable[str]) -> int:
    """The lines of code of these modules."""
    return sum(lines_of_code(MODULES[name].read_text(encoding="utf-8")) for name in names)


def lines_of(*patterns: str) -> int:
    """The lines of the package's files of another kind, comments and all."""
    paths = (path for pattern in patterns for path in PACKAGE.rglob(pattern))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
