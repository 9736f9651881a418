"""Operators: the small changes that `mutants.everywhere` makes to a module, one at a time."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Change(NamedTuple):
    """One change in one function of a module."""

    line: int
    """Where it is."""
    lines: frozenset[int]
    """The lines of the statement that is changed: a test that runs none of them cannot find the change."""
    was: str
    becomes: str
    code: CodeType
    """The whole module with the change."""

    def __str__(self) -> str:
        return f"{self.line}: {self.was}  ->  {self.becomes}"


def changes(source: str, name: str) -> Iterator[Change]:
    """Make each change in the bodies of the functions of a module. What runs at its import is left alone."""
    tree = ast.parse(source)
    for line, lines, path, new in _sites(tree):
        changed = copy.deepcopy(tree)
        node: object = changed
        for step in path[:-1]:
            node = getattr(node, step) if isinstance(step, str) else node[step]  # type: ignore[index]
        was = _get(node, path[-1])
        if isinstance(path[-1], str):
            setattr(node, path[-1], new)
        else:
            node[path[-1]] = new  # type: ignore[index]
        ast.copy_location(new, was)  # type: ignore[arg-type]
        for child in ast.walk(new):
            if "lineno" in child._attributes and not hasattr(child, "lineno"):
                ast.copy_location(child, was)  # type: ignore[arg-type]
        yield Change(line, lines, _text(was), _text(new), compile(ast.fix_missing_locations(changed), name, "exec"))


def _get(node: object, step: str | int) -> object:
    return getattr(node, step) if isinstance(step, str) else node[step]  # type: ignore[index]


def _text(node: object) -> str:
    return " ".join(ast.unparse(node).split())[:90]  # type: ignore[arg-type]


Site = tuple[int, frozenset[int], tuple[str | int, ...], ast.AST]


def _sites(tree: ast.Module) -> Iterator[Site]:
    """Where something is changed, by the path of fields from the module, and what is there instead."""

    def walk(node: ast.AST, path: tuple[str | int, ...], lines: frozenset[int], *, is_inside: bool) -> Iterator[Site]:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno or node.lineno
            lines = frozenset(range(node.lineno, max(last, node.lineno) + 1))
        if is_inside:
            for new in _instead(node):
                yield getattr(node, "lineno", min(lines)), lines, path, new
        if _says(node):
            return
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "returns", "decorator_list", "args"} and not isinstance(node, ast.Call):
                continue
            inside = is_inside or (isinstance(node, _FUNCTIONS) and field == "body")
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not _is_docstring(child):
                    step = (field,) if index is None else (field, index)
                    yield from walk(child, (*path, *step), lines, is_inside=inside)

    yield from walk(tree, (), frozenset(), is_inside=False)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _says(node: ast.AST) -> bool:
    """Whether a node only makes the text of an error or of a log line, which is not changed inside."""
    if isinstance(node, ast.Raise):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "warnings.warn"))


def _instead(node: ast.AST) -> Iterator[ast.AST]:
    """What takes the place of a node, one after the other."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in _COMPARISONS:
            yield ast.Compare(node.left, [_COMPARISONS[type(op)](), *node.ops[1:]], node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp() if type(node.op) in _OPERATORS:
            yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str(value)):
            yield ast.Constant(f"{value}XX")
        case ast.IfExp() | ast.If() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield type(node)(**{**dict(ast.iter_fields(node)), "test": ast.UnaryOp(ast.Not(), node.test)})
        case ast.comprehension(ifs=[_, *_]):
            yield ast.comprehension(node.target, node.iter, [], node.is_async)
        case ast.Call() if not ast.unparse(node.func).startswith("logger."):
            for index, argument in enumerate(node.args):
                if not isinstance(argument, ast.Starred | ast.Constant):
                    yield ast.Call(
                        node.func, [*node.args[:index], ast.Constant(None), *node.args[index + 1 :]], node.keywords
                    )
            for index, keyword in enumerate(node.keywords):
                if keyword.arg is not None:
                    yield ast.Call(node.func, node.args, [*node.keywords[:index], *node.keywords[index + 1 :]])
        case ast.Return(value=ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Raise() | ast.Delete():
            yield ast.Pass()
