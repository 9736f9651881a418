"""The wheel, installed into a clean environment: what users get, not what lies in the repository."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import venv
from email import message_from_bytes
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.lab.workers import ROOT

from .conftest import run

LOOK = """
import json
from importlib.metadata import distribution
from pathlib import Path
import celery_redislock
from celery_redislock.connection.store import LockStore

folder = Path(celery_redislock.__file__).parent
print(json.dumps({
    "file": celery_redislock.__file__,
    "public": [name for name in celery_redislock.__all__ if not hasattr(celery_redislock, name)],
    "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts),
    "distribution": str(distribution("celery-redislock").locate_file("")),
}))
"""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A clean environment with the wheel, and what its Python says about the package.

    It sees this environment's packages, for the dependencies, behind its own; but not the editable installation of
    this package, which a path file names: such files count only in an environment's own folder.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        wheel,
        cwd=folder,
    )
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    said: dict[str, Any] = json.loads(run(python, "-W", "error", "-c", LOOK, cwd=folder))
    return site_packages, said


def test_the_wheel_holds_the_package_and_its_metadata_alone(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"celery_redislock"}
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_the_description_for_a_package_index_is_the_readme_without_its_relative_links(wheel: Path) -> None:
    """Nothing on an index's page is at their end."""
    with ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        description = message_from_bytes(files.read(name)).get_payload()
    links = re.findall(r"\]\((?!https?://)[^)]*\)", (ROOT / "README.md").read_text())
    assert len(links) > 30
    assert re.findall(r"\]\((?!https?://)[^)]*\)", description) == []
    assert "[The guarantees](docs/guarantees.md) say where it ends" in (ROOT / "README.md").read_text()
    assert "The guarantees say where it ends" in description


def test_to_install_it_changes_nothing_for_pytest_and_adds_one_command_to_celery(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("entry_points.txt"))
        lines = files.read(name).decode().split()
    assert lines == ["[celery.commands]", "locks", "=", "celery_redislock.cli.commands:locks"]


def test_the_wheels_own_copy_is_imported(installed: tuple[Path, dict[str, Any]]) -> None:
    site_packages, said = installed
    assert Path(said["file"]).is_relative_to(site_packages)
    assert Path(said["distribution"]) == site_packages


def test_every_file_of_the_package_is_installed(installed: tuple[Path, dict[str, Any]]) -> None:
    """Every module, every script, and the mark that it is typed."""
    source = ROOT / "celery_redislock"
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in {".py", ".lua", ".typed"}}
    files = set(installed[1]["files"])
    assert ours - files == set()
    assert {"py.typed", "protocol/lua/acquire.lua", "protocol/lua/release.lua", "protocol/lua/renew.lua"} <= files


def test_every_public_name_is_there(installed: tuple[Path, dict[str, Any]]) -> None:
    assert installed[1]["public"] == []
