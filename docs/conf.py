"""The site of these pages, for Sphinx: `make docs` builds it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from pygments.lexers import get_lexer_for_filename

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
METADATA = PYPROJECT["project"]
#: A group of the sidebar: its caption, and its pages.
GROUP = re.compile(r'<p class="caption"[^>]*>(.*?)</p>\s*(<ul.*?</ul>)(?=\s*(?:<p class="caption"|\Z))', re.DOTALL)
#: Of a page's description, in characters: a shorter one says little, and search engines cut a longer one.
SHORTEST, LONGEST = 50, 160
#: The group that is always open, and the one that is on a page in no group, as the landing page is.
FIRST, SECOND = "Start", "How to"
#: A table, the name of a column, a cell, and the first one of a row.
TABLE = re.compile(r'<table class="docutils.*?</table>', re.DOTALL)
COLUMN = re.compile(r'<th class="head[^>]*>(.*?)</th>', re.DOTALL)
CELL = re.compile(r"<td\b")
FIRST_CELL = re.compile(r"<tr[^>]*><td[^>]*>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
#: Of a word in a first cell, in characters: on a phone, a longer one leaves no room for a second column.
LONG_WORD = 24
#: Of a cell, in characters, on average.
SHORT_CELL = 22
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
html_search_scorer = str(ROOT / "docs" / "static" / "scorer.js")
html_favicon = html_logo = "static/favicon.svg"
#: The one colour of links and of the pictures, on a light and on a dark page: `benchmarks/pictures/svg.py` has it too.
ACCENT = {"light": "#1f6f8b", "dark": "#5db3cf"}
html_theme_options = {
    f"{mode}_css_variables": {
        "color-brand-primary": colour,
        "color-brand-content": colour,
        "color-brand-visited": colour,
    }
    for mode, colour in ACCENT.items()
}
templates_path = ["templates"]
#: For the footer, which links to the source and to the issues as soon as there is an address.
html_context = {"repository": PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"].rstrip("/")}
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


def folded(tree: str) -> str:
    """The sidebar with its groups folded but the first and the page's own: all captions fit on a small screen."""
    opened = FIRST if " current-page" in tree else SECOND

    def group(found: re.Match[str]) -> str:
        caption, pages = found.groups()
        is_open = " current-page" in pages or any(f">{name}<" in caption for name in (FIRST, opened))
        return f"<details{' open' if is_open else ''}><summary class='caption'>{caption}</summary>{pages}</details>"

    return GROUP.sub(group, tree)


def stacked(body: str) -> str:
    """A page whose cells know their column's name: on a phone, `screens.css` makes a list of a table that is too wide.

    A table of figures or of other short cells remains one, and scrolls.
    """

    def table(found: re.Match[str]) -> str:
        names = [TAG.sub("", name).replace('"', "&quot;") for name in COLUMN.findall(found[0])]
        words = TAG.sub("", " ".join(FIRST_CELL.findall(found[0]))).split()
        if len(names) == 2:
            is_wide = max(map(len, words), default=0) >= LONG_WORD
        else:
            is_wide = len(names) > 2 and len(TAG.sub("", found[0])) / len(CELL.findall(found[0])) > SHORT_CELL
        if not is_wide or "text-right" in found[0]:
            return found[0]
        column = cycle(names)
        cells = CELL.sub(lambda _: f'<td data-column="{next(column)}"', found[0])
        return cells.replace('class="docutils', 'class="stacked docutils', 1)

    return TABLE.sub(table, body)


def description(page: Any) -> str:
    """A page in about two sentences, for search engines: its first full paragraph, or what the package is."""
    paragraphs = page.findall(lambda node: node.tagname == "paragraph" and node.parent.tagname == "section")
    texts = (" ".join(_without_footnotes(paragraph).split()) for paragraph in paragraphs)
    text = next((text for text in texts if len(text) >= SHORTEST), METADATA["description"])
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(' ', 1)[0]} …"


def _without_footnotes(paragraph: Any) -> str:
    return "".join(part.astext() for part in paragraph.children if part.tagname != "footnote_reference")


def is_drawing(text: str) -> bool:
    """Whether a block of text is a drawing or a table, whose columns must stay in place: two lines have inner gaps."""
    return sum(bool(re.search(r"\S {2,}\S", line)) for line in text.splitlines()) > 1


def _mark_drawings(app: Any, page: Any, name: str) -> None:
    for block in page.findall(lambda node: node.tagname == "literal_block"):
        if block.get("language") == "text":
            block["classes"].append("drawing" if is_drawing(block.astext()) else "prose")


def _complete(app: Any, name: str, template: str, context: dict[str, Any], page: Any) -> None:
    about = description(page) if page and name != app.config.root_doc else METADATA["description"]
    metatags = context.get("metatags", "")
    context["metatags"] = f'{metatags}<meta name="description" content="{escape(about, quote=True)}">\n'
    context["body"] = stacked(context.get("body", ""))
    context["furo_navigation_tree"] = folded(context["furo_navigation_tree"])


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
    app.connect("doctree-resolved", _mark_drawings)
    app.connect("html-page-context", _complete, priority=900)  # after the theme
    app.connect("html-collect-pages", source_pages)
    app.connect("autodoc-process-docstring", _read_docstring)
