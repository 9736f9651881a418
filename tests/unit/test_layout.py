"""Imports point one way, and every script's header tells what the script does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_redislock
from celery_redislock import script, store

PACKAGE = Path(celery_redislock.__file__).parent

#: Each module imports only those before it.
ORDER = [
    *("shown", "info", "errors", "signals", "outcome"),
    *("tokens", "wire", "keys", "options", "connection"),
    *(
        "lines",
        "script",
        "outage",
        "protocol",
        "store",
        "held",
        "keeper",
        "wake_ups",
        "cluster",
        "event_loop",
        "server",
    ),
    *("reentry", "handle", "locks", "nolock"),
    *("comeback", "delivery", "plan", "message"),
    *("attributes", "result"),
    *("abort", "policies", "held_by_request", "publish", "execution", "eager", "join"),
    *("leftovers", "failures", "body", "task"),
    *("locked", "children", "reminder", "request", "redelivery", "control", "cli", "startup", "masking", "bootsteps"),
    *("metrics", "tracing", "testing"),
    "__init__",
]
#: These serve any code, with or without Celery.
WITHOUT_CELERY = [
    *("tokens", "wire", "keys", "connection", "lines", "script", "outage", "protocol", "store", "held", "keeper"),
    *("wake_ups", "event_loop", "server", "reentry", "handle", "locks"),
]

MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}
SCRIPTS = {path.stem: path for path in sorted(PACKAGE.glob("scripts/*.lua"))}


def imports_of(statements: list[ast.stmt], *, nested: bool = False) -> Iterator[str]:
    """What the statements import: ``.store`` or ``redis.retry``; not what only type checkers see.

    Args:
        statements: Of a module.
        nested: Also what functions import when they run.
    """
    for statement in statements:
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imports_of(statement.orelse, nested=nested)
            case ast.Import():
                yield from (alias.name for alias in statement.names)
            case ast.ImportFrom(module=None):
                yield from (f".{alias.name}" for alias in statement.names)
            case ast.ImportFrom():
                yield "." * statement.level + str(statement.module)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not nested:
                pass
            case _:
                blocks = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
                handlers = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.ExceptHandler)]
                yield from imports_of([*blocks, *(s for handler in handlers for s in handler.body)], nested=nested)


def imports_of_module(name: str, *, nested: bool = False) -> set[str]:
    return set(imports_of(ast.parse(MODULES[name].read_text(encoding="utf-8")).body, nested=nested))


def test_every_module_has_its_place_in_the_order() -> None:
    assert MODULES.keys() <= set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_modules_before_it(name: str) -> None:
    own = {module.removeprefix(".").split(".")[0] for module in imports_of_module(name) if module.startswith(".")}
    assert own <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", MODULES)
def test_the_package_imports_itself_by_relative_imports(name: str) -> None:
    """So that the order above sees every import."""
    assert not {module for module in imports_of_module(name, nested=True) if module.startswith("celery_redislock")}


@pytest.mark.parametrize("name", WITHOUT_CELERY)
def test_a_module_for_any_code_does_not_import_celery(name: str) -> None:
    assert not {module for module in imports_of_module(name, nested=True) if module.split(".")[0] == "celery"}


def test_the_check_sees_imports_where_they_may_hide() -> None:
    source = """
if TYPE_CHECKING:
    from .task import A
else:
    import a
try:
    from .store import B
except ImportError:
    from . import keeper
with x:
    import redis.retry
class C:
    from .keys import D
def f():
    import late
"""
    seen = {"a", ".store", ".keeper", "redis.retry", ".keys"}
    assert set(imports_of(ast.parse(source).body)) == seen
    assert set(imports_of(ast.parse(source).body, nested=True)) == {*seen, "late"}


def header_and_body(script: str) -> tuple[list[str], str]:
    """A script's first comment, without its marks, and the code below it without comments."""
    lines = script.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
    header = [line.removeprefix("--").strip() for line in lines[:end]]
    return header, "\n".join(line.split("--")[0] for line in lines[end:])


def arguments_in(code: str) -> set[str]:
    """``KEYS[1]`` or ``ARGV[2i]``, however spaced; a loop over all keys is ``KEYS[i]``."""
    named = re.findall(r"\b(KEYS|ARGV)\[([^\]]+)\]", code)
    looped = re.findall(r"\bfor (\w+), \w+ in ipairs\((KEYS|ARGV)\)", code)
    return {f"{table}[{re.sub(r'[ *]', '', index)}]" for table, index in [*named, *((t, i) for i, t in looped)]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_header_names_what_its_body_uses_and_no_more(name: str) -> None:
    header, body = header_and_body(SCRIPTS[name].read_text(encoding="utf-8"))
    described = {line.split()[0] for line in header if re.match(r"(KEYS|ARGV)\[\S+\]\s+\S", line)}
    assert described == arguments_in(body)
    assert "KEYS[1]" in described or "KEYS[i]" in described


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_header_begins_with_its_purpose_and_tells_what_it_returns(name: str) -> None:
    header, body = header_and_body(SCRIPTS[name].read_text(encoding="utf-8"))
    assert re.match(r"[A-Z].*[.,]", header[0])
    assert [line for line in header if re.match(r"Returns \S", line)]
    numbers = set(re.findall(r"\breturn (-?\d+)$", body, re.MULTILINE))
    returned = " ".join(header[next(i for i, line in enumerate(header) if line.startswith("Returns")) :])
    assert numbers <= set(re.findall(r"-?\d+", returned))


def test_every_script_is_used_by_the_store() -> None:
    used = {value.text for value in vars(store).values() if isinstance(value, script.Script)}
    assert used == {path.read_text(encoding="utf-8") for path in SCRIPTS.values()}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("local a = KEYS[1]\nredis.call('SET', KEYS[2], ARGV[ 1 ])", {"KEYS[1]", "KEYS[2]", "ARGV[1]"}),
        ("for i, key in ipairs(KEYS) do x(key, ARGV[2 * i - 1]) end", {"KEYS[i]", "ARGV[2i-1]"}),
    ],
)
def test_the_check_sees_arguments_however_they_are_written(script: str, found: set[str]) -> None:
    assert arguments_in(script) == found
