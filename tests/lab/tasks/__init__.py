"""The tasks of the tests, a module for each theme; every run is written into the ledger."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from celery import Celery

from tests.lab.ledger import Ledger

from . import (
    after_the_end,
    comebacks,
    deaths,
    fair,
    jobs,
    late,
    limits,
    merging,
    never_start,
    one_job,
    own_lock,
    policies,
    pools,
    rates,
    replacing,
    several,
    successors,
    turns,
    unlocked,
    ways_out,
    windows,
)
from .decorator import choose

THEMES = (
    turns,
    unlocked,
    policies,
    comebacks,
    successors,
    ways_out,
    deaths,
    late,
    own_lock,
    jobs,
    never_start,
    one_job,
    after_the_end,
    limits,
    pools,
    windows,
    merging,
    rates,
    fair,
    replacing,
    several,
)

#: What the bodies of some tasks use besides.
NEEDS = {
    "as_many": {"three"},
    "by_time": {"by_turns"},
    "lingering_job": {"lingers_join"},
    "one_by_turns": {"by_turns"},
    "patient_job": {"job"},
    "takes_another": {"work"},
    "tracked": {"late"},
    **{f"on_{policy}": {"plain"} for policy in ("skip", "wait", "raise", "join")},
}
#: What a module of tests names: a task, or a family of them, as in ``f"on_{policy}"``.
_NAMED = re.compile(r'(?:(?<=tasks\.)|(?<=lab\.)|(?<="))(?:\w+_{|\w+)')


def define_tasks(app: Celery, ledger: Ledger, names: Collection[str] | None = None) -> None:
    """Define the tasks of these names; None for all. In Celery their names begin with ``lab.``.

    Celery binds each task in every process, and a worker makes a strategy for it: all of them take half a second.
    """
    choose(app, names)
    for theme in THEMES:
        theme.define(app, ledger)


def tasks_for(test: str, *files: Path) -> list[str]:
    """The tasks that a test or the rest of its modules name, and those that these need.

    If they name none, the test may be about whatever tasks there are: those that other tests name.
    """
    words = [_words_by_test(file) for file in files]
    named = _named(word for of in words for name in ("", test) for word in of.get(name, ()))
    named = named or _named(word for of in words for some in of.values() for word in some)
    return sorted(named.union(*(NEEDS.get(task, ()) for task in named)))


def _named(words: Iterable[str]) -> set[str]:
    every = set(words)
    return {task for task in _tasks() if is_named(task, every)}


@functools.cache
def _words_by_test(file: Path) -> dict[str, set[str]]:
    """What each test of a module may name, and what the rest of the module may, as the test ""."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    body = ast.parse(text).body
    words: dict[str, set[str]] = {}
    for node in [*body, *(node for group in body if isinstance(group, ast.ClassDef) for node in group.body)]:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min(part.lineno for part in (node, *node.decorator_list)) - 1
            words.setdefault(node.name, set()).update(words_of("".join(lines[first : node.end_lineno])))
            lines[first : node.end_lineno] = [""] * (node.end_lineno - first)
    return {**words, "": words_of("".join(lines))}


def words_of(text: str) -> set[str]:
    """The words of a text that may name a task or a family of tasks."""
    return set(_NAMED.findall(text))


def is_named(task: str, words: Collection[str]) -> bool:
    """Whether a task is among the words of a text, or its family is."""
    return task in words or f"{task.rpartition('_')[0]}_{{" in words


class _Names(list[str]):
    """Asked whether a task is chosen, it notes the name and says no."""

    def __contains__(self, name: object) -> bool:
        self.append(str(name))
        return False


@functools.cache
def _tasks() -> list[str]:
    """The names of all tasks."""
    names = _Names()
    define_tasks(Celery("names", set_as_current=False), Ledger(Path(os.devnull)), names)
    return names
