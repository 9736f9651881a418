"""SVG that follows light and dark, with its colours in one place."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

#: The width of a picture, and its margin: on a phone of 390 pixels its text is 10 pixels high.
WIDTH, MARGIN = 460, 10
#: The height of a line of text, and of its letters.
LINE, SIZE = 18, 12.5
#: What each kind of thing looks like: in light, in dark. Both pass 3:1 on the page's background.
COLOURS = {
    "text": ("#1f2328", "#cfd0d0"),
    "quiet": ("#59636e", "#9aa0a6"),
    "line": ("#d1d9e0", "#34373b"),
    "accent": ("#1f6f8b", "#5db3cf"),
    "second": ("#b5651d", "#e09a55"),
    "bad": ("#b3403a", "#e58079"),
    "held": ("#8fb9c8", "#2f6275"),
    "down": ("#f3dedc", "#472c2a"),
    "band": ("#eef4f6", "#1e2a30"),
    "page": ("#ffffff", "#131416"),
}


def _rules(mode: int) -> str:
    return " ".join(
        f":is(rect, text).{name} {{ fill: {pair[mode]} }} :is(line, path).{name} {{ stroke: {pair[mode]} }}"
        for name, pair in COLOURS.items()
    )


STYLE = (
    f"text {{ font: {SIZE}px ui-sans-serif, system-ui, sans-serif }} text.small {{ font-size: 11px }} "
    "text.bold { font-weight: 600 } text.code { font-family: ui-monospace, monospace; font-size: 11px } "
    f"path {{ fill: none }} {_rules(0)} @media (prefers-color-scheme: dark) {{ {_rules(1)} }}"
)


class Drawing:
    """What is drawn so far, from top to bottom; `top` is where the next thing comes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self.top = float(MARGIN)

    def text(self, x: float, y: float, words: str, kind: str = "text", anchor: str = "start") -> None:
        """Words on the line that ends at `y`."""
        end = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" x="{x:.5g}" y="{y:.5g}"{end}>{escape(words)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> None:
        """A rectangle."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" rx="{radius:g}"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str, dashes: str = "", width: float = 1) -> None:
        """A straight line."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        ends = f'x1="{x:.5g}" y1="{y:.5g}" x2="{to_x:.5g}" y2="{to_y:.5g}"'
        self._parts.append(f'<line class="{kind}" {ends} stroke-width="{width:g}"{dashed}/>')

    def path(self, points: str, kind: str) -> None:
        """A line through points, in SVG's own words."""
        self._parts.append(f'<path class="{kind}" d="{points}" stroke-width="1.5"/>')

    def write(self, path: Path) -> None:
        """Write the picture, as high as what is on it."""
        height = round(self.top + MARGIN)
        size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(self._title)}>'
        page = f'<rect class="page" width="{WIDTH}" height="{height}"/>'
        lines = [head, f"<style>{STYLE}</style>", page, *self._parts, "</svg>\n"]
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")
