"""The tables of the page of benchmarks, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

#: A table with more rows is folded: the page stays short enough to read on a phone.
SHOWN_ROWS = 8


def summary(rows: Sequence[tuple[str, str, str]]) -> str:
    """The table with which the page opens: what was measured, what it costs, and next to others."""
    return _rows(["", "cost", "other packages"], ["---"] * 3, rows)


def as_markdown(table: Table) -> str:
    """A table with its title and caption, folded if it is long. A column in which no cell has text is left out."""
    columns = [column for column in table.columns if any(str(cell) for cell in column.cells)]
    cells = [[_text(str(cell)) for cell in column.cells] for column in columns]
    rules = ["---:" if column.justify == "right" else "---" for column in columns]
    rows = _rows([str(column.header) for column in columns], rules, list(zip(*cells, strict=True)))
    title, caption = (f"{text}".replace("\n", " ") for text in (table.title or "", table.caption or ""))
    title = f"{title[:1].upper()}{title[1:]}"
    if table.row_count > SHOWN_ROWS:
        parts = [f"<details>\n<summary>{title}</summary>", rows, caption, "</details>"]
    else:
        parts = [f"**{title}**" if title else "", rows, caption]
    return "\n\n".join(part for part in parts if part)


def _rows(headers: Sequence[str], rules: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, rules, *rows])


def _text(cell: str) -> str:
    """What a cell says. Bold, as the name of a group of rows is, stays bold."""
    text = Text.from_markup(cell)
    bold = any(span.style == "bold" for span in text.spans)
    return f"**{text.plain}**" if bold else text.plain
