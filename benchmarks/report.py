"""The table of a benchmark whose cases take turns."""

from __future__ import annotations

from math import sqrt

from rich.table import Table

from .findings import Findings
from .timing import Rounds, Summary

#: If the median of a ratio is uncertain by more than this share of it, something else kept the CPUs busy, and the run
#: proves nothing.
NOISE = 0.03


class Report:
    """One table: a row per case with its time, its ratio to a baseline, its bound, and whether that is met.

    Args:
        findings: Where the figures go.
        title: What was measured.
        baseline: The name of the case that counts as 1.00.
    """

    def __init__(self, findings: Findings, title: str, baseline: str = "two bare EVALSHA calls") -> None:
        caption = f"Medians and quartiles of interleaved rounds. A ratio is relative to {baseline} in the same round."
        self._findings = findings
        self._title, self._section = title.partition(":")[0], ""
        self._table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        self._table.add_column("case")
        for column in ("µs", "quartiles", "ratio", "quartiles", "bound", "met"):
            self._table.add_column(column, justify="right")

    def section(self, name: str) -> None:
        """Start a group of rows."""
        self._section = name
        self._table.add_section()
        self._table.add_row(f"[bold]{name}[/]")

    def add(self, case: str, rounds: Rounds, baseline: Rounds, bound: float | None = None) -> None:
        """Add a row. With a `bound`, it tells whether the median ratio to `baseline` is at most that."""
        time, ratio = rounds.microseconds(), rounds.ratio(baseline)
        verdict = ""
        if bound is not None:
            what = f"{self._title}: {case}, {self._section}"
            verdict = self._findings.judge(
                what, round(ratio.median, 2), bound, noisy=is_noisy(ratio, len(rounds.seconds))
            )
        self._table.add_row(
            case,
            f"{time.median:.1f}",
            _spread(time, 1),
            f"{ratio.median:.2f}",
            _spread(ratio, 2),
            "" if bound is None else f"{bound:.2f}",
            verdict,
        )

    def show(self) -> None:
        """Print the table."""
        self._findings.show(self._table)


def is_noisy(ratio: Summary, rounds: int) -> bool:
    """Whether so many rounds differ by so much that their median proves nothing."""
    standard_error = 0.93 * (ratio.upper - ratio.lower) / sqrt(rounds)  # of the median of a normal distribution
    return standard_error > NOISE * ratio.median


def _spread(summary: Summary, digits: int) -> str:
    return f"{summary.lower:.{digits}f}\N{EN DASH}{summary.upper:.{digits}f}"
