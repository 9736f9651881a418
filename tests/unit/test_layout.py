"""Imports point one way, and every script's header tells what the script does."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from celery_redislock.protocol import commands, scripts
from celery_redislock.protocol.names import Demand, Share, keys_of
from celery_redislock.protocol.scripts import NOTE_TTL, Call, Claim, Command, Note, Numbered, Passed, Tag
from celery_redislock.protocol.tokens import RESERVED, known_by
from tests.house.imports import GRAPH, MODULES, PACKAGE, imported

#: The rooms of the house, from the ground up: what is in one imports only what is below it. The modules that are in no
#: folder stand where their imports allow; what only type checkers see counts as well.
ROOMS = [
    ("errors", "signals"),
    ("keys",),
    ("protocol",),
    ("connection", "options"),
    ("hold", "line"),
    ("lock", "celery_port"),
    ("app",),
    ("message",),
    ("policy",),
    ("task",),
    ("locked", "testing", "fixtures", "django"),
    ("asyncio",),
    ("worker",),
    ("metrics", "tracing"),
    ("__init__",),
    ("cli", "web"),
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


def test_a_publisher_loads_nothing_of_a_worker() -> None:
    """Celery's own worker and what is here for it take much of the time of the import."""
    loaded = "sorted(one for one in sys.modules if one.startswith(('celery.worker', 'celery_redislock.worker')))"
    run = [sys.executable, "-c", f"import sys, celery_redislock; print({loaded})"]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "[]\n"


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


def header_and_body(name: str) -> tuple[list[str], str]:
    """A script's first comment, without its marks, and the code below it with no comment but the prelude's line."""
    lines = SCRIPTS[name].read_text(encoding="utf-8").splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
    header = [line.removeprefix("--").strip() for line in lines[:end]]
    code = [
        line if line == scripts.PRELUDE_STANDS_HERE else line.split("--")[0].rstrip() + "\n" for line in lines[end:]
    ]
    return header, "".join(code)


def arguments_in(code: str) -> set[str]:
    """``KEYS[1]`` or ``ARGV[2i]``, however spaced; a loop over all keys is ``KEYS[i]``."""
    named = re.findall(r"\b(KEYS|ARGV)\[([^\]]+)\]", code)
    looped = re.findall(r"\bfor (\w+), \w+ in ipairs\((KEYS|ARGV)\)", code)
    return {f"{table}[{re.sub(r'[ *]', '', index)}]" for table, index in [*named, *((t, i) for i, t in looped)]}


def required_in(header: list[str]) -> list[str]:
    """What a header describes as always given: ``KEYS[1]`` or ``ARGV[2i]``."""
    return [match[1] for line in header if (match := re.match(r"((?:KEYS|ARGV)\[\S+\])\s+\S", line))]


class Option(NamedTuple):
    """One line of a header."""

    letter: str
    kind: str
    description: str

    @property
    def noun(self) -> str:
        """What it is, without what else is told of it, and without articles."""
        return re.sub(r"\b(a|the) ", "", re.split("[;:,]", self.description)[0])


def options_in(header: list[str]) -> list[Option]:
    return [Option(*match.groups()) for line in header if (match := re.match(r"(\w) (key|value)\s+(\S.*)", line))]


def places(letters: str, required: Iterable[str]) -> dict[str, str]:
    """Where each option is given: behind what is required, in the order of the letters."""
    ends = Counter(argument.split("[")[0] for argument in required)
    found = {}
    for letter in letters:
        table = "KEYS" if letter.islower() else "ARGV"
        ends[table] += 1
        found[letter] = f"{table}[{ends[table]}]"
    return found


OPTIONS = {name: options for name in SCRIPTS if (options := options_in(header_and_body(name)[0]))}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_header_names_what_its_body_uses_and_no_more(name: str) -> None:
    header, body = header_and_body(name)
    required, options = required_in(header), [option.letter for option in options_in(header)]
    assert required[0] in {"KEYS[1]", "KEYS[i]"}
    assert len(set(required)) == len(required)
    fast, _, rest = body.rpartition(scripts.PRELUDE_STANDS_HERE)
    tested = re.findall(r"\bARGV\[1\] == '(\w+)'", fast) if options else []
    optional = {place for letters in tested for place in places(letters, required).values()}
    assert arguments_in(fast) - optional <= set(required), "a fast path reads only the options for which it has tested"
    letters = {"ARGV[1]"} if "options(" in rest else set()
    assert arguments_in(fast) - optional | arguments_in(rest) | letters == set(required)
    assert set("".join(tested)) <= set(options)
    assert set(re.findall(r"\bgiven\.(\w+)", body)) == set(options)
    assert len(set(options)) == len(options)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_reads_what_is_optional_behind_all_that_is_given(name: str) -> None:
    header, body = header_and_body(name)
    tables = [argument.split("[")[0] for argument in required_in(header)]
    read = re.findall(r"\boptions\((\d+), (\d+)\)", body)
    assert read == [(str(tables.count("KEYS")), str(tables.count("ARGV")))] * (name in OPTIONS)
    assert ("ARGV[1]  the letters of the options that are given" in header) is (name in OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_a_key_if_its_letter_is_small_and_a_value_if_it_is_a_capital(name: str) -> None:
    assert [option for option in OPTIONS[name] if option.kind != ("key" if option.letter.islower() else "value")] == []


def test_an_options_letter_means_the_same_in_all_scripts() -> None:
    described = {(option.letter, option.noun) for options in OPTIONS.values() for option in options}
    assert sorted(letter for letter, _ in described) == sorted({letter for letter, _ in described})
    scripts_with = Counter(option.letter for options in OPTIONS.values() for option in options)
    assert {"n", "S", "w"} <= {letter for letter, number in scripts_with.items() if number > 1}


KEY = "redislock:{shop.bill:7}"
NAMES = keys_of(KEY)
DEMANDS = [Demand(KEY), Demand(KEY, 3)]
FAIR = [Demand(KEY, 3, share=Share("shown", "a group", 1000))]
RUN, LEFT = known_by("A" * 22), known_by("B" * 22, RESERVED)
GONE, WINDOW = NAMES.gone(LEFT.nonce), NAMES.window(LEFT.task_field)
#: What is sent for each option below, in whatever script.
MEANT = {
    "n": "a note",
    "N": "2000",
    "U": "1",
    "f": NAMES.fence,
    "W": b"a call",
    "C": LEFT.owner,
    "p": NAMES.queued,
    "P": "3000",
    "g": GONE,
    "G": f"{NOTE_TTL * 1000:.0f}",
    "K": LEFT.value,
    "T": "4000",
    "S": "3",
    "Q": "Q",
    "w": WINDOW,
    "D": "60000",
    "M": "7",
    "a": "what was given",
    "A": "a channel",
    "L": b"a body",
    "V": "5000",
    "E": "6000",
    "B": "7000",
    "X": "8000",
    "R": "1",
    "F": "a group",
    "H": "1000",
    "Y": "",
    "Z": " cause ",
}


def with_each(make: Callable[..., Command], **choices: Sequence[Any]) -> list[Command]:
    """The commands with each selection of what may be given."""
    return [make(**dict(zip(choices, chosen, strict=True))) for chosen in itertools.product(*choices.values())]


NOTES = [
    None,
    Note("a note", 2.0),
    Note("a note", 2.0, in_any_case=True),
    Note("a note", 2.0, given="what was given"),
]
SENT = {
    "acquire": with_each(
        functools.partial(commands.acquire, token=RUN, lease=1.0),
        demand=DEMANDS + FAIR,
        note=[None, "a note"],
        fence=[False, True],
        call=[None, b"a call"],
        claim=[None, Claim(LEFT.nonce, 3.0)],
        numbered=[None, Numbered(7), Numbered(7, b"a body"), Numbered(7, None, frozenset({"cause"}))],
    ),
    "merge": [
        commands.merge(KEY, LEFT, 1.0, 2.0, Passed(), Call(b"a body", *about))
        for about in itertools.product(
            [None, "a channel"],
            *([0.0, 5.0], [None, 6.0], [None, 7.0], [None, 8.0], [0, 7], [False, True]),
            [None, frozenset({"cause"})],
        )
    ],
    "replace": [commands.replace(KEY, LEFT, 1.0, ["cause"])],
    "reserve": with_each(
        functools.partial(commands.reserve, KEY, LEFT, 1.0, Passed()), in_queue=[False, True], window=[None, 60.0]
    ),
    "release": [
        *with_each(
            functools.partial(commands.release, owner=RUN.owner),
            demand=DEMANDS,
            note=NOTES,
            keeps=[None, (LEFT, 4.0)],
            gone=[None, (GONE, None), (GONE, NOTE_TTL)],
            places=[(), (NAMES.queued,), (NAMES.queued, WINDOW)],
        ),
        *with_each(functools.partial(commands.hand_over, token=RUN, to=LEFT, ttl=4.0), demand=DEMANDS, note=NOTES),
        *with_each(
            functools.partial(commands.give_up, claim=LEFT.nonce),
            demand=DEMANDS,
            is_to_come=[False, True],
            closes=[(), (WINDOW, "what was given")],
        ),
    ],
    "renew": [commands.renew([(KEY, RUN, 1.0)])],
    "inspect": with_each(commands.inspect, demand=DEMANDS),
    "stand": [
        *with_each(functools.partial(commands.enter, room=RUN, rank=1), demand=DEMANDS),
        *with_each(functools.partial(commands.stand, room=RUN, rank=1), demand=DEMANDS, next_rank=[None, 2]),
    ],
    "leave": with_each(functools.partial(commands.leave, room=RUN), demand=DEMANDS),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_sent_with_a_script_is_what_its_header_tells(name: str) -> None:
    """With each selection of what is optional, in the order of the header."""
    header, _ = header_and_body(name)
    of_the_first = {"KEYS[i]": "KEYS[1]", "ARGV[2i-1]": "ARGV[1]", "ARGV[2i]": "ARGV[2]"}
    required = [of_the_first.get(argument, argument) for argument in required_in(header)]
    letters = "".join(option.letter for option in options_in(header))
    for command in SENT[name]:
        assert command.script is vars(scripts)[name.upper()]
        given = str(command.values[0]) if letters else ""
        assert given == "".join(letter for letter in letters if letter in given)
        sent = {f"KEYS[{number}]": key for number, key in enumerate(command.keys, 1)}
        sent |= {f"ARGV[{number}]": value for number, value in enumerate(command.values, 1)}
        options = places(given, required)
        assert sent.keys() == {*required, *options.values()}
        assert {letter: sent[place] for letter, place in options.items()} == {letter: MEANT[letter] for letter in given}
    assert set(letters) == {letter for command in SENT[name] for letter in str(command.values[0]) if letters}


def tags_returned(code: str) -> set[str]:
    """The tags of all that a script may return; "?" for what has none, as where its end is reached without a return.

    What is returned is a table that begins with a tag, `refused` with a tag, or a name for such a table or a function
    that returns one. Of ``a and b or c`` it is `b` or `c`.
    """
    code = re.sub(r"\[[^\]]*\]|(?<!refused)\([^()]*\)", "", code)  # indices, and what functions are given
    code = re.sub(r"(?:\{|refused\()('\w+')[^{}()]*[})]", r"\1", code)
    functions = dict(re.findall(r"^local function (\w+)\n(.*?)^end$", code, re.MULTILINE | re.DOTALL))
    top = re.sub(r"^local function .*?^end$", "", code, flags=re.MULTILINE | re.DOTALL)

    def tags_of(value: str) -> set[str]:
        if tag := re.fullmatch(r"'(\w+)'", value):
            return {tag[1]}
        if value in functions:
            return all_of(r"\breturn (.+)", functions[value])
        return all_of(rf"^ *(?:local )?{re.escape(value)} = (?!\{{\}}$)(.+)", code) or {"?"}

    def all_of(pattern: str, code: str) -> set[str]:
        found = re.findall(pattern, code, re.MULTILINE)
        found = [one.removesuffix(" end") for one in found]
        values = [re.sub(r".* and ", "", value).strip() for one in found for value in one.split(" or ")]
        return {tag for value in values for tag in tags_of(value)}

    ends = re.search(r"^return .+\s*\Z", top, re.MULTILINE)
    return all_of(r"\breturn\b *(.*)", top) | (set() if ends else {"?"})


def tags_described(header: list[str]) -> set[str]:
    """The tags in the section "Returns": ``{granted, ...}``, or ``lost: what it means``, or ``; or free``."""
    begin = next(at for at, line in enumerate(header) if line.startswith("Returns "))
    section = [line.removeprefix("Returns ") for line in itertools.takewhile(bool, header[begin:])]
    first = [re.match(r"(?:one tag for each key: )?\{?(\w+)[:,]", line) for line in section]
    others = [re.search(r"(?:, (\w+):|; or (\w+)$)", line) for line in section]
    return {tag for found in (*first, *others) if found for tag in found.groups() if tag}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_header_begins_with_its_purpose_and_tells_what_it_returns(name: str) -> None:
    header, body = header_and_body(name)
    assert re.match(r"[A-Z].*[.,]", header[0])
    assert tags_described(header) == tags_returned(body)


def test_a_script_returns_only_tags_that_there_are_and_each_tag_is_returned() -> None:
    returned = {tag for name in SCRIPTS for tag in tags_returned(header_and_body(name)[1])}
    assert returned == {tag.value.decode() for tag in Tag}


@pytest.mark.parametrize(
    ("code", "tags"),
    [
        ("return {'a', x[1], f(y)}\n", {"a"}),
        ("local reply = {'a'}\nif x then\n  reply = {'b', 1}\nend\nreturn reply\n", {"a", "b"}),
        ("return x and {'a'} or refused('b', KEYS[1], y == '1' and 1 or z)\n", {"a", "b"}),
        ("local function f(x)\n  return x and {'a'} or {'b'}\nend\nreturn f(1)\n", {"a", "b"}),
        ("local function f(x)\n  return {'a'}\nend\nreturn {'b'}\n", {"b"}),
        ("local found = {}\nfound[1] = 'a'\nreturn found\n", {"a"}),
        ("if x then\n  return {'a'}\nend\n", {"a", "?"}),
        ("if x then return 'a' end\nreturn y and 'b' or {'c', 1}\n", {"a", "b", "c"}),
        ("if x then\n  return\nend\nreturn {'a'}\n", {"a", "?"}),
        ("if x then\n  return {1, 'b'}\nend\nreturn {'a'}\n", {"a", "?"}),
        ("return x and 1 or {'a'}\n", {"a", "?"}),
        ("return redis.call('GET', KEYS[1])\n", {"?"}),
    ],
)
def test_the_check_sees_what_is_returned(code: str, tags: set[str]) -> None:
    assert tags_returned(code) == tags


def test_every_script_has_the_prelude_where_it_stands_and_is_sent_by_the_store() -> None:
    used = {
        name.lower(): vars(scripts)[name].text
        for name in re.findall(r"Command(?:, )?\(scripts\.(\w+)", inspect.getsource(commands))
    }
    assert used.keys() == SCRIPTS.keys()
    for name, text in used.items():
        before, stands, behind = SCRIPTS[name].read_text(encoding="utf-8").partition(scripts.PRELUDE_STANDS_HERE)
        assert stands
        assert "OWNS" not in text
        assert text.count(scripts.PRELUDE) == 1
        if "OWNS" not in before + behind:
            assert text == f"{before}{scripts.PRELUDE}{behind}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_the_prelude_defines_is_used_below_it_alone_and_a_script_has_it_only_for_that(name: str) -> None:
    _, body = header_and_body(name)
    above, stands, below = body.rpartition(scripts.PRELUDE_STANDS_HERE)
    above, below = (above, below) if stands else (below, "")
    defined = re.findall(r"^local (?:function (\w+)|([\w, ]+) =)", scripts.PRELUDE, re.MULTILINE)
    names = {name for function, others in defined for name in (function, *others.split(", ")) if name}
    assert {"options", "LINE_MS", "MAX_PERMITS"} <= names
    assert names.isdisjoint(re.findall(r"\w+", above))
    assert names.isdisjoint(re.findall(r"\w+", below)) is (not stands)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("local a = KEYS[1]\nredis.call('SET', KEYS[2], ARGV[ 1 ])", {"KEYS[1]", "KEYS[2]", "ARGV[1]"}),
        ("for i, key in ipairs(KEYS) do x(key, ARGV[2 * i - 1]) end", {"KEYS[i]", "ARGV[2i-1]"}),
    ],
)
def test_the_check_sees_arguments_however_they_are_written(script: str, found: set[str]) -> None:
    assert arguments_in(script) == found
