"""How the plots look. Needs matplotlib: ``pip install -e '.[bench]'``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

#: Ours is blue in every plot, Celery's own and bare calls are grey, the others are what is left.
OURS, BARE, OTHERS = "#1f6fb4", "#8a8a8a", ("#d9822b", "#8e5ea2", "#3a9a5b", "#b8433f")

mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "svg.fonttype": "path",  # looks the same where a font is missing
        "svg.hashsalt": "celery-redislock",  # else a file differs though its picture does not
    }
)


def bars(path: Path, values: Mapping[str, Sequence[float]], label: str) -> None:
    """One bar for each case, from above to below, with its quartiles.

    Args:
        path: Of the picture.
        values: For each case: the median, the lower and the upper quartile.
        label: What is measured, with its unit.
    """
    with _picture(path, height=0.9 + 0.34 * len(values)) as axes:
        names = list(values)
        middle, lower, upper = zip(*values.values(), strict=True)
        spread = [
            [m - low for m, low in zip(middle, lower, strict=True)],
            [up - m for up, m in zip(upper, middle, strict=True)],
        ]
        axes.barh(names, middle, xerr=spread, color=colours(names), ecolor="#404040", capsize=2, height=0.65)
        for number, (value, end) in enumerate(zip(middle, upper, strict=True)):
            axes.annotate(
                f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
                (end, number),
                (5, 0),
                textcoords="offset points",
                va="center",
            )
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axes.grid(axis="x", alpha=0.3)


def lines(
    path: Path, xs: Sequence[float], values: Mapping[str, Sequence[float]], *, x: str, y: str, logarithmic: str = ""
) -> None:
    """One line for each case.

    Args:
        path: Of the picture.
        xs: The numbers from left to right.
        values: For each case: a figure for each of `xs`.
        x: What goes from left to right.
        y: What is measured, with its unit.
        logarithmic: The axes on which each step is so many times the step before: none, ``x`` or ``xy``.
    """
    with _picture(path, height=3.2) as axes:
        for (name, figures), colour in zip(values.items(), (OURS, BARE, *OTHERS), strict=False):
            axes.plot(xs, figures, marker="o", markersize=4, label=name, color=colour)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        if "x" in logarithmic:
            axes.set_xscale("log")
        if "y" in logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.1 * max(max(figures) for figures in values.values()))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
            axis.set_minor_locator(NullLocator())
        if len(values) > 1:
            axes.legend(loc="upper left")


@contextmanager
def _picture(path: Path, height: float) -> Iterator[Any]:
    """Yields matplotlib's axes, and writes the picture at the end of the block."""
    figure = Figure(figsize=(7.5, height), layout="constrained")
    yield figure.add_subplot()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def colours(names: Sequence[str]) -> list[str]:
    """The colour of each case."""
    others = iter(OTHERS)
    return [OURS if is_ours(name) else BARE if is_bare(name) else next(others) for name in names]


def is_ours(name: str) -> bool:
    """Whether a case is one of this package."""
    return name.startswith(("Lock", "added")) or name.endswith("LockedTask")


def is_bare(name: str) -> bool:
    """Whether a case is a baseline."""
    return "bare" in name or name.startswith(("Celery", "empty"))
