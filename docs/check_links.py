"""The links of the site and of the Markdown, and its searches: `make docs` runs this on the site that it has built.

Sphinx checks what it resolves itself. This looks at the finished pages, where themes and extensions have added links of
their own, and at the words of the links.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
#: A link of Markdown, and no image.
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
#: What a link's text must not be: a pointing word, the name of a page's file or of a folder, an address.
SAYS_NOTHING = re.compile(
    r"(click )?here|th(is|at|ese|ere)( page)?|page|link|above|below|more|\S+\.md|\S+/|\S+://\S+", re.IGNORECASE
)
#: What people search for; its stem, as Sphinx's index has it; and the page that a search must find first.
SEARCHES = (
    ("debounce", "debounc", "merging-calls"),
    ("install", "instal", "getting-started"),
    ("newest", "newest", "replacing"),
    ("revoked", "revok", "troubleshooting"),
    ("stuck", "stuck", "troubleshooting"),
    ("timeout", "timeout", "options"),
    ("unique", "uniqu", "unique-jobs"),
)
#: What a word counts in a page's text and in its headings, and what it adds in its title; and what pages lose that come
#: behind: as `scorer.js` has it.
TEXT, HEADING, TITLE, LOSS = 5, 15, 2, 4


class Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element is called, and where it leads."""
        found = dict(attrs)
        self.ids |= {name for name in (found.get("id"), found.get("name")) if name}
        self.links += [link for link in (found.get("href"), found.get("src")) if link]


def dead_links(site: Path) -> Iterator[str]:
    """The links within a site whose file or anchor is not there."""
    pages = {file.resolve(): Page(file) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (file.parent / unquote(address.path)).resolve() if address.path else file
            anchor = unquote(address.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                yield f"{file.relative_to(site.resolve())}: the link {link} leads nowhere"


def links_that_say_nothing(documents: Iterable[Path]) -> Iterator[str]:
    """The links of Markdown files whose text does not say what a reader finds there."""
    for document in documents:
        for text, target in LINK.findall(document.read_text(encoding="utf-8")):
            if SAYS_NOTHING.fullmatch(" ".join(text.split())):
                yield f"{document.name}: the text of [{text}]({target}) does not say what is there"


def searches_that_miss(site: Path) -> Iterator[str]:
    """The words whose search finds another page first. Pages with equal scores are all first."""
    index = json.loads(
        (site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(").rstrip(")")
    )
    behind = re.findall(r'"([\w-]+)"', (site / "_static" / "scorer.js").read_text(encoding="utf-8").split("]")[0])
    for word, stem, page in SEARCHES:
        scores: dict[str, int] = {}
        for table, points in (("terms", TEXT), ("titleterms", HEADING)):
            found = index[table].get(stem, [])
            for number in found if isinstance(found, list) else [found]:
                name = index["docnames"][number]
                is_named = word in index["titles"][number].lower()
                scores[name] = points - LOSS * (name in behind) + TITLE * is_named
        best = sorted(name for name, score in scores.items() if score == max(scores.values()))
        if page not in best:
            yield f"a search for {word} finds {', '.join(best) or 'nothing'} first, and not {page}"


if __name__ == "__main__":
    documents = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    site = Path(sys.argv[1])
    wrong = [*dead_links(site), *links_that_say_nothing(documents), *searches_that_miss(site)]
    sys.exit("\n".join(wrong) or 0)
