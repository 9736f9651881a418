"""Trial: a mutant's killer is run in a copy of the tree that has the mistake; and what came of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from .mutant import ROOT, Mutant

#: What a copy of the tree has.
COPIED = ("celery_redislock", "tests", "docs", "promises.py", "README.md", "pyproject.toml")
#: Seconds that one killer may take; pytest ends a test that hangs before that.
LONGEST = 200.0
#: How the message of a failed test begins that has looked at what the package does, and has found it wrong. Any other
#: error, such as one of the import, a NameError or a time-out, says nothing about the promise.
_IS_ASSERTION = re.compile(r"assert |AssertionError|Failed: (?!Timeout)").match


class Outcome(NamedTuple):
    """What came of a trial."""

    mutant: Mutant
    is_killed: bool
    """Whether the killer has failed, by an assertion."""
    why: str
    """What has failed in the killer, in a line; or why the mutant counts as alive."""
    seconds: float


def try_out(mutant: Mutant) -> Outcome:
    """Run the killer of `mutant` against it."""
    began = time.monotonic()
    with tree(mutant.changed()) as copy:
        code, report = run(copy, [mutant.killer], "-x")
        failures = failures_in(report) if report.exists() else []
    return Outcome(mutant, *verdict(code, failures), time.monotonic() - began)


def verdict(code: int, failures: Sequence[str]) -> tuple[bool, str]:
    """Whether a mutant is killed, and why or why not.

    Args:
        code: How pytest has ended.
        failures: What each test that has failed says.
    """
    for failure in failures:
        if _IS_ASSERTION(failure):
            return True, _line(failure)
    if code == 0:
        return False, "its killer passes"
    what = failures[0] if failures else f"pytest has ended with {code}, and no test has failed"
    return False, _line(f"its killer fails by no assertion: {what}")


def _line(text: str) -> str:
    return text.split("\n")[0][:120]


def passes(killers: Sequence[str]) -> bool:
    """Whether all killers pass without any mutant; where not, pytest has said why."""
    with tree({}) as copy:
        return run(copy, killers, "-n", "2", "--dist", "loadfile", is_quiet=False)[0] == 0


@contextmanager
def tree(changed: Mapping[str, str]) -> Iterator[Path]:
    """A copy of this tree, in a folder that ends with the block.

    Args:
        changed: The text of each file that is different there, by its path.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
            else:
                shutil.copy(source, copy / name)
        for path, text in changed.items():
            (copy / path).write_text(text, encoding="utf-8")
        yield copy


def run(copy: Path, tests: Sequence[str], *options: str, is_quiet: bool = True) -> tuple[int, Path]:
    """Run these tests in `copy`; return how pytest has ended, and its report.

    Each name may have a test that is parametrized: all its cases are run.
    """
    report = copy / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, *tests]
    # What is missing on this machine must be an error: a test that is skipped kills nobody.
    env = {**os.environ, "PYTHONPATH": str(copy), "CI": "true"}
    output = subprocess.DEVNULL if is_quiet else None
    try:
        ended = subprocess.run(
            command, cwd=copy, env=env, stdout=output, stderr=output, timeout=LONGEST * len(tests), check=False
        )
    except subprocess.TimeoutExpired:
        return -1, report
    return ended.returncode, report


def failures_in(report: Path) -> list[str]:
    """What each test that has failed says, from pytest's report. What fails before a test, or after it, is none."""
    return [failure.get("message", "") for failure in ElementTree.parse(report).iter("failure")]  # noqa: S314 - our own
