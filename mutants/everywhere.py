"""``python -m mutants.everywhere``: small changes everywhere in the modules without I/O.

It prints the changes that no test finds, and those whose lines no test runs. The tests that are about these modules are
run once in one process, to learn which lines each of them runs. Each change is then tried in a fork of that process: it
replaces the code of the live functions, and the tests that run its lines are run, the fastest first, until one fails.
What runs at an import is not changed: constants, defaults, and the fields of classes.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .mutant import ROOT
from .operators import Change, changes

PACKAGE = "celery_redislock"
#: The modules that are changed, and the files in tests/unit and tests/integration that are about them.
MODULES = {
    **dict.fromkeys(("protocol/tokens.py", "protocol/names.py"), ("tokens", "names", "hold", "decisions")),
    "protocol/hold.py": ("hold", "decisions"),
    "protocol/commands.py": ("commands", "hold", "fence", "limit", "line", "rate", "store"),
    "protocol/replies.py": ("replies", "hold", "decisions", "tokens", "observer", "cli"),
    "protocol/several.py": ("several",),
    **dict.fromkeys(
        (f"policy/{one}.py" for one in ("conflict", "join", "raise_", "replace", "skip", "wait")), ("decisions",)
    ),
    **dict.fromkeys(("keys/arguments.py", "keys/key_maker.py"), ("keys_*",)),
    "message/header.py": ("decisions", "republish", "broker_rules", "locked_task"),
    "cli/rows.py": ("cli",),
    "options.py": ("options", "calls", "locked_task"),
}
#: How many examples Hypothesis makes for each test that does not say how many it needs.
EXAMPLES = 15
#: How many changes are tried at a time.
AT_ONCE = 2
#: Seconds after which no further test of a change is begun, and after which its fork is ended.
ENOUGH, LONGEST = float(os.environ.get("ENOUGH", "20")), 120.0


class Everywhere:
    """A plugin of pytest: runs the tests in its own way."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._files = {str(ROOT / PACKAGE / name): name for name in modules}
        self._tests: dict[tuple[str, int], set[pytest.Item]] = defaultdict(set)
        self._seconds: dict[pytest.Item, float] = {}

    def pytest_collection(self) -> None:
        """Have Hypothesis choose few examples: each change is tried with them."""
        from hypothesis import settings  # pytest must be the first to import it

        settings.register_profile("few", settings.get_profile("unit"), max_examples=EXAMPLES)
        settings.load_profile("few")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Learn what each test runs, then try out all changes."""
        if session.testsfailed:
            return True
        gc.unfreeze()  # what tests/conftest.py has frozen is not found
        caches = [
            one
            for one in gc.get_objects()
            if isinstance(one, functools._lru_cache_wrapper) and (one.__module__ or "").startswith(PACKAGE)
        ]
        for item in (*session.items, None):
            for cache in caches:  # what a test has cached must hide no line from the next one, and no change
                cache.cache_clear()
            if item is not None:
                self._learn(item)
        gc.collect()
        gc.freeze()
        print(f"\n{len(session.items)} tests, {sum(self._seconds.values()):.0f} s", file=sys.__stderr__, flush=True)
        for path, name in self._files.items():
            _report(name, self._try_all(path))
        return True

    def _learn(self, item: pytest.Item) -> None:
        seen: set[tuple[str, int]] = set()
        files = self._files

        def line(frame: FrameType, event: str, _: Any) -> Any:
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def call(frame: FrameType, event: str, _: Any) -> Any:
            return line(frame, event, None) if frame.f_code.co_filename in files else None

        began = time.process_time()
        sys.settrace(call)
        try:
            reports = runtestprotocol(item, log=False, nextitem=None)
        finally:
            sys.settrace(None)
        if any(one.failed for one in reports):
            raise pytest.UsageError(f"{item.nodeid} fails without any change")
        self._seconds[item] = time.process_time() - began
        for place in seen:
            self._tests[place].add(item)

    def _try_all(self, path: str) -> Iterator[tuple[Change, str]]:
        """Try out all changes of a module, several at a time."""
        living = _living(path)
        running: dict[int, tuple[Change, int, float]] = {}
        every = list(changes(Path(path).read_text(encoding="utf-8"), path))
        for change in [*every, *[None] * AT_ONCE]:
            while len(running) >= AT_ONCE or (change is None and running):
                yield _waited(running)
            if change is None:
                continue
            tests = set().union(*(self._tests.get((path, line), ()) for line in change.lines))
            if not tests:
                yield change, "not reached"
                continue
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                try:
                    found = self._found(change, living, self._sorted(tests))
                except BaseException as error:  # noqa: BLE001 - no test could run with it
                    found = f"killed by {type(error).__name__}"
                os.write(writer, pickle.dumps(found))
                os._exit(0)
            os.close(writer)
            running[pid] = change, reader, time.monotonic() + LONGEST

    def _sorted(self, tests: set[pytest.Item]) -> list[pytest.Item]:
        """One case of each test first, and the fastest first."""
        cases: Counter[str] = Counter()
        ranked: list[tuple[bool, float, int, pytest.Item]] = []
        for item in sorted(tests, key=lambda one: (self._seconds[one], one.nodeid)):
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            ranked.append((cases[function] > 2, self._seconds[item], len(ranked), item))
        return [item for *_, item in sorted(ranked, key=lambda one: one[:3])]

    def _found(self, change: Change, living: dict[Any, list[FunctionType]], tests: Sequence[pytest.Item]) -> str:
        for code in _codes(change.code):
            for function in living.get(_key(code), ()):
                if code.co_freevars != function.__code__.co_freevars:
                    return "cannot be made in a living function: it no longer uses a name from outside"
                function.__code__ = code
        end = time.process_time() + ENOUGH
        for number, item in enumerate(tests):
            for report in runtestprotocol(item, log=False, nextitem=None):
                if report.failed:
                    is_late = "Failed: Timeout" in str(report.longrepr)
                    return f"{'timeout' if is_late else 'killed'} by {item.nodeid}"
            if time.process_time() > end:
                return f"survived {number + 1} of {len(tests)} tests"
        return f"survived all {len(tests)} tests"


def _waited(running: dict[int, tuple[Change, int, float]]) -> tuple[Change, str]:
    """Wait until one fork has ended, and return what it has found."""
    while True:
        for pid, (change, reader, end) in list(running.items()):
            is_over = time.monotonic() > end
            if is_over:
                os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, 0 if is_over else os.WNOHANG)[0]:
                del running[pid]
                with open(reader, "rb") as pipe:
                    said = pipe.read()
                return change, pickle.loads(said) if said else "timeout" if is_over else "killed by its end"  # noqa: S301
        time.sleep(0.005)


def _living(path: str) -> dict[Any, list[FunctionType]]:
    living: dict[Any, list[FunctionType]] = defaultdict(list)
    gc.unfreeze()
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == path:
            living[_key(one.__code__)].append(one)
    gc.freeze()
    return living


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)


def _key(code: CodeType) -> Any:
    return code.co_qualname, code.co_firstlineno, code.co_varnames[: code.co_argcount]


def _report(name: str, outcomes: Iterator[tuple[Change, str]]) -> None:
    counts: Counter[str] = Counter()
    for change, found in outcomes:
        counts[found.split(" by ")[0].split(" all ")[0].partition(" ")[0]] += 1
        if not found.startswith(("killed", "timeout")):
            print(f"{name}:{change}  ({found})", file=sys.__stderr__, flush=True)
    print(f"== {name}: {dict(counts)}", file=sys.__stderr__, flush=True)


def main() -> int:
    """Try out the changes of all modules, or of those that are named."""
    modules = sys.argv[1:] or list(MODULES)
    names = sorted({name for module in modules for name in MODULES[module]})
    paths = [ROOT / "tests" / folder for folder in ("unit", "integration")]
    files = [file for name in names for path in paths for file in sorted(path.glob(f"test_{name}.py"))]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=60", "--rootdir", str(ROOT)]
    ended = pytest.main([*options, *map(str, files)], plugins=[Everywhere(modules)])
    return 0 if ended == pytest.ExitCode.NO_TESTS_COLLECTED else int(ended)  # what it has run, pytest does not count


if __name__ == "__main__":
    sys.exit(main())
