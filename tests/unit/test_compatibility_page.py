"""Each cell of the tables in docs/compatibility.md has a test that runs with that pool, or on that broker.

The footnote of a promise names its tests.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
#: What the columns are called in the names of tests. A test that names none of them runs with the first.
POOLS = {
    "`prefork`": "prefork",
    "`threads`": "threads",
    "`solo`": "solo",
    "`gevent`": "gevent",
    "`eventlet`": "eventlet",
}
BROKERS = {
    "Redis": "redis",
    "RabbitMQ": "rabbitmq",
    "RabbitMQ, quorum": "quorum",
    "file system": "filesystem",
    "memory": "memory",
}


class Row(NamedTuple):
    promise: str
    cells: list[str]
    tests: list[tuple[str, str]]
    """The file and the function of each."""


def rows_of(section: str, columns: list[str]) -> list[Row]:
    page = PAGE.read_text(encoding="utf-8")
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    table = [line for line in text.split("\n### ")[0].splitlines() if line.startswith("|")]
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert head == ["Promise", *columns]
    return [Row(promise.split("[^")[0], cells, named_in(promise, page)) for promise, *cells in lines]


def named_in(promise: str, page: str) -> list[tuple[str, str]]:
    """The tests that the footnotes of a promise name."""
    footnotes = dict(re.findall(r"^\[\^([\w-]+)\]: ((?:.+\n)(?:    .+\n)*)", page, re.MULTILINE))
    named = "".join(footnotes[label] for label in re.findall(r"\[\^([\w-]+)\]", promise))
    return re.findall(r"\(\.\./(tests/[\w/]+\.py)#(\w+)\)", named)


ROWS = {
    **{f"Pools: {row.promise}": (row, POOLS) for row in rows_of("Pools", list(POOLS))},
    **{f"Brokers: {row.promise}": (row, BROKERS) for row in rows_of("Brokers", list(BROKERS))},
}


@functools.cache
def collected(*, matrix: bool) -> list[tuple[str, str, set[str]]]:
    """The file, the function and the parameters of all tests of the files that the page names."""
    files = {file for row, _ in ROWS.values() for file, _ in row.tests}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-o",
            "addopts=",
            "-q",
            "-p",
            "no:cacheprovider",
            *sorted(files),
        ],
        cwd=ROOT,
        env={**os.environ, "LAB_EVERY_BROKER": str(int(matrix))},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"^(tests/\S+?)::(?:\w+::)*(\w+)(?:\[(.*)\])?$", done.stdout, re.MULTILINE)
    return [(file, function, set(parameters.split("-"))) for file, function, parameters in found]


def shown(row: Row, names: dict[str, str], *, matrix: bool) -> list[bool]:
    """For each column, whether a test of the row runs with it."""
    known, seen = set(names.values()), set()
    for file, function, parameters in collected(matrix=matrix):
        if (file, function) in row.tests:
            seen |= parameters & known or {next(iter(names.values()))}
    return [name in seen for name in names.values()]


@pytest.mark.parametrize("name", ROWS)
def test_a_cell_says_yes_or_matrix_where_a_test_shows_it_and_nowhere_else(name: str) -> None:
    row, names = ROWS[name]
    assert row.tests
    at_once, in_the_matrix = shown(row, names, matrix=False), shown(row, names, matrix=True)
    found = ["yes" if now else "matrix" if full else "" for now, full in zip(at_once, in_the_matrix, strict=True)]
    assert [cell if cell in {"yes", "matrix"} else "" for cell in row.cells] == found


def test_ten_promises_are_shown_for_each_pool_and_broker_and_six_for_those_that_are_only_tried() -> None:
    least = {
        **dict.fromkeys(POOLS, 10),
        "Redis": 10,
        "RabbitMQ": 10,
        "RabbitMQ, quorum": 10,
        "file system": 6,
        "memory": 6,
    }
    for names in (POOLS, BROKERS):
        rows = [row for row, columns in ROWS.values() if columns is names]
        for number, name in enumerate(names):
            assert sum(row.cells[number] in {"yes", "matrix"} for row in rows) >= least[name], name
