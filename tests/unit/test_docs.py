"""What the documents say of tests, files, log lines and the model is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from promises import Excuse
from tests.model.fair import Mistake as MistakeOfTurns
from tests.model.merging import Mistake as MistakeOfMerging
from tests.model.merging_explore import SCENARIOS as OF_MERGING
from tests.model.rules import EXCUSES, OF_FAIR_TURNS, OF_MERGED_CALLS, PROMISES, Mistake
from tests.model.scenarios import SCENARIOS
from tests.model.several_world import Mistake as MistakeOfSeveral

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FILES = [*ROOT.glob("[a-z]*/**/*.py"), *ROOT.glob("[a-z]*/**/*.lua")]
CODE = [path for path in FILES if "_build" not in path.parts]  # where the site has copies of an earlier day
GUARANTEES = ROOT / "docs" / "guarantees.md"
IN_DETAIL = ROOT / "docs" / "guarantees-in-detail.md"
HOW_IT_IS_TESTED = ROOT / "docs" / "how-it-is-tested.md"


class Link(NamedTuple):
    document: Path
    text: str
    target: str
    anchor: str

    @property
    def file(self) -> Path:
        return (self.document.parent / self.target).resolve() if self.target else self.document


def links_of(document: Path) -> list[Link]:
    """The relative links of a document."""
    found = re.findall(r"\[([^\]]+)\]\(([^)#\s]*)#?([^)\s]*)\)", document.read_text(encoding="utf-8"))
    return [Link(document, *link) for link in found if "://" not in link[1]]


LINKS = [link for document in DOCUMENTS for link in links_of(document)]
TO_TESTS = [link for link in LINKS if link.target.endswith(".py") and link.anchor]


def headings_of(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_to_a_file_or_a_heading() -> None:
    dead = [link for link in LINKS if not link.file.exists()]
    dead += [link for link in LINKS if link.file.suffix == ".md" and link.anchor not in {"", *headings_of(link.file)}]
    assert dead == []


def test_every_module_that_contributing_names_exists() -> None:
    named = set(re.findall(r"`([\w./]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    known = [*CODE, *ROOT.glob("*.py")]
    assert len(named) > 20
    assert [one for one in sorted(named) if not any(path.as_posix().endswith(f"/{one}") for path in known)] == []


def test_no_text_cites_a_document_that_is_not_in_the_project() -> None:
    known = {document.name for document in DOCUMENTS}
    cited = re.compile(r"[\w-]+\.md\b|\bsection \d+", re.IGNORECASE)
    strange = [
        (str(text), name) for text in [*CODE, *DOCUMENTS] for name in cited.findall(text.read_text(encoding="utf-8"))
    ]
    assert [(text, name) for text, name in strange if name not in known] == []


def test_every_test_that_is_linked_exists_and_is_named_as_it_is() -> None:
    assert len(TO_TESTS) > 30
    for _, text, target, name in TO_TESTS:
        assert text == f"{Path(target).stem}: {name.removeprefix('test_').replace('_', ' ')}"
    missing = [link for link in TO_TESTS if not defines(link.file, link.anchor)]
    assert missing == []


def defines(file: Path, function: str) -> bool:
    return bool(re.search(rf"^ *def {re.escape(function)}\(", file.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_check_sees_a_test_that_is_not_there() -> None:
    assert defines(Path(__file__), "test_the_check_sees_a_test_that_is_not_there")
    assert not defines(Path(__file__), "test_the_check")
    assert headings_of(GUARANTEES) >= {"the-promise", "two-runs-may-overlap"}


def promise_in(document: Path) -> str:
    quoted = re.search(r"## The promise\n\n((?:> .+\n)+)", document.read_text(encoding="utf-8"))
    assert quoted
    return " ".join(quoted[1].replace("> ", "").split())


def test_the_promise_is_in_the_guarantees_and_in_the_readme_word_for_word() -> None:
    promise = promise_in(GUARANTEES)
    assert promise.startswith("At most one holder per key (with a `lock_limit` of N, at most N), as long as one Redis")
    assert promise.endswith("the resource itself must check the fencing number.")
    assert promise_in(ROOT / "README.md") == promise


def section_of(document: Path, heading: str) -> str:
    """The text below a heading, up to the next one of its level."""
    level = heading.split()[0]
    return document.read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split(f"\n{level} ")[0]


def rows_of(section: str) -> list[str]:
    """The rows of a section's first table, without its head."""
    table = section[section.index("\n|") :].lstrip().split("\n\n")[0]
    return table.splitlines()[2:]


def footnotes_of(document: Path) -> dict[str, str]:
    """What each footnote of a document says."""
    text = document.read_text(encoding="utf-8")
    return dict(re.findall(r"^\[\^([\w-]+)\]: (.+(?:\n  .+)*)", text, re.MULTILINE))


def test_every_way_out_and_every_row_like_it_has_its_test() -> None:
    footnotes = footnotes_of(IN_DETAIL)
    sections = {
        "Every way out of a task": 18,
        "Before a task starts": 8,
        "N at once": 10,
        "While a message waits": 16,
        "Copies": 6,
        "Lost locks": 1,
    }
    for heading, least in sections.items():
        rows = rows_of(section_of(IN_DETAIL, f"## {heading}"))
        assert len(rows) > least
        proofs = [(row, [footnotes[name] for name in re.findall(r"\[\^([\w-]+)\]", row)]) for row in rows]
        assert [row for row, notes in proofs if not any("(../tests/" in note for note in notes)] == []


def test_every_footnote_is_used_and_every_mark_has_one() -> None:
    for document in (GUARANTEES, IN_DETAIL):
        marks = set(re.findall(r"\[\^([\w-]+)\](?!:)", document.read_text(encoding="utf-8")))
        assert marks == set(footnotes_of(document))


def test_every_log_line_is_one_that_the_code_writes() -> None:
    section = section_of(IN_DETAIL, "## What the log says")
    lines = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(lines) > 12
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("celery_redislock/**/*.py")))
    written = re.sub(r'" *\n *f?"', "", code)
    parts = [
        (line, part) for line in lines for part in re.split(r"…|: (?=not renewed|held for|its key)|(?=; another)", line)
    ]
    assert [(line, part) for line, part in parts if part.strip(" :;") not in written] == []


def test_every_warning_and_error_that_the_code_logs_has_its_row() -> None:
    section = section_of(IN_DETAIL, "## What the log says")
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    rows = [line.split("…") for cell in cells for line in re.findall(r"`([^`]+)`", cell)]
    texts = [
        text for text in logged() if len(re.sub(r"%\S*|\W", "", text)) > 20
    ]  # shorter ones are what is put into them
    assert len(texts) > 25
    assert [text for text in texts if not any(all(part.strip(" :;") in text for part in row) for row in rows)] == []


def test_no_page_says_that_lock_options_belong_on_the_task_alone() -> None:
    """A call may set some of them."""
    said = re.compile(
        r"(?i)(lock|they are) options (belong|of the task, not)|options? (passed|given) to a call (is|are) refused"
        r"|lock options in a call are refused"
    )
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("celery_redislock/**/*.py")]
    assert [str(file) for file in files if said.search(" ".join(file.read_text(encoding="utf-8").split()))] == []


def logged() -> Iterator[str]:
    """The texts of all calls of the package's log at WARNING and above, without what is put into them."""
    for path in sorted(ROOT.glob("celery_redislock/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(ast.Name("logger"), "warning" | "error" | "exception" | "log"), args=[*_, _]
                ):
                    yield "".join(
                        one.value
                        for one in ast.walk(node.args[node.func.attr == "log"])
                        if isinstance(one, ast.Constant) and isinstance(one.value, str)
                    )


@pytest.mark.parametrize("excuse", EXCUSES, ids=lambda excuse: excuse.name)
def test_every_excuse_of_the_model_is_named(excuse: Excuse) -> None:
    assert f"`{excuse.name}`" in IN_DETAIL.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_each_row_of_a_table_is_one_line(page: Path) -> None:
    parts = re.split(r"^ *```.*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[::2]
    rows = [line for part in parts for line in part.splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.rstrip().endswith("|")] == []


def test_the_numbers_of_the_model_are_the_models() -> None:
    text = " ".join(HOW_IT_IS_TESTED.read_text(encoding="utf-8").split())
    assert (len(SCENARIOS), len(PROMISES)) == (45, 17)
    assert "Forty-five scenarios" in text
    assert "seventeen promises" in text
    assert f"each of {len(Mistake)} known mistakes" in text
    assert f"each of its {len(EXCUSES)} excuses" in text
    assert (len(OF_MERGING), len(OF_MERGED_CALLS)) == (11, 2)
    assert "Its eleven scenarios" in text
    assert "the two promises of merged calls" in text
    assert f"each of {len(MistakeOfMerging)} mistakes" in text
    assert (len(MistakeOfTurns), len(OF_FAIR_TURNS)) == (7, 1)
    assert "finds seven mistakes ([test_fair: " in text
    assert len(MistakeOfSeveral) == 17
    assert "finds seventeen mistakes" in text


def test_what_the_model_leaves_out_is_named_with_the_test_that_stands_in() -> None:
    section = HOW_IT_IS_TESTED.read_text(encoding="utf-8").split("### What is not in the model")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 12
    assert [row for row in rows if "(../tests/" not in row] == []
    model = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("tests/model/*.py")))
    decided = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split("\n## Decisions")[1]
    decisions = set(re.findall(r"^\| `(on_\w+|leaves_note|may_be_handed_a_key)`", decided, re.MULTILINE))
    scripts = {path.stem for path in ROOT.glob("celery_redislock/protocol/lua/*.lua")} - {"owner", "prelude"}
    known = {name for name in decisions if re.search(rf"\b(decisions\.)?{name}\(", model)}
    known |= {name for name in scripts if f"commands.{name}(" in model}
    assert {"on_conflict", "on_outstanding", "acquire", "stand"} <= known
    assert {name for name in decisions | scripts if f"`{name}`" in section} == (decisions | scripts) - known
