"""The pictures of docs/ are what was recorded, and each is on a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.pictures.__main__ import PICTURES, RECORDED, draw
from benchmarks.pictures.scenes import SCENES

PAGES = sorted(PICTURES.parent.glob("*.md"))


def recorded(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return cases


def test_each_picture_is_drawn_from_what_was_recorded(tmp_path: Path) -> None:
    draw(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    taken = PICTURES.glob("web-*.svg")  # by benchmarks/pictures/web.py
    paths = set(PICTURES.iterdir()) - set(taken)
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_each_picture_is_on_a_page_with_words_for_those_who_do_not_see_it() -> None:
    shown = {
        name: words
        for page in PAGES
        for words, name in re.findall(r"!\[([^\]]+)\]\(pictures/([\w-]+\.svg)\)", page.read_text(encoding="utf-8"))
    }
    assert set(shown) == {path.name for path in PICTURES.iterdir()}
    assert all(len(words) > 40 for words in shown.values())


def test_the_cases_that_were_recorded_are_those_that_are_played() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(SCENES)
    for name, cases in SCENES.items():
        assert [case["title"] for case in recorded(name)] == [title for title, _ in cases]


def test_no_two_recorded_runs_of_a_key_overlap() -> None:
    """The pictures show what they promise: each case of these has one key and no limit."""
    for name in ("scopes", "policies", "arguments", "line", "replacing"):
        for case in recorded(name):
            open_runs = 0
            for event in case["events"]:
                open_runs += {"start": 1, "end": -1}.get(event["kind"], 0)
                assert open_runs in {0, 1}, (name, case["title"])
