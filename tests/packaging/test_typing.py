"""What users' type checkers see: the installed package, with celery-types and without, and the code of the pages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.pages import PAGES, files_of, python_of
from tests.lab.readme import module
from tests.lab.workers import ROOT

TYPED = ROOT / "tests" / "typing"
#: The functions of the pages have no annotations; the README names some that a reader has to imagine.
UNANNOTATED = ("--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls", "--check-untyped-defs")
PASSES = "0 errors, 0 warnings, 0 informations\n"  # of pyright
IMAGINED = """
from typing import Any

def parts(index: str) -> list[Any]:
    raise NotImplementedError

def swap_index(index: str) -> None:
    raise NotImplementedError
"""


#: An example says `lock.fence > 0` where it knows that there is one, and begins a list without the type of its members.
UNNARROWED = (
    "--allow-any-generics",
    *(f"--disable-error-code={name}" for name in ("operator", "union-attr", "var-annotated")),
)
UNNARROWED_IN_PYRIGHT = {"reportOptionalMemberAccess": False, "reportOptionalOperand": False}


@pytest.fixture
def mypy(tmp_path: Path) -> Callable[..., str]:
    """Runs mypy --strict over the files of `tmp_path`, for an environment without some packages; returns its report."""

    def run(*options: str, without: tuple[str, ...] = ()) -> str:
        python = environment(tmp_path / "venv", without)
        command = ["mypy", "--strict", "--config-file=", "--cache-dir", os.devnull, "--python-executable", str(python)]
        return report(tmp_path, *command, *options, *files_in(tmp_path))

    return run


@pytest.fixture
def pyright(tmp_path: Path) -> Callable[..., str]:
    """Runs pyright over the same, for the same; with the mode ``strict`` a mark without an error is one."""

    def run(mode: str, without: tuple[str, ...] = (), **rules: bool) -> str:
        python = environment(tmp_path / "venv", without)
        rules["reportUnnecessaryTypeIgnoreComment"] = mode == "strict"
        config = {"include": files_in(tmp_path), "typeCheckingMode": mode, **rules}
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
        return report(tmp_path, "pyright", "--pythonpath", str(python))

    return run


def report(folder: Path, checker: str, *options: str) -> str:
    """What a type checker says that is run in this folder."""
    command = [sys.executable, "-m", checker, *options]
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # else it asks whether there is a newer one
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


def environment(folder: Path, without: tuple[str, ...]) -> Path:
    """A Python that has this one's packages, but for some, and the package of this checkout as an installed one."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name not in without and not path.name.startswith("celery_redislock") and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    (packages / "celery_redislock").symlink_to(ROOT / "celery_redislock")
    return folder / "bin" / "python"


def test_users_code_passes_mypy_where_celery_types_is_installed(mypy: Callable[..., str], tmp_path: Path) -> None:
    """What is wrong in it is marked, and a mark without an error is one."""
    for path in TYPED.glob("with*.py"):
        shutil.copy(path, tmp_path)
    assert mypy() == "Success: no issues found in 2 source files\n"


def test_users_code_passes_pyright_where_celery_types_is_installed(pyright: Callable[..., str], tmp_path: Path) -> None:
    for path in TYPED.glob("with*.py"):
        shutil.copy(path, tmp_path)
    assert pyright("strict") == PASSES


def test_what_is_ours_is_typed_for_mypy_where_celery_has_no_types(mypy: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(TYPED / "with_or_without_stubs.py", tmp_path)
    assert mypy(without=("celery-stubs",)) == "Success: no issues found in 1 source file\n"


def test_what_is_ours_is_typed_for_pyright_where_celery_has_no_types(
    pyright: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copy(TYPED / "with_or_without_stubs.py", tmp_path)
    assert pyright("strict", without=("celery-stubs",)) == PASSES


@pytest.fixture
def pages(tmp_path: Path) -> int:
    """The code of the pages, as files; returns how many. Left out is what stands amid frameworks without types."""
    (tmp_path / "imagined.py").write_text(IMAGINED)
    code = python_of(ROOT / "README.md")  # its line numbers are those of the README, whose first line is its title
    calls = module("calls.py")  # a program of its own, which imports from the other
    (tmp_path / "calls.py").write_text(calls)
    code = code.replace(calls, "\n" * calls.count("\n"))
    (tmp_path / "shop.py").write_text("from imagined import parts, swap_index" + code + "\n")
    for page in PAGES:
        if page.stem != "migrating" and not files_of(page):
            (tmp_path / f"docs_{page.stem.replace('-', '_')}.py").write_text(python_of(page) + "\n")
    return len(files_in(tmp_path))


def test_the_code_of_the_pages_passes_mypy_but_for_annotations(mypy: Callable[..., str], pages: int) -> None:
    assert mypy(*UNANNOTATED, *UNNARROWED) == f"Success: no issues found in {pages} source files\n"


def test_the_code_of_the_pages_passes_pyright_but_for_annotations(pyright: Callable[..., str], pages: int) -> None:
    assert pages
    assert pyright("basic", **UNNARROWED_IN_PYRIGHT) == PASSES
