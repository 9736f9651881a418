"""What docs/how-it-works.md lists of the code is what the code has, and no less."""

from __future__ import annotations

import re
from inspect import isfunction
from pathlib import Path
from typing import get_args

import pytest

from celery_redislock import policy
from celery_redislock.connection.store import LockStore
from celery_redislock.options import ATTRIBUTES, ConflictPolicy, Scope
from celery_redislock.policy import conflict, join
from celery_redislock.policy.conflict import POLICIES
from celery_redislock.protocol import tokens
from celery_redislock.protocol.names import MERGED, LockKeys
from celery_redislock.task.locked_task import LockedTask
from celery_redislock.worker.request import LockedRequest

from .test_layout import ROOMS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "celery_redislock"
DOCS = ROOT / "docs"
PAGE = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
CODE = "".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
MODULES = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
SCRIPTS = {path.stem for path in PACKAGE.glob("protocol/lua/*.lua")}


def section(page: str, heading: str) -> str:
    """What stands below a heading, down to the next one of its rank."""
    marks = heading.split()[0]
    return re.split(rf"^#{{1,{len(marks)}}} ", f"\n{page}".split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]


def first_table(page: str, heading: str) -> str:
    """The first table below a heading."""
    return "\n".join(re.findall(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE)[:1])


def column(text: str, number: int = 0) -> list[str]:
    """The cells of one column of all tables, without their heads."""
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    ends = [at for at, row in enumerate(rows) if re.fullmatch(r"[\s|:-]+", row)]
    heads = {at for end in ends for at in (end - 1, end)}
    return [row.split(" | ")[number].strip() for at, row in enumerate(rows) if at not in heads]


def quoted(cells: list[str]) -> list[str]:
    """The code in some cells, without its quotes."""
    return [code.strip('"') for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def files_named(text: str) -> set[str]:
    return set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|lua|md))`", text))


def exists(name: str) -> bool:
    return (ROOT / name).is_file() or (PACKAGE / name).is_file()


def test_every_file_and_folder_that_is_named_is_there() -> None:
    assert len(files_named(PAGE)) > 60
    assert {name for name in files_named(PAGE) if not exists(name)} == set()
    folders = re.findall(r"`((?:[\w-]+/)+)`", PAGE)
    assert [name for name in folders if not ((ROOT / name).is_dir() or (PACKAGE / name).is_dir())] == []


def test_the_check_sees_a_file_that_is_not_there() -> None:
    assert files_named("`task/plan.py` and `task/policies.py`, `.py`") == {"task/plan.py", "task/policies.py"}
    assert exists("task/plan.py")
    assert exists("tests/unit/test_docs.py")
    assert not exists("task/policies.py")


def test_every_module_has_its_line() -> None:
    assert sorted(name for name in quoted(column(PAGE)) if name.endswith(".py")) == sorted(MODULES)


def test_the_folder_is_read_aloud_from_the_ground_up() -> None:
    listing = section(PAGE, "## The folders").split("```text\n")[1].split("```")[0]
    names = re.findall(r"(\w+)(?:/|\.py)", "\n".join(line.split("  ")[-2] or line for line in listing.splitlines()[1:]))
    floor = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
    assert set(names) == floor.keys() - {"__init__"}
    assert [floor[name] for name in names] == sorted(floor[name] for name in names)


def test_the_keys_are_those_that_have_a_name() -> None:
    keys = LockKeys("<lock>")
    names = {
        keys.lock,
        keys.queued,
        keys.permit("<number>"),
        keys.pending,
        keys.given("<job>"),
        keys.queued.replace(":queued", f"{MERGED}<nonce>"),
        keys.queued.replace(":queued", ":newest"),
        keys.queued.replace(":queued", ":fair"),
        keys.note("<attempt>"),
        keys.gone("<claim>"),
        keys.window("<task>"),
        keys.fence,
        keys.line,
    }
    shown = {name.replace("{<lock>}", "<lock>") for name in names}
    assert set(quoted(column(section(PAGE, "## The keys").split("**A token**")[0]))) == shown


def test_the_states_are_those_of_the_tokens() -> None:
    held = [tokens.RUNS, tokens.SEEN, tokens.RESERVED, tokens.SENDING]
    states = [*held, tokens.COOLING, tokens.SPENT, tokens.OFFERED, tokens.CALLED]
    assert quoted(column(section(PAGE, "## The keys").split("**A token**")[1])) == states


def test_the_scripts_are_those_that_there_are_and_each_verb_is_one_of_the_store() -> None:
    scripts = section(PAGE, "## The scripts")
    assert set(quoted(column(scripts))) == SCRIPTS
    verbs = {name for name, verb in vars(LockStore).items() if isfunction(verb) and not name.startswith("_")}
    assert sorted(quoted(column(scripts, 2))) == sorted(verbs)


def test_the_threads_are_those_that_the_code_starts() -> None:
    threads = set(re.findall(r'(?:name=|PoolExecutor\(1, )"(redislock-\w+)"', CODE))
    assert threads == set(re.findall(r"`(redislock-\w+)`", section(PAGE, "### Processes and threads")))


def test_the_hooks_are_those_that_the_code_has() -> None:
    hooks = [hook.split(".") for hook in quoted(column(section(PAGE, "### Celery's hooks"))) if "." in hook]
    classes = {"Task": LockedTask, "Request": LockedRequest}
    assert [name for of, name in hooks if name not in vars(classes[of])] == []
    assert {"bind", "apply_async", "before_start", "after_return", "on_failure"} <= {name for _, name in hooks}


def test_the_decisions_are_functions_of_their_modules() -> None:
    names = quoted(column(section(PAGE, "## Decisions")))
    there = vars(policy) | vars(conflict) | vars(join)
    assert [name for name in names if not callable(there.get(name))] == []
    assert {name for name in there if name.startswith("on_")} <= set(names)


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("docs/conflicts.md", "## The policies"),
        ("docs/choosing.md", "## 3. What happens to a call that finds it held?"),
        ("README.md", "## Choose what is locked"),
    ],
)
def test_the_policies_are_the_same_in_their_table_their_type_and_the_documents(page: str, heading: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert sorted(quoted(column(first_table(text, heading)))) == sorted(POLICIES) == sorted(get_args(ConflictPolicy))


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("unique-jobs.md", "# Unique jobs"),
        ("choosing.md", "## 2. How long is the key held?"),
    ],
)
def test_the_scopes_are_the_same_in_their_type_and_the_documents(page: str, heading: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert quoted(column(first_table(text, heading))) == list(get_args(Scope))


def test_the_options_are_the_same_in_the_code_and_on_their_page() -> None:
    text = (DOCS / "options.md").read_text(encoding="utf-8")
    assert set(quoted(column(first_table(text, "## Options of a task")))) == ATTRIBUTES


@pytest.mark.parametrize("what", ["a policy", "a scope", "an option"])
def test_who_adds_something_is_told_the_files(what: str) -> None:
    rows = section(PAGE, "## Where to change what").splitlines()
    (named,) = [files_named(row) for row in rows if row.startswith(f"| add {what} |")]
    assert named >= {"options.py", "task/plan.py", "README.md"}
