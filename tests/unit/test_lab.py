"""The tests themselves: the lab holds nothing that none of them uses, and they know the package by its public names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from celery import Task

from tests.lab.app import Config, make_app
from tests.lab.tasks import NEEDS, is_named, tasks_for, words_of

ROOT = Path(__file__).parents[2]
TESTS = words_of("".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py")))
NOWHERE = "redis://nowhere.invalid/0"


def test_every_task_of_the_lab_has_a_test_that_uses_it(tmp_path: Path) -> None:
    with make_app(Config(NOWHERE, NOWHERE, NOWHERE, str(tmp_path / "ledger"))) as app:
        tasks = {name.removeprefix("lab."): type(task) for name, task in app.tasks.items() if name.startswith("lab.")}
    bases = {base for task in tasks.values() for base in task.__mro__[1:]}
    assert len(tasks) > 50
    assert [name for name, task in tasks.items() if task not in bases and not is_named(name, TESTS)] == []


MODULE = """
FAMILY = f"on_{policy}"

class TestIt:
    @parametrize("lab.work")
    def test_other(self):
        tasks.late()

    @parametrize("lab.once")
    def test_it(self):
        tasks.patient_job.delay()
"""


def test_an_app_has_the_tasks_that_its_test_and_no_test_names_and_those_that_these_need(tmp_path: Path) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(MODULE)
    named = tasks_for("test_it", module)
    assert named == ["job", "on_join", "on_raise", "on_skip", "on_wait", "once", "patient_job", "plain"]
    with make_app(Config(NOWHERE, NOWHERE, NOWHERE, str(tmp_path / "ledger"), tasks=named)) as app:
        assert sorted(name for name in app.tasks if name.startswith("lab.")) == [f"lab.{name}" for name in named]


def test_a_test_that_names_no_task_has_those_of_all_tests_of_its_module(tmp_path: Path) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(
        "def test_it(start_worker): ...\ndef test_once(tasks): tasks.once\ndef test_work(tasks): tasks.work"
    )
    assert tasks_for("test_it", module) == ["once", "work"]
    assert tasks_for("test_once", module) == ["once"]


def test_what_the_body_of_a_task_uses_is_known_to_be_needed(tmp_path: Path) -> None:
    with make_app(Config(NOWHERE, NOWHERE, NOWHERE, str(tmp_path / "ledger"))) as app:
        bodies = {
            name.removeprefix("lab."): inspect.unwrap(task.run) for name, task in app.tasks.items() if "lab." in name
        }
    used = {name: set(re.findall(r"lab\.(\w+)", inspect.getsource(body))) for name, body in bodies.items()}
    for name, body in bodies.items():
        around = inspect.getclosurevars(body).nonlocals.values()
        used[name] |= {value.name.removeprefix("lab.") for value in around if isinstance(value, Task)}
    assert {name: tasks - {name} for name, tasks in used.items() if tasks - {name}} == NEEDS


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
