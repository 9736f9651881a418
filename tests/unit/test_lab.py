"""The lab holds nothing that no test uses."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lab.app import Config, make_app

TESTS = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
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
