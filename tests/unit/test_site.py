"""The site's page of options is written from the code, and its links lead to what they name."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.pictures.svg import COLOURS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONF = runpy.run_path(str(DOCS / "conf.py"))
CHECK = runpy.run_path(str(DOCS / "check_links.py"))
PAGE = DOCS / "guarantees.md"
HERE = "../tests/unit/test_site.py"


def test_the_tables_of_options_are_what_make_docs_writes() -> None:
    written = runpy.run_path(str(DOCS / "write_options.py"))["written"]
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    assert written(page) == page
    emptied = "\n".join(line for line in page.split("\n") if not line.startswith("| `"))
    assert emptied != page
    assert written(emptied) == page


def test_a_link_to_a_test_leads_to_its_line_in_the_source_that_the_site_shows() -> None:
    name = "test_a_link_to_a_test_leads_to_its_line_in_the_source_that_the_site_shows"
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().split("\n"), 1) if text.startswith(f"def {name}(")
    )
    link = CONF["to_source"](f"[a\ntest]({HERE}#{name})", PAGE)
    assert link == f"[a\ntest](source:tests/unit/test_site.py#L-{line})"


def test_a_link_to_a_file_outside_leads_to_its_first_line_and_one_to_a_folder_or_page_is_text() -> None:
    text = (
        f"[scripts](../celery_redislock/protocol/lua), [how](../CONTRIBUTING.md#the-code), [this]({HERE}), [a](lock.md)"
    )
    assert CONF["to_source"](text, PAGE) == "scripts, how, [this](source:tests/unit/test_site.py#L-1), [a](lock.md)"


def test_a_dead_link_of_the_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "a.css").touch()
    (tmp_path / "index.html").write_text(
        '<a id="top"></a><link href="static/a.css"><a href="https://example.org/none"></a><a href="#top"></a>'
        '<a href="jobs.html#retries"></a><a href="jobs.html#none"></a><a href="none.html"></a><img src="none.png">'
    )
    (tmp_path / "jobs.html").write_text('<h2 id="retries"></h2><a href="./index.html#top"></a>')
    assert list(CHECK["dead_links"](tmp_path)) == [
        f"index.html: the link {link} leads nowhere" for link in ("jobs.html#none", "none.html", "none.png")
    ]


def test_a_link_whose_text_says_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "index.md"
    page.write_text(
        "[here](lock.md) [This\npage](lock.md) [docs/lock.md](lock.md) [docs/](docs) "
        "[the docs](docs) [jobs](lock.md) ![here](jobs.png)"
    )
    found = list(CHECK["links_that_say_nothing"]([page]))
    assert [line.split("]")[0].split("[")[1] for line in found] == ["here", "This\npage", "docs/lock.md", "docs/"]


def test_a_search_that_finds_another_page_first_is_found(tmp_path: Path) -> None:
    words = {"debounc": [0, 1], "instal": 2, "newest": 3, "revok": 4, "stuck": 4}
    headings = {"timeout": 5, "debounc": 1, "uniqu": [6, 7]}
    names = ["changelog", "merging-calls", "getting-started", "replacing", "troubleshooting", "redis-setup"]
    names += ["choosing", "unique-jobs"]
    titles = [name.replace("-", " ").capitalize() for name in names]
    index = {"docnames": names, "terms": words, "titleterms": headings, "titles": titles}
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})")
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "scorer.js").write_text((DOCS / "static" / "scorer.js").read_text())
    assert list(CHECK["searches_that_miss"](tmp_path)) == [
        "a search for timeout finds redis-setup first, and not options"
    ]


def test_the_colour_of_links_is_that_of_the_pictures() -> None:
    assert CONF["ACCENT"] == dict(zip(("light", "dark"), COLOURS["accent"], strict=True))


def test_a_page_that_is_still_to_come_is_left_out_of_the_contents() -> None:
    assert CONF["only_written"]("jobs\nlock*\nnever-written*\napi\n", DOCS) == "jobs\nlock*\napi\n"


def test_the_sidebar_shows_its_first_group_and_that_of_the_page_and_folds_the_others() -> None:
    def group(name: str, page: str, here: str = "") -> str:
        return f'<p class="caption" role="heading"><span>{name}</span></p>\n<ul><li class="l1{here}">{page}</li></ul>\n'

    def opened(tree: str) -> list[str]:
        return re.findall(r"<details( open|)><summary class='caption'><span>", CONF["folded"](tree))

    on_page = group("Start", "a") + group("How to", "b") + group("Reference", "c", " current current-page")
    assert opened(on_page) == [" open", "", " open"]
    assert opened(on_page.replace(" current current-page", "")) == [" open", " open", ""]
    captions = re.findall(r"^:caption: (.+)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert captions[:2] == [CONF["FIRST"], CONF["SECOND"]]


def test_a_drawing_keeps_its_lines_and_a_log_does_not() -> None:
    assert CONF["is_drawing"]("a  |==|  b\nc     |==|")
    assert not CONF["is_drawing"]("task shop.bill[1]: it waits\n    ->  one gap, and a line that is indented")


def test_each_cell_of_a_table_too_wide_for_a_phone_knows_its_column() -> None:
    def table(*rows: str, figures: str = "") -> str:
        heads, *others = (row.split(" | ") for row in rows)
        head = "".join(f'<th class="head"><p>{cell}</p></th>' for cell in heads)
        body = "".join(f"<tr>{''.join(f'<td{figures}><p>{cell}</p></td>' for cell in cells)}</tr>" for cells in others)
        return f'<table class="docutils"><tr>{head}</tr>{body}</table>'

    stacked, long = CONF["stacked"], "a sentence that needs the width of a column"
    three = stacked(table('what "why" says | meaning | what to do', f"{long} | {long} | {long}"))
    assert 'class="stacked docutils"' in three
    assert re.findall(r'data-column="(.*?)"', three) == ["what &quot;why&quot; says", "meaning", "what to do"]
    assert "stacked" in stacked(table("option | meaning", f"singleton_json_encoder_class | {long}"))

    tables = (
        table("question | answer", f"{long} | {long}"),
        table("promise | prefork | gevent", "a run keeps its key | yes | no"),
        table("case | µs | quartiles", f"{long} | {long} | {long}", figures=' class="text-right"'),
    )
    for other in tables:
        assert stacked(other) == other


def test_a_page_is_described_by_its_first_full_paragraph() -> None:
    def node(tagname: str, text: str = "", **more: Any) -> SimpleNamespace:
        return SimpleNamespace(tagname=tagname, astext=lambda: text, **more)

    def page(*texts: str) -> SimpleNamespace:
        parts = [[node("#text", text), node("footnote_reference", "1")] for text in texts]
        made = [node("paragraph", parent=node("section"), children=children) for children in parts]
        return node("document", findall=lambda condition: filter(condition, made))

    long = "A lock tells its holders whose turn it is. " * 5
    assert CONF["description"](page("Set it:", "What a lock costs, and a job, a duplicate\nand waiting.")) == (
        "What a lock costs, and a job, a duplicate and waiting."
    )
    assert CONF["description"](page("Set it:")) == CONF["METADATA"]["description"]
    assert 140 < len(CONF["description"](page(long))) <= CONF["LONGEST"] + 2


def test_every_page_is_in_the_contents() -> None:
    """Sphinx says so too, and a page need not wait for it."""
    contents = (DOCS / "index.md").read_text(encoding="utf-8").split("```{toctree}")[1:]
    named = {line.rstrip("*") for part in contents for line in part.split("```")[0].splitlines()}
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= named
