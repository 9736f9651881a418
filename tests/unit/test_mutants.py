"""The mutants of ``make mutants`` fit the code as it is today, and docs/how-it-is-tested.md lists them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutants.mutant import ROOT, Misfit, Mutant, mutants
from mutants.table import PAGE, written
from mutants.trial import verdict
from promises import Excuse, Promise

MUTANTS = mutants()
ONE = Mutant("one", "It is wrong.", Promise.OWNER, "t.py::t", "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    """Whoever changes the lines that it changes, changes the patch, or takes another mistake in its place."""
    for path, text in mutant.changed().items():
        assert path.startswith("celery_redislock/")
        assert text != (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            compile(text, path, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_killer_of_a_mutant_is_there(mutant: Mutant) -> None:
    file, *names = mutant.killer.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for name in names:
        (found,) = (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)
        body = found.body
    assert names[-1].startswith("test_")


def test_each_promise_has_its_mutants() -> None:
    assert len(MUTANTS) >= 40
    assert {mutant.promise for mutant in MUTANTS} == set(Promise)
    assert [mutant.mistake for mutant in MUTANTS if not mutant.mistake.endswith(".")] == []


def test_the_tables_are_written_anew_when_a_mutant_a_promise_or_an_excuse_is_changed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run python -m mutants --table"
    assert f"{len(MUTANTS)} mutants" in page
    for mark in ("../mutants/patches/", Promise.OWNER.value, Excuse.DATA_LOST.value):
        emptied = "\n".join(line for line in page.split("\n") if mark not in line)
        assert emptied != page
        assert written(emptied) == page


def test_each_promise_and_each_excuse_is_one_that_something_checks() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for member in (*Promise, *Excuse):
        (checks,) = (line for line in page.split("\n") if line.startswith(f"| `{member.name}` | {member.value} |"))
        assert checks.rstrip(" |") != f"| `{member.name}` | {member.value}", "no model, no mutant and no chaos names it"


def test_a_patch_is_found_by_its_lines_and_must_be_found_once() -> None:
    assert ONE.changed({"f": "a\nx\ny\n"}) == {"f": "a\nx\nz\n"}
    for text in ("a\nx\nb\n", "x\ny\nx\ny\n", "ax\ny\n"):
        with pytest.raises(Misfit, match="one: these lines must be in f once"):
            ONE.changed({"f": text})


def test_a_patch_that_does_not_say_what_is_wrong_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.patch"
    file.write_text(f"It is\nwrong.\n\nPromise: OWNER\nKilled by: t.py::t\n\n{ONE.diff}")
    assert Mutant.read(file) == ONE
    file.write_text(ONE.diff)
    with pytest.raises(ValueError, match="it begins with the mistake"):
        Mutant.read(file)


@pytest.mark.parametrize(
    ("code", "failures", "is_killed"),
    [
        (1, ["assert 1 == 2"], True),
        (1, ["NameError: x", "AssertionError: two hold it\nassert 2 == 1"], True),
        (1, ["Failed: DID NOT RAISE LockLost"], True),
        (0, [], False),
        (2, [], False),
        (1, ["ImportError: x"], False),
        (1, ["Failed: Timeout (>120.0s) from pytest-timeout."], False),
        (1, ["celery_redislock.errors.LockUnavailable: user_script:3: Script attempted to access nonexistent"], False),
    ],
)
def test_only_a_test_that_has_looked_at_what_happens_kills_a_mutant(
    code: int, failures: list[str], is_killed: bool
) -> None:
    assert verdict(code, failures)[0] is is_killed
