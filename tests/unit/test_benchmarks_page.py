"""The page of benchmarks opens with a summary and three plots, which can be read in light and in dark mode."""

from __future__ import annotations

import re
from pathlib import Path

from rich.table import Table

from benchmarks.findings import PAGE, TOPICS
from benchmarks.markdown import SHOWN_ROWS, as_markdown

OPENING = PAGE.read_text(encoding="utf-8").split("\n## ")[0]


def test_the_page_opens_with_a_row_on_each_topic() -> None:
    assert re.findall(r"^\| (\S[^|]*) \| \S*\d", OPENING, re.MULTILINE) == list(TOPICS)


def table(rows: int) -> Table:
    made = Table(title="renewal: of all locks", caption="The mean.")
    made.add_column("case")
    for column in ("µs", "met"):
        made.add_column(column, justify="right")
    made.add_row("[bold]near[/]")
    for _ in range(rows - 1):
        made.add_row("one", "1.0", "")
    return made


def test_a_short_table_is_shown_with_its_groups_in_bold_and_without_empty_columns() -> None:
    assert as_markdown(table(2)) == (
        "**Renewal: of all locks**\n\n| case | µs |\n| --- | ---: |\n| **near** |  |\n| one | 1.0 |\n\nThe mean."
    )


def test_a_long_table_is_folded() -> None:
    assert "<details>" not in as_markdown(table(SHOWN_ROWS))
    folded = as_markdown(table(SHOWN_ROWS + 1))
    assert folded.startswith("<details>\n<summary>Renewal: of all locks</summary>\n\n| case |")
    assert folded.endswith("|\n\nThe mean.\n\n</details>")


def test_no_table_of_the_page_is_long_and_open() -> None:
    opened = re.sub(r"<details>.*?</details>", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", opened, re.MULTILINE)
    assert [len(rows.splitlines()) - 2 for rows in tables if len(rows.splitlines()) - 2 > SHOWN_ROWS] == []


def test_three_plots_follow_and_the_title_of_each_says_what_it_shows() -> None:
    plots = re.findall(r"^!\[(.+)\]\((.+)\)$", OPENING, re.MULTILINE)
    assert len(plots) == 3
    assert [title for title, path in plots if not re.search(r"\d", title) or not (PAGE.parent / path).exists()] == []


def test_every_plot_has_colours_for_dark_mode() -> None:
    plots = sorted(Path(PAGE.parent, "benchmarks").glob("*.svg"))
    assert len(plots) > 3
    assert [plot.name for plot in plots if "prefers-color-scheme: dark" not in plot.read_text(encoding="utf-8")] == []
