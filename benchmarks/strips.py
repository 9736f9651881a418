"""Pictures of what happens one after the other: a strip for each case, and a cell for each thing that happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

#: The size of a cell, the height of a line of text, and the margin, in pixels.
CELL, LINE, MARGIN = 10, 16, 12
#: The colours, in the order of the legend: they can be seen on a light and on a dark background.
COLOURS = "#8a8a8a", "#2f81c8", "#d9822b"
STYLE = (
    "text { font: 12px sans-serif; fill: #1f2328 } .title { font-weight: bold } .page { fill: #ffffff } "
    "@media (prefers-color-scheme: dark) { text { fill: #cfd0d0 } .page { fill: #131416 } }"
)


class Strip(NamedTuple):
    """One case: what it is, and what happens."""

    name: str
    cells: Sequence[str]


def draw(path: Path, title: str, strips: Sequence[Strip], legend: Mapping[str, str]) -> None:
    """Write the strips, from top to bottom, as an SVG.

    Args:
        path: Where to write.
        title: What the picture shows.
        strips: The cases.
        legend: What a cell of each kind means.
    """
    colours = dict(zip(legend, COLOURS, strict=False))
    width = 2 * MARGIN + CELL * max(len(strip.cells) for strip in strips)
    top = MARGIN + LINE
    drawn = [f'<text class="title" x="{MARGIN}" y="{top - 4}">{escape(title)}</text>']
    for strip in strips:
        top += LINE + 6
        drawn.append(f'<text x="{MARGIN}" y="{top - 4}">{escape(strip.name)}</text>')
        size = f'y="{top}" width="{CELL - 1}" height="{2 * CELL}"'
        for place, cell in enumerate(strip.cells):
            drawn.append(f'<rect x="{MARGIN + place * CELL}" {size} fill="{colours[cell]}"/>')
        top += 2 * CELL
    top += LINE + 6
    for place, (cell, meaning) in enumerate(legend.items()):
        left = MARGIN + place * width // len(legend)
        drawn.append(f'<rect x="{left}" y="{top - CELL}" width="{CELL - 1}" height="{CELL}" fill="{colours[cell]}"/>')
        drawn.append(f'<text x="{left + CELL + 4}" y="{top}">{escape(meaning)}</text>')
    height = top + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    path.write_text("\n".join([head, f"<style>{STYLE}</style>", page, *drawn, "</svg>\n"]), encoding="utf-8")
