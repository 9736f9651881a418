"""The cases of docs/choosing.md can be set as the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redislock import LockedTask

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"


def cases() -> dict[str, dict[str, Any]]:
    """Each case with the options that its row names."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Ten cases\n")[1].split("\n## ")[0]
    found: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {}
    for case, cell in re.findall(r"^\| ([A-Z][^|]+) \| ([^|]+) \|$", section, re.MULTILINE):
        named = re.findall(r"(lock_\w+)=([^`,]+|\[[^`]*\])(?=`|, )", cell)
        options = {
            **(options if cell.startswith("the same") else {}),
            **{name: ast.literal_eval(value) for name, value in named},
        }
        found[case] = options
    return found


def test_a_task_can_have_the_options_of_each_case() -> None:
    found = cases()
    assert len(found) == 10
    app = Celery("shop", broker="redis://", backend="redis://", set_as_current=False)
    for number, (case, options) in enumerate(found.items()):
        assert options, case

        @app.task(name=f"case-{number}", base=LockedTask, **options)
        def body(
            event_id: int, product_id: int, shop_id: int, page: int, account_id: int, customer: int, text: str
        ) -> None: ...

        app.finalize()
        assert app.tasks[f"case-{number}"].name == f"case-{number}"
