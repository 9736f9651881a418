"""How the plots look. Needs matplotlib: ``pip install -e '.[bench]'``.

A plot follows the reader's preference for light or dark. It has its own background, so it can be read on any page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

#: Ours is blue in every plot, Celery's own and bare calls are grey, and the others take the other colours. All of them
#: can be seen on a light and on a dark background.
OURS, BARE, OTHERS = "#2f81c8", "#8a8a8a", ("#d9822b", "#9d6fb3", "#3a9a5b", "#c9524d")
#: The background, the text, and the lines of a plot in light mode, and what each becomes in dark mode.
BACKGROUND, TEXT, LINES = "#ffffff", "#1f2328", "#59636e"
DARK = {BACKGROUND: "#131416", TEXT: "#cfd0d0", LINES: "#9198a1"}

mpl.rcParams.update(
    {
        "font.size": 9,
        "figure.facecolor": BACKGROUND,
        "axes.facecolor": "none",
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "xtick.labelcolor": TEXT,
        "ytick.labelcolor": TEXT,
        "axes.edgecolor": LINES,
        "xtick.color": LINES,
        "ytick.color": LINES,
        "grid.color": LINES,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "svg.fonttype": "path",  # looks the same where a font is missing
        "svg.hashsalt": "celery-redislock",  # else a file differs though its picture does not
    }
)


def bars(path: Path, title: str, values: Mapping[str, Sequence[float]], label: str) -> None:
    """Draw one bar for each case, from top to bottom, with its quartiles.

    Args:
        path: Where to write.
        title: What the plot shows.
        values: For each case: the median, the lower and the upper quartile.
        label: What is measured, with its unit.
    """
    with _plot(path, title, height=1.2 + 0.34 * len(values)) as axes:
        names = list(values)
        middle, lower, upper = zip(*values.values(), strict=True)
        spread = [
            [m - low for m, low in zip(middle, lower, strict=True)],
            [up - m for up, m in zip(upper, middle, strict=True)],
        ]
        axes.barh(names, middle, xerr=spread, color=colours(names), ecolor=LINES, capsize=2, height=0.65)
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
        axes.grid(axis="x", alpha=0.35)


def lines(
    path: Path,
    title: str,
    xs: Sequence[float],
    values: Mapping[str, Sequence[float]],
    *,
    x: str,
    y: str,
    logarithmic: str = "",
) -> None:
    """Draw one line for each case.

    Args:
        path: Where to write.
        title: What the plot shows.
        xs: The numbers from left to right.
        values: For each case: a figure for each of `xs`.
        x: What the numbers are.
        y: What is measured, with its unit.
        logarithmic: The logarithmic axes: none, ``x`` or ``xy``.
    """
    with _plot(path, title, height=3.5) as axes:
        for (name, figures), colour in zip(values.items(), (OURS, BARE, *OTHERS), strict=False):
            axes.plot(xs, figures, marker="o", markersize=4, label=name, color=colour)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.35)
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
def _plot(path: Path, title: str, height: float) -> Iterator[Any]:
    """Yields matplotlib's axes, and writes the plot at the end of the block."""
    figure = Figure(figsize=(6.2, height), layout="constrained")
    axes = figure.add_subplot()
    yield axes
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    path.parent.mkdir(exist_ok=True)
    written = StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    path.write_text(_for_both_modes(written.getvalue()), encoding="utf-8")


def _for_both_modes(svg: str) -> str:
    """Add rules for dark mode, which override the colours that matplotlib has written into each `style`."""
    rules = "".join(
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }} '
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\1\n {style}", svg, count=1)


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
