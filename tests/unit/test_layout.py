"""Imports point one way, and every script's header tells what the script does."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from celery_redislock.protocol import commands, scripts
from celery_redislock.protocol.names import Demand
from celery_redislock.protocol.scripts import Claim, Command, Note
from celery_redislock.protocol.tokens import RESERVED, known_by
from tests.house.imports import GRAPH, MODULES, PACKAGE, imported

#: The rooms of the house, from the ground up: what is in one imports only what is below it. The modules that are in no
#: folder stand where their imports allow; what only type checkers see counts as well.
ROOMS = [
    ("info", "errors", "signals"),
    ("keys",),
    ("protocol",),
    ("connection", "options"),
    ("hold", "line"),
    ("lock", "celery_port"),
    ("app",),
    ("message",),
    ("task",),
    ("locked", "testing", "fixtures", "metrics", "tracing"),
    ("worker",),
    ("__init__",),
    ("cli",),
    ("__main__",),
]
#: These serve any code, with or without Celery.
WITHOUT_CELERY = ("keys", "protocol", "connection", "hold", "line", "lock")

SCRIPTS = {path.stem: path for path in sorted(PACKAGE.glob("protocol/lua/*.lua")) if path.stem != "prelude"}


ROOM_OF = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def floor_of(name: str) -> int:
    return ROOM_OF[name.split(".")[0]]


def test_every_module_has_its_room_and_every_room_its_modules() -> None:
    assert {name.split(".")[0] for name in MODULES} == ROOM_OF.keys()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_its_own_room_and_those_below_it(name: str) -> None:
    assert {other for other in GRAPH[name] if floor_of(other) > floor_of(name)} == set()


def test_no_modules_import_each_other_in_a_circle_types_counted() -> None:
    left = {name: set(others) for name, others in GRAPH.items()}
    while leaves := {name for name, others in left.items() if not others}:
        left = {name: others - leaves for name, others in left.items() if name not in leaves}
    assert left == {}


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[0] in WITHOUT_CELERY])
def test_a_module_for_any_code_does_not_import_celery(name: str) -> None:
    packages = {one.split(".")[0] for one in imported(MODULES[name].read_text(encoding="utf-8"))}
    assert "celery" not in packages


@pytest.mark.parametrize("name", MODULES)
def test_a_module_does_not_draw_from_the_users_random_numbers(name: str) -> None:
    """A program that has seeded `random` must see the numbers that it expects, whatever the plugin's threads do.

    And where all processes have the same seed, all of them would have the same jitter.
    """
    source = MODULES[name].read_text(encoding="utf-8")
    assert re.findall(r"\brandom\.(?!SystemRandom\b)\w+|\bfrom random import.*", source) == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_no_other_by_a_string(name: str) -> None:
    """As Celery's ``"package.module:Class"``: these tests do not see such an import, nor does who moves the module."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [text for text in texts if re.fullmatch(r"(celery_redislock(\.\w+)*|\w*\.?\w+):\w+", text)] == []


def test_the_check_sees_imports_where_they_may_hide() -> None:
    source = """
if TYPE_CHECKING:
    from .task import A
else:
    import a
try:
    from celery_redislock.store import B
except ImportError:
    from . import keeper
with x:
    import redis.retry
class C:
    from .keys import D
def f():
    import late
"""
    modules = {".task", "a", "celery_redislock.store", ".keeper", "redis.retry", ".keys", "late"}
    assert imported(source) == modules | {".task.A", "celery_redislock.store.B", ".keys.D"}


def header_and_body(script: str) -> tuple[list[str], str]:
    """A script's first comment, without its marks, and the code below it without comments."""
    lines = script.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
    header = [line.removeprefix("--").strip() for line in lines[:end]]
    return header, "\n".join(line.split("--")[0] for line in lines[end:])


def arguments_in(code: str) -> set[str]:
    """``KEYS[1]`` or ``ARGV[2i]``, however spaced; a loop over all keys is ``KEYS[i]``."""
    named = re.findall(r"\b(KEYS|ARGV)\[([^\]]+)\]", code)
    looped = re.findall(r"\bfor (\w+), \w+ in ipairs\((KEYS|ARGV)\)", code)
    return {f"{table}[{re.sub(r'[ *]', '', index)}]" for table, index in [*named, *((t, i) for i, t in looped)]}


def options_in(code: str) -> list[str]:
    """``n key`` or ``c value``, as a script reads them, keys first."""
    read = [f"{letter} {kind}" for kind, letter in re.findall(r"\boptional_(key|value)\('(\w)'\)", code)]
    return sorted(read, key=lambda option: option[1:])


def described_in(header: list[str], pattern: str) -> list[str]:
    return [match[1] for line in header if (match := re.match(rf"({pattern})\s+\S", line))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_header_names_what_its_body_uses_and_no_more(name: str) -> None:
    header, body = header_and_body(SCRIPTS[name].read_text(encoding="utf-8"))
    described = described_in(header, r"(?:KEYS|ARGV)\[\S+\]")
    flags = {"ARGV[1]"} if options_in(body) else set()  # read in the prelude
    assert set(described) == arguments_in(body) | flags
    assert described[0] in {"KEYS[1]", "KEYS[i]"}
    options = described_in(header, r"\w (?:key|value)")
    assert sorted(options, key=lambda option: option[1:]) == options_in(body), "in the order in which they are sent"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_reads_what_is_optional_behind_all_that_is_given(name: str) -> None:
    header, body = header_and_body(SCRIPTS[name].read_text(encoding="utf-8"))
    given = described_in(header, r"(?:KEYS|ARGV)\[\d+\]")
    counts = [str(sum(one.startswith(table) for one in given)) for table in ("KEYS", "ARGV")]
    begins = re.search(r"keys_read, values_read = (\d+), (\d+)", body)
    assert (begins is not None) is bool(options_in(body))
    assert begins is None or [*begins.groups()] == counts


KEY = "redislock:{shop.bill:7}"
ONE, THREE = Demand(KEY), Demand(KEY, 3)
RUN, LEFT = known_by("A" * 22), known_by("B" * 22, RESERVED)
FEATURES: dict[str, dict[str, Any]] = {
    "acquire": {"note": "a note", "fence": True, "call": b"a call", "claim": Claim(LEFT.nonce, 1.0)},
    "acquire_permit": {"note": "a note", "call": b"a call", "claim": Claim(LEFT.nonce, 1.0)},
    "release": {"note": Note("a note"), "keeps": (LEFT, 1.0), "gone": "another", "demand": THREE},
    "give_up": {"gone_ttl": 1.0, "demand": THREE},
}
CALLS: dict[str, Callable[..., Command]] = {
    "acquire": functools.partial(commands.acquire, ONE, RUN.owner, RUN, 1.0),
    "acquire_permit": functools.partial(commands.acquire, THREE, RUN.owner, RUN, 1.0),
    "release": functools.partial(commands.release, demand=ONE, owner=RUN.owner),
    "give_up": functools.partial(commands.give_up, demand=ONE, claim=LEFT.nonce),
}


def sent_with(name: str, features: Iterable[str]) -> Command:
    absent = {"gone_ttl": None} if name == "give_up" else {}
    return CALLS[name](**absent | {feature: FEATURES[name][feature] for feature in features})


@pytest.mark.parametrize("name", [name for name in SCRIPTS if options_in(SCRIPTS[name].read_text(encoding="utf-8"))])
def test_what_is_sent_with_a_script_is_what_its_header_tells(name: str) -> None:
    """With each selection of what is optional."""
    header, _ = header_and_body(SCRIPTS[name].read_text(encoding="utf-8"))
    given, options = described_in(header, r"(?:KEYS|ARGV)\[\d+\]"), described_in(header, r"\w (?:key|value)")
    letters = [*dict.fromkeys(option[0] for option in options)]
    for count in range(len(FEATURES[name]) + 1):
        for features in itertools.combinations(FEATURES[name], count):
            command = sent_with(name, features)
            flags = str(command.values[0])
            named = [letter for letter in letters if letter in flags]
            assert [letter for letter in flags if letter in letters] == named
            expected = [option for option in options if option[0] in named]
            keys = sum(one.startswith("KEYS") for one in given) + sum("key" in option for option in expected)
            values = sum(one.startswith("ARGV") for one in given) + sum("value" in option for option in expected)
            assert (len(command.keys), len(command.values)) == (keys, values), features


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_header_begins_with_its_purpose_and_tells_what_it_returns(name: str) -> None:
    header, body = header_and_body(SCRIPTS[name].read_text(encoding="utf-8"))
    assert re.match(r"[A-Z].*[.,]", header[0])
    assert [line for line in header if re.match(r"Returns \S", line)]
    numbers = set(re.findall(r"\breturn (-?\d+)$", body, re.MULTILINE))
    returned = " ".join(header[next(i for i, line in enumerate(header) if line.startswith("Returns")) :])
    assert numbers <= set(re.findall(r"-?\d+", returned))


def test_every_script_has_the_prelude_in_it_and_is_sent_by_the_store() -> None:
    used = [value.text for value in vars(commands).values() if isinstance(value, scripts.Script)]
    written = [path.read_text(encoding="utf-8").replace(scripts.PRELUDE_STANDS_HERE, "") for path in SCRIPTS.values()]
    assert all(text.count(scripts.PRELUDE) == 1 for text in used)
    assert sorted(_letters(text.replace(scripts.PRELUDE, "")) for text in used) == sorted(map(_letters, written))


def _letters(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("local a = KEYS[1]\nredis.call('SET', KEYS[2], ARGV[ 1 ])", {"KEYS[1]", "KEYS[2]", "ARGV[1]"}),
        ("for i, key in ipairs(KEYS) do x(key, ARGV[2 * i - 1]) end", {"KEYS[i]", "ARGV[2i-1]"}),
    ],
)
def test_the_check_sees_arguments_however_they_are_written(script: str, found: set[str]) -> None:
    assert arguments_in(script) == found
