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
from functools import cache
from pathlib import Path

import pytest

from tests.lab.pages import files_of, python_of, write_files
from tests.lab.readme import README
from tests.lab.workers import ROOT

TYPED = ROOT / "tests" / "typing"
EVERY_PAGE = sorted((ROOT / "docs").glob("*.md"))
PASSES = "0 errors, 0 warnings, 0 informations\n"  # of pyright
#: What the examples use that a reader has to imagine.
IMAGINED = """
from typing import Any

flask_app: Any

def parts(index: str) -> list[Any]:
    raise NotImplementedError

def swap_index(index: str) -> None:
    raise NotImplementedError
"""


#: celery-once has no types: what comes from it is Any.
UNTYPED = (
    "--disable-error-code=import-untyped",
    "--allow-subclassing-any",
    "--allow-untyped-decorators",
    "--no-warn-return-any",
)
#: Whole projects, which pass pyright's mode "strict" as well.
PROJECTS = {"django", "fastapi"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Makes an environment without some packages, once; what mypy has read of its packages lies beside it."""

    @cache
    def made(without: tuple[str, ...]) -> Path:
        return environment(tmp_path_factory.mktemp("environment") / "venv", without)

    return made


@pytest.fixture
def mypy(tmp_path: Path, python: Callable[[tuple[str, ...]], Path]) -> Callable[..., str]:
    """Runs mypy --strict over the files of `tmp_path`, for an environment without some packages; returns its report."""

    def run(*options: str, without: tuple[str, ...] = ()) -> str:
        executable = python(without)
        known = executable.parents[2] / "mypy"
        command = ["mypy", "--strict", "--config-file=", f"--cache-dir={known}", f"--python-executable={executable}"]
        return report(tmp_path, *command, *options, *files_in(tmp_path))

    return run


@pytest.fixture
def pyright(tmp_path: Path, python: Callable[[tuple[str, ...]], Path]) -> Callable[..., str]:
    """Runs pyright over the same, for the same; with the mode ``strict`` a mark without an error is one."""

    def run(mode: str, without: tuple[str, ...] = (), **rules: bool) -> str:
        rules["reportUnnecessaryTypeIgnoreComment"] = mode == "strict"
        config = {"include": files_in(tmp_path), "typeCheckingMode": mode, **rules}
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
        return report(tmp_path, "pyright", "--pythonpath", str(python(without)))

    return run


def report(folder: Path, checker: str, *options: str) -> str:
    """What a type checker says that is run in this folder."""
    command = [sys.executable, "-m", checker, *options]
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # else it asks whether there is a newer one
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))


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
def programs(tmp_path: Path) -> None:
    """The code of the README and of each page that is one program, as modules whose lines have the page's numbers."""
    (tmp_path / "imagined.py").write_text(IMAGINED)
    code = python_of(ROOT / "README.md")  # its first line is its title: there is room for an import
    calls = README.module("calls.py")  # a program of its own, which imports from the other
    (tmp_path / "calls.py").write_text(calls)
    code = code.replace(calls, "\n" * calls.count("\n"))
    (tmp_path / "shop.py").write_text("from imagined import parts, swap_index" + code + "\n")
    for page in EVERY_PAGE:
        if page.stem != "migrating" and not files_of(page):
            (tmp_path / f"docs_{page.stem.replace('-', '_')}.py").write_text(python_of(page) + "\n")


@pytest.mark.usefixtures("programs")
def test_the_code_of_the_pages_passes_mypy(mypy: Callable[..., str], tmp_path: Path) -> None:
    assert mypy() == f"Success: no issues found in {len(files_in(tmp_path))} source files\n"


@pytest.mark.usefixtures("programs")
def test_the_code_of_the_pages_passes_pyright(pyright: Callable[..., str]) -> None:
    assert pyright("basic") == PASSES


@pytest.mark.parametrize("page", [page for page in EVERY_PAGE if files_of(page)], ids=lambda page: page.stem)
def test_the_files_of_a_page_pass_mypy(page: Path, mypy: Callable[..., str], tmp_path: Path) -> None:
    write_files(page, tmp_path)
    assert mypy("--explicit-package-bases") == f"Success: no issues found in {len(files_of(page))} source files\n"


@pytest.mark.parametrize("page", [page for page in EVERY_PAGE if files_of(page)], ids=lambda page: page.stem)
def test_the_files_of_a_page_pass_pyright(page: Path, pyright: Callable[..., str], tmp_path: Path) -> None:
    write_files(page, tmp_path)
    assert pyright("strict" if page.stem in PROJECTS else "basic") == PASSES


#: One line of a page's files, what is wrong with it instead, and what mypy and pyright say about that.
MISTAKES = [
    (
        "django",
        "index.delay_on_commit(product.pk)",
        'index.delay_on_commit("tea")',
        ("incompatible type", "cannot be assigned"),
    ),
    ("django", "adelay(product_id, quantity)", "adelay(product_id)", ("Missing pos", 'missing for parameter "quan')),
    ("django", "= daily_report.delay()", '= daily_report.delay("monday")', ("Too many arg", "Expected 0 po")),
    ("django", 'lock_scope="queue"', 'lock_scop="queue"', ("did you mean", "No parameter named")),
    ("django", "lock_block_for=0.5", 'lock_block_for="0.5"', ("incompatible type", "cannot be assigned")),
    ("fastapi", "daily_report.adelay(day)", "daily_report.adelay(7)", ("incompatible type", "cannot be assigned")),
    ("fastapi", "order.sku, order.quantity)", "order.sku)", ("Missing positional arg", 'missing for parameter "quan')),
    ("fastapi", 'lock_scope="job"', 'lock_scope="jobs"', ("incompatible type", "cannot be assigned")),
    ("fastapi", "lock_block_for=2", "lock_blok_for=2", ("did you mean", "No parameter named")),
]


@pytest.mark.parametrize("page", sorted({page for page, *_ in MISTAKES}))
@pytest.mark.parametrize("of", ["options", "calls"])  # a wrong option would hide what is wrong with a call
def test_each_mistake_in_the_files_of_a_page_is_found(
    page: str, of: str, mypy: Callable[..., str], pyright: Callable[..., str], tmp_path: Path
) -> None:
    mistakes = [
        (right, wrong, said)
        for where, right, wrong, said in MISTAKES
        if where == page and right.startswith("lock_") == (of == "options")
    ]
    write_files(ROOT / "docs" / f"{page}.md", tmp_path)
    for path in tmp_path.rglob("*.py"):
        text = path.read_text()
        for right, wrong, _ in mistakes:
            text = text.replace(right, wrong)
        path.write_text(text)
    by_mypy = mypy("--explicit-package-bases")
    assert f"Found {len(mistakes)} errors in " in by_mypy
    by_pyright = pyright("strict")
    for _, _, (said_by_mypy, said_by_pyright) in mistakes:
        assert said_by_mypy in by_mypy
        assert said_by_pyright in by_pyright  # and what follows from it, such as an unused variable


def test_the_page_on_migrating_passes_mypy_but_for_what_has_no_types(mypy: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "imagined.py").write_text(IMAGINED)
    (tmp_path / "app.py").write_text(
        "from imagined import flask_app" + python_of(ROOT / "docs" / "migrating.md") + "\n"
    )
    assert mypy(*UNTYPED) == "Success: no issues found in 2 source files\n"
