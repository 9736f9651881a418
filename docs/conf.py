"""The site of these pages, for Sphinx: `make docs` builds it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments.lexers import get_lexer_for_filename

ROOT = Path(__file__).resolve().parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: A link that leaves docs/: its text, the file or folder, and what stands after the `#`.
OUTWARD = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)#?([^)\s]*)\)")

project = METADATA["name"]
author = project_copyright = METADATA["authors"][0]["name"]
release = METADATA["version"]
html_title = f"{project} {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["screens.css"]
# What stands in single backticks in a docstring is a name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Links to headings are written as GitHub makes them.
myst_heading_anchors = 4
# A file of the repository, as `to_source` writes it: a page that `source_pages` makes.
myst_url_schemes = {"http": None, "https": None, "source": "_code/{{path}}.html#{{fragment}}"}


def to_source(text: str, page: Path) -> str:
    """What a page says, with the links that leave docs/ as they work on the site.

    On GitHub these links lead to a file or folder next to docs/. The site shows such a file on a page of its own, where
    a link to a test leads to its line. A link to a folder, or to Markdown outside docs/, becomes its text alone.

    Args:
        text: The page's Markdown.
        page: Its file.
    """

    def link(found: re.Match[str]) -> str:
        label, target, name = found.groups()
        path = (page.parent / target).resolve()
        if not _is_shown(path):
            return label
        return f"[{label}](source:{path.relative_to(ROOT)}#L-{_line_of(path, name)})"

    return OUTWARD.sub(link, text)


def _is_shown(path: Path) -> bool:
    return path.is_file() and path.suffix != ".md"


def _line_of(path: Path, function: str) -> int:
    before = path.read_text(encoding="utf-8").split(f"def {function}(")[0] if function else ""
    return before.count("\n") + 1


def source_pages(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    """A page for each file that a link of docs/ leads to, with an id for each line."""
    pages = sorted(Path(app.srcdir).glob("*.md"))
    linked = {
        (page.parent / found[2]).resolve()
        for page in pages
        for found in OUTWARD.finditer(page.read_text(encoding="utf-8"))
    }
    for path in sorted(filter(_is_shown, linked)):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        language = get_lexer_for_filename(name).aliases[0]
        code = app.builder.highlighter.highlight_block(text, language, linenos="inline", linespans="L")
        yield f"_code/{name}", {"title": name, "body": f"<h1 class='file'>{name}</h1>\n{code}"}, "page.html"


def only_written(text: str, pages: Path) -> str:
    """A page whose table of contents names with a star what may be still to come, without what is not there."""

    def entry(found: re.Match[str]) -> str:
        return found[0] if (pages / f"{found[1]}.md").exists() else ""

    return re.sub(r"^([\w-]+)\*\n", entry, text, flags=re.MULTILINE)


def _read_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Understand Args, Returns and Raises. Used as an extension, napoleon takes "A name: its use" for a type too."""
    from sphinx.ext.napoleon.docstring import GoogleDocstring

    if what not in {"attribute", "data", "property"}:
        lines[:] = GoogleDocstring(lines).lines()


def setup(app: Any) -> None:
    """Have Sphinx read pages and docstrings in this way."""

    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = to_source(only_written(source[0], Path(app.srcdir)), Path(app.srcdir, f"{name}.md"))

    app.connect("source-read", read)
    app.connect("html-collect-pages", source_pages)
    app.connect("autodoc-process-docstring", _read_docstring)
