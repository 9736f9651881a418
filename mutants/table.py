"""The tables of docs/how-it-is-tested.md: ``python -m mutants --table`` writes them, and a test holds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from promises import Excuse, Promise

from .mutant import ROOT, Mutant, mutants

PAGE = ROOT / "docs" / "how-it-is-tested.md"
_OF_MUTANTS = "\n**{}**\n\n| a mistake that would break it | found by |\n| --- | --- |\n"
_OF_PROMISES = "\n| name | promise | model | mutants | chaos |\n| --- | --- | :---: | ---: | :---: |\n"
_OF_EXCUSES = "\n| name | excuse | model | chaos |\n| --- | --- | :---: | :---: |\n"


def written(page: str) -> str:
    """The text of `PAGE`, with the tables and the number of mutants as they are today."""
    known = mutants()
    page = re.sub(r"\b\d+ mutants\b", f"{len(known)} mutants", page)
    page = _between("promises", page, _OF_PROMISES + "".join(_promises(known)))
    page = _between("excuses", page, _OF_EXCUSES + "".join(_excuses()))
    tables = [_OF_MUTANTS.format(promise.value) + "".join(map(_row, of)) for promise, of in groupby(known, _promise)]
    return _between("mutants", page, "".join(tables))


def _between(name: str, page: str, tables: str) -> str:
    """The page with these tables between the marks of this name."""
    before, mark, after = re.split(rf"(<!-- {name}:.*-->\n)", page)
    return before + mark + tables + "\n" + after[after.index(f"<!-- end of {name} -->") :]


def _promises(known: list[Mutant]) -> Iterator[str]:
    model, chaos = _named_in("tests/model/rules.py"), _named_in("chaos/*.py")
    for promise in Promise:
        count = sum(mutant.promise is promise for mutant in known)
        checks = f"{_tick(promise, model)} | {count or ''} | {_tick(promise, chaos)}"
        yield f"| `{promise.name}` | {promise.value} | {checks} |\n"


def _excuses() -> Iterator[str]:
    model, chaos = _named_in("tests/model/rules.py"), _named_in("chaos/*.py")
    for excuse in Excuse:
        yield f"| `{excuse.name}` | {excuse.value} | {_tick(excuse, model)} | {_tick(excuse, chaos)} |\n"


def _named_in(files: str) -> set[str]:
    """The promises and excuses that these files name."""
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob(files)))
    return set(re.findall(r"\b(?:Promise|Excuse)\.[A-Z_]+\b", text))


def _tick(member: Promise | Excuse, named: set[str]) -> str:
    return "✓" if f"{type(member).__name__}.{member.name}" in named else ""


def _promise(mutant: Mutant) -> Promise:
    return mutant.promise


def _row(mutant: Mutant) -> str:
    file, *_, test = mutant.killer.split("::")
    link = f"[{Path(file).stem}: {test.removeprefix('test_').replace('_', ' ')}](../{file}#{test})"
    return f"| [{mutant.mistake}](../mutants/patches/{mutant.name}.patch) | {link} |\n"
