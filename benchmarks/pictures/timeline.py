"""Time lines: a row for each call, and on it what happened when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .svg import LINE, MARGIN, WIDTH, Drawing

#: Where the time begins and ends, from left to right; what is right of it says how a row ends.
LEFT, RIGHT = 62, 318
#: The height of a row, and of what is drawn on it.
ROW, BAR = 20, 11
#: What a kind of thing means, for the legend.
MEANINGS = {
    "sent": "call",
    "waits": "waits",
    "runs": "runs",
    "ends": "cleans up, the key still held",
    "held": "the key is held",
    "killed": "killed",
}


#: Where a time is, from left to right.
Scale = Callable[[float], float]


class Bar(NamedTuple):
    """Something that lasts, in seconds."""

    kind: str
    start: float
    end: float


class Row(NamedTuple):
    """A call: what it is called, what happens to it, and how it ends."""

    name: str
    bars: Sequence[Bar]
    #: When it was made, was killed, and the like: a kind, and when.
    marks: Sequence[tuple[str, float]] = ()
    outcome: str = ""


class Panel(NamedTuple):
    """One case."""

    title: str
    rows: Sequence[Row]
    #: A span in which something is down: its name, and from when to when.
    down: tuple[str, float, float] | None = None
    #: What happens at one moment.
    event: tuple[str, float] | None = None
    #: Figures over time, such as the time that is left to a lock: its name, the highest, and each with its time.
    curve: tuple[str, float, Sequence[tuple[float, float]]] | None = None


def draw(title: str, panels: Sequence[Panel], meanings: Mapping[str, str] = MEANINGS) -> Drawing:
    """All panels, one below the other, on one scale of time."""
    drawing = Drawing(title)
    seconds = max(_ends(panels))
    step = next(step for step in (0.5, 1, 2, 5, 10) if seconds / step <= 7)
    ticks = [tick * step for tick in range(int(seconds / step) + 1)]

    def x(at: float) -> float:
        return LEFT + (RIGHT - LEFT) * at / seconds

    for panel in panels:
        _panel(drawing, panel, x, ticks)
    _axis(drawing, x, ticks)
    _legend(drawing, panels, meanings)
    return drawing


def _ends(panels: Sequence[Panel]) -> list[float]:
    ends = [bar.end for panel in panels for row in panel.rows for bar in row.bars]
    ends += [at for panel in panels for row in panel.rows for _, at in row.marks]
    ends += [panel.curve[2][-1][0] for panel in panels if panel.curve]
    return ends


def _panel(drawing: Drawing, panel: Panel, x: Scale, ticks: Sequence[float]) -> None:
    drawing.top += LINE
    drawing.text(MARGIN, drawing.top - 4, panel.title, "text code bold")
    above = drawing.top
    below = above + ROW * len(panel.rows) + (50 if panel.curve else 0)
    for tick in ticks:
        drawing.line(x(tick), above, x(tick), below, "line")
    if panel.down:
        name, start, end = panel.down
        drawing.rect(x(start), above, x(end) - x(start), below - above, "down")
        drawing.text(WIDTH - MARGIN, above - 4, name, "bad small", "end")
    if panel.event:
        name, at = panel.event
        drawing.line(x(at), above - 2, x(at), below, "bad", "2 2")
        drawing.text(WIDTH - MARGIN, above - 4, name, "bad small", "end")
    for row in panel.rows:
        _row(drawing, row, x)
    if panel.curve:
        _curve(drawing, panel.curve, x)
    drawing.top += 6


def _row(drawing: Drawing, row: Row, x: Scale) -> None:
    middle = drawing.top + ROW / 2
    drawing.text(MARGIN, middle + 4, row.name, "quiet")
    for kind, start, end in row.bars:
        width = max(x(end) - x(start) - 0.5, 1.5)
        if kind == "waits":
            drawing.line(x(start), middle, x(end), middle, "quiet", "3 3", 1.5)
        elif kind == "held":
            drawing.rect(x(start), middle - 2.5, width, 5, "held")
        else:
            drawing.rect(x(start), middle - BAR / 2, width, BAR, "accent" if kind == "runs" else "second", 2)
    for kind, at in row.marks:
        if kind == "sent":
            drawing.line(x(at), middle - 7, x(at), middle + 7, "text", width=1.5)
        else:
            for way in (-1, 1):
                drawing.line(x(at) - 4, middle - 4 * way, x(at) + 4, middle + 4 * way, "bad", width=2)
    drawing.text(RIGHT + 8, middle + 4, row.outcome, "text small")
    drawing.top += ROW


def _curve(drawing: Drawing, curve: tuple[str, float, Sequence[tuple[float, float]]], x: Scale) -> None:
    name, most, figures = curve
    low = drawing.top + 42
    points = [f"{x(at):.1f} {low - 36 * figure / most:.1f}" for at, figure in figures]
    drawing.line(LEFT, low, RIGHT, low, "quiet")
    drawing.path("M" + " L".join(points), "accent")
    drawing.text(MARGIN, low - 15, name, "quiet small")
    for figure in (0, most):
        drawing.text(RIGHT + 8, low + 3 - 36 * figure / most, f"{figure:g} s", "quiet small")
    drawing.top += 50


def _axis(drawing: Drawing, x: Scale, ticks: Sequence[float]) -> None:
    drawing.top += 8
    for tick in ticks:
        drawing.text(x(tick), drawing.top + 2, f"{tick:g} s", "quiet small", "middle")
    drawing.top += 8


def _legend(drawing: Drawing, panels: Sequence[Panel], meanings: Mapping[str, str]) -> None:
    drawn = {bar.kind for panel in panels for row in panel.rows for bar in row.bars}
    drawn |= {kind for panel in panels for row in panel.rows for kind, _ in row.marks}
    left, drawing.top = float(MARGIN), drawing.top + LINE
    for kind, meaning in meanings.items():
        if kind not in drawn:
            continue
        width = 34 + 6.1 * len(meaning)
        if left + width > WIDTH:
            left, drawing.top = float(MARGIN), drawing.top + LINE
        _sample(drawing, kind, left)
        drawing.text(left + 22, drawing.top, meaning, "quiet small")
        left += width


def _sample(drawing: Drawing, kind: str, left: float) -> None:
    row = Row("", [Bar(kind, 0, 16)] if kind not in {"sent", "killed"} else [], [(kind, 8)])
    top, drawing.top = drawing.top, drawing.top - 4 - ROW / 2
    _row(drawing, row if not row.bars else row._replace(marks=()), lambda at: left + at)
    drawing.top = top
