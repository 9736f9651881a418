"""The tasks of the tests, a module for each theme; every run is written into the ledger."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from celery import Celery

from tests.lab.kinds import OPTIONS
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


NOWHERE = "redis://nowhere.invalid/0"
#: What a theme needs besides: `policies` has a task that another one of `unlocked` takes the place of.
NEEDS = {"policies": {"unlocked"}}


def define_tasks(app: Celery, ledger: Ledger, themes: Collection[str] | None = None) -> None:
    """Define the tasks of these themes; None for all. Their names begin with ``lab.``.

    Celery binds each task once in every process, and a worker makes a strategy for it: all tasks take 0.1 s of a CPU.
    """
    for theme in THEMES:
        if themes is None or _name(theme) in themes:
            theme.define(app, ledger)


@functools.cache
def themes_named_in(*files: Path) -> list[str]:
    """The themes of which modules of tests name a task, and what these need."""
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    named = {theme for theme, names in _tasks().items() if any(is_named(name, text) for name in names)}
    return sorted(named.union(*(NEEDS.get(theme, ()) for theme in named)))


def is_named(task: str, text: str) -> bool:
    """Whether a text names a task: by its name, or by that of its family, as in ``f"on_{policy}"``."""
    family = task.rpartition("_")[0] or task
    return bool(re.search(rf'(tasks\.|lab\.|"){task}\b|"{family}_{{', text))


@functools.cache
def _tasks() -> dict[str, list[str]]:
    """The names of the tasks of each theme."""
    found = {}
    for theme in THEMES:
        with Celery("names", broker=NOWHERE, backend=NOWHERE, set_as_current=False) as app:
            app.conf.update(redislock_url=NOWHERE, redislock_client_options=OPTIONS)
            theme.define(app, Ledger(Path(os.devnull)))
            found[_name(theme)] = [name.removeprefix("lab.") for name in app.tasks if name.startswith("lab.")]
    return found


def _name(theme: ModuleType) -> str:
    return theme.__name__.rpartition(".")[2]
