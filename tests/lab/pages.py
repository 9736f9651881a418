"""The Python of a documentation page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.lab.workers import ROOT

#: Each example of redis-setup.md needs a server of its own kind: tests/topologies has them.
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "redis-setup.md"]


def python_of(page: Path, section: str | None = None) -> str:
    """The page's python blocks, or those of its section with that heading. Every line keeps its number in the page."""
    return "\n".join(_lines(page.read_text(), section))


def files_of(page: Path) -> dict[str, str]:
    """The page's python blocks that begin with the name of a file, by that name."""
    blocks = re.findall(r"^```python\n# ([\w/]+\.py)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return dict(blocks)


def write_files(page: Path, folder: Path) -> None:
    """Write the page's files into `folder`, as a reader does."""
    for name, text in files_of(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _lines(text: str, section: str | None) -> Iterator[str]:
    heading = fence = ""
    for line in text.splitlines():
        is_fence = line.startswith("```")
        if is_fence:
            fence = "" if fence else line
        elif not fence and line.startswith("#"):
            heading = line.strip("# ")
        wanted = fence == "```python" and not is_fence and section in {None, heading}
        yield line if wanted else ""
