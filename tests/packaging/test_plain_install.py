"""What `pip install celery-redislock` gives a user, from a package registry: by `make wheel`, not by `make test`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from noxfile import oldest
from tests.lab.readme import README, celerys_own, try_it
from tests.lab.servers import Valkey, free_port
from tests.lab.workers import ROOT

from .conftest import run

pytestmark = pytest.mark.network

LOOK = """
import json
from importlib.metadata import distributions
import celery_redislock
names = {each.metadata["Name"].lower(): each.version for each in distributions()}
print(json.dumps([celery_redislock.__file__, names]))
"""


def installed(folder: Path, *wanted: str) -> Path:
    """The Python of a new environment in which pip has installed what is wanted, and nothing else."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted, cwd=folder)
    return python


@pytest.fixture
def variables(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Those of a user's shell: nothing of this checkout is on a path.

    The server is on a port, as in the README: redis-py 8 treats connections by TCP in a way of their own.
    """
    with Valkey(tmp_path, free_port()).serve() as server:
        yield {**os.environ, **celerys_own(server), "PYTHONPATH": ""}


@pytest.mark.parametrize("extra", ["", "[hiredis]"], ids=["without-hiredis", "with-hiredis"])
@pytest.mark.parametrize("pins", [oldest(), []], ids=["oldest", "newest"])
def test_the_readmes_first_screen_works_with_the_wheel_alone(wheel, tmp_path, variables, pins, extra):
    python = installed(tmp_path, f"{wheel}{extra}", *pins)
    file, versions = json.loads(run(python, "-c", LOOK, cwd=tmp_path, env=variables))
    assert Path(file).is_relative_to(tmp_path)
    assert ("hiredis" in versions) == bool(extra)
    for pin in pins:
        name, version = pin.split("==")
        assert Version(versions[name.split("[")[0]]) == Version(version)
    printed, log = try_it(python, tmp_path, variables)
    assert printed == README.console("python calls.py")[1], log


def test_the_demo_works_with_the_wheel_alone(wheel, tmp_path):
    """It is no part of the wheel: copied, it finds no other celery_redislock than the installed one."""
    python = installed(tmp_path, f"{wheel}[demo]")
    shutil.copytree(ROOT / "example_worker", tmp_path / "example_worker")
    shown = run(python, "-m", "example_worker", cwd=tmp_path)
    assert "lost: 0  overlaps: 0" in shown
