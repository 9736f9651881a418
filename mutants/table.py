"""The tables of mutants in docs/how-it-is-tested.md, which ``python -m mutants --table`` writes; a test holds them."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from .mutant import ROOT, Mutant, mutants
from .promises import Promise

PAGE = ROOT / "docs" / "how-it-is-tested.md"
HEAD = "\n**{}**\n\n| a mistake that would break it | found by |\n| --- | --- |\n"


def written(page: str) -> str:
    """The text of `PAGE`, with the tables and the number of mutants as they are today."""
    known = mutants()
    before, mark, after = re.split(r"(<!-- mutants:.*-->\n)", page)
    before = re.sub(r"\b\d+ mutants\b", f"{len(known)} mutants", before)
    tables = [HEAD.format(promise.value) + "".join(map(_row, of)) for promise, of in groupby(known, _promise)]
    return before + mark + "".join(tables) + "\n" + after[after.index("<!-- end -->") :]


def _promise(mutant: Mutant) -> Promise:
    return mutant.promise


def _row(mutant: Mutant) -> str:
    file, *_, test = mutant.killer.split("::")
    link = f"[{Path(file).stem}: {test.removeprefix('test_').replace('_', ' ')}](../{file}#{test})"
    return f"| [{mutant.mistake}](../mutants/patches/{mutant.name}.patch) | {link} |\n"
