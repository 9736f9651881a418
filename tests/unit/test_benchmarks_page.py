"""The page of benchmarks opens with its conclusions and three plots, which can be read in light and in dark mode."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.findings import PAGE, TOPICS

OPENING = PAGE.read_text(encoding="utf-8").split("\n## ")[0]


def test_the_page_opens_with_a_conclusion_on_each_topic() -> None:
    assert re.findall(r"^- \*\*(.+)\.\*\* \S", OPENING, re.MULTILINE) == list(TOPICS)


def test_three_plots_follow_and_the_title_of_each_says_what_it_shows() -> None:
    plots = re.findall(r"^!\[(.+)\]\((.+)\)$", OPENING, re.MULTILINE)
    assert len(plots) == 3
    assert [title for title, path in plots if not re.search(r"\d", title) or not (PAGE.parent / path).exists()] == []


def test_every_plot_has_colours_for_dark_mode() -> None:
    plots = sorted(Path(PAGE.parent, "benchmarks").glob("*.svg"))
    assert len(plots) > 3
    assert [plot.name for plot in plots if "prefers-color-scheme: dark" not in plot.read_text(encoding="utf-8")] == []
