"""The wheel, installed into a clean environment: what users get, not what lies in the repository."""

from __future__ import annotations

import json
import re
import shutil
import sys
import sysconfig
import venv
from email import message_from_bytes
from email.message import Message
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


def metadata_of(wheel: Path) -> Message:
    with ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        return message_from_bytes(files.read(name))


def with_address(address: str, folder: Path) -> Message:
    """The metadata of a wheel whose `pyproject.toml` names this repository."""
    for name in ("README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "celery_redislock").mkdir()
    (folder / "celery_redislock" / "__init__.py").touch()
    text = (ROOT / "pyproject.toml").read_text()
    set_to, times = re.subn(r'^repository = ".*"$', f'repository = "{address}"', text, flags=re.MULTILINE)
    assert times == 1
    (folder / "pyproject.toml").write_text(set_to)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return metadata_of(wheel)


def description_of(metadata: Message) -> str:
    text = metadata.get_payload(decode=True)
    assert isinstance(text, bytes)
    return text.decode()


def links_of(text: str) -> list[tuple[str, str]]:
    """The text and the target of each link that leaves the page."""
    return re.findall(r"\[([^\]]+)\]\((?!#)([^)]+)\)", text)


def test_the_description_for_a_package_index_has_no_relative_link(wheel: Path) -> None:
    """A package index does not have the files that they lead to."""
    links = links_of(description_of(metadata_of(wheel)))
    assert [target for _, target in links if "://" not in target] == []


def test_without_an_address_the_links_of_the_readme_are_plain_text(tmp_path: Path) -> None:
    built = with_address("", tmp_path)
    readme, description = (ROOT / "README.md").read_text(), description_of(built)
    relative = [link for link in links_of(readme) if "://" not in link[1]]
    assert len(relative) > 20
    assert links_of(description) == [link for link in links_of(readme) if "://" in link[1]]
    assert [text for text, _ in relative if text not in description] == []
    assert "in the folder `docs` of the source distribution" in description
    assert built.get_all("Project-URL") is None


def test_one_address_makes_the_urls_and_the_links_of_the_readme(tmp_path: Path) -> None:
    built = with_address("https://example.org/a/b/", tmp_path)
    readme, description = (ROOT / "README.md").read_text(), description_of(built)
    files = f"https://example.org/a/b/blob/v{built['Version']}/"
    assert links_of(description) == [
        (text, target if "://" in target else files + target) for text, target in links_of(readme)
    ]
    assert "source distribution" not in description
    urls = dict(line.split(", ") for line in built.get_all("Project-URL", []))
    assert urls.keys() == {"Documentation", "Source", "Changelog", "Issues"}
    assert urls["Source"] == "https://example.org/a/b"
    assert all(url.startswith("https://example.org/a/b") for url in urls.values())


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
    """Every module and script, the files of the web page, and the mark that it is typed."""
    source = ROOT / "celery_redislock"
    kinds = {".py", ".lua", ".typed", ".html", ".css", ".js", ".svg"}
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in kinds}
    files = set(installed[1]["files"])
    assert ours - files == set()
    assert {"py.typed", "protocol/lua/acquire.lua", "protocol/lua/release.lua", "protocol/lua/renew.lua"} <= files


def test_every_public_name_is_there(installed: tuple[Path, dict[str, Any]]) -> None:
    assert installed[1]["public"] == []
