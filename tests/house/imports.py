"""Imports: which module of the package imports which."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import celery_redislock

PACKAGE = Path(celery_redislock.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


#: The web page has limits of its own, and only the command that serves it imports it.
WEB = {name for name in MODULES if name == "cli.web" or name.split(".")[0] == "web"}


def imported(source: str) -> set[str]:
    """All that a module imports, wherever it stands and whoever sees it: ``.store``, ``celery_redislock.errors``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=None, level=level, names=names):
                found |= {"." * level + alias.name for alias in names}
            case ast.ImportFrom(module=module, level=level, names=names):
                # A name may be a module of that package.
                found |= {"." * level + str(module)} | {f"{'.' * level}{module}.{alias.name}" for alias in names}
    return found


def own_imports(name: str) -> set[str]:
    """The modules of this package that one of them imports."""
    folder = name.split(".")[0] + "." if "." in name else ""
    dotted = {
        folder + one[1:] if one.startswith(".") else one.removeprefix("celery_redislock.")
        for one in imported(MODULES[name].read_text(encoding="utf-8"))
        if one.startswith((".", "celery_redislock."))
    }
    return dotted & MODULES.keys() - {name}


GRAPH = {name: own_imports(name) for name in MODULES}


@cache
def chain(name: str) -> tuple[str, ...]:
    """The longest chain of imports that begins with a module. One outside the web page does not lead into it."""
    others = GRAPH[name] - (set() if name in WEB else WEB)
    return (name, *max(map(chain, sorted(others)), key=len, default=()))


def longest_chain(names: Iterable[str] = GRAPH.keys() - WEB) -> tuple[str, ...]:
    """The longest chain of imports that begins with one of these modules: each of its modules imports the next."""
    return max(map(chain, sorted(names)), key=len)
