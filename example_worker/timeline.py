"""The picture: which call ran when, in which process of the worker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from .ledger import Child, Ledger, Refusal, Run

#: The characters for a message that finds its key held, and for a free process.
REFUSED, WAITED, FREE = "x", "-", "."
#: Seconds between two ticks of the axis. The first that leaves room for a label is used.
_STEPS = (1, 2, 5, 10, 20)
_LABEL_WIDTH = 6


@dataclass(frozen=True)
class Look:
    """How to draw a run."""

    mark: str
    """A letter or digit, so the picture is readable without colors."""
    style: str


@dataclass(frozen=True)
class Scale:
    """Maps seconds since the epoch to columns."""

    start: float
    end: float
    columns: int

    def column(self, at: float) -> int:
        """The column for the time `at`, or the nearest one if it is outside the picture."""
        share = min((at - self.start) / (self.end - self.start), 1.0)
        return max(0, min(int(share * self.columns), self.columns - 1))

    def axis(self) -> str:
        """The ticks, each with its label on the right."""
        seconds = self.end - self.start
        step = next((s for s in _STEPS if s / seconds * self.columns >= _LABEL_WIDTH), _STEPS[-1])
        axis = ""
        for tick in range(0, math.ceil(seconds), step):
            axis = f"{axis:<{self.column(self.start + tick)}}|{tick} s"
        return axis[: self.columns]


def timeline(entries: Ledger, looks: Mapping[str, Look], width: int, now: float = 0.0) -> Text:
    """Draw a row for each process, under an axis in seconds.

    Args:
        entries: What the bodies recorded.
        looks: How to draw the run of each task id.
        width: Columns, including labels.
        now: The time, in seconds since the epoch, if runs go on: they are drawn up to it.
    """
    labels = _labels(sorted({run.child for run in entries.runs} | {refusal.child for refusal in entries.refusals}))
    margin = max(map(len, labels.values()), default=0) + 2
    scale = _scale(entries, max(width - margin, 20), now)
    rows = [Text(" " * margin + scale.axis(), style="dim")]
    for child, label in labels.items():
        runs = [replace(run, end=run.end or now) for run in entries.runs if run.child == child]
        refusals = [refusal for refusal in entries.refusals if refusal.child == child]
        rows.append(Text(f"{label:<{margin}}") + _row(scale, runs, refusals, looks))
    return Text("\n").join(rows)


def _scale(entries: Ledger, columns: int, now: float) -> Scale:
    times = [run.start for run in entries.runs] + [run.end for run in entries.runs if run.end]
    start = min(times, default=now)
    return Scale(start, max([*times, now, start + 1.0]), columns)


def _labels(children: Sequence[Child]) -> dict[Child, str]:
    several = len({child.host for child in children}) > 1
    return {child: f"{child.host} pid {child.pid}" if several else f"pid {child.pid}" for child in children}


def _row(scale: Scale, runs: Iterable[Run], refusals: Iterable[Refusal], looks: Mapping[str, Look]) -> Text:
    cells = [Text(FREE, style="dim") for _ in range(scale.columns)]
    for refusal in refusals:
        mark = REFUSED if refusal.policy == "skip" else WAITED
        cells[scale.column(refusal.at)] = Text(mark, style="yellow")
    for run in runs:
        look = looks[run.task_id]
        first, end = scale.column(run.start), scale.column(run.end or run.start)
        # Leave out the column of the end: the next run may start in it.
        for column in range(first, max(end, first + 1)):
            cells[column] = Text(look.mark, style=f"bold reverse {look.style}")
    return Text().join(cells)
