"""The site of these pages, for Sphinx: `make docs` builds it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Where the repository can be read; None until the project's metadata says so.
SOURCE: str | None = METADATA.get("urls", {}).get("Source")
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


def to_source(text: str, page: Path, repository: str | None) -> str:
    """What a page says, with the links that leave docs/ as they work on the site.

    On GitHub these links lead to a file or folder beside docs/. The site has no such file, so they lead to the
    repository, and those to a test to its line. Until it is known where that is, a link to a file gets a copy of the
    file, as MyST makes it, and one to a folder or to another page is its text alone.

    Args:
        text: The page's Markdown.
        page: Its file.
        repository: The address before a path in the repository, at the commit that the site is built from.
    """

    def link(found: re.Match[str]) -> str:
        label, target, name = found.groups()
        path = (page.parent / target).resolve()
        if repository is None:
            return found[0] if path.is_file() and path.suffix != ".md" else label
        line = f"#L{_line_of(path, name)}" if name and path.suffix == ".py" else f"#{name}" if name else ""
        return f"[{label}]({repository}/{path.relative_to(ROOT)}{line})"

    return OUTWARD.sub(link, text)


def _line_of(path: Path, function: str) -> int:
    before = path.read_text(encoding="utf-8").split(f"def {function}(")[0]
    return before.count("\n") + 1


def only_written(text: str, pages: Path) -> str:
    """A page whose table of contents names with a star what may be still to come, without what is not there."""

    def entry(found: re.Match[str]) -> str:
        return found[0] if (pages / f"{found[1]}.md").exists() else ""

    return re.sub(r"^([\w-]+)\*\n", entry, text, flags=re.MULTILINE)


def _repository() -> str | None:
    if SOURCE is None:
        return None
    if not (ROOT / ".git").exists():  # an unpacked sdist
        return f"{SOURCE}/blob/v{release}"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S607
    return f"{SOURCE}/blob/{commit.stdout.strip()}"


def _read_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Understand Args, Returns and Raises. Used as an extension, napoleon takes "A name: its use" for a type too."""
    from sphinx.ext.napoleon import GoogleDocstring

    if what not in {"attribute", "data", "property"}:
        lines[:] = GoogleDocstring(lines).lines()


def setup(app: Any) -> None:
    """Have Sphinx read pages and docstrings in this way."""
    repository = _repository()

    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = to_source(only_written(source[0], Path(app.srcdir)), Path(app.srcdir, f"{name}.md"), repository)

    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", _read_docstring)
