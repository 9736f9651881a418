"""The site's page of options is written from the code, and its links to the code find it."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONF = runpy.run_path(str(DOCS / "conf.py"))
PAGE = DOCS / "guarantees.md"
HERE = "../tests/unit/test_site.py"


def test_the_tables_of_options_are_what_make_docs_writes() -> None:
    written = runpy.run_path(str(DOCS / "write_options.py"))["written"]
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    assert written(page) == page
    emptied = "\n".join(line for line in page.split("\n") if not line.startswith("| `"))
    assert emptied != page
    assert written(emptied) == page


def test_a_link_to_a_test_leads_to_its_line_in_the_repository() -> None:
    name = "test_a_link_to_a_test_leads_to_its_line_in_the_repository"
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().split("\n"), 1) if text.startswith(f"def {name}(")
    )
    link = CONF["to_source"](f"[a\ntest]({HERE}#{name})", PAGE, "https://example.org/blob/1")
    assert link == f"[a\ntest](https://example.org/blob/1/tests/unit/test_site.py#L{line})"


def test_a_link_to_a_folder_or_page_outside_leads_to_the_repository() -> None:
    text = "[the scripts](../celery_redislock/server/lua), [how](../CONTRIBUTING.md#the-code), [a page](jobs.md)"
    assert CONF["to_source"](text, PAGE, "https://example.org/blob/1") == (
        "[the scripts](https://example.org/blob/1/celery_redislock/server/lua), "
        "[how](https://example.org/blob/1/CONTRIBUTING.md#the-code), [a page](jobs.md)"
    )


def test_without_a_repository_a_link_to_a_file_stays_and_others_are_text() -> None:
    text = f"[the scripts](../celery_redislock/server/lua), [how](../CONTRIBUTING.md#the-code), [this]({HERE}#it)"
    assert CONF["to_source"](text, PAGE, None) == f"the scripts, how, [this]({HERE}#it)"


def test_a_page_that_is_still_to_come_is_left_out_of_the_contents() -> None:
    assert CONF["only_written"]("jobs\nlock*\nnever-written*\napi\n", DOCS) == "jobs\nlock*\napi\n"


def test_every_page_is_in_the_contents() -> None:
    """Sphinx says so too, and a page need not wait for it."""
    contents = (DOCS / "index.md").read_text(encoding="utf-8").split("```{toctree}")[1:]
    named = {line.rstrip("*") for part in contents for line in part.split("```")[0].splitlines()}
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= named
