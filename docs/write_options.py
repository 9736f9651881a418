"""Writes the tables of docs/options.md from the code. `make docs` runs it; a test checks that the page is current."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from inspect import cleandoc, getsource
from itertools import pairwise
from pathlib import Path

from celery_redislock.options import KEY_OPTIONS, OPTIONS, PER_CALL, SETTINGS, LockSettings, Rule
from celery_redislock.task.plan import LockAttributes

PAGE = Path(__file__).with_name("options.md")
HEAD = "| {} | meaning | default | allowed |\n| --- | --- | --- | --- |\n"


def descriptions(of: type) -> Iterator[tuple[str, str]]:
    """The names of a class's attributes in order, each with its docstring."""
    (body,) = (node.body for node in ast.parse(getsource(of)).body if isinstance(node, ast.ClassDef))
    for declared, text in pairwise(body):
        if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield ast.unparse(declared.target), cleandoc(ast.literal_eval(text.value))


def table(kind: str, of: type, rules: Mapping[str, Rule], prefix: str, mark: str = "") -> str:
    """A table of options.

    Args:
        kind: The heading of the first column.
        of: The class whose attributes are the options.
        rules: The rule of each option, by its name without a prefix.
        prefix: The prefix of the names on the page.
        mark: What follows the name of an option that a call may set.
    """
    rows = (
        f"| `{prefix}{name}`{mark if name in PER_CALL else ''} | {markdown(text)} | `{shown(rules[name].default)}` "
        f"| {quoted(rules[name].allowed)} |\n"
        for name, text in ((name.removeprefix("lock_"), text) for name, text in descriptions(of))
    )
    return HEAD.format(kind) + "".join(rows)


def shown(value: object) -> str:
    """A default as a reader writes it."""
    return repr(value).replace("'", '"')


def quoted(allowed: str) -> str:
    """The text of `Rule.allowed`, with its values as code."""
    return re.sub(r"'(\w+)'", r'`"\1"`', as_code(allowed))


def as_code(text: str) -> str:
    """A text with Python's constants as code."""
    return re.sub(r"(?<!`)\b(None|True|False)\b", r"`\1`", text)


def markdown(text: str) -> str:
    """A docstring as one line of Markdown, with links to the pages that it names."""
    line = as_code(without_default(text.replace("``", "`").replace("\n", " ")))
    return re.sub(r"docs/([\w-]+[.]md)", lambda page: f"[{title(page[1])}]({page[1]})", line)


def without_default(text: str) -> str:
    """The text without the default, which has a column of its own."""
    text = re.sub(r", the default(?=:)| (?:\w|[.])+ by default[.](?= |$)", "", text)
    return re.sub(r"\w+ by default; (\w)", lambda rest: rest[1].upper(), text)


def title(page: str) -> str:
    """The title of a page, without its subtitle."""
    return PAGE.with_name(page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(":")[0]


def written(page: str) -> str:
    """The page, with its tables generated again."""
    tables = {
        "options": table("option", LockAttributes, {**KEY_OPTIONS, **OPTIONS}, "lock_", " (also per call)"),
        "settings": table("setting", LockSettings, SETTINGS, "redislock_"),
    }
    for name, text in tables.items():
        before, mark, after = re.split(rf"(<!-- {name}:.*-->\n)", page)
        page = before + mark + text + after[after.index("<!-- end -->") :]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
