"""The tests themselves: the lab holds nothing that none of them uses, and they know the package by its public names."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lab.app import Config, make_app

ROOT = Path(__file__).parents[2]
TESTS = "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
NOWHERE = "redis://nowhere.invalid/0"


def test_every_task_of_the_lab_has_a_test_that_uses_it(tmp_path: Path) -> None:
    with make_app(Config(NOWHERE, NOWHERE, NOWHERE, str(tmp_path / "ledger"))) as app:
        tasks = {name.removeprefix("lab."): type(task) for name, task in app.tasks.items() if name.startswith("lab.")}
    bases = {base for task in tasks.values() for base in task.__mro__[1:]}
    assert len(tasks) > 50
    assert [name for name, task in tasks.items() if task not in bases and not is_used(name)] == []


def is_used(name: str) -> bool:
    """By its name, or by that of its family, as in ``f"on_{policy}"``."""
    family = name.rpartition("_")[0] or name
    return bool(re.search(rf'(tasks\.|lab\.|"){name}\b|"{family}_{{', TESTS))


def test_no_test_reaches_into_what_is_private_to_a_module_or_an_object() -> None:
    package = "".join(path.read_text() for path in ROOT.glob("celery_redislock/**/*.py"))
    private = set(re.findall(r"\b(?:self|cls)\.(_[a-z]\w*)|^ *def (_[a-z]\w*)", package, re.MULTILINE))
    names = {name for pair in private for name in pair if name} - {"_asdict", "_fields", "_replace"}  # of a NamedTuple
    assert {"_send", "_held", "_lock_track_started"} <= names
    folders = ("tests", "chaos", "example_worker")
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    reached = [
        (str(path.relative_to(ROOT)), found)
        for path in files
        for found in re.findall(r"(?<!self)(?<!cls)\.(_[a-z]\w*)", path.read_text())
        if found in names
    ]
    assert reached == []
