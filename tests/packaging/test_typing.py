"""What users' type checkers see: the installed package, with celery-types and without, and the README's own code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.pages import python_of
from tests.lab.readme import module
from tests.lab.workers import ROOT

#: The README's functions have no annotations, and it names some that a reader has to imagine.
UNANNOTATED = ("--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls", "--check-untyped-defs")
IMAGINED = """
from typing import Any

def parts(index: str) -> list[Any]:
    raise NotImplementedError

def swap_index(index: str) -> None:
    raise NotImplementedError
"""


@pytest.fixture
def mypy(tmp_path: Path) -> Callable[..., str]:
    """Runs mypy --strict over the files of `tmp_path`, for an environment without some packages; returns its report."""

    def run(*options: str, without: tuple[str, ...] = ()) -> str:
        python = environment(tmp_path / "venv", without)
        files = sorted(path.name for path in tmp_path.glob("*.py"))
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", os.devnull]
        command += ["--python-executable", str(python), *options, *files]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.stdout

    return run


def environment(folder: Path, without: tuple[str, ...]) -> Path:
    """A Python that has this one's packages, but for some, and the package of this checkout as an installed one."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name not in without and not path.name.startswith("celery_redislock") and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    (packages / "celery_redislock").symlink_to(ROOT / "celery_redislock")
    return folder / "bin" / "python"


def test_users_code_passes_where_celery_types_is_installed(mypy: Callable[..., str], tmp_path: Path) -> None:
    """What is wrong in it is marked, and a mark without an error is one."""
    for path in (ROOT / "tests" / "typing").glob("with*.py"):
        shutil.copy(path, tmp_path)
    assert mypy() == "Success: no issues found in 2 source files\n"


def test_what_is_ours_is_typed_where_celery_has_no_types(mypy: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "typing" / "with_or_without_stubs.py", tmp_path)
    assert mypy(without=("celery-stubs",)) == "Success: no issues found in 1 source file\n"


def test_the_code_of_the_readme_passes_but_for_annotations(mypy: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "imagined.py").write_text(IMAGINED)
    code = python_of(ROOT / "README.md")  # its line numbers are those of the README, whose first line is its title
    calls = module("calls.py")  # a program of its own, which imports from the other
    (tmp_path / "calls.py").write_text(calls)
    code = code.replace(calls, "\n" * calls.count("\n"))
    (tmp_path / "shop.py").write_text("from imagined import parts, swap_index" + code + "\n")
    assert mypy(*UNANNOTATED) == "Success: no issues found in 3 source files\n"
