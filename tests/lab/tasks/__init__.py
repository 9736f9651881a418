"""The tasks of the tests, a module for each theme; every run is written into the ledger."""

from __future__ import annotations

from celery import Celery

from tests.lab.ledger import Ledger

from . import (
    after_the_end,
    comebacks,
    deaths,
    jobs,
    late,
    limits,
    never_start,
    one_job,
    own_lock,
    policies,
    pools,
    successors,
    turns,
    unlocked,
    ways_out,
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
)


def define_tasks(app: Celery, ledger: Ledger) -> None:
    """Define all tasks of the tests; their names begin with ``lab.``."""
    for theme in THEMES:
        theme.define(app, ledger)
